"""What else than a fault can make a check of a product fail.

Looked at after a check has failed, so at leisure, and in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outlast.guard.elements import bits
from outlast.guard.judged import Judged, judge
from outlast.guard.product import rounding_of
from outlast.guard.threshold import product_bound, unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor


def beyond_rounding(
    judged: Judged, stored: Tensor, factors: tuple[Tensor, Tensor], added: Tensor | None = None
) -> Judged:
    """Of flagged rows, those that no rounding whatever explains.

    Sums of many nearly equal terms round in the same direction again and again, which the model of
    independent roundings does not allow for. So numbers that a second computation has given again
    are compared, element by element, with the product in float64, against the worst case of
    rounding ``k u sum |a b|`` (Higham, Accuracy and Stability, 3.5), which nothing clean exceeds.

    Args:
        judged: Of the rows of `stored`.
        stored: (rows, columns) the product of the factors.
        factors: (rows, terms) and (terms, columns).
        added: (columns,) a bias.
    """
    rows = judged.flags.nonzero()[:, 0]
    if not len(rows):
        return judged
    left, right = factors[0][rows].double(), factors[1].double()
    expected, sizes = left @ right, left.abs() @ right.abs()
    if added is not None:
        expected, sizes = expected + added.double(), sizes + added.double().abs()
    rounding = rounding_of(stored)
    unit = (left.shape[1] + 1) * unit_roundoff(rounding.accumulated)
    if rounding.read:
        unit += 2 * unit_roundoff(rounding.read)
    spacing = torch.finfo(stored.dtype).smallest_normal
    last = unit_roundoff(rounding.stored)
    limit = unit * sizes + last * (expected.abs() + unit * sizes + spacing)
    # What overflows in float64's terms, or begins with no finite number, may be anything.
    free = ~torch.isfinite(expected) | (sizes > torch.finfo(stored.dtype).max)
    within = (stored[rows].double() - expected).abs() <= limit
    wrong = ~(within | free).all(dim=1)
    flags = judged.flags.clone()
    flags[rows] = wrong
    return replace(judged, flags=flags, exceeded=int(wrong.sum()))


def overflowed(dy: Tensor, db: Tensor, judged: Judged) -> bool:
    """Whether what is wrong is the bias's gradient alone, by sums of dy (rows, outputs) too large.

    Otherwise `db` holds what a second computation gives.
    """
    if bool(torch.isfinite(db[judged.flags]).any()):
        return False
    again = dy.sum(0)
    if torch.equal(bits(again), bits(db)):
        return True
    db.copy_(again)
    return False


def compared(matrix: Tensor, signs: Tensor, kept: Tensor) -> Judged:
    """Judge kept sums (rows,) of a matrix (rows, columns) over signs (columns,).

    Sums that were not finite say nothing.
    """
    wide = matrix.double()
    squares = wide.square().sum(dim=1)
    summed = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    bound = product_bound(rounding_of(matrix, summed), matrix.shape[1], 1)
    known = torch.isfinite(kept)
    difference = torch.where(known, wide @ signs.double() - kept, 0.0)
    variance = torch.where(known, bound.by_square * squares + bound.floor, 1.0)
    return judge(difference, variance, squares)
