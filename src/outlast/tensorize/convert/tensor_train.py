"""Dense to tensor train, Tucker and canonical polyadic factors.

Dense to tensor train (TT) and tensor-train matrix (TTM): TT-SVD.

TT-SVD (Oseledets 2011, "Tensor-train decomposition", algorithm 1) cuts the tensor bond by bond
with truncated singular value decompositions. What one cut discards is orthogonal to all that later
cuts discard, so the error is exactly ``sqrt(sum of all discarded sigma^2)``. Every cut discards at
most what the best tensor of these ranks lacks at that bond, so the error is at most
``sqrt(bonds)`` times the best possible one (theorem 2.2 and corollary 2.4).

Dense to Tucker: one small factor per mode and a core that joins them.

    W[a.., c..] = sum over p.., s.. of  A_1[a, p] .. G[p.., s..] .. B_1[s, c]

The factors come from the higher-order singular value decomposition, cut mode by mode (ST-HOSVD,
Vannieuwenhoven et al. 2012), whose error is at most sqrt(modes) times the best possible one, and
improve by orthogonal iteration (HOOI, De Lathauwer et al. 2000), which never makes it worse. With
one mode on each side the best factors are those of the singular value decomposition.

Dense to canonical polyadic (CP): a sum of outer products, one vector per mode in each.

    W[a, b, .., c, d] = sum_r A[a, r] B[b, r] .. C[c, r] D[d, r]

By alternating least squares (Carroll and Chang 1970; Kolda and Bader 2009, figure 3.3): with all
factors but one fixed, the last has a closed form, so the error never rises. It can end in a local
minimum, and a best approximation need not exist, so several starts are tried and the best is kept;
the error is measured, never bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.svd import (
    Factored,
    check_one_of,
    choose_rank,
    matrix_copy,
    padded,
    root_sum,
    singular,
    spend,
    split,
    tails,
    working_copy,
)
from outlast.tensorize.shapes import bond_ranks


def tensor_train(
    tensor: Tensor, *, rank: int | Sequence[int] | None = None, error: float | None = None
) -> Factored:
    """A tensor of any order as a train of cores.

    Args:
        tensor: (n_1, .., n_k), any floating type.
        rank: Rank of all bonds or of each (k - 1), cut to what the modes can use, see
            `outlast.tensorize.shapes.bond_ranks`; or
        error: largest error as a share of the norm, spread over the bonds as they need it.

    Returns:
        Cores (n_1, r_1), (r_1, n_2, r_2), .., (r_{k-1}, n_k) in the tensor's type, balanced (see
        `balance_train`); the error is exact up to rounding.

    Raises:
        TensorizeError: For ranks or an error out of range, or values that are not finite.
    """
    check_one_of(rank=rank, error=error)
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise TensorizeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot become a train: it has no modes"
        )
    wide = working_copy(tensor, "tensor")
    modes = tuple(tensor.shape)
    ranks = None if rank is None else bond_ranks(rank, modes)
    norm = float(wide.norm())
    bonds = len(modes) - 1
    left_over = (error or 0.0) ** 2
    lost = 0.0
    cores: list[Tensor] = []
    rest = wide.reshape(1, -1)
    for bond in range(bonds):
        rows = rest.shape[0] * modes[bond]
        u, sigma, vh = singular(rest.reshape(rows, -1))
        discarded = tails(sigma)
        # What earlier bonds did not use of the budget is shared among those to come.
        allowed = math.sqrt(left_over / (bonds - bond))
        kept = choose_rank(
            discarded,
            rank=None if ranks is None else min(ranks[bond], len(sigma)),
            error=None if ranks is not None else allowed,
            norm=norm,
        )
        lost += float(discarded[kept]) ** 2
        if norm > 0.0:
            left_over = max(0.0, left_over - (float(discarded[kept]) / norm) ** 2)
        cores.append(u[:, :kept].reshape(-1, modes[bond], kept))
        rest = sigma[:kept, None] * vh[:kept]
    cores.append(rest.reshape(-1, modes[-1], 1))
    cores = balance_train(cores)
    # Without the ranks of 1 at both ends.
    cores[0] = cores[0].squeeze(0)
    cores[-1] = cores[-1].squeeze(-1)
    return Factored(
        tuple(core.to(tensor.dtype).contiguous() for core in cores), root_sum(lost), norm
    )


def to_tensor_train(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: int | Sequence[int] | None = None,
    error: float | None = None,
) -> Factored:
    """A weight as the train of CoMERA (arXiv 2405.14377): input cores, then output cores.

    Args:
        weight: (out, in), any floating type.
        in_modes: Modes of the input features, row-major; product >= in.
        out_modes: Modes of the output features, row-major; product >= out.
        rank: As in `tensor_train`, for in_modes followed by out_modes; or
        error: as in `tensor_train`.

    Returns:
        Cores with indices ``ap, pbq, .., qcs, sd``: (in_1, r_1), .., (r, out_d). Where the product
        of the modes passes the features, the error is measured, without the padding.

    Raises:
        TensorizeError: For modes that are too small, ranks or an error out of range, or a weight
            that cannot be converted.
    """
    matrix = matrix_copy(weight)
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    joined = wide.mT.reshape(*in_modes, *out_modes)

    def measured(found: Factored) -> Factored:
        out_features, in_features = matrix.shape
        dense = train_weight(found.cores, in_features, out_features, inputs=len(in_modes))
        return replace(found, error=float((matrix - dense).norm()))

    found = _train_of(
        joined, measured, padding=wide.numel() > matrix.numel(), rank=rank, error=error
    )
    return _in_type(found, weight.dtype)


def to_tensor_train_matrix(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: int | Sequence[int] | None = None,
    error: float | None = None,
) -> Factored:
    """A weight as a tensor-train matrix: core k joins output mode k and input mode k.

    Args:
        weight: (out, in), any floating type.
        in_modes: (d,) modes of the input features, row-major; product >= in.
        out_modes: (d,) modes of the output features, row-major; product >= out.
        rank: As in `tensor_train`, for the modes out_k x in_k; or
        error: as in `tensor_train`.

    Returns:
        Cores (out_1, in_1, r_1), (r_1, out_2, in_2, r_2), .., (r_{d-1}, out_d, in_d). The error is
        measured where modes are padded, as in `to_tensor_train`.

    Raises:
        TensorizeError: As `to_tensor_train`, and for unequal numbers of modes.
    """
    count = len(in_modes)
    if count != len(out_modes) or count == 0:
        raise TensorizeError(
            f"in_modes = {tuple(in_modes)} and out_modes = {tuple(out_modes)} must be equally many"
        )
    matrix = matrix_copy(weight)
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    paired = wide.reshape(*out_modes, *in_modes).permute(
        *(axis for k in range(count) for axis in (k, count + k))
    )
    joined = paired.reshape([out * into for out, into in zip(out_modes, in_modes, strict=True)])

    def measured(found: Factored) -> Factored:
        out_features, in_features = matrix.shape
        dense = train_matrix_weight(
            _paired(found.cores, out_modes, in_modes), in_features, out_features
        )
        return replace(found, error=float((matrix - dense).norm()))

    found = _train_of(
        joined, measured, padding=wide.numel() > matrix.numel(), rank=rank, error=error
    )
    found = _in_type(found, weight.dtype)
    return replace(found, cores=_paired(found.cores, out_modes, in_modes))


def _train_of(
    joined: Tensor,
    measured: Callable[[Factored], Factored],
    *,
    padding: bool,
    rank: int | Sequence[int] | None,
    error: float | None,
) -> Factored:
    """`tensor_train`, whose error is measured where there is padding, which it would count."""
    if not padding:
        return tensor_train(joined, rank=rank, error=error)
    if error is None:
        return measured(tensor_train(joined, rank=rank))
    check_one_of(rank=rank, error=error)
    return spend(lambda budget: measured(tensor_train(joined, error=budget)), error)


def _paired(
    cores: Sequence[Tensor], out_modes: Sequence[int], in_modes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Cores of joined modes, each with its output and its input mode."""
    last = len(cores) - 1
    return tuple(
        core.reshape(
            *(core.shape[:1] if k else ()),
            out_modes[k],
            in_modes[k],
            *(core.shape[-1:] if k < last else ()),
        )
        for k, core in enumerate(cores)
    )


