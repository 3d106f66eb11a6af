"""Dense to two factors, to low rank plus sparse, and to blocks, by singular value decomposition.

`Factored` is what every conversion of a dense weight returns.

Dense to two factors, where the inputs of the layer say which errors matter.

A layer's output changes by (W - W') x, so the factors that keep the model's function minimise

    E |(W - W') x|^2 = |(W - W') M^(1/2)|_F^2   with M = E[x x^T],

not |W - W'|. With M = L L^T the minimiser is the truncated singular value decomposition of W L
times L^-1 (SVD-LLM, arXiv 2403.07378).

Dense to low rank plus sparse: two factors and a few entries that they cannot hold.

Alternates between the best factors of W - S and the best entries of W - BA (GoDec, Zhou and Tao
2011): each is exact for the other, so the error never rises. It can end in a local minimum, so it
starts twice, with no sparse part and with the largest entries of W. Singular vectors hold what
many entries share, the sparse part single large ones.

Dense to two-core block tensor train (BTT) and Monarch: one small matrix problem per block.

With input features read as (m1, m0) and output features as (n0, n1), both row-major, a two-core
BTT of rank r ("Compute Better Spent", arXiv 2406.06248) holds the weight

    W[(n0 n1), (m1 m0)] = sum_r L[n0, n1, m1, r] R[m1, n0, r, m0].

For fixed (m1, n0) that is a product of an (n1, r) and an (r, m0) matrix which no other block
shares. So truncated singular value decompositions of all m1 x n0 blocks are together the best BTT
of that rank, exactly; Monarch projection (arXiv 2204.00595, theorem 1) is the same at one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.extras import require

_LIVE = 1e-8
"""Singular values below this share of the largest count as zero when they are split."""

_ATTEMPTS = 3

_WORTHWHILE = 1e-3
"""A budget that is larger by less than this share changes no rank that matters."""

_MOST = 1.0 - 1e-6
"""The largest relative error that is a budget."""


@dataclass(frozen=True, eq=False)
class Factored:
    """The factors of a weight; unpacks into them.

    Attributes:
        cores: In the chain order and with the index order of the form they are for.
        error: Norm of what was discarded: Frobenius norm of weight - product, or the root mean
            square of the outputs' change where the conversion weighs by activations. Exact up to
            rounding, without what padding of modes holds.
        norm: The same norm of the weight.
    """

    cores: tuple[Tensor, ...]
    error: float
    norm: float

    @property
    def relative_error(self) -> float:
        """`error` as a share of `norm`; 0 for a weight of zeros."""
        return self.error / self.norm if self.norm > 0.0 else 0.0

    @property
    def parameters(self) -> int:
        """Numbers in all cores."""
        return sum(core.numel() for core in self.cores)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.cores)


def working_copy(weight: Tensor, name: str = "weight") -> Tensor:
    """A detached copy in the type that conversions compute in.

    Args:
        weight: Any shape and floating type.
        name: What messages call it.

    Returns:
        float64, or float32 on devices that have no float64 (mps).

    Raises:
        TensorizeError: For values that are not finite, and for meta tensors, which have none.
    """
    if weight.is_meta:
        raise TensorizeError(
            f"{name} is on the meta device and has no values to convert: load it first"
        )
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    copy = weight.detach().to(wide)
    if not bool(torch.isfinite(copy).all()):
        raise TensorizeError(
            f"{name} holds values that are not finite and cannot be converted: "
            f"restore a checkpoint from before they appeared"
        )
    return copy


def matrix_copy(weight: Tensor) -> Tensor:
    """`working_copy` of a weight (out, in).

    Raises:
        TensorizeError: For anything but two dimensions of at least one element.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise TensorizeError(
            f"weight has shape {tuple(weight.shape)}, and conversion wants (out, in) features"
        )
    return working_copy(weight)


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reduced singular value decomposition U, S, Vh of (..., rows, columns).

    LAPACK's divide and conquer (gesdd), which torch uses on CPU, fails to converge on a few finite
    matrices; the slower QR iteration (gesvd) then does it.
    """
    try:
        return torch.linalg.svd(matrix, full_matrices=False)  # type: ignore[no-any-return]
    except torch.linalg.LinAlgError:
        require("tensorize", "this weight's decomposition", "scipy")
        from scipy.linalg import svd

        parts = [
            svd(one.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
            for one in matrix.reshape(-1, *matrix.shape[-2:])
        ]
        left, values, right = (
            torch.stack([torch.as_tensor(part) for part in same]).to(matrix)
            for same in zip(*parts, strict=True)
        )
        batch = matrix.shape[:-2]
        return (
            left.reshape(*batch, *left.shape[1:]),
            values.reshape(*batch, *values.shape[1:]),
            right.reshape(*batch, *right.shape[1:]),
        )


def tails(values: Tensor) -> Tensor:
    """Norm of what remains when the first k singular values are kept, for k = 0..len.

    Args:
        values: (..., k) singular values in descending order; leading dimensions are summed over.

    Returns:
        (k + 1,) Frobenius norms; the last is 0.
    """
    squares = values.square().reshape(-1, values.shape[-1]).sum(0)
    kept_last = torch.cat([squares, squares.new_zeros(1)])
    return kept_last.flip(0).cumsum(0).flip(0).sqrt()


def choose_rank(discarded: Tensor, *, rank: int | None, error: float | None, norm: float) -> int:
    """The rank asked for, or the smallest that keeps to an error.

    Args:
        discarded: (most + 1,) what each rank discards, see `tails`.
        rank: Between 1 and `most`.
        error: Largest discarded share of `norm`.
        norm: Norm of the whole.

    Raises:
        TensorizeError: Unless exactly one of both is given, or where it is out of range.
    """
    most = len(discarded) - 1
    check_one_of(rank=rank, error=error)
    if rank is not None:
        if not 1 <= rank <= most:
            raise TensorizeError(
                f"rank = {rank} must be between 1 and {most}, at which nothing is lost"
            )
        return rank
    assert error is not None
    fitting = int((discarded > error * norm).sum())
    return max(1, min(fitting, most))


def check_one_of(*, rank: object | None, error: float | None) -> None:
    """Refuse both or none of a rank and an error, and errors outside 0 to 1.

    Raises:
        TensorizeError: See above.
    """
    if (rank is None) == (error is None):
        raise TensorizeError(
            f"rank = {rank} and error = {error}: give one of them, a rank or the share to lose"
        )
    if error is not None and not 0.0 <= error < 1.0:
        raise TensorizeError(f"error = {error} must be between 0 and 1, the share that is lost")


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split singular values in two factors, equally where they are not zero.

    Both factors of a zero would be zero with ``sqrt``, and their gradients too: a part of the
    layer that never learns. So the right factor keeps a little, and the left takes the rest; a
    matrix of zeros becomes 0 times 1.

    Args:
        values: (..., k) singular values.

    Returns:
        Left and right (..., k), whose product is `values`.
    """
    largest = values.amax(-1, keepdim=True)
    floor = torch.where(largest > 0, largest * _LIVE, torch.ones_like(largest))
    right = torch.maximum(values, floor).sqrt()
    return values / right, right


def balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The factors with the same product and equal Gram matrices, ``up^T up = down down^T``.

    Balanced factors have the smallest sum of squares for their product, learn at the same speed,
    and gradient flow keeps them balanced (Du et al. 2018, arXiv 1806.00900).

    Args:
        down: (.., rank, in).
        up: (.., out, rank).
    """
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.mT)
    u, s, vh = singular(r_up @ r_down.mT)
    left, right = split(s)
    return right[..., None] * (vh @ q_down.mT), (q_up @ u) * left[..., None, :]


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """(out, in) extended with zeros to (rows, columns).

    Raises:
        TensorizeError: Where the modes hold fewer features than the weight has.
    """
    out_features, in_features = matrix.shape
    if rows < out_features or columns < in_features:
        raise TensorizeError(
            f"modes hold {columns} input and {rows} output features, but the weight has "
            f"{in_features} and {out_features}: take modes whose product is at least that"
        )
    return torch.nn.functional.pad(matrix, (0, columns - in_features, 0, rows - out_features))


def spend(convert: Callable[[float], Factored], error: float) -> Factored:
    """The smallest of a few conversions that keep to an error, where padding does not count.

    A conversion of a padded weight spends its budget on the padding too, so that the weight itself
    comes out nearer than was asked for. It is tried with as much more as it left over, three times
    at most.

    Args:
        convert: From a budget, a share of the norm of the padded weight, to factors whose `error`
            is that of the weight itself.
        error: Largest relative error of the weight.
    """
    best = convert(error)
    enough, budget = error, error
    for _ in range(_ATTEMPTS):
        left = error / best.relative_error if best.relative_error > 0.0 else 1.0
        budget = min(enough * left, _MOST) if budget == enough else (enough + budget) / 2.0
        if budget <= enough * (1.0 + _WORTHWHILE):
            break
        found = convert(budget)
        if found.relative_error <= error:
            enough = budget
            best = found if found.parameters <= best.parameters else best
    return best


def root_sum(squares: float) -> float:
    """Square root of a sum that rounding may have made slightly negative."""
    return math.sqrt(max(squares, 0.0))


def low_rank(weight: Tensor, *, rank: int | None = None, error: float | None = None) -> Factored:
    """The best factors of a weight in the Frobenius norm (Eckart and Young 1936).

    Args:
        weight: (out, in), any floating type.
        rank: Inner size, 1 to min(out, in); or
        error: largest ``|W - up down| / |W|``, for which the smallest rank is taken.

    Returns:
        ``down`` (rank, in) and ``up`` (out, rank) in the weight's type, with
        ``up^T up = down down^T = diag(sigma)``; the error is exactly
        ``sqrt(sum of discarded sigma^2)``.

    Raises:
        TensorizeError: For a rank or error out of range, or a weight that cannot be converted.
    """
    u, sigma, vh = singular(matrix_copy(weight))
    discarded = tails(sigma)
    norm = float(discarded[0])
    kept = choose_rank(discarded, rank=rank, error=error, norm=norm)
    left, right = split(sigma[:kept])
    down = right[:, None] * vh[:kept]
    up = u[:, :kept] * left
    return Factored(
        (down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous()),
        float(discarded[kept]),
        norm,
    )


def spectrum(weight: Tensor) -> Tensor:
    """Singular values of a weight (out, in) in descending order, in float64.

    Raises:
        TensorizeError: For a weight that cannot be converted.
    """
    return singular(matrix_copy(weight))[1]


def discarded_shares(weight: Tensor) -> Tensor:
    """``|W - W_r| / |W|`` of the best rank r, for r = 0..min(out, in): what each rank would cost.

    Returns:
        (min(out, in) + 1,) in float64, from 1 down to 0.

    Raises:
        TensorizeError: For a weight that cannot be converted.
    """
    discarded = tails(spectrum(weight))
    return discarded / torch.clamp(discarded[0], min=torch.finfo(discarded.dtype).tiny)


DAMPING = 1e-6
"""Share of the mean second moment that is added to every feature's: directions that calibration
never showed then count a little, so W' follows W there."""


