"""Putting wrong numbers right by computing them again.

Nothing is reconstructed from checksums: rows are computed a second time by the same operation, so a
corrected run has the bits of a run without the fault. Only a tile around the flagged rows is
computed, if its other rows, the witnesses, come out with the bits that they have already: then the
operation is known to round the same way in the smaller shape. Otherwise the whole product is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.guard.elements import bits
from outlast.guard.threshold import DEVIATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outlast.guard.findings import Outcome
    from outlast.guard.judged import Judged

_ALIGNMENT = 128
"""Tiles begin and end at multiples of this: many witnesses, and shapes that kernels like."""

BELIEVED = 4.0
"""Numbers that come out twice with the same bits are believed up to so many thresholds."""


def correct(
    stored: Tensor,
    flags: Tensor,
    redo: Callable[[int, int], Tensor],
    check: Callable[[], Judged],
    beyond: Callable[[Judged], Judged] | None = None,
) -> Outcome:
    """Compute flagged rows of `stored` again, in place where that helps.

    Args:
        stored: (rows, columns) the numbers that did not pass.
        flags: (rows,) bool, which rows did not; at least one.
        redo: ``redo(first, last)`` computes rows [first, last) again by the same operation.
        check: Checks `stored` as it is now.
        beyond: Of the rows of a judgement, those that no rounding explains, as
            `outlast.guard.doubt.beyond_rounding`; asked where computing again changes nothing.
            Without it such numbers are believed up to `BELIEVED` thresholds.

    Returns:
        ``corrected``, ``check``, ``rounding``, ``not_finite`` or ``persistent``; see `Outcome`.
    """
    changed = _replace(stored, flags, redo)
    judged = check()
    if judged.exceeded and changed:
        # A second fault may have hit the second computation; a third decides.
        _replace_all(stored, redo)
        judged = check()
    if not judged.exceeded:
        return "corrected" if changed else "check"
    rows = judged.flags.to(stored.device).nonzero().flatten()
    finite = torch.isfinite(stored[rows]).all(dim=1)
    if beyond is not None:
        wrong = bool(beyond(judged).exceeded)
    else:
        wrong = bool(finite.any()) and not float(judged.worst) <= BELIEVED * DEVIATIONS
    if wrong:
        return "persistent"
    return "rounding" if bool(finite.all()) else "not_finite"


def _replace(stored: Tensor, flags: Tensor, redo: Callable[[int, int], Tensor]) -> bool:
    """Put the flagged rows' second computation in place; returns whether that changed any bit."""
    first, last = _tile(flags)
    if last - first < len(stored):
        again, own = redo(first, last), flags[first:last]
        same = _same(again, stored[first:last]).all(dim=1)
        if bool(same[~own].all()):
            stored[first:last][own] = again[own]
            return not bool(same.all())
    return _replace_all(stored, redo)


def _replace_all(stored: Tensor, redo: Callable[[int, int], Tensor]) -> bool:
    again = redo(0, len(stored))
    if bool(_same(again, stored).all()):
        return False
    stored.copy_(again)
    return True


def _same(again: Tensor, stored: Tensor) -> Tensor:
    """Where both have the same bits, or both are NaN, whose payload depends on the kernel."""
    return (bits(again) == bits(stored)) | (torch.isnan(again) & torch.isnan(stored))


def _tile(flags: Tensor) -> tuple[int, int]:
    """The aligned range around the flagged rows that has at least as many rows without a flag."""
    rows = flags.nonzero()
    first = int(rows[0]) // _ALIGNMENT * _ALIGNMENT
    last = -(-(int(rows[-1]) + 1) // _ALIGNMENT) * _ALIGNMENT
    last = min(last, len(flags))
    if 2 * len(rows) > last - first:
        return 0, len(flags)
    return first, last