def train_product(cores: Sequence[Tensor]) -> Tensor:
    """The tensor that a train holds: (n_1, .., n_k) from cores as `tensor_train` returns them."""
    whole = cores[0]
    for core in cores[1:]:
        whole = torch.tensordot(whole, core, dims=1)
    return whole


def train_weight(
    cores: Sequence[Tensor], in_features: int, out_features: int, *, inputs: int
) -> Tensor:
    """The weight (out, in) of cores as `to_tensor_train` returns them, without padding.

    Args:
        cores: Input cores, then output cores.
        in_features: At most the product of the input modes.
        out_features: At most the product of the output modes.
        inputs: Number of input cores.
    """
    whole = train_product(cores)
    rows = math.prod(whole.shape[:inputs])
    return whole.reshape(rows, -1).mT[:out_features, :in_features]


def train_matrix_weight(cores: Sequence[Tensor], in_features: int, out_features: int) -> Tensor:
    """The weight (out, in) of cores as `to_tensor_train_matrix` returns them, without padding."""
    count = len(cores)
    whole = train_product(cores)
    order = (*range(0, 2 * count, 2), *range(1, 2 * count, 2))
    rows = math.prod(whole.shape[axis] for axis in order[:count])
    return whole.permute(*order).reshape(rows, -1)[:out_features, :in_features]


