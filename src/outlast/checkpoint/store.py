"""The checkpoint store: copy now, write in the background, publish by a rename.

Tensors are written by ``torch.distributed.checkpoint`` (DCP) in a process group of the store's
own, so the background never runs a collective on the training process group. DCP by itself
overwrites in place and can mix two versions silently; here every version gets a fresh directory
and is sealed by hashes before it gets its name.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from outlast.checkpoint.fit import ExactLoadPlanner
from outlast.checkpoint.state import State, gather, scatter
from outlast.checkpoint.version import (
    Version,
    list_versions,
    partial_path,
    publish,
    published_path,
    remove,
    remove_partial,
    set_aside,
    verify,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future as Writes

T = TypeVar("T")

# DCP says this at every save and load of a process alone. A filter around the calls would race
# with the filters of other threads.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


@dataclass(frozen=True)
class SaveResult:
    """How one save went.

    Attributes:
        step: The step saved.
        blocked_seconds: How long the caller waited in `CheckpointStore.save_async`.
        seconds: From the request to the publication.
        bytes: Size of the published files of all ranks; 0 when it failed.
        error: Why it failed, or None.
    """

    step: int
    blocked_seconds: float
    seconds: float
    bytes: int
    error: str | None = None


@dataclass(frozen=True)
class Restored:
    """What was restored.

    Attributes:
        step: The step of the version that was loaded.
        skipped: One sentence for every newer version that did not verify.
    """

    step: int
    skipped: list[str] = field(default_factory=list)


class SaveHandle:
    """A save under way."""

    def __init__(self, future: Future[SaveResult]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it is published or has failed."""
        return self._future.done()

    def result(self) -> SaveResult:
        """Wait for the end; a failure is in the result's `error`."""
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


