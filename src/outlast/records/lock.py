"""The lock that keeps two live processes out of one directory, and the lease of a job's processes.

A lock belongs to a process. A lease belongs to one Slurm job of a chain and is shared by all its
processes, on any node: its file names the job that may write the run. Whoever takes the run over
replaces that file, so that a process that was believed dead (its node was lost, it was suspended)
finds out: what it saves is refused, and it ends. Neither depends on clocks of two hosts agreeing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from outlast.errors import EXIT_CRASHED, LeaseLostError, RunError
from outlast.records.process import boot_identity, started_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

# A lock has no content for a moment after its creation; its owner may die in that moment.
_WRITING_SECONDS = 5.0
_ACQUIRE_SECONDS = 6.0
# Twice the resolution of /proc; two processes with one pid are at least a round of pids apart.
_SAME_START_SECONDS = 0.02

LEASE_FILE = "OUTLAST_LINK_FENCE"
"""Environment variable of a job's processes: the file of their lease."""
LEASE_TOKEN = "OUTLAST_LINK_TOKEN"
"""And the token by which that file names their job."""
LEASE_JOB = "OUTLAST_LINK_SLURM_JOB"
"""And Slurm's number of that job: other jobs inherit the environment, and not the lease."""
LEASE_SILENT_SECONDS = 80.0
"""Without a heartbeat of the job's own process for so long, its other processes end."""
_LEASE_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Lease:
    """The right to write a run that the processes of one job share; see the module.

    Attributes:
        path: The file that names the job that has it, as JSON with a ``token``.
        token: Of the job that started this process.
    """

    path: Path
    token: str

    def problem(self) -> str:
        """Why this process may write no more; empty while it may."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                # A container that does not show the chain's folder: see `leave_without_lease`.
                return ""
            return f"{self.path} is gone, so the job that started this process has ended"
        except OSError:
            # A file system that does not answer for a moment takes no right away.
            return ""
        holder = _parse(content)
        if holder.get("token", self.token) == self.token:
            return ""
        return f"job {holder.get('job')} on host {holder.get('host')} has taken over this run"


def is_of_another_job(environment: Mapping[str, str]) -> bool:
    """Whether a process has what a link tells its own only by inheritance.

    sbatch hands the environment of who submits a job on to it.
    """
    job = environment.get(LEASE_JOB)
    return bool(job) and environment.get("SLURM_JOB_ID", job) != job


def process_lease() -> Lease | None:
    """The lease under which this process was started; None outside of a chain's own jobs."""
    path, token = os.environ.get(LEASE_FILE), os.environ.get(LEASE_TOKEN)
    if not path or not token or is_of_another_job(os.environ):
        return None
    return Lease(Path(path), token)


def check_lease() -> None:
    """Refuse to go on where the lease of this process is lost; to be called at each commit.

    Raises:
        LeaseLostError: Says who has it now.
    """
    lease = process_lease()
    if lease is not None and (problem := lease.problem()):
        raise LeaseLostError(f"{problem}: nothing more is saved by this process")


_watching: set[int] = set()


def leave_without_lease() -> None:
    """End this process, by a thread of its own, when its lease is lost or the job has died.

    The job's own process shows that it is alive by touching the lease's file. How long it was
    silent is counted by this process's clock, and only over times in which this process itself ran
    and the file system answered.
    """
    lease = process_lease()
    if lease is None or os.getpid() in _watching:
        return
    _watching.add(os.getpid())
    if not lease.path.parent.is_dir():
        warnings.warn(
            f"{lease.path.parent}, the folder of the chain, is not visible to this process: it "
            "does not find out when another job takes the run over; mount it at the same path",
            stacklevel=2,
        )
    threading.Thread(target=_leave_without, args=(lease,), name="lease", daemon=True).start()


