"""The run directory and the lock that keeps two live processes out of one run.

runs/<name>/
  job.toml             the resolved job
  events.jsonl         rank 0's events (events.rank<N>.jsonl: the other ranks')
  lock                 owner of the run while it lives: host, pid, start time of the process
  attempts             one byte for every start of the run
  data/ checkpoints/ model/ tensorboard/ report.html
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from outlast.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


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

    @property
    def lock_file(self) -> Path:
        """The owner while the run is alive."""
        return self.path / "lock"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.job_file.exists()

    def create(self, job_text: str) -> None:
        """Make the directory and publish `job_text` as its job.

        Raises:
            RunError: When the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(self.job_file, job_text.encode())
        except OSError as error:
            raise RunError(f"the run directory {self.path} cannot be written: {error}") from None

    def next_attempt(self) -> int:
        """Count one more start of the run and return its number, from 1."""
        with (self.path / "attempts").open("ab") as file:
            file.write(b".")
            return file.tell()

    def move_aside(self) -> Path:
        """Rename the directory to the first free ``<name>.old<N>``; nothing is deleted."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds the old or the new bytes, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
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


class RunLock:
    """Holds a run directory for this process; a lock whose owner is dead is broken.

    The lock is a file created with O_EXCL that names host, pid and the process's start time, so a
    reused pid is told from a live owner. An owner on another host cannot be examined from here: its
    lock counts as live while its heartbeat (the file's modification time, see `refresh`) is younger
    than `stale_after_seconds`.
    """

    stale_after_seconds = 120.0

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.lock_file
        self._held = False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            RunError: When a live process holds it; names host and pid.
        """
        for _ in range(3):
            try:
                descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._break_if_stale()
                continue
            except OSError as error:
                raise RunError(f"the lock {self._path} cannot be written: {error}") from None
            with os.fdopen(descriptor, "w") as file:
                json.dump(_owner(os.getpid()), file)
            self._held = True
            return
        raise RunError(f"the lock {self._path} changes hands all the time; try again")

    def _break_if_stale(self) -> None:
        try:
            text = self._path.read_text()
            age_seconds = time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return
        try:
            owner = json.loads(text)
        except ValueError:
            owner = {}
        if _alive(owner, age_seconds, self.stale_after_seconds):
            raise RunError(
                f"the run directory {self._path.parent} is in use by process "
                f"{owner.get('pid', '?')} on host {owner.get('host', '?')}; wait for it to end or "
                "give this run another name (run.name=...)"
            )
        # Renaming first makes sure that only one of several contenders removes this very file.
        grave = self._path.with_name(f".lock.stale.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(grave)
            grave.unlink()

    def refresh(self) -> None:
        """Tell other hosts that the owner is alive; call it at least once a minute."""
        if self._held:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._held:
            self._held = False
            self._path.unlink(missing_ok=True)


def _owner(pid: int) -> dict[str, object]:
    started = psutil.Process(pid).create_time()
    return {"host": socket.gethostname(), "pid": pid, "started": started}


def _alive(owner: dict[str, object], age_seconds: float, stale_after_seconds: float) -> bool:
    pid = owner.get("pid")
    if not isinstance(pid, int):
        # A lock that is being written has no content for a moment.
        return age_seconds < 5.0
    if owner.get("host") != socket.gethostname():
        return age_seconds < stale_after_seconds
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - float(str(owner.get("started")))) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