def balance_train(cores: Sequence[Tensor]) -> list[Tensor]:
    """The same train with equal Gram matrices left and right of every bond.

    TT-SVD leaves all norm in the last core. Balanced as `svd.balanced` does for two
    factors, both sides of each bond have Gram matrix diag(sigma) of that bond: cores of similar
    size, which learn at similar speed.

    Args:
        cores: (r_{k-1}, n_k, r_k) with r_0 = r_d = 1; all but the last left-orthogonal, as TT-SVD
            leaves them.

    Returns:
        Cores of the same shapes and product.
    """
    result = list(cores)
    gram = result[-1].new_ones(1, 1)
    for bond in range(len(result) - 1, 0, -1):
        # The left side's Gram matrix is the identity, so the right side's eigenvalues are the
        # squared singular values of the bond. The gauges of other bonds cancel in both.
        core = cores[bond]
        gram = torch.einsum("anb,bc,dnc->ad", core, gram, core)
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        _, root = split(values.clamp(min=0).sqrt().flip(-1))
        vectors = vectors.flip(-1)
        result[bond - 1] = torch.einsum("anb,bc->anc", result[bond - 1], vectors * root)
        result[bond] = torch.einsum("ab,bnc->anc", vectors.mT / root[:, None], result[bond])
    return result


def _in_type(found: Factored, dtype: torch.dtype) -> Factored:
    return Factored(tuple(core.to(dtype) for core in found.cores), found.error, found.norm)


SWEEPS = 5
"""Rounds of orthogonal iteration; most of what it gains comes in the first few."""


