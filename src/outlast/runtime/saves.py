"""The checkpoints of a run: where they are, saves in the background, the last one awaited."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outlast.checkpoint import CheckpointStore, Compression, Reduction, Retention, SaveResult, Tier
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError
from outlast.records import CheckpointCopied, CheckpointRestored, Warned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from outlast.checkpoint import DrainResult, Restored, SaveHandle
    from outlast.checkpoint.storage import Pacing
    from outlast.job import CheckpointSection
    from outlast.records import Event, RunDirectory
    from outlast.runtime.cadence import SaveCadence
    from outlast.state.live import State


def open_store(
    settings: CheckpointSection,
    directory: RunDirectory,
    pacings: Mapping[str, Pacing] | None = None,
    keep: Retention | None = None,
) -> CheckpointStore:
    """The run's checkpoints: in its directory, before that in a faster place if there is one.

    Args:
        settings: The section [checkpoint].
        directory: Of the run.
        pacings: What besides their caps says how fast tiers are copied to, by name.
        keep: Which versions stay; by default what [checkpoint] says.

    Raises:
        CheckpointError: When nothing can be written to ``checkpoint.fast`` and the tier disk is
            asked for by its name, on all ranks. Otherwise saves fail until something can.
    """
    keep = keep or Retention(
        settings.keep, every=settings.keep_every, best=settings.keep_best, metric="validation_loss"
    )
    # Elsewhere, an earlier run of this name may have left its checkpoints.
    run = f"{directory.path.name}-{directory.identifier}"
    pacings, mirror = pacings or {}, settings.mirror and f"{settings.mirror}/{run}"
    places = [
        (
            RUN,
            "shared",
            settings.fast and directory.checkpoints,
            settings.drain_every,
            settings.drain_megabytes_per_s,
        ),
        (MIRROR, MIRROR, mirror, settings.mirror_every, settings.mirror_megabytes_per_s),
    ]
    if settings.tiers != "auto":
        raise_together(lambda: _check_disk(settings.fast))
    tiers = [
        Tier(
            place,
            every=every,
            keep=keep,
            bytes_per_second=1e6 * megabytes_per_s or None,
            pacing=pacings.get(name),
            name=tier,
        )
        for name, tier, place, every, megabytes_per_s in places
        if place
    ]
    return CheckpointStore(
        f"{settings.fast}/{run}" if settings.fast else directory.checkpoints,
        keep=settings.fast_keep if settings.fast else keep,
        tiers=tiers,
        private=bool(settings.fast) and settings.fast_private,
        name="disk" if settings.fast else "shared",
        **store_options(settings),
    )


def _check_disk(folder: str) -> None:
    """Refuse a tier ``disk`` to which nothing can be written: all saves go there first.

    Raises:
        CheckpointError: Naming the setting and why.
    """
    if not folder or "://" in folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.fast = {folder}, the tier disk, cannot be written to "
            f"({error.strerror}): make room or give another directory, or leave disk out of "
            "checkpoint.tiers"
        ) from None


_PROBE_BYTES = 4096


def restored_event(
    store: CheckpointStore,
    restored: Restored,
    seconds: float,
    passed_over: Sequence[str] = (),
    lacking: Sequence[str] = (),
) -> CheckpointRestored:
    """The event of a restore from `store`, which says what nearer tiers lacked.

    Args:
        store: Of the run's checkpoints.
        restored: Result of `CheckpointStore.restore`.
        seconds: That it took.
        passed_over: One sentence for each nearer state that could not be used.
        lacking: One phrase for each tier nearer than the store that held nothing.
    """
    skipped = [*passed_over, *restored.skipped]
    names = store.tier_names
    phrases = [*lacking]
    for place, name in names.items():
        if place == restored.place:
            break
        # What is damaged or cannot be listed there is told of.
        if not any(place in sentence for sentence in skipped):
            phrases.append(f"{name or place}: has no version of step {restored.step}")
    source = names.get(restored.place, "") or "shared"
    return CheckpointRestored(
        restored.step, seconds, skipped, source=source, place=restored.place, lacking=phrases
    )


def store_options(settings: CheckpointSection) -> dict[str, Any]:
    """Arguments of a `CheckpointStore` that [checkpoint] gives, wherever it lies."""
    return {
        "reduction": Reduction(Compression(settings.compression)),
        "asynchronous": settings.asynchronous,
        "when_busy": settings.when_busy,
        "writer": settings.writer,
        "timeout_seconds": settings.timeout_seconds,
    }


RUN, MIRROR = "run", "mirror"
"""Names of the tiers: the run's directory below checkpoint.fast, and checkpoint.mirror."""


