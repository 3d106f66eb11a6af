"""Lock of a directory against a second live process.

It belongs to a process; the lease (`outlast.records.lease`) belongs to all processes of a job. It
does not depend on clocks of two hosts agreeing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil

from outlast.errors import LeaseLostError, RunError
from outlast.records.lease import json_object, process_lease
from outlast.records.process import boot_identity, process_lives, started_seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# A lock has no content for a moment after its creation; its owner may die in that moment.
_WRITING_SECONDS = 5.0
_ACQUIRE_SECONDS = 6.0
_LONGEST = 1 << 16
"""Bytes of a lock file that are read; it has a few hundred."""


class OwnerLock:
    """Holds a directory for this process; a lock whose owner is dead is broken.

    The lock is a file created with O_EXCL that names the owner: host, its boot id, pid, and when
    the process started after that boot (so a reused pid is told from a live owner, and setting the
    clock changes nothing). An owner on another host, or before a reboot, cannot be examined from
    here: its lock counts as live while its heartbeat (the file's modification time, see `refresh`)
    is younger than `stale_after_seconds`, and does not move while it is watched: hosts' clocks may
    differ. An owner whose lease this process's job has taken over holds nothing.

    Args:
        path: The lock file; its directory exists.
        subject: What is held, for the error, e.g. ``the run directory runs/a``.
        remedy: What to do when it is taken.
    """

    stale_after_seconds = 120.0
    heartbeat_seconds = 10.0
    watch_seconds = 25.0
    """Time for which an old heartbeat of another host is watched before its lock is broken."""

    def __init__(self, path: Path, *, subject: str, remedy: str) -> None:
        self._path = path
        self._subject = subject
        self._remedy = remedy
        self._owner: dict[str, Any] | None = None
        self._released = threading.Event()
        # The training thread and the one that publishes both check.
        self._checking = threading.Lock()

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
                begun = time.monotonic()
                remove_lock_file(self._path, self._is_stale)
                # Watching a heartbeat is no failure to take the lock.
                deadline += time.monotonic() - begun
                time.sleep(0.01)
        except OSError as error:
            words = error.strerror or error
            raise RunError(f"the lock {self._path} cannot be taken: {words}") from None
        raise RunError(
            f"the lock {self._path} could not be taken within {_ACQUIRE_SECONDS:g} s; if no other "
            "process works in this directory, remove that file"
        )

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        owner = this_process()
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

    def _is_stale(self, content: bytes, opened: os.stat_result) -> bool:
        """True if the owner of the lock is dead; RunError while it lives."""
        owner, age_seconds = _parse_owner(content), time.time() - opened.st_mtime
        if not owner:
            return age_seconds >= _WRITING_SECONDS
        if not _alive(owner, age_seconds, self.stale_after_seconds) and (
            _is_here(owner) or _has_lost_lease(owner) or not self._beats(opened.st_mtime_ns)
        ):
            return True
        remedy = self._remedy
        if owner == this_process():
            remedy = "that is this process: close what holds it first, or use another directory"
        raise RunError(
            f"{self._subject} is in use by process {owner['pid']} on host {owner['host']}; {remedy}"
        )

    def _beats(self, touched: int) -> bool:
        """Return True if the heartbeat that seems old moves after all."""
        until = time.monotonic() + self.watch_seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, self.watch_seconds))
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_mtime_ns != touched:
                    return True
        return False

    def _beat(self) -> None:
        """Refresh the lock until it is released, also during long steps and set-ups."""
        while not self._released.wait(self.heartbeat_seconds):
            self.refresh()

    def refresh(self) -> None:
        """Tell other hosts that the owner is alive; the lock's own thread calls it."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.utime(self._path)

    def check(self) -> None:
        """Refuse to continue where the lock was taken over; to be called at each commit.

        A lock that has gone with its whole directory is taken anew.

        Raises:
            LeaseLostError: Says by whom, and that this process must end.
        """
        with self._checking:
            try:
                if self._owner is None or self._is_ours():
                    return
                owner = _parse_owner(self._path.read_bytes())
            except FileNotFoundError:
                owner = {}
            except OSError:
                return
            if not owner and not self._path.parent.exists():
                self._take_anew()
                return
        by = f"lost its lock {self._path}, which another process took over or somebody deleted,"
        if owner:
            by = f"was taken over by process {owner['pid']} on host {owner['host']}"
        raise LeaseLostError(
            f"{self._subject} {by} while this process was suspended, cut off or training: "
            "nothing more is saved by it"
        )

    def _take_anew(self) -> None:
        self._released.set()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.acquire()
        except OSError:
            # The save itself says that the storage is away.
            return
        except RunError as error:
            if not isinstance(error.__context__, OSError):
                raise LeaseLostError(f"{error}: nothing more is saved by this process") from None

    def is_held(self) -> bool:
        """Return True if a live process holds it, this one or another."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            owner = _parse_owner(file.read(_LONGEST))
            age_seconds = time.time() - os.fstat(file.fileno()).st_mtime
            return bool(owner) and _alive(owner, age_seconds, self.stale_after_seconds)
        return False

    def release(self) -> None:
        """Give the lock back, if this process still holds it."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._path.unlink()
        self._owner = None

    def _is_ours(self) -> bool:
        """Return True if the lock is held and was not broken while this process was suspended."""
        return self._owner is not None and _parse_owner(self._path.read_bytes()) == self._owner


def this_process() -> dict[str, Any]:
    """Identity of this process: host, boot, pid, start after that boot, and lease."""
    pid, lease = os.getpid(), process_lease()
    return {
        "host": socket.gethostname(),
        "boot": boot_identity(),
        "pid": pid,
        "started": started_seconds(psutil.Process(pid)),
        **({"lease": [str(lease.path), lease.token]} if lease is not None else {}),
    }


def remove_lock_file(path: Path, stale: Callable[[bytes, os.stat_result], bool]) -> bool:
    """Remove a lock file whose content and status are `stale`; False where another is at it.

    Of several contenders that found the same dead owner, one at a time may look and unlink; the
    others then see that the path is no longer the file that they opened.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without flock: the few microseconds' risk is taken
        opened = os.fstat(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), opened) and stale(file.read(_LONGEST), opened):
                path.unlink()
    return True


def _parse_owner(content: bytes) -> dict[str, Any]:
    """The owner that a lock file names; empty when it is being written, or damaged."""
    owner = json_object(content)
    return owner if _is_process(owner) else {}


def _is_process(owner: dict[str, Any]) -> bool:
    """Return True if it names a process, as `this_process` does."""
    types = {"host": str, "boot": str, "pid": int, "started": float}
    return all(type(owner.get(name)) is kind for name, kind in types.items()) and (
        0 < owner["pid"] < 1 << 31
    )


def _is_here(owner: dict[str, Any]) -> bool:
    """True if the owner, if it lives, is a process of this host."""
    return (owner["host"], owner["boot"]) == (socket.gethostname(), boot_identity())


def _has_lost_lease(owner: dict[str, Any]) -> bool:
    """True if it is of a job whose lease the job of this process has now."""
    mine, its = process_lease(), owner.get("lease")
    if mine is None or not isinstance(its, list) or its[:1] != [str(mine.path)]:
        return False
    return its[1:] != [mine.token] and not mine.problem()


def lives_on_this_host(owner: dict[str, Any]) -> bool:
    """Return True if the process named by `this_process` runs on this host since this boot."""
    return _is_process(owner) and _alive(owner, 1.0, 0.0)


def _alive(owner: dict[str, Any], age_seconds: float, stale_after_seconds: float) -> bool:
    if _has_lost_lease(owner):
        return False
    if not _is_here(owner):
        return age_seconds < stale_after_seconds
    return process_lives(owner["pid"], owner["started"])
