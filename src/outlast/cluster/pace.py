"""Rate limits of copies: a token bucket, and one that backs off when others need the bandwidth.

`GentlePace` makes way for others. Nobody says how busy a shared file system is; the bandwidth that
one gets does. As long as a copy moves as fast as it asks to, it asks for a little more; when it
gets clearly less, others are there, and it asks for half of what it got. Copies that all do so
converge to equal shares (Chiu and Jain 1989, Analysis of the increase and decrease algorithms for
congestion avoidance).
"""

from __future__ import annotations

import math
import threading
import time

from outlast.errors import ClusterError

BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 64 << 10
_BLOCK_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 3600.0
_BURST_SECONDS = 0.1
"""How much rate that was not used may be made up for later."""


class TokenBucket:
    """Lets bytes pass at a rate, in any number of threads.

    Args:
        bytes_per_s: The rate; infinite for no limit, 0 to let nothing pass for now.

    Raises:
        ClusterError: For a rate below 0.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self._changed = threading.Condition()
        self._rate = _checked(bytes_per_s)
        self._level = 0.0
        self._at = time.monotonic()
        self._stopped = False
        self._passed = 0

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self._rate

    @property
    def passed_bytes(self) -> int:
        """Bytes let pass since the beginning."""
        return self._passed

    @property
    def block_bytes(self) -> int:
        """Bytes to copy between two calls of `take`, so that the flow is even."""
        if math.isinf(self._rate):
            return BLOCK_BYTES
        even = int(self._rate * _BLOCK_SECONDS)
        return min(max(even, _SMALLEST_BLOCK_BYTES), BLOCK_BYTES)

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate; whoever waits goes on at the new one."""
        with self._changed:
            self._refill()
            self._rate = _checked(bytes_per_s)
            self._refill()
            self._changed.notify_all()

    def take(self, size: int, deadline_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
        """Let `size` bytes pass: waits until the rate allows for them.

        Args:
            size: Bytes.
            deadline_seconds: Longest wait.

        Raises:
            ClusterError: When the bucket was stopped, or at the deadline.
        """
        with self._changed:
            end = time.monotonic() + deadline_seconds
            self._refill()
            self._level -= 0.0 if math.isinf(self._rate) else size
            while self._level < 0.0 and not math.isinf(self._rate):
                if self._stopped:
                    raise ClusterError("the transfer was stopped")
                left = end - time.monotonic()
                if left <= 0:
                    raise ClusterError(
                        f"a transfer waited {deadline_seconds:g} s for bandwidth: raise its cap "
                        "or its deadline"
                    )
                self._changed.wait(min(-self._level / self._rate, left) if self._rate else left)
                self._refill()
            if self._stopped:
                raise ClusterError("the transfer was stopped")
            self._passed += size

    def stop(self) -> None:
        """Let nobody pass any more; whoever waits or comes gets a ClusterError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _refill(self) -> None:
        now = time.monotonic()
        if math.isinf(self._rate):
            self._level = 0.0
        else:
            self._level += (now - self._at) * self._rate
            self._level = min(self._level, _BURST_SECONDS * self._rate)
        self._at = now


def _checked(bytes_per_s: float) -> float:
    if not bytes_per_s >= 0:
        raise ClusterError(f"bytes_per_s = {bytes_per_s}: give 0 or more")
    return bytes_per_s


TOLERANCE = 0.8
"""Getting less than this share of the rate means that others are there."""
DECREASE = 0.5
"""What is then asked for, as a share of what was got."""
INCREASE = 0.05
"""What is added otherwise, as a share of the most."""
_LEAST_BYTES_PER_S = 1e6
_LEAST_SHARE = 0.1


class Backoff:
    """Chooses the rate of a copy from the bandwidth that it gets.

    Args:
        most_bytes_per_s: Never ask for more; finite, e.g. what a copy gets when it is alone.
        least_bytes_per_s: Never ask for less, or the copy would not end.
        start_bytes_per_s: The first rate; None: half of the most.

    Raises:
        ClusterError: For rates between which there is none.
    """

    def __init__(
        self,
        most_bytes_per_s: float,
        *,
        least_bytes_per_s: float = _LEAST_BYTES_PER_S,
        start_bytes_per_s: float | None = None,
    ) -> None:
        if not (0 < least_bytes_per_s <= most_bytes_per_s and math.isfinite(most_bytes_per_s)):
            raise ClusterError(
                f"least_bytes_per_s = {least_bytes_per_s} and most_bytes_per_s = "
                f"{most_bytes_per_s}: give finite rates, the least not above the most"
            )
        self._most, self._least = most_bytes_per_s, least_bytes_per_s
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
            if got < TOLERANCE * self._rate:
                self._rate = max(DECREASE * got, self._least)
            else:
                self._rate = min(self._rate + INCREASE * self._most, self._most)
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
        """Bytes to move between two calls of `take`."""
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
