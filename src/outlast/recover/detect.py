"""When a step counts as hung, and who is slow: from measured step times and no clock of its own.

deadline = StepDeadline(first_seconds=600.0)
deadline.observe(0.31)                     # after every step
deadline.seconds                           # how long the next one may take
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

MEDIANS = 10.0
"""A step may take so many times as long as the median of the last ones."""

SLACK = 3.0
"""It may also take so many times as long as the longest of them."""

LEAST_SECONDS = 60.0
"""No deadline that follows from measured steps is shorter: a machine's own hiccups take seconds."""

FIRST_STEPS = 10
"""Fewer measured steps say nothing; the deadline is the longest wait for another process."""

_REMEMBERED = 256
_REFRESHED = 16

SLOWNESS = 1.2
"""A rank is slow that takes so many times as long as the median one."""

WINDOW_SECONDS = 10.0
"""Of the median rank's own work, in which ranks are compared."""

WINDOWS = 5
"""A rank must be slow so many times in a row."""


@dataclass
class StepDeadline:
    """How long a step may take.

    ``max(60 s, 10 median, 3 longest)`` over the last 256 steps. The next of n + 1 interchangeable
    step times is the longest with probability 1 / (n + 1), whatever their distribution; the
    factor 3 beyond it, and the 10 medians, are slack for what is no longer the same distribution.
    The first step of an attempt may take `first_seconds` in any case, since it compiles and
    connects.

    Args:
        first_seconds: While fewer than `FIRST_STEPS` steps are measured.
        fixed_seconds: In the place of all that from the second step on; 0 for no limit at all.
        least_seconds: In the place of `LEAST_SECONDS`, for steps that may compile anew.
    """

    first_seconds: float
    fixed_seconds: float | None = None
    least_seconds: float = LEAST_SECONDS
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _count: int = 0
    _measured: float = 0.0

    def observe(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._steps.append(seconds)
        self._count += 1
        if self._count <= FIRST_STEPS or self._count % _REFRESHED == 0:
            typical, longest = statistics.median(self._steps), max(self._steps)
            self._measured = max(self.least_seconds, MEDIANS * typical, SLACK * longest)
        self._measured = max(self._measured, SLACK * seconds)

    @property
    def seconds(self) -> float:
        """How long the step under way may take; 0 for no limit."""
        if self.fixed_seconds == 0.0:
            return 0.0
        if self._count == 0:
            return max(self.first_seconds, self.fixed_seconds or 0.0)
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        return self.first_seconds if self._count < FIRST_STEPS else self._measured


@dataclass
class SlowRanks:
    """Finds ranks that are slower than the others for long: each of 5 windows of 10 s in a row.

    Args:
        ranks: How many there are.
    """

    ranks: int
    _seconds: list[float] = field(default_factory=list)
    _windows: list[int] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)

    def observe(self, seconds: list[float]) -> list[tuple[int, float]]:
        """Take in some steps.

        Args:
            seconds: Each rank's own time for these steps, waiting left out.

        Returns:
            Ranks that are slow for `WINDOWS` windows now, with the ratio of their time to the
            median; each rank once.
        """
        total = [a + b for a, b in zip(self._seconds or [0.0] * self.ranks, seconds, strict=True)]
        # Of two, the faster one is typical: their mean would hide what is slow.
        typical = statistics.median_low(total)
        if typical < WINDOW_SECONDS:
            self._seconds = total
            return []
        self._seconds = []
        windows = self._windows or [0] * self.ranks
        self._windows = [
            count + 1 if item > SLOWNESS * typical else 0
            for count, item in zip(windows, total, strict=True)
        ]
        news = [
            (rank, total[rank] / typical)
            for rank, count in enumerate(self._windows)
            if count >= WINDOWS and rank not in self._told
        ]
        self._told.update(rank for rank, _ in news)
        return news
