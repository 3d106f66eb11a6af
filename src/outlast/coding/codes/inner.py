"""The code that schemes built from smaller codes take when the caller names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.coding.codes.checks import check_workers
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.coding.codes.roots import RealReedSolomon
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.code import GradientCode


def checked_code(code: GradientCode | None, workers: int, stragglers: int) -> GradientCode:
    """`code`, if it is for so many workers and tolerates so many stragglers, or one that does.

    That is fractional repetition where stragglers + 1 divides workers, which is 0/1 and often
    survives more, else the real code that amplifies rounding least.

    Raises:
        CodingError: For stragglers outside [0, workers), where `code` does not fit, or where the
            real code would amplify too much.
    """
    check_workers(workers, stragglers)
    if code is None and workers % (stragglers + 1) == 0:
        return FractionalRepetition(workers, stragglers)
    chosen = RealReedSolomon(workers, stragglers) if code is None else code
    if chosen.workers != workers:
        raise CodingError(f"code = {chosen!r} is for {chosen.workers} workers, not for {workers}")
    if chosen.tolerance < stragglers:
        raise CodingError(
            f"code = {chosen!r} tolerates {chosen.tolerance} stragglers, but {stragglers} are "
            "needed here"
        )
    return chosen
