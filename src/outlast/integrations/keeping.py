"""Keeps the state of a loop that is not ours: on disk, in memory, and when it has to stop."""

from __future__ import annotations

import math
import time
import warnings
from typing import TYPE_CHECKING, Any

from outlast.checkpoint import IntervalEstimator
from outlast.cluster import report_progress
from outlast.distributed.group import raise_together
from outlast.errors import CheckpointError
from outlast.integrations.agreement import Agreement
from outlast.integrations.clock import StepClock
from outlast.integrations.memory import LoopMemory
from outlast.integrations.pace import Every, pace_of
from outlast.records import CheckpointFailed, StopRequested, read_run
from outlast.train.saves import unsaved
from outlast.train.saving import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.integrations.recording import Recording
    from outlast.integrations.stop import Stop
    from outlast.job import LoopJob
    from outlast.records import Event


class StateKeeper:
    """Restores a state, saves it on the way as [checkpoint] says, and knows when to stop.

    All ranks of the default process group, if there is one, make it and call it together.

    Args:
        job: The settings.
        ranks: This process among the others.
        recording: Of the run; told what happens.
        stop: Why to stop.
        state: What is kept: name -> module, optimizer, or object with a ``state_dict``.
        note: Called before the state is looked at, to bring entries up to date.

    Attributes:
        stopped: Why the run was ended before its end; empty for a run that was not.
    """

    def __init__(
        self,
        job: LoopJob,
        ranks: Ranks,
        recording: Recording,
        stop: Stop,
        *,
        state: Mapping[str, Any],
        note: Callable[[], None],
    ) -> None:
        self.stopped = ""
        self._job = job
        self._ranks = ranks
        self._recording = recording
        self._stop = stop
        self._state = state
        self._note = note
        self._store = raise_together(lambda: open_store(job.checkpoint, recording.directory))
        self._memory = LoopMemory(job, ranks, recording.directory, self._store, state, note=note)
        self._agreement: Agreement | None = None
        self._handles: list[SaveHandle] = []
        self._saved_step = -1
        self._problem = ""
        self._clock = StepClock()

    def restore(self) -> tuple[int, list[Event]]:
        """Bring the newest state back; the steps that it has done, and what there is to say."""
        step, events = self._memory.restore()
        self._saved_step = -1 if self._memory.unsaved else step
        if self._ranks.world_size > 1:
            self._agreement = Agreement(step)
        every, directory = self._job.checkpoint.every_steps, self._recording.directory.path
        before = read_run(directory).attempts[:-1] if self._ranks.is_first else []
        fixed = Every(steps=every) if every and every != "auto" else Every(seconds=math.inf)
        self._pace = pace_of(
            Every() if every == "auto" else fixed,
            directory / "pace.json",
            nodes=self._ranks.nodes,
            failed_before=bool(before) and before[-1].outcome == "died",
            estimator=self._estimator(),
        )
        return step, events

    def begin(self, step: int) -> None:
        """Set-up is over, with `step` steps done."""
        self._pace.begun(step, time.monotonic())
        self._stop.training_begins()
        self._clock.begin()

    def settle(self) -> None:
        """To be called before an optimizer's step: what was being copied from memory is copied."""
        self._memory.settle()

    def observe_step(self) -> None:
        """A step has been done."""
        seconds = self._clock.step()
        self._stop.observe_step(seconds)
        self._pace.observe_step(seconds, saving=bool(self._handles))
        self._collect(wait=False)

    def boundary(self, step: int) -> str:
        """Between two steps: keep and save the state as is due.

        Returns:
            Why to stop, in which case all is saved; empty to go on.

        Raises:
            CheckpointError: When the run is to stop and cannot be saved.
        """
        stop, save = self._wishes(step)
        if stop:
            self._recording.write(StopRequested(step, stop))
            self.save_last(step)
            self.stopped = stop
            return stop
        self._recording.write(self._memory.keep(step, self._agreement))
        if save:
            self._save(step)
        return ""

    def meet(self, step: int) -> None:
        """The loop is left after `step` steps: on all ranks, before anything else that they share.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        if self._agreement is not None:
            self._agreement.meet(step)

    def save_last(self, step: int) -> None:
        """Save where the loop ends, and wait for it: here a failure must not be passed over.

        Raises:
            CheckpointError: When it fails.
        """
        self._collect(wait=True)
        if self._saved_step < step:
            self._save(step)
            self._collect(wait=True)
        if self._saved_step < step:
            raise CheckpointError(
                f"step {step} could not be saved: {self._problem or 'the save was skipped'}; "
                f"{unsaved(self._saved_step)}"
            )
        self.finish()

    def finish(self) -> None:
        """The loop has come to its end: wait for the saves under way, and forget the memory."""
        self._collect(wait=True)
        self._memory.close(forget=True)

    def close(self, *, failed: bool = False, forget: bool = False) -> None:
        """Give up the store and the memory, which is kept for a restart.

        Args:
            failed: Other ranks may wait for this one elsewhere: they are not waited for.
            forget: What is in memory may be wrong: a restart must go on from a checkpoint.
        """
        self._memory.close(forget=forget)
        self._store.close(drain=not failed, failed=failed)

    def _estimator(self) -> IntervalEstimator:
        """Of the best interval between saves, as [checkpoint] expects failures and costs."""
        settings = self._job.checkpoint
        return IntervalEstimator(
            nodes=self._ranks.nodes,
            mtbf_seconds=3600.0 * settings.mtbf_hours or None,
            budget=settings.slowdown_budget,
            longest_seconds=60.0 * settings.longest_minutes,
        )

    def _wishes(self, step: int) -> tuple[str, bool]:
        """Why to stop after this step, and whether to save; the same on all ranks."""
        save = self._pace.due(step, time.monotonic())
        if self._agreement is None:
            return self._stop(), save
        why = self._stop() if self._ranks.is_first else self._stop.signalled
        common = save and self._pace.is_common
        if not self._agreement.is_due(step):
            return "", common
        agreed = self._agreement.exchange(step, bool(why), save, self._clock.mean_seconds)
        stop = (why or "a signal to another rank") if agreed.stop else ""
        return stop, common or agreed.save

    def _save(self, step: int) -> None:
        """Begin a save; what goes wrong is recorded and stops no training."""
        self._pace.begun(step, time.monotonic())
        with self._recording.watch("checkpoint"):
            self._note()
            try:
                self._handles.append(self._store.save_async(step, self._state))
            except CheckpointError as error:
                self._recording.write(CheckpointFailed(step, str(error)))
                self._tell(str(error))
        self._collect(wait=False)
        self._clock.begin()

    def _collect(self, *, wait: bool) -> None:
        """See how the saves under way went, those that are done or all."""
        for handle in [handle for handle in self._handles if wait or handle.done()]:
            self._handles.remove(handle)
            with self._recording.watch("checkpoint"):
                result = handle.result()
            self._recording.saved(result)
            if result.error is not None:
                # Of a save that could not begin, the store has told.
                self._tell(result.error, silent=handle.version is None)
            elif not result.skipped:
                self._published(result)

    def _tell(self, problem: str, *, silent: bool = False) -> None:
        self._problem = problem
        if self._ranks.is_first and not silent:
            warnings.warn(f"{problem}; training goes on", stacklevel=2)

    def _published(self, result: SaveResult) -> None:
        self._saved_step = result.step
        self._pace.observe_save(result)
        self._stop.observe_save(result.seconds)
        if self._ranks.is_first:
            report_progress(result.step, save_seconds=result.seconds)
