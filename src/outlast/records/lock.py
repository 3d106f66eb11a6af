"""The lock that keeps two live processes out of one directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from outlast.errors import RunError
from outlast.records.process import boot_identity, started_seconds

# A lock has no content for a moment after its creation; its owner may die in that moment.
_WRITING_SECONDS = 5.0
_ACQUIRE_SECONDS = 6.0
# Twice the resolution of /proc; two processes with one pid are at least a round of pids apart.
_SAME_START_SECONDS = 0.02


class OwnerLock:
    """Holds a directory for this process; a lock whose owner is dead is broken.

    The lock is a file created with O_EXCL that names the owner: host, its boot id, pid, and when
    the process started after that boot (so a reused pid is told from a live owner, and setting the
    clock changes nothing). An owner on another host, or before a reboot, cannot be examined from
    here: its lock counts as live while its heartbeat (the file's modification time, see `refresh`)
    is younger than `stale_after_seconds`.

    Args:
        path: The lock file; its directory exists.
        subject: What is held, for the error, e.g. ``the run directory runs/a``.
        remedy: What to do when it is taken.
    """

    stale_after_seconds = 120.0
    heartbeat_seconds = 20.0

    def __init__(self, path: Path, *, subject: str, remedy: str) -> None:
        self._path = path
        self._subject = subject
        self._remedy = remedy
        self._owner: dict[str, Any] | None = None
        self._released = threading.Event()

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
            "process works in this directory, remove that file"
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
        self._released.clear()
        threading.Thread(target=self._beat, name="owner-lock", daemon=True).start()
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
                remedy = self._remedy
                if owner == _this_process():
                    remedy = (
                        "that is this process: close what holds it first, or use another directory"
                    )
                raise RunError(
                    f"{self._subject} is in use by process {owner['pid']} on host "
                    f"{owner['host']}; {remedy}"
                )
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Refresh the lock until it is released, also during long steps and set-ups."""
        while not self._released.wait(self.heartbeat_seconds):
            self.refresh()

    def refresh(self) -> None:
        """Tell other hosts that the owner is alive; the lock's own thread calls it."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.utime(self._path)

    def is_held(self) -> bool:
        """Whether a live process holds it, this one or another."""
        try:
            with self._path.open("rb") as file:
                owner = _parse_owner(file.read())
                age_seconds = time.time() - os.fstat(file.fileno()).st_mtime
        except OSError:
            return False
        return bool(owner) and _alive(owner, age_seconds, self.stale_after_seconds)

    def release(self) -> None:
        """Give the lock back, if this process still holds it."""
        self._released.set()
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
        "boot": boot_identity(),
        "pid": pid,
        "started": started_seconds(psutil.Process(pid)),
    }


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
    if (owner["host"], owner["boot"]) != (socket.gethostname(), boot_identity()):
        return age_seconds < stale_after_seconds
    try:
        process = psutil.Process(owner["pid"])
        same = abs(started_seconds(process) - owner["started"]) < _SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
