"""A lane: one stream of saves with its own plan, memory, writer and background thread.

A store has a lane for versions of the state and, where it is asked for, one for replay logs, so
that neither waits for the other.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from outlast.checkpoint.encoder import AbandonedError, PartJob, Written
from outlast.checkpoint.manifest import STATE
from outlast.checkpoint.plan import Holding, Plan, make_plan
from outlast.checkpoint.staging import StagingMemory, StagingPlan, plan_staging
from outlast.checkpoint.storage import describe_failure, storage_of, within
from outlast.checkpoint.writer import ProcessWriter, ThreadWriter, Writer
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outlast.checkpoint.encoder import Reduction
    from outlast.checkpoint.lossy import Bound
    from outlast.checkpoint.staging import CopyWindow
    from outlast.checkpoint.version import Version
    from outlast.distributed.group import Group

WriterKind = Literal["process", "thread"]
_REPLACED = "a newer save replaced it"


@dataclass(frozen=True)
class SaveResult:
    """Result of one save.

    Attributes:
        step: The step saved.
        blocked_seconds: How long the caller waited for copies: in `CheckpointStore.save_async`, and
            where tensors were late, in `SaveHandle.copied` or the call that did its work.
        seconds: From the request to the publication.
        bytes: Bytes that this rank wrote, on rank 0 those of all ranks that it can see; 0 when the
            save failed or was not made.
        raw_bytes: Bytes that this rank staged.
        error: Why it failed, or None.
        skipped: Why it was not made or was given up, although nothing failed; else empty.
    """

    step: int
    blocked_seconds: float
    seconds: float
    bytes: int
    raw_bytes: int = 0
    error: str | None = None
    skipped: str = ""


class SaveHandle:
    """A save under way.

    Args:
        future: Of its result.
        copied: Makes the copies that are missing; None where all are made.
        version: What is being written; None where that is not known, or nothing is.

    Attributes:
        version: As given.
    """

    def __init__(
        self,
        future: Future[SaveResult],
        copied: Callable[[], None] | None = None,
        version: Version | None = None,
    ) -> None:
        self.version = version
        self._future = future
        self._copied = copied

    def done(self) -> bool:
        """Return whether the save has ended, well or not; never before all copies are made."""
        return self._future.done()

    def copied(self) -> None:
        """Make the copies that are missing, and let the writing begin.

        To be called, where tensors were late, by the thread that trains and before it writes to the
        first of them: after the backward pass, before the optimizer's step. Where none was late,
        and from the second call on, it does nothing.
        """
        if self._copied is not None:
            self._copied()

    def result(self) -> SaveResult:
        """Wait for the end, of the copies too; a failure is in the result's `error`."""
        self.copied()
        return self._future.result()

    def wait(self) -> SaveResult:
        """Wait for the end.

        Raises:
            CheckpointError: When the version was not published.
        """
        result = self.result()
        if result.error is not None:
            raise CheckpointError(result.error)
        return result


@dataclass(frozen=True)
class Save:
    """One save on its way: what identifies it, and when the caller asked for it."""

    version: Version
    begun: float
    kind: str = STATE
    requires: tuple[int, ...] = ()
    notes: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Staged:
    """A save that is copied or being copied, with what `Lane.submit` was told to do after it."""

    job: PartJob
    save: Save
    abandoned: threading.Event
    finish: Callable[[Version, str], str]


class _Copies:
    """The late copies of a save, and what comes after them.

    Args:
        window: With the copies that are still to be made.
        blocked_seconds: How long the caller has waited so far.
        write: Called once, with why the copies must not be used or an empty text, and with the
            seconds for which the caller has waited.
    """

    def __init__(
        self, window: CopyWindow, blocked_seconds: float, write: Callable[[str, float], None]
    ) -> None:
        self._window = window
        self._blocked_seconds = blocked_seconds
        self._write: Callable[[str, float], None] | None = write
        self._lock = threading.Lock()

    def close(self) -> None:
        """Make the copies that are missing and begin to write; does nothing when called again."""
        with self._lock:
            if self._write is None:
                return
            begun = time.perf_counter()
            problem = self._window.close()
            write, self._write = self._write, None
            write(problem, self._blocked_seconds + time.perf_counter() - begun)


