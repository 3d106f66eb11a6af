"""Comparing what was found with what was expected, against a variance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.guard.threshold import DEVIATIONS


@dataclass(frozen=True)
class Judged:
    """How the rows of one check did; numbers are 0-dim tensors where the device is not waited for.

    Attributes:
        flags: (rows,) bool, which rows exceeded their threshold.
        exceeded: Their number.
        worst: Largest |difference| in standard deviations.
        total: Sum of squared differences in standard deviations, of rows that passed.
        widest: Largest threshold of a row that passed, as a share of its scale; an error of twice
            as much is surely found.
        bitwise: Whether numbers were compared that must be equal, whatever they are.
    """

    flags: Tensor
    exceeded: int | Tensor
    worst: float | Tensor
    total: float | Tensor
    widest: float | Tensor
    bitwise: bool = False


def judge(difference: Tensor, variance: Tensor, scale_squared: Tensor) -> Judged:
    """Judge differences, on any device without waiting for it.

    Args:
        difference: (rows,) found minus expected.
        variance: (rows,) what rounding makes of it, above 0.
        scale_squared: (rows,) squared norm of what is checked.
    """
    limit = DEVIATIONS**2
    ratio = difference.square() / variance
    # A NaN is not at most the limit, and an infinite variance allows nothing.
    flags = ~(ratio <= limit) | ~torch.isfinite(variance)
    width = torch.where(flags | (scale_squared == 0), 0.0, variance / scale_squared)
    return Judged(
        flags,
        flags.sum(),
        ratio.max().sqrt(),
        torch.where(flags, 0.0, ratio).sum(),
        (limit * width.max()).sqrt(),
    )


def exact(found: Tensor, expected: Tensor) -> Judged:
    """Judge values (rows,) that must be equal bit for bit, such as hashes."""
    flags = found != expected
    zero = torch.zeros((), device=flags.device)
    worst = torch.where(flags.any(), torch.inf, 0.0)
    return Judged(flags, flags.sum(), worst, zero, zero, bitwise=True)
