"""Claims on what processes share: kernel locks within a node, files with a heartbeat between nodes.

`FileLock` is an advisory lock of the kernel (``flock(2)``): taken at once or not at all, and gone
with the last process that holds the file open, however it ended, so nobody has to judge from a
process number (which containers hide and the kernel gives out again) who is alive. It holds between
processes of one node only.

`Claims` are small JSON files in a folder that several nodes see. Each names its owner and counts as
long as the owner lives: seen by its process number on the same node, else by the heartbeat, the
file's modification time, compared with the file server's own clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outlast.errors import OutlastError
from outlast.records.lease import json_object
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_forgotten_by_children: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """One lock on one file; the file is made when needed.

    Args:
        path: The file; its folder exists.
        inherited: Whether forked children hold it too. A child that continues reading what a shared
            lock protects must keep it; a child of a process that works under an exclusive lock
            must not.
    """

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self._path = path
        self._descriptor: int | None = None
        if not inherited:
            _forgotten_by_children.add(self)

    def take(self, *, shared: bool = False) -> bool:
        """Take the lock if it is free now, or free of exclusive holders where `shared`.

        Raises:
            OSError: The file cannot be made, or its file system knows no locks.
        """
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Whoever had it before may have deleted the file: then this lock keeps nobody out.
            current = os.path.samestat(os.fstat(descriptor), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            current = False
        except BaseException:
            os.close(descriptor)
            raise
        if current:
            self._descriptor = descriptor
        else:
            os.close(descriptor)
        return current

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def delete(self) -> None:
        """Delete the file of a lock that is held, and give it back; others make a new one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def _forget_in_child() -> None:
    # Closing a copy of the descriptor leaves the parent's lock as it is.
    for lock in list(_forgotten_by_children):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


_boot = cache(boot_identity)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told from all others, also from a later one with the same number.

    Attributes:
        host: Its node.
        boot: Identity of the node's present boot.
        namespace: In which process numbers are counted; containers have their own.
        pid: Its number.
        started: When it started, in clock ticks after the boot; 0 where that is not known.
        job: Slurm's number of its job, or empty.
        cluster: Slurm's name of the cluster, or empty.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    job: str = ""
    cluster: str = ""

    @classmethod
    def here(cls) -> Owner:
        """The process that asks."""
        pid = os.getpid()
        job, cluster = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_CLUSTER_NAME", "")
        host, started = socket.gethostname(), started_ticks(pid) or 0
        return cls(host, _boot(), _namespace(), pid, started, job, cluster)

    @classmethod
    def of(cls, content: Any) -> Owner | None:
        """The owner that a file names; None where it names none."""
        with contextlib.suppress(TypeError, KeyError, ValueError):
            host, boot, namespace = (str(content[name]) for name in ("host", "boot", "namespace"))
            job, cluster = (str(content.get(name, "")) for name in ("job", "cluster"))
            pid, started = int(content["pid"]), int(content["started"])
            return cls(host, boot, namespace, pid, started, job, cluster)
        return None

    def is_alive(self) -> bool | None:
        """True if it lives; None where that cannot be seen from here, as on another node."""
        here = (socket.gethostname(), _boot(), _namespace())
        if (self.host, self.boot, self.namespace) != here or not self.started:
            return None
        return started_ticks(self.pid) == self.started


def started_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks after the boot; None where there is none, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return int(fields[19])


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


Value = TypeVar("Value")
# A file may be empty for a moment after its creation; its owner may die in that moment.
WRITING_SECONDS = 5.0
_SILENT = 1 / 3


class Claims(Generic[Value]):
    """Claims in a folder.

    Args:
        folder: Made if missing.
        parse: A claim's value from its content; KeyError, TypeError, ValueError and OutlastError
            say that it is damaged.
        stale_after_seconds: After so long without a heartbeat an owner that cannot be seen from
            here counts as dead.
        ask_alive: Whether an owner lives that has been silent for a third of that time, e.g. by
            asking Slurm for its job; None: not known.

    Raises:
        OSError: When the folder cannot be made or written to; so do the methods.
    """

    def __init__(
        self,
        folder: Path,
        parse: Callable[[dict[str, Any]], Value],
        stale_after_seconds: float,
        ask_alive: Callable[[Owner], bool | None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._parse = parse
        self._stale_after_seconds = stale_after_seconds
        self._ask_alive = ask_alive

    def put(self, path: Path, content: Mapping[str, object]) -> float:
        """Make or replace a claim of this process, whole at once; returns the file server's time.

        The time stands in the claim too, as ``asked_seconds``.
        """
        draft = path.with_name(f".draft-{path.stem}")
        try:
            with draft.open("w") as file:
                now = os.fstat(file.fileno()).st_mtime
                json.dump({"asked_seconds": now, **content, "owner": asdict(Owner.here())}, file)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return now

    def read(self, path: Path, now_seconds: float) -> tuple[Value | None, bool, float]:
        """Value of a claim, whether its owner lives, and seconds since the heartbeat.

        The value is None where the claim has gone or is damaged.
        """
        try:
            age = now_seconds - path.stat().st_mtime
            content = json_object(path.read_bytes())
        except OSError:
            return None, False, 0.0
        try:
            owner, value = Owner.of(content.get("owner")), self._parse(content)
        except (KeyError, TypeError, ValueError, OutlastError):
            owner = None
        if owner is None:
            return None, False, age
        lives = owner.is_alive() is not False and age <= self._stale_after_seconds
        # Who has just said that it lives need not be asked about.
        if lives and self._ask_alive and age >= _SILENT * self._stale_after_seconds:
            lives = self._ask_alive(owner) is not False
        return value, lives, age

    def living(
        self, prefix: str, now_seconds: float, *, but_not: Path | None = None
    ) -> list[Value]:
        """Values of the claims of live owners whose names begin so; those of dead ones go."""
        found = []
        for path in self.folder.glob(f"{prefix}*.json"):
            if path == but_not:
                continue
            value, lives, age = self.read(path, now_seconds)
            if value is not None and lives:
                found.append(value)
            elif value is not None or age > max(self._stale_after_seconds, WRITING_SECONDS):
                with contextlib.suppress(OSError):
                    path.unlink()
        return found
