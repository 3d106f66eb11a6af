"""Taking turns with other jobs at saving: a due save waits for its turn while training goes on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


LOOK_SECONDS = 1.0
"""Between two looks at a folder that a shared file system holds."""


class Turn(Protocol):
    """A place in the line; see `outlast.cluster.storage`."""

    def ready(self) -> bool:
        """Whether to save now: it is this job's turn, or there is none to be had."""

    def release(self) -> None:
        """The save has ended, or is not made."""


class AskTurn(Protocol):
    """Asks for a turn without waiting for it."""

    def __call__(
        self, size_bytes: float, *, nodes: float, unsaved_seconds: float, mtbf_seconds: float
    ) -> Turn:
        """Put a request up."""


class SaveTurns:
    """The turns of one job; on its rank 0 alone.

    Args:
        ask: Puts a request up.
        size_bytes: Of a save, until one was made.
        nodes: Of the job.
        mtbf_seconds: Between failures of the job, which put its unsaved work at risk.
        longest_seconds: After so long a save is made without a turn.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        ask: AskTurn,
        *,
        size_bytes: float,
        nodes: int,
        mtbf_seconds: float,
        longest_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size_bytes = size_bytes
        self._ask = ask
        self._nodes = nodes
        self._mtbf_seconds = mtbf_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._saved = self._asked = clock()
        self._turn: Turn | None = None
        self._looked = -math.inf

    def may_save(self) -> bool:
        """Whether a save that is due may be made now; asks for a turn at the first call."""
        now = self._clock()
        if self._turn is None:
            self._asked = now
            self._looked = -math.inf
            self._turn = self._ask(
                max(self.size_bytes, 1.0),
                nodes=self._nodes,
                unsaved_seconds=now - self._saved,
                mtbf_seconds=self._mtbf_seconds,
            )
        if now - self._asked >= self._longest_seconds:
            return True
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        return self._turn.ready()

    def saving(self) -> None:
        """A save begins: what is trained from here on is unsaved."""
        self._saved = self._clock()

    def release(self) -> None:
        """The save has ended, well or not."""
        if self._turn is not None:
            self._turn.release()
            self._turn = None