def _leave_without(lease: Lease) -> None:
    silent_seconds, seen, before = 0.0, 0, time.monotonic()
    while True:
        time.sleep(_LEASE_LOOK_SECONDS)
        problem = lease.problem()
        with contextlib.suppress(OSError):
            touched = lease.path.stat().st_mtime_ns
            passed = min(time.monotonic() - before, 2.0 * _LEASE_LOOK_SECONDS)
            silent_seconds = 0.0 if touched != seen else silent_seconds + passed
            seen = touched
        before = time.monotonic()
        if not problem and silent_seconds > LEASE_SILENT_SECONDS:
            problem = f"the job's own process has been silent for {silent_seconds:.0f} s"
        if problem:
            # Past Python's buffers and handlers: another job may write this run already. Whoever
            # read what this process prints may be gone as well.
            with contextlib.suppress(OSError):
                os.write(2, f"outlast: {problem}; this process ends\n".encode())
            os._exit(EXIT_CRASHED)


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
    """How long an old heartbeat of another host is watched before its lock is broken."""

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
                self._break_if_stale()
                # Watching a heartbeat is no failure to take the lock.
                deadline += time.monotonic() - begun
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
            if owner and (
                _alive(owner, age_seconds, self.stale_after_seconds)
                or (not _can_be_judged(owner) and self._beats(opened.st_mtime_ns))
            ):
                remedy = self._remedy
                if owner == this_process():
                    remedy = (
                        "that is this process: close what holds it first, or use another directory"
                    )
                raise RunError(
                    f"{self._subject} is in use by process {owner['pid']} on host "
                    f"{owner['host']}; {remedy}"
                )
            self._path.unlink(missing_ok=True)

    def _beats(self, touched: int) -> bool:
        """Whether the heartbeat that seems old moves after all."""
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
        """Refuse to go on where the lock was taken over; to be called at each commit.

        A lock that has gone with its whole directory is taken anew.

        Raises:
            LeaseLostError: Says by whom, and that this process must end.
        """
        with self._checking:
            self._check()

    def _check(self) -> None:
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
        by = (
            f"was taken over by process {owner['pid']} on host {owner['host']}"
            if owner
            else f"lost its lock {self._path}, which another process took over or somebody deleted,"
        )
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


def this_process() -> dict[str, Any]:
    """What names this process for good: host, boot, pid, when it started after that, and lease."""
    pid, lease = os.getpid(), process_lease()
    return {
        "host": socket.gethostname(),
        "boot": boot_identity(),
        "pid": pid,
        "started": started_seconds(psutil.Process(pid)),
        **({"lease": [str(lease.path), lease.token]} if lease is not None else {}),
    }


def _is_file(path: Path, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), opened)
    except FileNotFoundError:
        return False


def _parse_owner(content: bytes) -> dict[str, Any]:
    """The owner that a lock file names; empty when it is being written, or damaged."""
    owner = _parse(content)
    return owner if {"host", "boot", "pid", "started"} <= owner.keys() else {}


def _parse(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether the owner, if it lives, is a process of this host."""
    return (owner["host"], owner["boot"]) == (socket.gethostname(), boot_identity())


def _has_lost_lease(owner: dict[str, Any]) -> bool:
    """Whether it is of a job whose lease the job of this process has now."""
    mine, its = process_lease(), owner.get("lease")
    if mine is None or not isinstance(its, list) or its[:1] != [str(mine.path)]:
        return False
    return its[1:] != [mine.token] and not mine.problem()


def _can_be_judged(owner: dict[str, Any]) -> bool:
    """Whether it is known without its heartbeat that it lives or not."""
    return _is_here(owner) or _has_lost_lease(owner)


def lives_on_this_host(owner: dict[str, Any]) -> bool:
    """Whether the process that `this_process` has named runs on this host since this boot."""
    return {"host", "boot", "pid", "started"} <= owner.keys() and _alive(owner, 1.0, 0.0)


def _alive(owner: dict[str, Any], age_seconds: float, stale_after_seconds: float) -> bool:
    if _has_lost_lease(owner):
        return False
    if not _is_here(owner):
        return age_seconds < stale_after_seconds
    try:
        process = psutil.Process(owner["pid"])
        same = abs(started_seconds(process) - owner["started"]) < _SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
