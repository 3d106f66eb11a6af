"""What a training goes on from, and its saves: begun beside it, recorded, the last one awaited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import CheckpointError
from outlast.records import (
    CheckpointFailed,
    CheckpointInterval,
    CheckpointRestored,
    CheckpointSaved,
    StateRecovered,
)
from outlast.train.recovering import from_disk
from outlast.train.transfers import CopyNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint import CheckpointStore, SaveHandle
    from outlast.records import Event, RecordWriter, Stopwatch
    from outlast.recover.phase_page import EnterPhase
    from outlast.state.live import State
    from outlast.train.recovering import RunMemory
    from outlast.train.saving import SaveCadence
    from outlast.train.waits import CommunicationWait


def restored(
    recovery: RunMemory | None, store: CheckpointStore, state: State, *, must_restore: bool
) -> tuple[int, list[Event]]:
    """Restore what was saved or kept: the steps that it has done, and the events.

    Args:
        recovery: Of what is kept in memory, if it is.
        store: The run's checkpoints.
        state: Model and optimizers.
        must_restore: Whether the model has no first weights.

    Raises:
        CheckpointError: When nothing was restored, and something must be.
    """
    step, events = from_disk(store, state) if recovery is None else recovery.restore()
    found = any(isinstance(event, (CheckpointRestored, StateRecovered)) for event in events)
    if must_restore and not found:
        raise CheckpointError(
            "the checkpoint that was there when this start began has gone, and the model has "
            "no first weights; run the same command again"
        )
    return step, events


def unsaved(newest: int) -> str:
    """What is lost where the last save has failed, and the remedy.

    Args:
        newest: Steps of the newest checkpoint that this start has saved or begun from; 0 or less:
            there is none.
    """
    if newest > 0:
        return (
            f"the run can go on from its checkpoint of step {newest}: mend the cause and run the "
            "same command again"
        )
    return (
        "no save of this start has succeeded, so its steps are lost: mend the cause and run the "
        "same command again, which begins where this start began"
    )


@dataclass
class Saves:
    """The saves of one attempt on this rank.

    `begins` is called with the step before each save. `metrics` are the figures of the step that
    is saved next.
    """

    store: CheckpointStore
    state: State
    cadence: SaveCadence
    records: RecordWriter | None
    watch: Stopwatch
    waits: CommunicationWait
    mark: EnterPhase
    begins: Callable[[int], None]
    metrics: dict[str, float] = field(default_factory=dict)
    _pending: SaveHandle | None = None
    _published: int = -1
    _copies: CopyNotes = field(default_factory=CopyNotes)

    @property
    def under_way(self) -> bool:
        """Whether one is being written."""
        return self._pending is not None

    def begin(self, step: int) -> str | None:
        """Save in the background; what goes wrong is recorded and stops no training.

        Returns:
            Why the save could not be begun, or None.
        """
        self.mark("save")
        with self.watch("checkpoint"):
            metrics, self.metrics = self.metrics, {}
            self.cadence.saved(step)
            self.begins(step)
            try:
                handle = self.store.save_async(step, self.state, metrics=metrics)
            except CheckpointError as error:
                self.cadence.ended()
                self._record(CheckpointFailed(step, str(error)))
                return str(error)
            # The store has waited for the save before, and counted that as blocked.
            self.collect(wait=True)
            self._pending = handle
            self.waits.take()
        return None

    def collect(self, *, wait: bool) -> str | None:
        """Record the save under way if it has ended; returns its error."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        result = self._pending.result()
        self._pending = None
        self.cadence.ended()
        if result.error is None:
            self._published = result.step
            self._record(
                CheckpointSaved(result.step, result.blocked_seconds, result.seconds, result.bytes)
            )
            self.cadence.observe_save(result)
            if (news := self.cadence.news()) is not None:
                self._record(CheckpointInterval(result.step, *news))
        else:
            self._record(CheckpointFailed(result.step, result.error))
        return result.error

    def end(self, step: int, error: str | None, *, made: bool) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over.

        Args:
            step: The last one.
            error: Of the save before.
            made: Whether the state of `step` is for this process to save, if it has not.

        Raises:
            CheckpointError: When the newest state is not on disk.
        """
        if made and self._published < step:
            error = self.begin(step)
            with self.watch("checkpoint"):
                error = self.collect(wait=True) or error
        if error is not None and self._published < step:
            raise CheckpointError(f"{error}; {unsaved(self._published)}")

    def record_copies(self) -> None:
        """Write down which checkpoints were copied on to lower tiers meanwhile."""
        if self.records is not None:
            for event in self._copies.news(self.store.drained()):
                self._record(event)

    def _record(self, event: Event) -> None:
        if self.records is not None:
            self.records.write(event)
