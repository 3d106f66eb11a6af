"""From dense weights to the cores of every form: tensor train, Tucker, canonical polyadic.

`convert` does it for a layer; two factors and blocks are in `outlast.tensorize.svd`.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import balanced_modes, block_modes, bond_ranks, largest_block_rank
from outlast.tensorize.svd import (
    Factored,
    check_one_of,
    choose_rank,
    discarded_shares,
    low_rank,
    low_rank_and_sparse,
    matrix_copy,
    padded,
    root_sum,
    singular,
    spend,
    split,
    tails,
    to_blocks,
)

if TYPE_CHECKING:
    from outlast.tensorize.network import Network
    from outlast.tensorize.shapes import Ranks

Rank = int | Sequence[int]

SWEEPS = 5
"""Rounds of orthogonal iteration; most of what it gains comes in the first few."""

RESTARTS = 3
"""Starts of alternating least squares; the first from the unfoldings' singular vectors, the others
random."""

ITERATIONS = 100
"""Most rounds over all modes for each of its starts."""

TOLERANCE = 1e-6
"""A start ends when a round lowers the relative error by less."""

_RIDGE = 1e-12
"""Added to normal equations, as a share of their mean diagonal: terms may become parallel."""

CONVERTIBLE = ("low_rank", "tt", "ttm", "btt", "monarch", "tucker", "cp", "sltrain")
"""Forms that a dense weight is turned into; all but ``cp`` and ``sltrain`` without a search."""


def check_convertible(form: str) -> None:
    """Refuse forms that no dense weight is turned into.

    Raises:
        TensorizeError: See above.
    """
    if form in CONVERTIBLE:
        return
    remedies = {
        "cola": "its nonlinearity makes it no matrix: start from scratch and distil the dense "
        "model into it (outlast.tensorize.conversion.distill_model), or use form = 'low_rank'",
        "lax": "its layers add up: start from scratch, or use form = 'low_rank'",
    }
    why = remedies.get(form, f"there are conversions to {', '.join(CONVERTIBLE)} alone")
    raise TensorizeError(f"init = 'from_dense' does not go with form = {form!r}: {why}")


@torch.no_grad()
def convert(layer: Any, form: str, weight: Tensor) -> float:
    """Give a layer the factors nearest to a dense weight.

    Args:
        layer: A layer of one of `CONVERTIBLE`.
        form: Which.
        weight: (out, in); of an embedding (features, rows).

    Returns:
        ``|W - product| / |W|`` in the Frobenius norm.

    Raises:
        TensorizeError: See `check_convertible`, or the weight has no finite values.
    """
    check_convertible(form)
    network: Network = layer.network
    into, out, ranks = (
        tuple(map(network.size, letters))
        for letters in (network.inputs, network.outputs, network.bonds)
    )
    modes: Any = {"in_modes": into, "out_modes": out}
    # The letters of the cores' dimensions in the order in which conversions give them.
    given = network.cores
    if form == "sltrain":
        found = low_rank_and_sparse(weight, rank=ranks[0], density=layer.density)
        down, up, values, indices = found.cores
        layer.down.weight.copy_(down)
        layer.up.weight.copy_(up / layer.scale)
        layer.values.copy_(values)
        layer.indices.copy_(indices)
        return found.relative_error
    if form == "low_rank":
        found = low_rank(weight, rank=ranks[0])
        given = (network.bonds + network.inputs, network.outputs + network.bonds)
    elif form == "cp":
        found = to_cp(weight, **modes, rank=ranks[0])
        given = tuple(mode + network.bonds for mode in network.inputs + network.outputs)
    elif form in ("btt", "monarch"):
        found = to_blocks(weight, **modes, rank=ranks[0])
    else:
        found = _CHAINS[form](weight, **modes, rank=ranks)
    for factor, core, letters, wanted in zip(
        layer.factors(), found.cores, given, network.cores, strict=True
    ):
        turned = core.permute([letters.index(letter) for letter in wanted])
        if turned.shape != factor.shape:
            # A conversion can need less than the rank that was asked for.
            factor.zero_()
        factor[tuple(map(slice, turned.shape))].copy_(turned)
    return found.relative_error


def rank_for_error(form: str, weight: Tensor, error: float, modes: int) -> Ranks:
    """The smallest rank whose conversion keeps to a relative error in the Frobenius norm.

    Args:
        form: Which.
        weight: (out, in).
        error: The largest.
        modes: On each side, of chains.

    Raises:
        TensorizeError: The form has no such conversion.
    """
    out_features, in_features = weight.shape
    if form == "low_rank":
        return max(1, int((discarded_shares(weight) > error).sum()))
    if form == "btt":
        in_pair, out_pair = block_modes(in_features, out_features)
        found = to_blocks(weight, in_modes=in_pair, out_modes=out_pair, error=error)
        return min(found.cores[0].shape[2], largest_block_rank(in_pair, out_pair))
    if form not in _CHAINS:
        raise TensorizeError(
            f"rank = 'error={error}' is for low_rank, tt, ttm, btt and tucker, not {form}: "
            "give it a rank or a budget of parameters"
        )
    into, out = balanced_modes(in_features, modes), balanced_modes(out_features, modes)
    found = _CHAINS[form](weight, in_modes=into, out_modes=out, error=error)
    if form == "tucker":
        return tuple(found.cores[len(into)].shape)
    return tuple(core.shape[-1] for core in found.cores[:-1]) or 1


def _from_weight(
    matrix: Tensor,
    dtype: torch.dtype,
    decomposed: Callable[[Rank | None, float | None], Factored],
    product: Callable[[Sequence[Tensor]], Tensor],
    *,
    measured: bool,
    rank: Rank | None,
    error: float | None,
) -> Factored:
    """A decomposition of a weight whose modes may be padded.

    Args:
        matrix: The weight (out, in) as conversions compute with it.
        dtype: That of the cores that are returned.
        decomposed: From a rank or an error to cores of the padded weight.
        product: From the cores to the weight without padding.
        measured: Whether there is padding: then errors are measured without it, and of an error
            budget it takes none.
        rank: As asked for; or
        error: as asked for.
    """
    check_one_of(rank=rank, error=error)

    def found(rank: Rank | None, error: float | None) -> Factored:
        factored = decomposed(rank, error)
        if not measured:
            return factored
        difference = float((matrix - product(factored.cores)).norm())
        return replace(factored, error=difference)

    if measured and error is not None:
        best = spend(lambda budget: found(None, budget), error)
    else:
        best = found(rank, error)
    return replace(best, cores=tuple(core.to(dtype).contiguous() for core in best.cores))


def _joined(matrix: Tensor, in_modes: Sequence[int], out_modes: Sequence[int]) -> Tensor:
    """A weight as a tensor with the modes of the inputs and then of the outputs."""
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    return wide.mT.reshape(*in_modes, *out_modes)


def _weight(whole: Tensor, in_features: int, out_features: int, inputs: int) -> Tensor:
    """A tensor as `_joined` gives it as the weight (out, in), without padding."""
    rows = math.prod(whole.shape[:inputs])
    return whole.reshape(rows, -1).mT[:out_features, :in_features]


def tensor_train(
    tensor: Tensor, *, rank: Rank | None = None, error: float | None = None
) -> Factored:
    """A tensor of any order as a train of cores.

    Args:
        tensor: (n_1, .., n_k), float64.
        rank: Rank of all bonds or of each (k - 1), cut to what the modes can use, see
            `outlast.tensorize.shapes.bond_ranks`; or
        error: largest error as a share of the norm, spread over the bonds as they need it.

    Returns:
        Cores (n_1, r_1), (r_1, n_2, r_2), .., (r_{k-1}, n_k), balanced (see `balance_train`); the
        error is exact up to rounding.

    Raises:
        TensorizeError: For ranks or an error out of range.
    """
    modes = tuple(tensor.shape)
    ranks = None if rank is None else bond_ranks(rank, modes)
    norm = float(tensor.norm())
    bonds = len(modes) - 1
    left_over = (error or 0.0) ** 2
    lost = 0.0
    cores: list[Tensor] = []
    rest = tensor.reshape(1, -1)
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
    return Factored(tuple(cores), root_sum(lost), norm)


def to_tensor_train(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: Rank | None = None,
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
    out_features, in_features = matrix.shape
    joined = _joined(matrix, in_modes, out_modes)
    return _from_weight(
        matrix,
        weight.dtype,
        lambda rank, error: tensor_train(joined, rank=rank, error=error),
        lambda cores: train_weight(cores, in_features, out_features, inputs=len(in_modes)),
        measured=joined.numel() > matrix.numel(),
        rank=rank,
        error=error,
    )


def to_tensor_train_matrix(
    weight: Tensor,
    *,
    in_modes: Sequence[int],
    out_modes: Sequence[int],
    rank: Rank | None = None,
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
    out_features, in_features = matrix.shape
    wide = padded(matrix, math.prod(out_modes), math.prod(in_modes))
    paired = wide.reshape(*out_modes, *in_modes).permute(
        *(axis for k in range(count) for axis in (k, count + k))
    )
    joined = paired.reshape([out * into for out, into in zip(out_modes, in_modes, strict=True)])

    def decomposed(rank: Rank | None, error: float | None) -> Factored:
        found = tensor_train(joined, rank=rank, error=error)
        # Each core with its output and its input mode.
        cores = tuple(
            core.reshape(
                *(core.shape[:1] if k else ()),
                out_modes[k],
                in_modes[k],
                *(core.shape[-1:] if k < count - 1 else ()),
            )
            for k, core in enumerate(found.cores)
        )
        return replace(found, cores=cores)

    return _from_weight(
        matrix,
        weight.dtype,
        decomposed,
        lambda cores: train_matrix_weight(cores, in_features, out_features),
        measured=wide.numel() > matrix.numel(),
        rank=rank,
        error=error,
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
    return _weight(train_product(cores), in_features, out_features, inputs)


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


def tucker(
    tensor: Tensor, *, rank: Rank | None = None, error: float | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Core and orthonormal factors of a tensor.

    Args:
        tensor: (n_1, .., n_k) in float64.
        rank: Rank of all modes or of each, cut to the mode's size; or
        error: largest error as a share of the norm, which is reached without orthogonal iteration.

    Returns:
        Core (r_1, .., r_k), which has what norm there is, and factors (n_j, r_j) with orthonormal
        columns.

    Raises:
        TensorizeError: For ranks or an error out of range.
    """
    order, modes = tensor.dim(), tuple(tensor.shape)
    ranks: list[int] | None = None
    if rank is not None:
        ranks = [rank] * order if isinstance(rank, int) else list(rank)
        if len(ranks) != order or any(one < 1 for one in ranks):
            raise TensorizeError(
                f"rank = {rank} must be one number or one per mode ({order}), each 1 or more"
            )
        ranks = [min(one, mode) for one, mode in zip(ranks, modes, strict=True)]
        # A rank beyond the product of all others adds nothing to the core.
        for mode in range(order):
            ranks[mode] = min(ranks[mode], math.prod(ranks[:mode] + ranks[mode + 1 :]))
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
    for _ in range(SWEEPS if ranks is not None and order > 1 else 0):
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
    rank: Rank | None = None,
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
    matrix, inputs = matrix_copy(weight), len(in_modes)
    out_features, in_features = matrix.shape
    joined = _joined(matrix, in_modes, out_modes)

    def product(cores: Sequence[Tensor]) -> Tensor:
        return tucker_weight(cores, in_features, out_features, inputs=inputs)

    def decomposed(rank: Rank | None, error: float | None) -> Factored:
        core, factors = tucker(joined, rank=rank, error=error)
        cores = (*factors[:inputs], core, *(factor.mT for factor in factors[inputs:]))
        return Factored(cores, float((matrix - product(cores)).norm()), float(matrix.norm()))

    return _from_weight(
        matrix,
        weight.dtype,
        decomposed,
        product,
        measured=joined.numel() > matrix.numel(),
        rank=rank,
        error=error,
    )


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
    return _weight(whole, in_features, out_features, inputs)


