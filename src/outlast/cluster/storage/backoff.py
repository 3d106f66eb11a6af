"""A rate for copies that makes way for others: additive increase, multiplicative decrease.

Nobody says how busy a shared file system is; the bandwidth that one gets does. As long as a copy
moves as fast as it asks to, it asks for a little more; when it gets clearly less, others are there,
and it asks for half of what it got. Copies that all do so converge to equal shares (Chiu and Jain
1989, Analysis of the increase and decrease algorithms for congestion avoidance).
"""

from __future__ import annotations

import math
import time

from outlast.cluster.storage.pace import TokenBucket
from outlast.errors import ClusterError

TOLERANCE = 0.8
DECREASE = 0.5
INCREASE = 0.05
_LEAST_BYTES_PER_S = 1e6
_LEAST_SHARE = 0.1


class Backoff:
    """Chooses the rate of a copy from the bandwidth that it gets.

    Args:
        most_bytes_per_s: Never ask for more; finite, e.g. what a copy gets when it is alone.
        least_bytes_per_s: Never ask for less, or the copy would not end.
        start_bytes_per_s: The first rate; None: half of the most.
        tolerance: Getting less than this share of the rate means that others are there.
        decrease: What is then asked for, as a share of what was got.
        increase: What is added otherwise, as a share of the most.

    Raises:
        ClusterError: For settings with which the rate could not find its place.
    """

    def __init__(
        self,
        most_bytes_per_s: float,
        *,
        least_bytes_per_s: float = _LEAST_BYTES_PER_S,
        start_bytes_per_s: float | None = None,
        tolerance: float = TOLERANCE,
        decrease: float = DECREASE,
        increase: float = INCREASE,
    ) -> None:
        if not (0 < least_bytes_per_s <= most_bytes_per_s and math.isfinite(most_bytes_per_s)):
            raise ClusterError(
                f"least_bytes_per_s = {least_bytes_per_s} and most_bytes_per_s = "
                f"{most_bytes_per_s}: give finite rates, the least not above the most"
            )
        for name, value in (
            ("tolerance", tolerance),
            ("decrease", decrease),
            ("increase", increase),
        ):
            if not 0 < value < 1:
                raise ClusterError(f"{name} = {value}: give a share between 0 and 1")
        self._most, self._least = most_bytes_per_s, least_bytes_per_s
        self._tolerance, self._decrease, self._increase = tolerance, decrease, increase
        first = 0.5 * most_bytes_per_s if start_bytes_per_s is None else start_bytes_per_s
        self._rate = min(max(first, least_bytes_per_s), most_bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """The rate to ask for now."""
        return self._rate

    def observe(self, size_bytes: float, seconds: float) -> float:
        """Learn what was got; returns the rate to ask for from now on.

        Args:
            size_bytes: What was moved with the present rate asked for; some seconds' worth of it,
                or the noise of single writes decides.
            seconds: How long it took.
        """
        if size_bytes > 0 and seconds > 0:
            got = size_bytes / seconds
            if got < self._tolerance * self._rate:
                self._rate = max(self._decrease * got, self._least)
            else:
                self._rate = min(self._rate + self._increase * self._most, self._most)
        return self._rate


class GentlePace:
    """A pace for one background copy that finds its rate by `Backoff`.

    Call `take` before each block is written; the time until the next call tells what was got.

    Args:
        backoff: Chooses the rate.
        window_seconds: For how long bandwidth is measured before the rate changes.
    """

    def __init__(self, backoff: Backoff, window_seconds: float = 2.0) -> None:
        self._backoff = backoff
        self._window_seconds = window_seconds
        self._bucket = TokenBucket(backoff.bytes_per_s)
        self._since: float | None = None
        self._last = 0.0
        self._moved = 0

    @classmethod
    def below(cls, most_bytes_per_s: float) -> GentlePace:
        """A pace that finds its rate below a limit, and never stops."""
        least = min(_LEAST_BYTES_PER_S, _LEAST_SHARE * most_bytes_per_s)
        return cls(Backoff(most_bytes_per_s, least_bytes_per_s=least))

    @property
    def bytes_per_s(self) -> float:
        """The present rate."""
        return self._bucket.bytes_per_s

    @property
    def block_bytes(self) -> int:
        """How much to move between two calls of `take`."""
        return self._bucket.block_bytes

    def take(self, size_bytes: int, deadline_seconds: float = 3600.0) -> None:
        """Wait until so many bytes may be moved.

        Raises:
            ClusterError: At the deadline.
        """
        now = time.monotonic()
        # A pause between two copies says nothing about the file system.
        paused = self._since is None or now - self._last > self._window_seconds
        if self._since is not None and not paused and now - self._since >= self._window_seconds:
            self._bucket.set_rate(self._backoff.observe(self._moved, now - self._since))
            paused = True
        if paused:
            self._since, self._moved = now, 0
        self._bucket.take(size_bytes, deadline_seconds)
        self._moved += size_bytes
        self._last = time.monotonic()