def tucker(
    tensor: Tensor,
    *,
    rank: int | Sequence[int] | None = None,
    error: float | None = None,
    sweeps: int = SWEEPS,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Core and orthonormal factors of a tensor.

    Args:
        tensor: (n_1, .., n_k) in float64 or float32.
        rank: Rank of all modes or of each, cut to the mode's size; or
        error: largest error as a share of the norm.
        sweeps: Rounds of orthogonal iteration, which `error` skips, having reached it.

    Returns:
        Core (r_1, .., r_k), which has what norm there is, and factors (n_j, r_j) with orthonormal
        columns.

    Raises:
        TensorizeError: For ranks or an error out of range, or a tensor without modes.
    """
    check_one_of(rank=rank, error=error)
    order = tensor.dim()
    if order == 0 or tensor.numel() == 0:
        raise TensorizeError(f"a tensor of shape {tuple(tensor.shape)} has no modes to factor")
    ranks = None if rank is None else _ranks(rank, tuple(tensor.shape))
    norm = float(tensor.norm())
    left_over = (error or 0.0) ** 2
    factors: list[Tensor] = []
    core = tensor
    for mode in range(order):
        u, sigma, _ = singular(_unfold(core, mode))
        discarded = tails(sigma)
        kept = choose_rank(
            discarded,
            rank=None if ranks is None else min(ranks[mode], len(sigma)),
            error=None if ranks is not None else math.sqrt(left_over / (order - mode)),
            norm=norm,
        )
        if norm > 0.0:
            left_over = max(0.0, left_over - (float(discarded[kept]) / norm) ** 2)
        factors.append(u[:, :kept])
        core = _times(core, u[:, :kept].mT, mode)
    for _ in range(sweeps if ranks is not None and order > 1 else 0):
        for mode in range(order):
            rest = tensor
            for other in range(order):
                if other != mode:
                    rest = _times(rest, factors[other].mT, other)
            u = singular(_unfold(rest, mode))[0]
            factors[mode] = u[:, : factors[mode].shape[1]]
            core = _times(rest, factors[mode].mT, mode)
    return core, tuple(factors)


def to_tucker(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: int | Sequence[int] | None = None,
    error: float | None = None,
) -> Factored:
    """A weight as a Tucker chain: input factors, core, output factors.

    Args:
        weight: (out, in), any floating type.
        in_modes: (d,) modes of the input features, row-major; product >= in.
        out_modes: (e,) modes of the output features, row-major; product >= out.
        rank: Rank of all modes or of each (in_modes followed by out_modes), cut to the mode; or
        error: largest error as a share of the norm; what padding would take of it is used.

    Returns:
        d input factors (in_k, p_k), the core (p_1, .., p_d, s_1, .., s_e) and e output factors
        (s_k, out_k), in the weight's type. Error and norm are those of the weight itself.

    Raises:
        TensorizeError: For modes that are too small, ranks or an error out of range, or a weight
            that cannot be converted.
    """
    matrix = matrix_copy(weight)
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    joined, inputs = wide.mT.reshape(*in_modes, *out_modes), len(in_modes)
    out_features, in_features = matrix.shape

    def measured(rank: int | Sequence[int] | None, error: float | None) -> Factored:
        core, factors = tucker(joined, rank=rank, error=error)
        cores = (*factors[:inputs], core, *(factor.mT for factor in factors[inputs:]))
        dense = tucker_weight(cores, in_features, out_features, inputs=inputs)
        return Factored(cores, float((matrix - dense).norm()), float(matrix.norm()))

    if rank is None and error is not None and wide.numel() > matrix.numel():
        found = spend(lambda budget: measured(None, budget), error)
    else:
        found = measured(rank, error)
    return replace(found, cores=tuple(one.to(weight.dtype).contiguous() for one in found.cores))


def tucker_weight(
    cores: Sequence[Tensor], in_features: int, out_features: int, *, inputs: int
) -> Tensor:
    """The weight (out, in) of cores as `to_tucker` returns them, without padding.

    Args:
        cores: Input factors, core, output factors.
        in_features: At most the product of the input modes.
        out_features: At most the product of the output modes.
        inputs: Number of input factors.
    """
    whole = cores[inputs]
    for mode, factor in enumerate(cores[:inputs]):
        whole = _times(whole, factor, mode)
    for mode, factor in enumerate(cores[inputs + 1 :], start=inputs):
        whole = _times(whole, factor.mT, mode)
    rows = math.prod(whole.shape[:inputs])
    return whole.reshape(rows, -1).mT[:out_features, :in_features]


def leading_vectors(tensor: Tensor, mode: int, count: int) -> Tensor:
    """The first left singular vectors of an unfolding: (n_mode, min(count, n_mode))."""
    left, _, _ = singular(_unfold(working_copy(tensor, "tensor"), mode))
    return left[:, :count]


def _ranks(rank: int | Sequence[int], modes: tuple[int, ...]) -> tuple[int, ...]:
    asked = [rank] * len(modes) if isinstance(rank, int) else list(rank)
    if len(asked) != len(modes) or any(one < 1 for one in asked):
        raise TensorizeError(
            f"rank = {rank} must be one number or one per mode ({len(modes)}), each 1 or more"
        )
    cut = [min(one, mode) for one, mode in zip(asked, modes, strict=True)]
    # A rank beyond the product of all others adds nothing to the core.
    for mode in range(len(cut)):
        cut[mode] = min(cut[mode], math.prod(cut[:mode] + cut[mode + 1 :]) if len(cut) > 1 else 1)
    return tuple(cut)


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)


def _times(tensor: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Multiply one mode: (.., n, ..) by (m, n) -> (.., m, ..)."""
    moved: Tensor = torch.tensordot(matrix, tensor, dims=([1], [mode])).movedim(0, mode)
    return moved


_RIDGE = 1e-12
"""Added to normal equations, as a share of their mean diagonal: terms may become parallel."""


def cp(
    tensor: Tensor,
    *,
    rank: int,
    restarts: int = 3,
    iterations: int = 100,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Factored:
    """A tensor as a sum of `rank` outer products.

    Args:
        tensor: (n_1, .., n_k) with k >= 2, any floating type.
        rank: Number of terms.
        restarts: Starts; the first from the unfoldings' singular vectors, the others random.
        iterations: Most rounds over all modes for each start.
        tolerance: A start ends when a round lowers the relative error by less.
        seed: Of the random starts.

    Returns:
        Factors (n_j, rank) in the tensor's type, whose columns share the norm of their term
        equally; the error is measured.

    Raises:
        TensorizeError: For numbers below 1, less than two modes, or values that are not finite.
    """
    if rank < 1 or restarts < 1 or iterations < 1:
        raise TensorizeError(
            f"rank = {rank}, restarts = {restarts} and iterations = {iterations} must be 1 or more"
        )
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise TensorizeError(
            f"a tensor of shape {tuple(tensor.shape)} has no sum of outer products: give two modes"
        )
    wide = working_copy(tensor, "tensor")
    norm = float(wide.norm())
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, list[Tensor]] | None = None
    if norm == 0.0:
        # Factors that are all zero would have no gradient; one is enough.
        begun = _begin(wide, rank, 0, generator)
        factors = [*begun[:-1], torch.zeros_like(begun[-1])]
        return Factored(tuple(one.to(tensor.dtype) for one in factors), 0.0, 0.0)
    for start in range(restarts):
        found = _alternate(wide, _begin(wide, rank, start, generator), iterations, tolerance * norm)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    terms = best[1]
    # The same terms, each with equally long vectors in all modes.
    sizes = [factor.norm(dim=0) for factor in terms]
    term = torch.stack(sizes).prod(0) ** (1.0 / len(terms))
    factors = [
        factor * (term / torch.where(size > 0, size, 1.0))
        for factor, size in zip(terms, sizes, strict=True)
    ]
    return Factored(tuple(one.to(tensor.dtype).contiguous() for one in factors), best[0], norm)


def to_cp(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: int,
    restarts: int = 3,
    iterations: int = 100,
    seed: int = 0,
) -> Factored:
    """A weight as a CP chain: input factors, then output factors.

    Args:
        weight: (out, in), any floating type.
        in_modes: (d,) modes of the input features, row-major; product >= in.
        out_modes: (e,) modes of the output features, row-major; product >= out.
        rank: Number of terms.
        restarts: See `cp`.
        iterations: See `cp`.
        seed: See `cp`.

    Returns:
        Factors (in_1, rank), .., (in_d, rank), (out_1, rank), .., (out_e, rank) in the weight's
        type. The error is measured, without the padding of modes.

    Raises:
        TensorizeError: For modes that are too small, or as `cp`.
    """
    matrix = matrix_copy(weight)
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    joined = wide.mT.reshape(*in_modes, *out_modes)
    found = cp(joined, rank=rank, restarts=restarts, iterations=iterations, seed=seed)
    error = found.error
    if wide.numel() > matrix.numel():
        out_features, in_features = matrix.shape
        dense = cp_weight(found.cores, in_features, out_features, inputs=len(in_modes))
        error = float((matrix - dense).norm())
    return Factored(tuple(one.to(weight.dtype) for one in found.cores), error, found.norm)


def cp_product(factors: Sequence[Tensor]) -> Tensor:
    """The tensor (n_1, .., n_k) that factors (n_j, rank) hold."""
    whole = factors[0]
    for factor in factors[1:-1]:
        whole = whole.unsqueeze(-2) * factor
    return whole @ factors[-1].mT


def cp_weight(
    factors: Sequence[Tensor], in_features: int, out_features: int, *, inputs: int
) -> Tensor:
    """The weight (out, in) of factors as `to_cp` returns them, without padding.

    Args:
        factors: Input factors, then output factors.
        in_features: At most the product of the input modes.
        out_features: At most the product of the output modes.
        inputs: Number of input factors.
    """
    whole = cp_product(factors)
    rows = math.prod(whole.shape[:inputs])
    return whole.reshape(rows, -1).mT[:out_features, :in_features]


def _begin(tensor: Tensor, rank: int, start: int, generator: torch.Generator) -> list[Tensor]:
    """Unit columns: singular vectors for the first start, completed with random ones."""
    factors = []
    for mode, size in enumerate(tensor.shape):
        drawn = torch.randn(size, rank, generator=generator, dtype=torch.float64).to(tensor)
        if start == 0:
            vectors = leading_vectors(tensor, mode, rank)
            drawn[:, : vectors.shape[1]] = vectors
        factors.append(drawn / drawn.norm(dim=0))
    return factors


def _alternate(
    tensor: Tensor, factors: list[Tensor], iterations: int, tolerance: float
) -> tuple[float, list[Tensor]]:
    before = math.inf
    for _ in range(iterations):
        for mode in range(len(factors)):
            gram = factors[0].new_ones(factors[0].shape[1], factors[0].shape[1])
            for other, factor in enumerate(factors):
                if other != mode:
                    gram = gram * (factor.mT @ factor)
            added = _RIDGE * gram.diagonal().mean()
            gram = gram + torch.eye(len(gram)).to(gram) * added
            # Contract all modes but one with the factors' columns: (n_mode, rank).
            others = [factor for other, factor in enumerate(factors) if other != mode]
            result = tensor.movedim(mode, 0) @ others[-1]
            for factor in reversed(others[:-1]):
                result = (result * factor).sum(-2)
            answer = torch.linalg.lstsq(gram, result.mT)
            factors[mode] = answer.solution.mT
            if mode < len(factors) - 1:
                sizes = factors[mode].norm(dim=0)
                factors[mode] = factors[mode] / torch.where(sizes > 0, sizes, 1.0)
        error = float((tensor - cp_product(factors)).norm())
        if before - error <= tolerance:
            break
        before = error
    return error, factors