_CHAINS: dict[str, Callable[..., Factored]] = {
    "tt": to_tensor_train,
    "ttm": to_tensor_train_matrix,
    "tucker": to_tucker,
}


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)


def _times(tensor: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Multiply one mode: (.., n, ..) by (m, n) -> (.., m, ..)."""
    moved: Tensor = torch.tensordot(matrix, tensor, dims=([1], [mode])).movedim(0, mode)
    return moved


def cp(tensor: Tensor, *, rank: int) -> Factored:
    """A tensor as a sum of `rank` outer products.

    Args:
        tensor: (n_1, .., n_k) with k >= 2, float64.
        rank: Number of terms.

    Returns:
        Factors (n_j, rank), whose columns share the norm of their term equally; the error is
        measured.

    Raises:
        TensorizeError: For a rank below 1.
    """
    if rank < 1:
        raise TensorizeError(f"rank = {rank} must be 1 or more")
    norm = float(tensor.norm())
    generator = torch.Generator().manual_seed(0)
    if norm == 0.0:
        # Factors that are all zero would have no gradient; one is enough.
        begun = _begin(tensor, rank, 0, generator)
        return Factored((*begun[:-1], torch.zeros_like(begun[-1])), 0.0, 0.0)
    best: tuple[float, list[Tensor]] = (math.inf, [])
    for start in range(RESTARTS):
        found = _alternate(tensor, _begin(tensor, rank, start, generator), TOLERANCE * norm)
        best = min(best, found, key=lambda answer: answer[0])
    error, terms = best
    # The same terms, each with equally long vectors in all modes.
    sizes = [factor.norm(dim=0) for factor in terms]
    term = torch.stack(sizes).prod(0) ** (1.0 / len(terms))
    factors = tuple(
        factor * (term / torch.where(size > 0, size, 1.0))
        for factor, size in zip(terms, sizes, strict=True)
    )
    return Factored(factors, error, norm)


def to_cp(
    weight: Tensor, *, in_modes: Sequence[int], out_modes: Sequence[int], rank: int
) -> Factored:
    """A weight as a CP chain: input factors, then output factors.

    Args:
        weight: (out, in), any floating type.
        in_modes: (d,) modes of the input features, row-major; product >= in.
        out_modes: (e,) modes of the output features, row-major; product >= out.
        rank: Number of terms.

    Returns:
        Factors (in_1, rank), .., (in_d, rank), (out_1, rank), .., (out_e, rank) in the weight's
        type. The error is measured, without the padding of modes.

    Raises:
        TensorizeError: For modes that are too small, or as `cp`.
    """
    matrix = matrix_copy(weight)
    out_features, in_features = matrix.shape
    joined = _joined(matrix, in_modes, out_modes)
    return _from_weight(
        matrix,
        weight.dtype,
        lambda *_: cp(joined, rank=rank),
        lambda cores: cp_weight(cores, in_features, out_features, inputs=len(in_modes)),
        measured=joined.numel() > matrix.numel(),
        rank=rank,
        error=None,
    )


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
    return _weight(cp_product(factors), in_features, out_features, inputs)


def _begin(tensor: Tensor, rank: int, start: int, generator: torch.Generator) -> list[Tensor]:
    """Unit columns: singular vectors for the first start, completed with random ones."""
    factors = []
    for mode, size in enumerate(tensor.shape):
        drawn = torch.randn(size, rank, generator=generator, dtype=torch.float64).to(tensor)
        if start == 0:
            vectors = singular(_unfold(tensor, mode))[0][:, :rank]
            drawn[:, : vectors.shape[1]] = vectors
        factors.append(drawn / drawn.norm(dim=0))
    return factors


def _alternate(
    tensor: Tensor, factors: list[Tensor], tolerance: float
) -> tuple[float, list[Tensor]]:
    """Alternating least squares from a start: the error and the factors."""
    before = math.inf
    for _ in range(ITERATIONS):
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
