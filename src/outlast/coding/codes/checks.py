"""What every construction asks of its numbers of workers and stragglers, in the same words."""

from __future__ import annotations

from outlast.errors import CodingError


def check_positive(name: str, value: int) -> None:
    """Refuse a count that is below 1.

    Raises:
        CodingError: For such a count, under this name.
    """
    if value < 1:
        raise CodingError(f"{name} = {value} is below 1, the smallest number")


def check_workers(workers: int, stragglers: int, most: int | None = None) -> None:
    """Refuse numbers of workers and stragglers that no code has.

    Args:
        workers: n.
        stragglers: s.
        most: Largest number of stragglers; workers - 1 if None.

    Raises:
        CodingError: Without workers, or for stragglers that are not in [0, most].
    """
    check_positive("workers", workers)
    largest = workers - 1 if most is None else most
    if not 0 <= stragglers <= largest:
        nearest = min(max(stragglers, 0), largest)
        more = f", or workers = {workers + stragglers - largest}" if stragglers > 0 else ""
        raise CodingError(
            f"stragglers = {stragglers} is not in [0, {largest}] for {workers} workers; take "
            f"stragglers = {nearest}{more}"
        )
