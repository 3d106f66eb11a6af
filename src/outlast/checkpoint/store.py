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

from outlast.checkpoint.state import State, gather, scatter
from outlast.checkpoint.version import (
    Version,
    list_versions,
    partial_path,
    publish,
    published_path,
    set_aside,
    verify,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


@dataclass(frozen=True)
class SaveResult:
    """How one save went.

    Attributes:
        step: The step saved.
        blocked_seconds: How long the caller waited in `CheckpointStore.save_async`.
        seconds: From the request to the publication.
        bytes: Size of the published files (0 on ranks other than 0, which do not publish).
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
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        collective: bool = True,
    ) -> None:
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
        carries an error instead of raising, so that a failed write need not stop training.
        """
        begun = time.perf_counter()
        if self._last is not None:
            self._last.result()
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
        except (OSError, dcp.CheckpointException, RuntimeError, CheckpointError) as problem:
            reason = str(problem) if isinstance(problem, CheckpointError) else _cause(problem)
            error = f"the checkpoint of step {step} in {self.directory} failed: {reason}"
        return SaveResult(step, blocked_seconds, time.perf_counter() - begun, size, error)

    def _write_and_publish(self, step: int, staged: dict[str, Any]) -> int:
        partial = partial_path(self.directory, step)
        self._from_rank_zero(lambda: _make_empty(partial))
        writer = dcp.FileSystemWriter(partial, sync_files=True, overwrite=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                staged,
                storage_writer=writer,
                process_group=self._group,
                no_dist=not self._distributed,
            )
        return self._from_rank_zero(lambda: self._publish(partial, step))

    def _publish(self, partial: Path, step: int) -> int:
        target = published_path(self.directory, step)
        size = publish(partial, target, step, self._world_size)
        for version in list_versions(self.directory)[: -self.keep]:
            with contextlib.suppress(OSError):
                shutil.rmtree(version.path)
        return size

    def _choose(self) -> tuple[int, list[str]] | None:
        skipped, damaged = [], []
        for version in reversed(list_versions(self.directory)):
            try:
                verify(version)
            except CheckpointError as problem:
                skipped.append(str(problem))
                damaged.append(version)
                continue
            for each in damaged:
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
            except (OSError, CheckpointError) as problem:
                outcome[1] = str(problem)
        if self._distributed:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise CheckpointError(outcome[1])
        result: T = outcome[0]
        return result


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _cause(error: BaseException) -> str:
    """The sentence of the first underlying failure."""
    if isinstance(error, dcp.CheckpointException):
        for failure in error.failures.values():
            return _cause(failure[0])
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
