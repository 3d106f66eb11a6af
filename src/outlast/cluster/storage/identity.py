"""Owners of files that processes on several nodes read, and the test of their liveness."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable

_boot = cache(boot_identity)
_SILENT = 1 / 3


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


def this_process() -> Owner:
    """The process that asks."""
    pid = os.getpid()
    job, cluster = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_CLUSTER_NAME", "")
    return Owner(socket.gethostname(), _boot(), _namespace(), pid, _started(pid) or 0, job, cluster)


def owner_of(content: Any) -> Owner | None:
    """The owner that a file names; None where it names none."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        return Owner(
            str(content["host"]),
            str(content["boot"]),
            str(content["namespace"]),
            int(content["pid"]),
            int(content["started"]),
            str(content.get("job", "")),
            str(content.get("cluster", "")),
        )
    return None


def is_alive(owner: Owner) -> bool | None:
    """True if a process lives; None where that cannot be seen from here, as on another node."""
    here = (socket.gethostname(), _boot(), _namespace())
    if (owner.host, owner.boot, owner.namespace) != here or not owner.started:
        return None
    return _started(owner.pid) == owner.started


def lives(
    owner: Owner,
    age_seconds: float,
    stale_after_seconds: float,
    ask_alive: Callable[[Owner], bool | None] | None = None,
) -> bool:
    """True if an owner counts as alive.

    Args:
        owner: Of a file.
        age_seconds: Since it has last said that it lives.
        stale_after_seconds: After so long an owner that cannot be seen from here counts as dead.
        ask_alive: Asked about an owner that has said nothing for a third of that time; None: not
            known.
    """
    if is_alive(owner) is False or age_seconds > stale_after_seconds:
        return False
    # Who has just said that it lives need not be asked about.
    if ask_alive is None or age_seconds < _SILENT * stale_after_seconds:
        return True
    return ask_alive(owner) is not False


def _started(pid: int) -> int | None:
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
