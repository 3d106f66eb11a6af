"""Taking turns with other jobs at saving: a due save waits for its turn while training goes on."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from outlast.checkpoint import IntervalEstimator, SaveResult

LOOK_SECONDS = 1.0
"""Between two looks at a folder that a shared file system holds."""
_REMEMBERED = 16
_SHORTEST_SECONDS = 1e-3


class Turn(Protocol):
    """A place in the line; see `outlast.cluster.storage`."""

    def ready(self) -> bool:
        """Whether to save now: it is this job's turn, or there is none to be had."""

    def release(self) -> None:
        """The save has ended, or is not made."""


class Saver(Protocol):
    """This job among those that save to one file system."""

    def least_seconds(
        self,
        *,
        nodes: float,
        save_seconds: float,
        overhead_seconds: float,
        mtbf_seconds: float,
        period_seconds: float,
    ) -> float:
        """Tell the others what saves cost; returns how far apart they should be, 0: no matter."""

    def close(self) -> None:
        """The job saves no more."""


class Turns(Protocol):
    """The turns of the jobs that save to one file system; it travels to worker processes."""

    def ask(
        self,
        size_bytes: float,
        *,
        nodes: float,
        unsaved_seconds: float,
        mtbf_seconds: float,
        period_seconds: float,
    ) -> Turn:
        """Put a request up, without waiting for the turn."""

    def saver(self) -> Saver:
        """Join those that save there."""


class SaveTurns:
    """The turns of one job; on its rank 0 alone.

    Args:
        turns: Of the file system.
        size_bytes: Of a save, until one was made.
        nodes: Of the job.
        mtbf_seconds: Between failures of the job, which put its unsaved work at risk.
        longest_seconds: After so long a save is made without a turn.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        turns: Turns,
        *,
        size_bytes: float,
        nodes: int,
        mtbf_seconds: float,
        longest_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size_bytes = size_bytes
        self._turns = turns
        self._saver = turns.saver()
        self._nodes = nodes
        self._mtbf_seconds = mtbf_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._saved = self._asked = clock()
        self._turn: Turn | None = None
        self._saving = False
        self._told = False
        self._looked = -math.inf
        self._periods: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def may_save(self) -> bool:
        """Whether a save that is due may be made now; asks for a turn at the first call.

        While a save is under way it may not: each has a turn of its own.
        """
        if self._saving:
            return False
        now = self._clock()
        if self._turn is None:
            self._asked = now
            self._looked = -math.inf
            unsaved = now - self._saved
            self._turn = self._turns.ask(
                max(self._size_bytes, 1.0),
                nodes=self._nodes,
                unsaved_seconds=unsaved,
                mtbf_seconds=self._mtbf_seconds,
                period_seconds=self._period_seconds([*self._periods, unsaved]),
            )
        if now - self._asked >= self._longest_seconds:
            return True
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        return self._turn.ready()

    def saving(self) -> None:
        """A save begins: what is trained from here on is unsaved."""
        now = self._clock()
        self._periods.append(now - self._saved)
        self._saved = now
        self._saving = True

    def withdraw(self) -> None:
        """No save is due any more: whoever waits behind this request goes on."""
        if not self._saving:
            self.release()

    def leave(self) -> None:
        """Another process of the run saves from here on; this one may come back."""
        self.withdraw()
        if self._told and not self._saving:
            self._told = False
            self._saver.close()
            self._saver = self._turns.saver()

    def release(self) -> None:
        """The save has ended, well or not."""
        self._saving = False
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def saved(self, result: SaveResult, estimator: IntervalEstimator | None) -> None:
        """A save was published: tell the others of it, and make way for theirs.

        Args:
            result: Of the save.
            estimator: Of the best interval, which is told how far apart saves should be; None
                where the job has a fixed one.
        """
        self._told = True
        self._size_bytes = result.bytes
        self._seconds.append(result.seconds)
        cost = None if estimator is None else estimator.save_cost
        least = self._saver.least_seconds(
            nodes=self._nodes,
            save_seconds=max(statistics.median(self._seconds), _SHORTEST_SECONDS),
            overhead_seconds=result.blocked_seconds if cost is None else cost.overhead_seconds,
            mtbf_seconds=self._mtbf_seconds if estimator is None else estimator.mtbf_seconds,
            period_seconds=self._period_seconds(self._periods) if estimator is None else 0.0,
        )
        if estimator is not None:
            estimator.make_way(least)

    def close(self) -> None:
        """The job saves no more."""
        self.release()
        self._saver.close()

    def _period_seconds(self, periods: Collection[float]) -> float:
        return max(statistics.fmean(periods) if periods else 0.0, _SHORTEST_SECONDS)