class Transfers(Protocol):
    """Says how fast copies may be, besides the caps of their tiers; it travels to worker processes.

    See `outlast.cluster.transfers`.
    """

    def tiers(self) -> Mapping[str, Pacing]:
        """For `RUN` and `MIRROR`; copies to a tier that is left out have its cap alone."""


def unsaved_remedy(newest: int) -> str:
    """Say what is lost where the last save has failed, and the remedy.

    Args:
        newest: Steps of the newest checkpoint that this start has saved or begun from; 0 or less:
            there is none.
    """
    if newest > 0:
        return (
            f"the run can continue from its checkpoint of step {newest}: mend the cause and run "
            "the same command again"
        )
    return (
        "no save of this start has succeeded, so its steps are lost: mend the cause and run the "
        "same command again, which begins where this start began"
    )


class RunSaves:
    """The saves of one attempt on this rank: begun beside training, the last one awaited.

    Args:
        store: Of the run's checkpoints.
        ended: Called with each save's result, and whether its failure has been told.
        state: Saved, where `begin` is given no other.
        cadence: Told of every save; None: somebody else says when they are due.
        watch: Makes contexts whose time counts for a purpose.
        note: Called before the state is looked at, to bring entries up to date.
        raises: Whether a save that cannot begin is an error; else it is one more that has failed.

    Attributes:
        state: As given.
        metrics: Figures of the step that is saved next, where `begin` is given none.
        newest: Steps of the newest version that is known to be published, -1: none.
        begun: Steps of the newest version that was begun and has not failed, -1: none.
        results: Of the last saves that have ended, 1000 at most.
        problem: Why the last save has failed; empty: it has not, or nobody minds.
        closed: Whether the store was given up.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ended: Callable[[SaveResult, bool], None],
        state: State | None = None,
        cadence: SaveCadence | None = None,
        watch: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        note: Callable[[], None] | None = None,
        raises: bool = False,
    ) -> None:
        self.store = store
        self.cadence = cadence
        self.metrics: Mapping[str, float] = {}
        self.newest = self.begun = -1
        self.results: deque[SaveResult] = deque(maxlen=1000)
        self.problem = ""
        self.closed = False
        self._ended = ended
        self.state = state or {}
        self._watch = watch
        self._note = note
        self._raises = raises
        self._handles: list[tuple[SaveHandle, float]] = []
        self._last_copied: DrainResult | None = None

    @property
    def under_way(self) -> bool:
        """Return whether one is being written."""
        return bool(self._handles)

    def begin(
        self,
        step: int,
        state: State | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        late: Collection[str] | Callable[[str], bool] = (),
        looking_seconds: float = 0.0,
    ) -> SaveHandle | None:
        """Copy the state and write it in the background.

        Args:
            step: Steps done.
            state: What is saved; None: the run's state.
            metrics: Figures of this step, by which the best versions are kept.
            late: Tensors that may be copied until `copied`; see `CheckpointStore.save_async`.
            looking_seconds: That it took to find the state, in which the loop was blocked, too.

        Returns:
            The save; None where it has failed at once.

        Raises:
            CheckpointError: With `raises`, when it cannot begin.
        """
        with self._watch("checkpoint"):
            metrics, self.metrics = metrics or self.metrics, {}
            if self.cadence is not None:
                self.cadence.begun(step)
            if self._note is not None:
                self._note()
            try:
                handle = self.store.save_async(
                    step, self.state if state is None else state, metrics=metrics, late=late
                )
            except CheckpointError as error:
                if self._raises:
                    raise
                self._end(SaveResult(step, 0.0, 0.0, 0, error=str(error)), told=False)
                return None
            self.begun = step
            self._handles.append((handle, looking_seconds))
        self.collect(wait=False)
        return handle

    def go_back(self, step: int) -> None:
        """Training continues after `step` steps: what was saved of later ones must not be newest.

        Where there may be any, the state is saved again; it counts as newer than them.
        """
        self.collect(wait=True)
        later = any(gather_objects(self.store.newest_step() > step))
        self.begun = self.newest = -1 if later else min(self.newest, step)
        if later:
            # The entries are as they were saved, wherever the loop stands.
            note, self._note = self._note, None
            self.begin(step)
            self._note = note
            self.collect(wait=True)

    def copied(self) -> None:
        """Make the copies that are missing: what is late is about to change."""
        for handle, _ in self._handles:
            handle.copied()

    def collect(self, *, wait: bool) -> None:
        """See how the saves under way went that have ended, or all of them."""
        for item in [item for item in self._handles if wait or item[0].done()]:
            self._handles.remove(item)
            handle, looking_seconds = item
            with self._watch("checkpoint"):
                result = handle.result()
            if looking_seconds:
                blocked = result.blocked_seconds + looking_seconds
                result = replace(result, blocked_seconds=blocked)
            # Of a save that could not begin, the store has told.
            self._end(result, told=handle.version is None)

    def wait(self) -> None:
        """Wait for the saves under way.

        Raises:
            CheckpointError: When the last one has failed.
        """
        self.collect(wait=True)
        if self.problem:
            raise CheckpointError(self.problem)

    def end(self, step: int, *, made: bool = True) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over.

        Args:
            step: The last one.
            made: Whether the state of `step` is for this process to save, if it has not.

        Raises:
            CheckpointError: When the newest state is not on disk.
        """
        self.problem = ""
        self.collect(wait=True)
        if made and self.newest < step:
            self.problem = ""
            self.begin(step)
            self.collect(wait=True)
        if self.newest < step and (made or self.problem):
            error = self.problem or "the save was skipped"
            raise CheckpointError(
                f"step {step} could not be saved: {error}; {unsaved_remedy(self.newest)}"
            )

    def close(self, *, failed: bool) -> None:
        """Give up the store; a second call does nothing.

        Args:
            failed: The run has ended by an error: no save is waited for, since other ranks may
                never finish it.

        Raises:
            CheckpointError: When the last save has failed; the store is given up.
        """
        if self.closed:
            return
        if not failed:
            self.collect(wait=True)
        self.closed = True
        self._handles.clear()
        if self.cadence is not None:
            self.cadence.close()
        self.store.close(drain=not failed, failed=failed)
        if self.problem and not failed:
            raise CheckpointError(self.problem)

    def copies(self) -> list[Event]:
        """Events of the checkpoints that were copied on to lower tiers since the last call.

        A copy that was not made because a newer one came first is nothing that anybody misses.
        """
        new: list[DrainResult] = []
        results = self.store.drained()
        for result in reversed(results):
            if result is self._last_copied:
                break
            new.append(result)
        self._last_copied = results[-1] if results else self._last_copied
        return [
            CheckpointCopied(result.step, result.place, result.seconds, result.bytes)
            if result.error is None
            else Warned(result.error)
            for result in reversed(new)
            if not result.skipped
        ]

    def _end(self, result: SaveResult, *, told: bool) -> None:
        if self.cadence is not None:
            self.cadence.ended()
        self.results.append(result)
        if result.error is not None:
            self.problem, self.begun = result.error, -1
        elif not result.skipped:
            self.problem, self.newest = "", result.step
            if self.cadence is not None:
                self.cadence.observe_save(result)
        self._ended(result, told)


_failed_at_exit: list[str] = []


@atexit.register
def _end_as_failed() -> None:
    """End with code 1 where a save has failed that nobody waited for.

    Python takes no exit code from what runs at exit. This was registered before any save, so that
    it runs after most of the rest; it does what is known to come behind it.
    """
    if not _failed_at_exit:
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
        child.join()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def close_at_exit(close: Callable[[], None]) -> None:
    """Close what saves when the program ends without a word to it; a failure ends it with code 1.

    To be called by what runs at exit.
    """
    try:
        close()
    except CheckpointError as error:
        print(f"outlast: {error}", file=sys.stderr)
        _failed_at_exit.append(str(error))
