"""The checkpoints of a run: where they are, saves in the background, the last one awaited."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outlast.checkpoint import CheckpointStore, Compression, Reduction, Retention, Tier
from outlast.errors import CheckpointError
from outlast.records import CheckpointCopied, CheckpointFailed, CheckpointSaved, Warned
from outlast.recover.phase_page import EnterPhase, ignore_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outlast.checkpoint import DrainResult, SaveHandle, SaveResult
    from outlast.checkpoint.tiers import Pacing
    from outlast.distributed.ranks import Ranks
    from outlast.job import CheckpointSection
    from outlast.records import Event, RunDirectory, Stopwatch
    from outlast.runtime.cadence import SaveCadence
    from outlast.runtime.stop import JobChain
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
    """
    keep = keep or Retention(
        settings.keep, every=settings.keep_every, best=settings.keep_best, metric="validation_loss"
    )
    # Elsewhere, an earlier run of this name may have left its checkpoints.
    run = f"{directory.path.name}-{directory.identifier}"
    pacings = pacings or {}
    tiers = []
    if settings.fast:
        tiers.append(
            Tier(
                directory.checkpoints,
                every=settings.drain_every,
                keep=keep,
                bytes_per_second=1e6 * settings.drain_megabytes_per_s or None,
                pacing=pacings.get(RUN),
            )
        )
    if settings.mirror:
        tiers.append(
            Tier(
                f"{settings.mirror}/{run}",
                every=settings.mirror_every,
                keep=keep,
                bytes_per_second=1e6 * settings.mirror_megabytes_per_s or None,
                pacing=pacings.get(MIRROR),
            )
        )
    return CheckpointStore(
        f"{settings.fast}/{run}" if settings.fast else directory.checkpoints,
        keep=settings.fast_keep if settings.fast else keep,
        tiers=tiers,
        private=bool(settings.fast) and settings.fast_private,
        reduction=Reduction(Compression(settings.compression), chain=settings.delta_chain),
        asynchronous=settings.asynchronous,
        when_busy=settings.when_busy,
        writer=settings.writer,
        timeout_seconds=settings.timeout_seconds,
    )


RUN, MIRROR = "run", "mirror"
"""Names of the tiers: the run's directory below checkpoint.fast, and checkpoint.mirror."""


class Transfers(Protocol):
    """Says how fast copies may be, besides the caps of their tiers; it travels to worker processes.

    See `outlast.cluster.transfers`.
    """

    def tiers(self) -> Mapping[str, Pacing]:
        """For `RUN` and `MIRROR`; copies to a tier that is left out have its cap alone."""


class CopyLog:
    """Log of the copies that have been written down."""

    def __init__(self) -> None:
        self._last: DrainResult | None = None

    def news(self, results: Sequence[DrainResult]) -> list[Event]:
        """Events of what has ended since the last call.

        A copy that was not made because a newer one came first is nothing that anybody misses.

        Args:
            results: All that are known, oldest first.
        """
        new: list[DrainResult] = []
        for result in reversed(results):
            if result is self._last:
                break
            new.append(result)
        self._last = results[-1] if results else self._last
        return [_event_of(result) for result in reversed(new) if not result.skipped]


def _event_of(result: DrainResult) -> Event:
    if result.error is not None:
        return Warned(result.error)
    return CheckpointCopied(result.step, result.place, result.seconds, result.bytes)


