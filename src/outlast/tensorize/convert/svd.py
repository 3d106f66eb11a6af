"""Dense to two factors: truncated singular value decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

from outlast.tensorize.convert.factored import (
    Factored,
    choose_rank,
    matrix_copy,
    singular,
    split,
    tails,
)


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
