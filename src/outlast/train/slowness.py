"""Ranks that are slower than the others: measured without waiting, told once, with a remedy."""

from __future__ import annotations

from outlast.records import Warned
from outlast.recover.hang import (
    WINDOW_SECONDS,
    WINDOWS,
    SlowRanks,
)


class SlownessWatch:
    """Compares the ranks' own time; all of them share theirs with each record of steps.

    Args:
        rank: This process.
        ranks: All that do equal work.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._seconds = 0.0
        self._slow = SlowRanks(ranks)

    def add(self, seconds: float) -> None:
        """A step took this process `seconds`, waiting for others left out."""
        self._seconds += seconds

    def share(self) -> list[float]:
        """This rank's time since the last call at its place, 0 elsewhere: ranks sum them up."""
        shares = [0.0] * self._ranks
        shares[self._rank], self._seconds = self._seconds, 0.0
        return shares

    def observe(self, seconds: list[float]) -> Warned | None:
        """Take in the sum of all ranks' shares; a warning if a rank has been slow for long."""
        found = self._slow.observe(seconds)
        if not found:
            return None
        names = ", ".join(f"rank {rank} ({ratio:.2f} times)" for rank, ratio in found)
        return Warned(
            f"slower than the median rank for {WINDOWS * WINDOW_SECONDS:.0f} s of work: {names}; "
            'look at that node, or let the others take work over with coding.scheme = "coverage"'
        )
