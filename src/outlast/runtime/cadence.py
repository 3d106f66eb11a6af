"""Save cadence: every so many steps, every so long, or as often as is best for this run.

With "auto" the first rank measures steps and saves, and a save is due when the time that is lost
by a failure and the time that saves cost are smallest together. Where several jobs save to one file
system, a due save waits for its turn while training continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outlast.errors import AutosaveError, ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from outlast.checkpoint import IntervalEstimator, SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.job import CheckpointSection
    from outlast.records import RunDirectory

LOOK_SECONDS = 1.0
"""Between two looks at a folder that a shared file system holds."""

UNASKED_SECONDS = 600.0
"""From save to save, where neither the script nor the command line asks for any."""

_WITH_UNIT = re.compile(r"\d+(\.\d+)?[a-z]+")

_DECIDE_SECONDS = 1.0
"""The best interval is worked out anew at most this often."""

_WORTH_TELLING = 0.1
_REMEMBERED = 16
_SHORTEST_SECONDS = 1e-3
_WEIGHT = 0.1
"""Of the newest step in the mean."""


@dataclass(frozen=True)
class Every:
    """A fixed distance from save to save; neither: as often as is best.

    Attributes:
        steps: From save to save.
        seconds: From save to save.
    """

    steps: int | None = None
    seconds: float | None = None


NEVER = Every(seconds=math.inf)


def every_of(text: str) -> Every:
    """Read ``--every TEXT``.

    Raises:
        AutosaveError: When it means nothing.
    """
    from outlast.durations import limit_seconds

    plain = text.strip().lower()
    if plain == "auto":
        return Every()
    if plain.isascii() and plain.isdigit() and int(plain) > 0:
        return Every(steps=int(plain))
    if _WITH_UNIT.fullmatch(plain):
        with contextlib.suppress(ClusterError):
            seconds = limit_seconds(plain)
            if seconds > 0.0:
                return Every(seconds=seconds)
    raise AutosaveError(
        f'--every {text} is neither a number of steps, as "100", nor a length of time, as "10m", '
        '"90s" or "1.5h", nor "auto"'
    )


def seconds_of(option: str, text: str) -> float:
    """The length of time that an option names.

    Raises:
        AutosaveError: When it is none, or not above zero.
    """
    from outlast.durations import FORMS, limit_seconds

    seconds = 0.0
    with contextlib.suppress(ClusterError):
        seconds = limit_seconds(text)
    if not seconds > 0.0:
        raise AutosaveError(f"{option} {text} is no length of time above 0 s: write it as {FORMS}")
    return seconds


class SaveCadence:
    """Tells at which step boundaries a save is due; learns from each step and save.

    Args:
        every: Asked for by the user.
        estimator: Of the best interval; None where steps or seconds are asked for.
        memory: File that keeps what the estimator has observed, for the next start.
        turns: Taken with other jobs of one file system, on rank 0; None for saves at once.
    """

    def __init__(
        self,
        every: Every,
        estimator: IntervalEstimator | None = None,
        memory: Path | None = None,
        turns: SaveTurns | None = None,
    ) -> None:
        self._every = every
        self._estimator = estimator
        self._memory = memory
        self._turns = turns
        self._last_step: int | None = None
        self._last_seconds = 0.0
        self._interval = 0
        self._decided = 0.0
        self._told = 0

    @property
    def is_common(self) -> bool:
        """Return whether every rank comes to the same answer by itself."""
        return self._every.steps is not None

    def due(self, step: int, now: float | None = None) -> bool:
        """Return whether to save after `step` steps, at `now` seconds of the monotonic clock."""
        now = time.monotonic() if now is None else now
        if self._last_step is None:
            # Set-up is done again for nothing, so what it has made need not be saved.
            self.start(step, now)
            return False
        if self._every.steps is not None:
            # Also where nobody asked at the very step at which it was due, or it waits for a turn.
            return step // self._every.steps > self._last_step // self._every.steps
        if self._every.seconds is not None:
            return now - self._last_seconds >= self._every.seconds
        assert self._estimator is not None
        if now - self._decided >= _DECIDE_SECONDS or not self._interval:
            self._interval, self._decided = self._estimator.next_interval_steps(), now
        return step - self._last_step >= self._interval

    def wants(self, step: int, *, writes: bool = True) -> bool:
        """Return whether this rank asks for a save after `step` steps; one that asks is enough.

        Args:
            step: Steps of the run.
            writes: Whether the save would be up to this process and its ranks; where it is not,
                they ask for no turn and give back what they have.
        """
        due = writes and self.due(step)
        if self._turns is None or due:
            return due and (self._turns is None or self._turns.may_save())
        if writes:
            self._turns.withdraw()
        else:
            self._turns.leave()
        return False

    def start(self, step: int, now: float | None = None) -> None:
        """Count from `step`, whose state needs no save."""
        self._last_step = step
        self._last_seconds = time.monotonic() if now is None else now

    def begun(self, step: int, now: float | None = None) -> None:
        """Note that a save of `step` has begun, or that there is one already."""
        self.start(step, now)
        if self._turns is not None:
            self._turns.saving()

    def ended(self) -> None:
        """Note that the save under way has ended, well or not."""
        if self._turns is not None:
            self._turns.release()

    def observe_step(self, seconds: float, *, saving: bool) -> None:
        """Take in a step of `seconds` without what a save blocked; `saving`: as one was written."""
        if self._estimator is not None:
            self._estimator.observe_step(seconds, saving)

    def observe_save(self, result: SaveResult) -> None:
        """Take in a save that was published."""
        if self._estimator is not None:
            self._estimator.observe_save(result.blocked_seconds, result.seconds)
            self._interval = 0
            if self._memory is not None:
                from outlast.records import replace_file

                # To learn it anew is no loss.
                with contextlib.suppress(OSError):
                    replace_file(self._memory, json.dumps(self._estimator.state_dict()).encode())
        if self._turns is not None:
            self._turns.saved(result, self._estimator)

    def close(self) -> None:
        """Save no more."""
        if self._turns is not None:
            self._turns.close()

    def news(self) -> tuple[int, str] | None:
        """The interval in steps and the reason for it, when it has changed enough to tell."""
        if self._estimator is None:
            return None
        steps = self._estimator.next_interval_steps()
        if abs(steps - self._told) <= _WORTH_TELLING * self._told:
            return None
        self._told = steps
        return steps, self._estimator.explain()


def cadence_of(
    every: Every,
    memory: Path,
    *,
    nodes: int,
    failed_before: bool,
    estimator: IntervalEstimator | None = None,
    turns: SaveTurns | None = None,
) -> SaveCadence:
    """The cadence of a run, with what its earlier starts have learnt.

    Args:
        every: Asked for by the user.
        memory: File that keeps what was learnt.
        nodes: Machines of the run.
        failed_before: Whether the start before this one died.
        estimator: Of the best interval, with a user's expectations; None: without any.
        turns: Of the jobs that save to one file system.
    """
    if every != Every():
        return SaveCadence(every, turns=turns)
    if estimator is None:
        from outlast.checkpoint import IntervalEstimator

        estimator = IntervalEstimator(nodes=nodes)
    with contextlib.suppress(OSError, ValueError, KeyError, OutlastError):
        estimator.load_state_dict(json.loads(memory.read_text(encoding="utf-8")))
    if failed_before:
        estimator.observe_failure()
    return SaveCadence(every, estimator, memory, turns)


def job_cadence(  # noqa: PLR0917
    settings: CheckpointSection,
    ranks: Ranks,
    directory: RunDirectory,
    memory: str,
    turns: Turns | None = None,
    state_bytes: float = 1.0,
) -> SaveCadence:
    """The cadence that [checkpoint] asks for, with what earlier attempts have learnt and suffered.

    Args:
        settings: The section [checkpoint].
        ranks: This process among the others.
        directory: Of the run.
        memory: Name of the file in it that keeps what was learnt.
        turns: Of the jobs of a file system; None for saves at once.
        state_bytes: Of model and optimizer, about what a first save writes.
    """
    from outlast.checkpoint import IntervalEstimator
    from outlast.checkpoint.cost import NODE_MTBF_SECONDS
    from outlast.records import read_run

    own = None
    if turns is not None and ranks.is_first:
        own = SaveTurns(
            turns,
            size_bytes=state_bytes,
            nodes=ranks.nodes,
            mtbf_seconds=3600.0 * settings.mtbf_hours or NODE_MTBF_SECONDS / ranks.nodes,
            longest_seconds=settings.turn_seconds,
        )
    if settings.every_steps != "auto":
        # One rank that asks is enough: where turns are taken, the one that takes them.
        every = settings.every_steps if own is not None or turns is None else 0
        return SaveCadence(Every(steps=every) if every else NEVER, turns=own)
    if not ranks.is_first:
        return SaveCadence(NEVER)
    before = read_run(directory.path).attempts[:-1] if directory.exists() else []
    return cadence_of(
        Every(),
        directory.path / memory,
        nodes=ranks.nodes,
        failed_before=bool(before) and before[-1].outcome == "died",
        estimator=IntervalEstimator(
            nodes=ranks.nodes,
            mtbf_seconds=3600.0 * settings.mtbf_hours or None,
            budget=settings.slowdown_budget,
            longest_seconds=60.0 * settings.longest_minutes,
        ),
        turns=own,
    )


class StepClock:
    """Seconds from step boundary to step boundary.

    Attributes:
        seconds: Of the last step; 0 before the first.
        mean_seconds: Of the newest steps; 0 before the first.
    """

    def __init__(self) -> None:
        self.seconds = self.mean_seconds = 0.0
        self._boundary = time.monotonic()

    def begin(self) -> None:
        """Begin a step now; what was done since the last one counts for none."""
        self._boundary = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """Do not count `seconds` of the step under way."""
        self._boundary += seconds

    def so_far(self) -> float:
        """Seconds of the step under way."""
        return time.monotonic() - self._boundary

    def step(self) -> float:
        """End a step now and begin the next; returns its seconds."""
        now = time.monotonic()
        self.seconds, self._boundary = now - self._boundary, now
        weight = _WEIGHT if self.mean_seconds else 1.0
        self.mean_seconds += weight * (self.seconds - self.mean_seconds)
        return self.seconds


class Turn(Protocol):
    """A place in the line; see `outlast.cluster.storage`."""

    def ready(self) -> bool:
        """Return whether to save now: it is this job's turn, or there is none to be had."""

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
        """Return whether a save that is due may be made now; asks for a turn at the first call.

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
        """No save is due any more: whoever waits behind this request continues."""
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