def unsaved_remedy(newest: int) -> str:
    """Say what is lost where the last save has failed, and the remedy.

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


def _nothing(*_: Any) -> None:
    return None


@dataclass
class RunSaves:
    """The saves of one attempt on this rank: begun beside training, recorded, the last awaited.

    Attributes:
        store: Of the run's checkpoints.
        state: Saved.
        cadence: Told of every save; set before the first one.
        record: Writes an event down.
        watch: Time by purpose.
        mark: Told that a save begins.
        before: Called with the step before the state is copied.
        copied: Called when the state is copied.
        published: Called with the result of each save that was published.
        failed: Called with why a save has failed, and whether the store has told so.
        one_at_a_time: Whether a save waits for the end of the one before; the store's own rule
            counts otherwise.
        names_step: Whether the error of the last save says which step is lost.
        metrics: Figures of the step that is saved next.
        newest: Steps of the newest version that is known to be published, -1: none.
    """

    store: CheckpointStore
    state: State
    cadence: SaveCadence
    record: Callable[[Event], None]
    watch: Stopwatch
    mark: EnterPhase = ignore_phase
    before: Callable[[int], None] = _nothing
    copied: Callable[[], object] = _nothing
    published: Callable[[SaveResult], None] = _nothing
    failed: Callable[[str, bool], None] = _nothing
    one_at_a_time: bool = True
    names_step: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    newest: int = -1
    _handles: list[SaveHandle] = field(default_factory=list)
    _problem: str = ""
    _copies: CopyLog = field(default_factory=CopyLog)

    @property
    def under_way(self) -> bool:
        """Return whether one is being written."""
        return bool(self._handles)

    def begin(self, step: int) -> None:
        """Save in the background; what goes wrong is recorded and stops no training."""
        self.mark("save")
        with self.watch("checkpoint"):
            metrics, self.metrics = self.metrics, {}
            self.cadence.begun(step)
            self.before(step)
            try:
                handle = self.store.save_async(step, self.state, metrics=metrics)
            except CheckpointError as error:
                self.cadence.ended()
                self.record(CheckpointFailed(step, str(error)))
                self._fail(str(error), told=False)
            else:
                if self.one_at_a_time:
                    # The store has waited for the save before, and counted that as blocked.
                    self.collect(wait=True)
                self._handles.append(handle)
                self.copied()
        if not self.one_at_a_time:
            self.collect(wait=False)

    def collect(self, *, wait: bool) -> None:
        """Record the saves under way that have ended, or all of them."""
        for handle in [handle for handle in self._handles if wait or handle.done()]:
            self._handles.remove(handle)
            with self.watch("checkpoint"):
                result = handle.result()
            self.cadence.ended()
            if result.error is not None:
                self.record(CheckpointFailed(result.step, result.error))
                # Of a save that could not begin, the store has told.
                self._fail(result.error, told=handle.version is None)
            elif not result.skipped:
                self._publish(result)

    def end(self, step: int, *, made: bool = True) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over.

        Args:
            step: The last one.
            made: Whether the state of `step` is for this process to save, if it has not.

        Raises:
            CheckpointError: When the newest state is not on disk.
        """
        self._problem = ""
        self.collect(wait=True)
        if made and self.newest < step:
            self._problem = ""
            self.begin(step)
            self.collect(wait=True)
        if self.newest < step and (made or self._problem):
            error = self._problem or "the save was skipped"
            if self.names_step:
                error = f"step {step} could not be saved: {error}"
            raise CheckpointError(f"{error}; {unsaved_remedy(self.newest)}")

    def record_copies(self) -> None:
        """Write down which checkpoints were copied on to lower tiers meanwhile."""
        for event in self._copies.news(self.store.drained()):
            self.record(event)

    def _publish(self, result: SaveResult) -> None:
        self.newest, self._problem = result.step, ""
        self.record(
            CheckpointSaved(result.step, result.blocked_seconds, result.seconds, result.bytes)
        )
        self.cadence.observe_save(result)
        self.published(result)

    def _fail(self, problem: str, *, told: bool) -> None:
        self._problem = problem
        self.failed(problem, told)


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


class AdapterSaves:
    """One save at a time, which is waited for when it has to be.

    Args:
        ranks: This process among the others.
        chain: Told of each published save; None: nobody is.

    Attributes:
        events: What restoring had to say.
        results: Of the saves that have ended.
        on_result: Called with each result.
        watch: Makes contexts whose time counts for a purpose.
    """

    def __init__(self, ranks: Ranks, chain: JobChain | None = None) -> None:
        self.events: list[Event] = []
        self.results: list[SaveResult] = []
        self.on_result: Callable[[SaveResult], None] = lambda _: None
        self.watch: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda _: (
            contextlib.nullcontext()
        )
        self._ranks = ranks
        self._chain = chain
        self._handle: SaveHandle | None = None
        self._number = -1
        """Of the newest version that was begun, and has not failed."""

    def collect(self, *, wait: bool = False) -> None:
        """See how the save under way went, if it is done.

        Args:
            wait: Wait for it.
        """
        if self._handle is None or not (wait or self._handle.done()):
            return
        with self.watch("checkpoint"):
            result = self._handle.result()
        # Of a save that could not begin, the store has told.
        told, self._handle = self._handle.version is None, None
        self.results.append(result)
        self.on_result(result)
        if result.error is not None:
            self._number = -1
            if not told:
                warnings.warn(f"{result.error}; training goes on", stacklevel=2)
        elif not result.skipped and self._ranks.is_first and self._chain is not None:
            self._chain.report_progress(result.step, save_seconds=result.seconds)

    def finish(self) -> None:
        """Wait for the save under way: where training ends, a failure must not be passed over.

        Raises:
            CheckpointError: When the last save has failed.
        """
        self.collect(wait=True)
        if self.results and self.results[-1].error is not None:
            raise CheckpointError(self.results[-1].error)

    def _tell_all(self, events: Iterable[Event]) -> None:
        """Take over what another part of restoring had to say."""
        for event in events:
            if isinstance(event, Warned):
                self._tell(event.message)
            else:
                self.events.append(event)

    def _tell(self, sentence: str) -> None:
        self.events.append(Warned(sentence))
        if self._ranks.is_first:
            warnings.warn(sentence, stacklevel=2)
