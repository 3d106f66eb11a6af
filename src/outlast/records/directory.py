"""The run directory and the lock that keeps two live processes out of one run.

runs/<name>/
  job.toml             the resolved job
  events.jsonl         rank 0's events (events.rank<N>.jsonl: the other ranks')
  lock                 owner of the run while it lives: host, boot id, pid, start of the process
  attempts             one byte for every start of the run
  data/ checkpoints/ model/ tensorboard/ report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outlast.errors import RunError

# A lock has no content for a moment after its creation; its owner may die in that moment.
_WRITING_SECONDS = 5.0
_ACQUIRE_SECONDS = 6.0
# Twice the resolution of /proc; two processes with one pid are at least a round of pids apart.
_SAME_START_SECONDS = 0.02


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
            raise RunError(
                f"the run directory {self.path} cannot be written: {error.strerror}"
            ) from None

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

    def move_aside(self) -> Path:
        """Rename the directory to the first free ``<name>.old<N>``; nothing is deleted."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds the old or the new bytes, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
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

    The lock is a file created with O_EXCL that names the owner: host, its boot id, pid, and when
    the process started after that boot (so a reused pid is told from a live owner, and setting the
    clock changes nothing). An owner on another host, or before a reboot, cannot be examined from
    here: its lock counts as live while its heartbeat (the file's modification time, see `refresh`)
    is younger than `stale_after_seconds`.
    """

    stale_after_seconds = 120.0

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.lock_file
        self._owner: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            RunError: When a live process holds it; names host and pid.
        """
        try:
            deadline = time.monotonic() + _ACQUIRE_SECONDS
            while time.monotonic() < deadline:
                if self._create():
                    return
                self._break_if_stale()
                time.sleep(0.01)
        except OSError as error:
            raise RunError(f"the lock {self._path} cannot be taken: {error.strerror}") from None
        raise RunError(
            f"the lock {self._path} could not be taken within {_ACQUIRE_SECONDS:g} s; if no other "
            "process works on this run, remove that file"
        )

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        owner = _this_process()
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(owner, file)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        self._owner = owner
        return True

    def _break_if_stale(self) -> None:
        try:
            file = self._path.open("r+b")
        except FileNotFoundError:
            return
        with file:
            # Of several contenders that found the same dead owner, one at a time may look and
            # unlink; the others then see that the path is no longer the file that they opened.
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                pass  # a file system without flock: the few microseconds' risk is taken
            opened = os.fstat(file.fileno())
            if not _is_file(self._path, opened):
                return
            owner, age_seconds = _parse_owner(file.read()), time.time() - opened.st_mtime
            if not owner and age_seconds < _WRITING_SECONDS:
                return
            if owner and _alive(owner, age_seconds, self.stale_after_seconds):
                raise RunError(
                    f"the run directory {self._path.parent} is in use by process {owner['pid']} "
                    f"on host {owner['host']}; wait for it to end or give this run another name "
                    "(run.name=...)"
                )
            self._path.unlink(missing_ok=True)

    def refresh(self) -> None:
        """Tell other hosts that the owner is alive; call it at least once a minute."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.utime(self._path)

    def release(self) -> None:
        """Give the lock back, if this process still holds it."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._path.unlink()
        self._owner = None

    def _is_ours(self) -> bool:
        """Whether the lock is held and was not broken while this process was suspended."""
        return self._owner is not None and _parse_owner(self._path.read_bytes()) == self._owner


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid": pid,
        "started": _started_seconds(psutil.Process(pid)),
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started_seconds(process: psutil.Process) -> float:
    # psutil adds the boot time, which moves when the clock is set; the difference does not.
    return round(process.create_time() - psutil.boot_time(), 2)


def _is_file(path: Path, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), opened)
    except FileNotFoundError:
        return False


def _parse_owner(content: bytes) -> dict[str, Any]:
    """The owner that a lock file names; empty when it is being written, or damaged."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    whole = isinstance(owner, dict) and {"host", "boot", "pid", "started"} <= owner.keys()
    return owner if whole else {}


def _alive(owner: dict[str, Any], age_seconds: float, stale_after_seconds: float) -> bool:
    if (owner["host"], owner["boot"]) != (socket.gethostname(), _boot_id()):
        return age_seconds < stale_after_seconds
    try:
        process = psutil.Process(owner["pid"])
        same = abs(_started_seconds(process) - owner["started"]) < _SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
