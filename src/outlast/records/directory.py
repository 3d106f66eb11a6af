"""The run directory: its files, and their atomic replacement.

runs/<name>/
  job.toml             the resolved job
  events.jsonl         rank 0's events (events.rank<N>.jsonl: the other ranks')
  lock                 owner of the run while it lives: host, boot id, pid, start of the process
  attempts             one byte for every start of the run
  id                   eight characters that tell this run from earlier ones of the same name
  data/ checkpoints/ model/ tensorboard/ report.html
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from outlast.errors import RunError
from outlast.records.lock import OwnerLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run directory."""

    path: Path

    @property
    def job_file(self) -> Path:
        """The resolved job."""
        return self.path / "job.toml"

    @property
    def data(self) -> Path:
        """Tokenised corpus."""
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        """Checkpoint store."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Exported Hugging Face model."""
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard log."""
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        """The run as pictures."""
        return self.path / "report.html"

    def exists(self) -> bool:
        """True if a run has begun here."""
        return self.job_file.exists()

    def create(self, job_text: str | None = None) -> None:
        """Make the directory, publish `job_text` as its job, and give it an identifier if needed.

        Args:
            job_text: None: the directory is of a run without a job of its own.

        Raises:
            RunError: When the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if job_text is not None:
                replace_file(self.job_file, job_text.encode())
            if not self._identifier_file.exists():
                replace_file(self._identifier_file, uuid.uuid4().hex[:8].encode())
        except OSError as error:
            raise RunError(
                f"the run directory {self.path} cannot be written: {error.strerror}"
            ) from None

    @property
    def identifier(self) -> str:
        """Eight characters that tell this run from earlier ones of the same name.

        Raises:
            RunError: When the directory was not made by `create`, or cannot be read.
        """
        try:
            return self._identifier_file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is damaged"
            raise RunError(f"{self._identifier_file} cannot be read: {reason}") from None

    @property
    def _identifier_file(self) -> Path:
        return self.path / "id"

    @property
    def attempts(self) -> int:
        """Number of starts of the run so far."""
        try:
            return (self.path / "attempts").stat().st_size
        except OSError:
            return 0

    def next_attempt(self) -> int:
        """Count one more start of the run and return its number, from 1.

        Raises:
            RunError: When it cannot be counted, because the disk is full for example.
        """
        path = self.path / "attempts"
        try:
            with path.open("ab", buffering=0) as file:
                file.write(b".")
                return file.tell()
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None

    def lock(self) -> OwnerLock:
        """The lock that keeps a second live process out of the run; not taken yet."""
        return OwnerLock(
            self.path / "lock",
            subject=f"the run directory {self.path}",
            remedy="wait for it to end or give this run another name (run.name=...)",
        )

    def claim(self, job_text: str, check: Callable[[], None], *, fresh: bool) -> OwnerLock:
        """Take the directory for one more start of the run, and publish its job.

        Args:
            job_text: Of the job.
            check: Raises where the directory holds the run of another job.
            fresh: Move an earlier run aside first; a launcher that starts a group of processes
                again gives it the same arguments, and then what is there stays.

        Returns:
            The lock, held.

        Raises:
            RunError: When it is in use or cannot be written.
        """
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if fresh and not restarted and self.exists():
            # Holding the lock for a moment makes sure that no live run is moved aside.
            lock = self.lock()
            lock.acquire()
            lock.release()
            self.move_aside()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"the run directory {self.path} cannot be made: {error.strerror}; set "
                "run.directory to a folder of yours"
            ) from None
        lock = self.lock()
        lock.acquire()
        try:
            check()
            self.create(job_text)
        except BaseException:
            lock.release()
            raise
        return lock

    def move_aside(self) -> Path:
        """Rename the directory to the first free ``<name>.old<N>``; nothing is deleted."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds the old or the new bytes, never a mixture."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path`, durably, when the block ends well, and else is gone."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # Its own failure must not hide the first one.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
