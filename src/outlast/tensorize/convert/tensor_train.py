"""Dense to tensor train (TT) and tensor-train matrix (TTM): TT-SVD.

TT-SVD (Oseledets 2011, "Tensor-train decomposition", algorithm 1) cuts the tensor bond by bond
with truncated singular value decompositions. What one cut discards is orthogonal to all that later
cuts discard, so the error is exactly ``sqrt(sum of all discarded sigma^2)``. Every cut discards at
most what the best tensor of these ranks lacks at that bond, so the error is at most
``sqrt(bonds)`` times the best possible one (theorem 2.2 and corollary 2.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.convert.factored import (
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
    return Factored(
        tuple(core.to(tensor.dtype).contiguous() for core in _without_ends(balance_train(cores))),
        root_sum(lost),
        norm,
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

    TT-SVD leaves all norm in the last core. Balanced as `convert.factored.balanced` does for two
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


def _without_ends(cores: Sequence[Tensor]) -> list[Tensor]:
    """Cores without their boundary ranks of 1."""
    result = list(cores)
    result[0] = result[0].squeeze(0)
    result[-1] = result[-1].squeeze(-1)
    return result


def _in_type(found: Factored, dtype: torch.dtype) -> Factored:
    return Factored(tuple(core.to(dtype) for core in found.cores), found.error, found.norm)
