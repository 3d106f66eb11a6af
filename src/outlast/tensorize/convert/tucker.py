"""Dense to Tucker: one small factor per mode and a core that joins them.

    W[a.., c..] = sum over p.., s.. of  A_1[a, p] .. G[p.., s..] .. B_1[s, c]

The factors come from the higher-order singular value decomposition, cut mode by mode (ST-HOSVD,
Vannieuwenhoven et al. 2012), whose error is at most sqrt(modes) times the best possible one, and
improve by orthogonal iteration (HOOI, De Lathauwer et al. 2000), which never makes it worse. With
one mode on each side the best factors are those of the singular value decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    singular,
    spend,
    tails,
    working_copy,
)

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
