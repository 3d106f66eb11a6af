"""How fast one copy may be: a cap of its tier, and whatever the caller says besides.

The store knows of its own copies alone. Who knows of others that use the same bandwidth hands in a
`Pacing`, e.g. one that shares it as a plan says or makes way for strangers (`outlast.cluster`).

Needs no torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager
    from types import TracebackType

_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 16 << 10
# With a bandwidth cap, blocks are as small as this time allows, so that the flow is even.
_BLOCK_SECONDS = 0.1


class Rate(Protocol):
    """Lets the bytes of a copy pass when it is their time."""

    @property
    def block_bytes(self) -> int:
        """How much to copy between two calls of `take`; may change."""

    def take(self, size_bytes: int, /) -> None:
        """Wait until so many bytes may be copied; an exception makes the copy fail."""


Pacing = Callable[[int], "AbstractContextManager[Rate]"]
"""Gives the rate of one copy of the version of a step; entered when it begins, left at its end."""


class Pace:
    """The pace of one copy: a context manager around it.

    Args:
        bytes_per_second: Most that the copy takes; None: no limit.
        stop: Set when the store is closed.
        rate: What the caller of the store has to say; None: nothing.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        stop: threading.Event,
        rate: AbstractContextManager[Rate] | None = None,
    ) -> None:
        self._cap = bytes_per_second
        self._stop = stop
        self._free_at = 0.0
        self._asked = rate
        self._rate: Rate | None = None
        even = _BLOCK_BYTES if bytes_per_second is None else int(bytes_per_second * _BLOCK_SECONDS)
        self._block_bytes = min(max(even, _SMALLEST_BLOCK_BYTES), _BLOCK_BYTES)

    @property
    def block_bytes(self) -> int:
        """How much to copy between two calls of `take`."""
        if self._rate is None:
            return self._block_bytes
        return max(min(self._block_bytes, self._rate.block_bytes), _SMALLEST_BLOCK_BYTES)

    def take(self, size: int) -> None:
        """Count `size` bytes; raises CheckpointError when the store was closed."""
        if self._rate is not None and size:
            self._rate.take(size)
        if self._cap is not None:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._cap
            self._stop.wait(self._free_at - now)
        if self._stop.is_set():
            raise CheckpointError("the store was closed")

    def __enter__(self) -> Pace:
        if self._asked is not None:
            self._rate = self._asked.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rate is not None and self._asked is not None:
            self._rate = None
            # The copy has ended, well or not; what comes now says nothing about it.
            with contextlib.suppress(Exception):
                self._asked.__exit__(kind, error, trace)
