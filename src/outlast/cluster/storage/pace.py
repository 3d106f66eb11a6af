"""A rate that a copier keeps: a token bucket that may be changed while it is in use."""

from __future__ import annotations

import math
import threading
import time

from outlast.errors import ClusterError

BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 64 << 10
_BLOCK_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 3600.0


class TokenBucket:
    """Lets bytes pass at a rate, in any number of threads.

    Args:
        bytes_per_s: The rate; infinite for no limit, 0 to let nothing pass for now.
        burst_seconds: How much rate that was not used may be made up for later.

    Raises:
        ClusterError: For a rate below 0.
    """

    def __init__(self, bytes_per_s: float = math.inf, *, burst_seconds: float = 0.1) -> None:
        self._changed = threading.Condition()
        self._burst_seconds = burst_seconds
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
        """What was let pass since the beginning."""
        return self._passed

    @property
    def block_bytes(self) -> int:
        """How much to copy between two calls of `take`, so that the flow is even."""
        if math.isinf(self._rate):
            return BLOCK_BYTES
        even = int(self._rate * _BLOCK_SECONDS)
        return min(max(even, _SMALLEST_BLOCK_BYTES), BLOCK_BYTES)

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate; whoever waits goes on at the new one."""
        with self._changed:
            self._refill()
            self._rate = _checked(bytes_per_s)
            self._level = min(self._level, self._most())
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

    def _most(self) -> float:
        return 0.0 if math.isinf(self._rate) else self._rate * self._burst_seconds

    def _refill(self) -> None:
        now = time.monotonic()
        if math.isinf(self._rate):
            self._level = 0.0
        else:
            self._level = min(self._level + (now - self._at) * self._rate, self._most())
        self._at = now


def _checked(bytes_per_s: float) -> float:
    if not bytes_per_s >= 0:
        raise ClusterError(f"bytes_per_s = {bytes_per_s}: give 0 or more")
    return bytes_per_s
