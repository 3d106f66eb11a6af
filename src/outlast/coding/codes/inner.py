"""The code that schemes built from smaller codes take when the caller names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.coding.codes.cyclic import CyclicRepetition
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.code import GradientCode


def default_code(workers: int, stragglers: int) -> GradientCode:
    """Fractional repetition where stragglers + 1 divides workers, else cyclic repetition.

    The first is 0/1, hence adds no rounding error, and often survives more stragglers.
    """
    if workers % (stragglers + 1) == 0:
        return FractionalRepetition(workers, stragglers)
    return CyclicRepetition(workers, stragglers)


def checked_code(code: GradientCode | None, workers: int, stragglers: int) -> GradientCode:
    """`code`, or the default one, if it is for so many workers and tolerates so many stragglers.

    Raises:
        CodingError: Where it is not.
    """
    chosen = default_code(workers, stragglers) if code is None else code
    if chosen.workers != workers:
        raise CodingError(f"code = {chosen!r} is for {chosen.workers} workers, not for {workers}")
    if chosen.tolerance < stragglers:
        raise CodingError(
            f"code = {chosen!r} tolerates {chosen.tolerance} stragglers, but {stragglers} are "
            "needed here"
        )
    return chosen
