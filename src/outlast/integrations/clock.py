"""How long the steps of a loop take."""

from __future__ import annotations

import time

_WEIGHT = 0.1
"""Of the newest step in the mean."""


class StepClock:
    """Seconds from step boundary to step boundary.

    Attributes:
        mean_seconds: Of the newest steps; 0 before the first.
    """

    def __init__(self) -> None:
        self.mean_seconds = 0.0
        self._boundary = time.monotonic()

    def begin(self) -> None:
        """A step begins now; what was done since the last one counts for none."""
        self._boundary = time.monotonic()

    def step(self) -> float:
        """A step ends now, and the next begins; how long it took."""
        now = time.monotonic()
        seconds, self._boundary = now - self._boundary, now
        self.observe(seconds)
        return seconds

    def observe(self, seconds: float) -> None:
        """A step took `seconds`."""
        weight = _WEIGHT if self.mean_seconds else 1.0
        self.mean_seconds += weight * (seconds - self.mean_seconds)