class CheckpointStore:
    """Saves and restores versions of a training state below one directory.

    All ranks of the default process group (if there is one) make it, save and restore together.

    Args:
        directory: Where the versions live; made if missing.
        keep: Newest versions kept; older ones are deleted after a newer one is durable.
        asynchronous: Write in a background thread. A second save waits for the first.
        collective: Whether all ranks of the default process group take part; False: this process
            works alone, also where there is a group.

    Raises:
        CheckpointError: When `keep` is less than 1.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        collective: bool = True,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep = {keep} keeps no checkpoint; it must be at least 1")
        self.directory = Path(directory)
        self.keep = keep
        self.asynchronous = asynchronous
        self._distributed = collective and dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if self._distributed else 0
        self._world_size = dist.get_world_size() if self._distributed else 1
        self._group = dist.new_group(backend="gloo") if self._distributed else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: SaveHandle | None = None

    def save_async(self, step: int, state: State) -> SaveHandle:
        """Copy `state` and write it in the background as the version of `step`.

        Returns when the copy is made (after the previous save has ended). The handle's result
        carries an error instead of raising, so that a failed write need not stop training. A step
        that is published already is refused in the same way: no version is ever overwritten.

        Raises:
            CheckpointError: When `step` is negative or the state cannot be saved.
        """
        if step < 0:
            raise CheckpointError(f"step = {step} cannot be saved; steps are counted from 0")
        begun = time.perf_counter()
        self._settle()
        staged = self._stage(gather(state))
        blocked_seconds = time.perf_counter() - begun
        future = self._executor.submit(self._write, step, staged, begun, blocked_seconds)
        self._last = SaveHandle(future)
        if not self.asynchronous:
            self._last.result()
        return self._last

    def save(self, step: int, state: State) -> SaveResult:
        """Save and wait until the version is published; raises CheckpointError if it is not."""
        return self.save_async(step, state).wait()

    def restore(self, state: State) -> Restored | None:
        """Load the newest version that verifies into `state`, on any number of ranks.

        Returns:
            What was restored, or None when there is no version at all.

        Raises:
            CheckpointError: When versions exist but none verifies, or the chosen one does not fit.
        """
        self._settle()
        chosen = self._from_rank_zero(self._choose)
        if chosen is None:
            return None
        step, skipped = chosen
        target = gather(state)
        path = published_path(self.directory, step)
        try:
            dcp.load(
                target,
                storage_reader=dcp.FileSystemReader(path),
                planner=ExactLoadPlanner(),
                process_group=self._group,
                no_dist=not self._distributed,
            )
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{path} does not fit this model: {_cause(error)}") from None
        scatter(state, target)
        return Restored(step, skipped)

    def newest(self) -> Version | None:
        """The newest published version, verified or not."""
        versions = list_versions(self.directory)
        return versions[-1] if versions else None

    def close(self) -> None:
        """Wait for a save under way and end the background thread."""
        self._executor.shutdown(wait=True)

    def _settle(self) -> None:
        """Wait for the save under way: two at a time would mix their messages in the group."""
        if self._last is not None:
            self._last.result()

    def _stage(self, gathered: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory that later training steps do not touch."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = stager.stage(gathered)
        assert isinstance(staged, dict)
        stager.close()
        return staged

    def _write(
        self, step: int, staged: dict[str, Any], begun: float, blocked_seconds: float
    ) -> SaveResult:
        size, error = 0, None
        try:
            size = self._write_and_publish(step, staged)
        except (Exception, dcp.CheckpointException) as problem:
            error = f"the checkpoint of step {step} in {self.directory} failed: {_cause(problem)}"
            if self._rank == 0:
                shutil.rmtree(partial_path(self.directory, step), ignore_errors=True)
        return SaveResult(step, blocked_seconds, time.perf_counter() - begun, size, error)

    def _write_and_publish(self, step: int, staged: dict[str, Any]) -> int:
        partial = partial_path(self.directory, step)
        self._from_rank_zero(lambda: self._prepare(partial, step))
        dcp.save(
            staged,
            storage_writer=_Writer(partial, sync_files=True, overwrite=False),
            process_group=self._group,
            no_dist=not self._distributed,
        )
        return self._from_rank_zero(lambda: self._publish(partial, step))

    def _prepare(self, partial: Path, step: int) -> None:
        existing = Version(step, published_path(self.directory, step))
        if existing.path.exists():
            if not _damaged(existing):
                raise CheckpointError(
                    f"{existing.path} is published already and is never overwritten; delete it to "
                    "save this step again"
                )
            set_aside(existing)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _publish(self, partial: Path, step: int) -> int:
        target = published_path(self.directory, step)
        size = publish(partial, target, step, self._world_size)
        for version in list_versions(self.directory)[: -self.keep]:
            # After a return to an earlier step, the new version may be the oldest by number.
            if version.step != step:
                with contextlib.suppress(OSError):
                    remove(version)
        remove_partial(self.directory, before=step)
        return size

    def _choose(self) -> tuple[int, list[str]] | None:
        skipped, damaged = [], []
        for version in reversed(list_versions(self.directory)):
            if problem := _damaged(version):
                skipped.append(problem)
                damaged.append(version)
                continue
            for each in damaged:
                # One who may only read can restore as well.
                with contextlib.suppress(OSError):
                    set_aside(each)
            return version.step, skipped
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is intact ({'; '.join(skipped)}); "
                "restore the files from a copy, or start anew with --fresh"
            )
        return None

    def _from_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; every rank gets its result, or raises its error."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = work()
            except Exception as problem:
                outcome[1] = _cause(problem)
        if self._distributed:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise CheckpointError(outcome[1])
        result: T = outcome[0]
        return result


class _Writer(dcp.FileSystemWriter):
    """Reports the operating system's error, where PyTorch's zip writer hides it behind its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Writes[list[WriteResult]]:
        """Write this rank's file."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            behind: BaseException | None = error
            while behind is not None and not isinstance(behind, OSError):
                behind = behind.__cause__ or behind.__context__
            raise behind or error from None


def _damaged(version: Version) -> str:
    """Why `version` does not verify; empty when it does."""
    try:
        verify(version)
    except CheckpointError as problem:
        return str(problem)
    return ""


def _cause(error: BaseException) -> str:
    """The sentence of the first underlying failure."""
    if isinstance(error, dcp.CheckpointException):
        for failure in error.failures.values():
            return _cause(failure[0])
    if isinstance(error, (OSError, CheckpointError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