def low_rank_for_inputs(weight: Tensor, moment: Tensor, *, rank: int) -> Factored:
    """The factors that change the outputs least for inputs with this second moment.

    Args:
        weight: (out, in), any floating type.
        moment: (in, in) E[x x^T]; see `outlast.tensorize.conversion.InputMoments`.
        rank: Inner size, 1 to min(out, in).

    Returns:
        Balanced ``down`` (rank, in) and ``up`` (out, rank) in the weight's type. Error and norm
        are ``sqrt(E |(W - W') x|^2)`` and ``sqrt(E |W x|^2)``, without damping.

    Raises:
        TensorizeError: For a rank or a moment out of range, or a weight that cannot be converted.
    """
    matrix = matrix_copy(weight)
    wide_moment = checked_moment(moment, matrix)
    multiply, solve = moment_root(wide_moment)
    u, sigma, vh = singular(multiply(matrix))
    kept = choose_rank(tails(sigma), rank=rank, error=None, norm=1.0)
    down, up = balanced(solve(vh[:kept]), u[:, :kept] * sigma[:kept])
    return Factored(
        (down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous()),
        output_change(matrix - up @ down, wide_moment),
        output_change(matrix, wide_moment),
    )


def output_change(difference: Tensor, moment: Tensor) -> float:
    """``sqrt(E |D x|^2) = sqrt(trace(D M D^T))`` of a change of the weight.

    Args:
        difference: (out, in) change D.
        moment: (in, in), see `low_rank_for_inputs`.
    """
    wide = working_copy(difference, "difference")
    by = working_copy(moment, "moment").to(wide.device)
    return root_sum(float((wide @ by * wide).sum()))


