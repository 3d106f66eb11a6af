"""When the trainer saves: every so many steps, or as often as is best for this run."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from outlast.checkpoint import IntervalEstimator
from outlast.errors import OutlastError
from outlast.records import read_run, replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.checkpoint import SaveResult
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.train.ranks import Ranks

_WORTH_TELLING = 0.1


class SaveCadence:
    """Says after which steps to save.

    With ``checkpoint.every_steps = "auto"`` rank 0 measures steps and saves and asks for the next
    save when the time that is lost and the time that saves cost are smallest together; the others
    follow it, see `wants`.

    Args:
        every_steps: A fixed number of steps, or None for the best.
        estimator: Of the best number, on rank 0.
        memory: File that keeps what the estimator has learnt for the next attempt.
    """

    def __init__(
        self,
        every_steps: int | None,
        estimator: IntervalEstimator | None = None,
        memory: Path | None = None,
    ) -> None:
        self._every_steps = every_steps
        self._estimator = estimator
        self._memory = memory
        self._saved_at = 0
        self._told = 0

    def begin(self, step: int) -> None:
        """The attempt begins with `step` steps done."""
        self._saved_at = step

    def wants(self, done: int) -> bool:
        """Whether this rank asks for a save after `done` steps; one that asks is enough."""
        if self._every_steps is not None:
            return self._every_steps > 0 and done % self._every_steps == 0
        if self._estimator is None:
            return False
        return done - self._saved_at >= self._estimator.next_interval_steps()

    def saved(self, step: int) -> None:
        """A save was made at `step`."""
        self._saved_at = step

    def observe_step(self, seconds: float, *, saving: bool) -> None:
        """A step took `seconds`, without what a save blocked; `saving`: while one was written."""
        if self._estimator is not None:
            self._estimator.observe_step(seconds, saving)

    def observe_save(self, result: SaveResult) -> None:
        """A save was published."""
        if self._estimator is not None:
            self._estimator.observe_save(result.blocked_seconds, result.seconds)
            if self._memory is not None:
                # To begin anew is no loss.
                with contextlib.suppress(OSError):
                    replace_file(self._memory, json.dumps(self._estimator.state_dict()).encode())

    def news(self) -> tuple[int, str] | None:
        """The interval in steps and the reason for it, when it has changed enough to tell."""
        if self._estimator is None:
            return None
        steps = self._estimator.next_interval_steps()
        if abs(steps - self._told) <= _WORTH_TELLING * self._told:
            return None
        self._told = steps
        return steps, self._estimator.explain()


def cadence_of(job: Job, ranks: Ranks, directory: RunDirectory) -> SaveCadence:
    """The cadence that the job asks for, with what earlier attempts have learnt and suffered."""
    settings = job.checkpoint
    if settings.every_steps != "auto":
        return SaveCadence(settings.every_steps)
    if not ranks.is_first:
        return SaveCadence(None)
    estimator = IntervalEstimator(
        nodes=-(-ranks.world_size // ranks.local_world_size),
        mtbf_seconds=settings.mtbf_hours * 3600.0 if settings.mtbf_hours else None,
        budget=settings.slowdown_budget,
        longest_seconds=settings.longest_minutes * 60.0,
    )
    memory = directory.path / "cadence.json"
    with contextlib.suppress(OSError, ValueError, KeyError, OutlastError):
        estimator.load_state_dict(json.loads(memory.read_text(encoding="utf-8")))
        before = read_run(directory.path).attempts[:-1]
        if before and before[-1].outcome == "died":
            estimator.observe_failure()
    return SaveCadence(None, estimator, memory)