class Lane:
    """Stages and writes, one save at a time.

    Args:
        place: Path or URL of the store.
        ranks: This process among those that save together.
        reduction: Codecs and deltas.
        writer: Who codes and writes.
        coordinated: Whether ranks share the work of every new plan.
        check: Called in the background before each write; raises CheckpointError or OSError when
            nothing may be written.
        timeout_seconds: Longest time of a write.
    """

    def __init__(
        self,
        place: str,
        ranks: Group,
        *,
        reduction: Reduction,
        writer: WriterKind,
        coordinated: bool,
        check: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        self._place = place
        self._ranks = ranks
        self._reduction = reduction
        self._writer_kind = writer
        self._coordinated = coordinated
        self._check = check
        self._timeout_seconds = timeout_seconds
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._held: Holding | None = None
        self._plan: Plan | None = None
        self._bounds: dict[str, Bound] = {}
        self._staging: StagingPlan | None = None
        self._memory: StagingMemory | None = None
        self._writer: Writer | None = None
        self._base_arena = -1
        self._abandoned = threading.Event()
        self._window: CopyWindow | None = None
        self._last: SaveHandle | None = None
        self.last_step = -1

    @property
    def busy(self) -> bool:
        """True while a save is under way."""
        return self._last is not None and not self._last.done()

    def copied(self) -> None:
        """Make the late copies of the save under way."""
        if self._last is not None:
            self._last.copied()

    def settle(self) -> None:
        """Wait for the save under way."""
        if self._last is not None:
            self._last.result()

    def failed_at(self, step: int) -> bool:
        """Return whether the save before was of `step` and was not published."""
        if self._last is None or step != self.last_step:
            return False
        result = self._last.result()
        return result.error is not None or bool(result.skipped)

    def abandon(self) -> None:
        """Give up the save under way; it is never published."""
        self._abandoned.set()
        if self._window is not None:
            self._window.drop()

    def changed(self, held: Holding) -> bool:
        """Return whether this rank holds something else than when the work was shared out."""
        return held != self._held

    def forget(self) -> None:
        """Share out the work anew with the next save, because it could not be done."""
        self._held = None

    def replan(self, held: Holding, memory: dict[str, torch.Tensor]) -> None:
        """Share out the work anew, because what is to be saved has changed.

        Ranks that coordinate all come here together, and all ranks do for their first save.
        """
        if self._ranks.size > 1 and (self._coordinated or self._plan is None):
            plan = make_plan(self._ranks.gather(held), self._ranks.rank)
        else:
            plan = make_plan([held], 0, alone=self._ranks.size > 1)
        self._held, self._plan = held, plan
        self._bounds = self._reduction.bounds_of(plan.catalogue, plan.tensors)
        self._staging = plan_staging(plan.tensors, memory, self._bounds)
        if self._memory is None or self._memory.size < self._staging.size:
            self._grow(self._staging.size, memory)

    def submit(
        self,
        save: Save,
        memory: dict[str, torch.Tensor],
        values: dict[str, Any],
        finish: Callable[[Version, str], str],
        late: Mapping[str, torch.Tensor],
    ) -> SaveHandle:
        """Copy the tensors and write them in the background.

        Args:
            save: Which.
            memory: Name to tensor, as `plan.holding` gives it.
            values: Name to JSON value.
            finish: Called in the background with the version and what went wrong on this rank;
                returns what went wrong on any.
            late: Name to tensor of those that may be copied while training goes on.
        """
        assert self._plan is not None
        assert self._staging is not None
        assert self._memory is not None
        arena = (self._base_arena + 1) % len(self._memory.arenas)
        window = self._memory.stage(arena, self._staging, memory, late, self._timeout_seconds)
        job = PartJob(
            arena=arena,
            version=save.version,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            catalogue=self._plan.catalogue,
            pieces=self._staging.pieces,
            values={name: values[name] for name in self._plan.values},
            bounds=self._bounds,
            kind=save.kind,
            requires=list(save.requires),
            notes=save.notes or {},
            alone=self._ranks.size > 1 and not self._coordinated,
        )
        self.last_step = save.version.step
        self._abandoned = threading.Event()
        staged = _Staged(job, save, self._abandoned, finish)
        future: Future[SaveResult] = Future()

        def write(problem: str, blocked_seconds: float) -> None:
            self._in_background(
                lambda: _give(future, lambda: self._run(staged, problem, blocked_seconds))
            )

        copies = _Copies(window, time.perf_counter() - save.begun, write)
        self._window, self._last = window, SaveHandle(future, copies.close, save.version)
        if window:
            # The executor's thread must not wait for the caller: a program that ends without
            # closing its windows ends all the same, without this version.
            self._in_background(window.copy)
        else:
            copies.close()
        return self._last

    def close(self) -> None:
        """Wait for the save under way and give everything back."""
        self.copied()
        self._executor.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close()
        self._writer = self._memory = None

    def _grow(self, size: int, memory: dict[str, torch.Tensor]) -> None:
        writer, old = self._writer, self._memory
        self._writer = self._memory = None
        if writer is not None:
            writer.close()
        if old is not None:
            old.close()
        # Both memories at once might be more than there is.
        del writer, old
        device = next((t.device for t in memory.values() if t.is_cuda), torch.device("cpu"))
        self._memory = StagingMemory(size, 2 if self._reduction.chain else 1, device)
        self._base_arena = -1
        arenas = self._memory.arenas
        if self._writer_kind == "thread":
            self._writer = ThreadWriter(self._place, self._reduction, arenas)
        else:
            self._writer = ProcessWriter(
                self._place, self._reduction, arenas, self._timeout_seconds
            )

    def _in_background(self, work: Callable[[], None]) -> None:
        try:
            self._executor.submit(work)
        except RuntimeError:
            # The interpreter is ending and starts no more work in threads.
            work()

    def _run(self, staged: _Staged, problem: str, blocked_seconds: float) -> SaveResult:
        job, abandoned, written = staged.job, staged.abandoned, None
        try:
            if abandoned.is_set():
                raise AbandonedError
            if problem:
                raise CheckpointError(problem)
            within(self._timeout_seconds, self._check, self._place)
            written = self._write(job, abandoned)
        except AbandonedError:
            problem = _REPLACED
        except Exception as error:
            problem = describe_failure(error)
        problem = staged.finish(job.version, problem)
        skipped = ""
        if problem == _REPLACED:
            # Also where this rank had written its part before another gave up.
            problem, skipped = "", _REPLACED
        step = job.version.step
        sentence = f"the checkpoint of step {step} in {self._place} failed: {problem}"
        return SaveResult(
            step,
            blocked_seconds,
            time.perf_counter() - staged.save.begun,
            0 if written is None or problem or skipped else self._stored_bytes(job, written),
            0 if written is None else written.raw_bytes,
            sentence if problem else None,
            skipped,
        )

    def _stored_bytes(self, job: PartJob, written: Written) -> int:
        if job.rank > 0 or job.world_size == 1:
            return written.stored_bytes
        try:
            return sum(storage_of(self._place).files(job.version.folder).values())
        except (OSError, CheckpointError):
            return written.stored_bytes

    def _write(self, job: PartJob, abandoned: threading.Event) -> Written:
        assert self._writer is not None
        # A failed save leaves no base for deltas, one that was given up leaves the one before.
        self._base_arena, base = -1, self._base_arena
        try:
            written = self._writer.write(job, abandoned)
        except AbandonedError:
            self._base_arena = base
            raise
        self._base_arena = job.arena
        return written


def _give(future: Future[SaveResult], work: Callable[[], SaveResult]) -> None:
    """Give `future` the result of `work`, or its error."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