def checked_moment(moment: Tensor, matrix: Tensor) -> Tensor:
    """The second moment (in, in) in the type and on the device of a weight (out, in).

    Raises:
        TensorizeError: For another shape, or values that no second moment has.
    """
    features = matrix.shape[1]
    if moment.shape != (features, features):
        raise TensorizeError(
            f"moment has shape {tuple(moment.shape)}, and a weight of {features} input features "
            f"wants ({features}, {features})"
        )
    wide = working_copy(moment, "moment").to(matrix.device)
    diagonal = wide.diagonal()
    if bool((diagonal < 0).any()) or not bool((diagonal > 0).any()):
        raise TensorizeError(
            "moment has a negative or no positive mean square: run calibration batches first"
        )
    return wide


def moment_root(
    moment: Tensor,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Multiplication from the right by a root L of the damped moment, and by its inverse.

    Args:
        moment: (in, in) M.

    Returns:
        Two functions of (.., in) matrices, X -> X L and X -> X L^-1, where L L^T is the moment.
    """
    added = DAMPING * moment.diagonal().mean()
    symmetric = (moment + moment.mT) / 2
    symmetric.diagonal().add_(added)
    root, failed = torch.linalg.cholesky_ex(symmetric)
    if not int(failed):
        return (
            lambda matrix: matrix @ root,
            lambda matrix: torch.linalg.solve_triangular(root, matrix, upper=False, left=False),
        )
    values, vectors = torch.linalg.eigh(symmetric)
    scale = values.clamp(min=float(added)).sqrt()
    return (lambda matrix: (matrix @ vectors) * scale, lambda matrix: (matrix / scale) @ vectors.mT)


SWEEPS = 5
"""Rounds from each start; each costs a singular value decomposition."""


def low_rank_and_sparse(weight: Tensor, *, rank: int, density: float) -> Factored:
    """Factors and sparse entries of a weight.

    Args:
        weight: (out, in), any floating type.
        rank: Inner size of the factors.
        density: Share of the entries in the sparse part, at the places that serve best.

    Returns:
        ``down`` (rank, in), ``up`` (out, rank), ``values`` (entries,) and ``indices`` (entries,)
        int64, ascending and flat, with W' = up down + the values at the indices.

    Raises:
        TensorizeError: For numbers out of range, or a weight that cannot be converted.
    """
    matrix = matrix_copy(weight)
    if not 0.0 <= density <= 1.0:
        raise TensorizeError(f"density = {density} must be between 0 and 1")
    entries = round(density * matrix.numel())

    def largest(residual: Tensor) -> tuple[Tensor, Tensor]:
        """The largest entries in a matrix of zeros, and where they are."""
        flat = residual.reshape(-1)
        places = flat.abs().topk(entries).indices.sort().values
        kept = torch.zeros_like(flat).index_copy(0, places, flat[places])
        return kept.reshape(residual.shape), places

    best: tuple[Factored, Tensor, Tensor] | None = None
    for start in (torch.zeros_like(matrix), largest(matrix)[0]):
        sparse = start
        for _ in range(SWEEPS):
            u, sigma, vh = singular(matrix - sparse)
            kept = choose_rank(tails(sigma), rank=rank, error=None, norm=1.0)
            sparse, places = largest(matrix - ((u[:, :kept] * sigma[:kept]) @ vh[:kept]))
        # The factors last: they are balanced, and best for the entries that are returned.
        found = low_rank(matrix - sparse, rank=rank)
        if best is None or found.error < best[0].error:
            best = (found, sparse.reshape(-1)[places], places)
    assert best is not None
    found, values, places = best
    down, up = found.cores
    return Factored(
        (down.to(weight.dtype), up.to(weight.dtype), values.to(weight.dtype), places),
        found.error,
        float(matrix.norm()),
    )


def to_blocks(
    weight: Tensor,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
    rank: int | None = None,
    error: float | None = None,
) -> Factored:
    """The best two-core block tensor train of a weight in the Frobenius norm.

    Args:
        weight: (out, in), any floating type.
        in_modes: (m1, m0), product >= in.
        out_modes: (n0, n1), product >= out.
        rank: Rank of every block, 1 to min(n1, m0); or
        error: largest ``|W - W'| / |W|``, for which the smallest rank is taken.

    Returns:
        ``R`` (m1, n0, r, m0) and ``L`` (n0, n1, m1, r) in the weight's type, balanced block by
        block. The error is exactly ``sqrt(sum of discarded sigma^2)`` over all blocks, also where
        modes are padded: padding only adds rows and columns of zeros to blocks.

    Raises:
        TensorizeError: For modes that are too small, a rank or error out of range, or a weight
            that cannot be converted.
    """
    blocks = _blocks(matrix_copy(weight), in_modes, out_modes)
    u, sigma, vh = singular(blocks)
    discarded = tails(sigma)
    norm = float(discarded[0])
    kept = choose_rank(discarded, rank=rank, error=error, norm=norm)
    left, right = split(sigma[..., :kept])
    first = right[..., None] * vh[..., :kept, :]
    second = (u[..., :kept] * left[..., None, :]).permute(1, 2, 0, 3)
    return Factored(
        (first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous()),
        float(discarded[kept]),
        norm,
    )


def to_blocks_for_inputs(
    weight: Tensor,
    moment: Tensor,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
    rank: int,
) -> Factored:
    """A two-core block tensor train that weighs errors by the inputs' second moment.

    Each block minimises the change of its own part of the outputs, see `low_rank_for_inputs`. That
    is the best train where inputs of different blocks of m0 features are uncorrelated; what they
    correlate is left out of account.

    Args:
        weight: (out, in), any floating type.
        moment: (in, in) E[x x^T].
        in_modes: (m1, m0), product >= in.
        out_modes: (n0, n1), product >= out.
        rank: Rank of every block, 1 to min(n1, m0).

    Returns:
        Cores as of `to_blocks`. Error and norm are ``sqrt(E |(W - W') x|^2)`` and
        ``sqrt(E |W x|^2)``, with all correlations.

    Raises:
        TensorizeError: As `to_blocks`, or for a moment out of range.
    """
    matrix = matrix_copy(weight)
    wide_moment = checked_moment(moment, matrix)
    m0 = in_modes[1]
    # Padded features, and blocks never seen, count a little.
    little = DAMPING * wide_moment.diagonal().mean()
    firsts, seconds = [], []
    for index, block in enumerate(_blocks(matrix, in_modes, out_modes)):
        part = wide_moment[index * m0 : (index + 1) * m0, index * m0 : (index + 1) * m0]
        whole = part.new_zeros(m0, m0)
        whole[: len(part), : len(part)] = part
        whole.diagonal().add_(little)
        multiply, solve = moment_root(whole)
        u, sigma, vh = singular(multiply(block))
        kept = choose_rank(tails(sigma), rank=rank, error=None, norm=1.0)
        first, second = balanced(solve(vh[:, :kept]), u[..., :kept] * sigma[:, None, :kept])
        firsts.append(first)
        seconds.append(second)
    first, second = torch.stack(firsts), torch.stack(seconds, dim=2)
    out_features, in_features = matrix.shape
    change = matrix - blocks_weight(first, second, in_features, out_features)
    return Factored(
        (first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous()),
        output_change(change, wide_moment),
        output_change(matrix, wide_moment),
    )


def blocks_weight(first: Tensor, second: Tensor, in_features: int, out_features: int) -> Tensor:
    """The weight (out, in) that the two cores hold, without padding.

    Args:
        first: R (m1, n0, r, m0).
        second: L (n0, n1, m1, r).
        in_features: At most m1 m0.
        out_features: At most n0 n1.
    """
    product = second.permute(2, 0, 1, 3) @ first
    m1, n0, n1, m0 = product.shape
    dense = product.permute(1, 2, 0, 3).reshape(n0 * n1, m1 * m0)
    return dense[:out_features, :in_features]


def _blocks(matrix: Tensor, in_modes: tuple[int, int], out_modes: tuple[int, int]) -> Tensor:
    """(out, in) as blocks (m1, n0, n1, m0)."""
    (m1, m0), (n0, n1) = in_modes, out_modes
    return padded(matrix, n0 * n1, m1 * m0).reshape(n0, n1, m1, m0).permute(2, 0, 1, 3)
