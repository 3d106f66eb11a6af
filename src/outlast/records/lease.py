"""The lease of a job's processes: the right to write a run.

A lease belongs to one Slurm job of a chain and is shared by all its processes, on any node: its
file names the job that may write the run. Whoever takes the run over replaces that file, so that a
process that was believed dead (its node was lost, it was suspended) finds out: what it saves is
refused, and it ends. It does not depend on clocks of two hosts agreeing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import EXIT_CRASHED, LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        holder = json_object(content)
        if holder.get("token", self.token) == self.token:
            return ""
        return f"job {holder.get('job')} on host {holder.get('host')} has taken over this run"


def lease_environment(path: Path, token: str) -> dict[str, str]:
    """Environment variables of the processes that share the lease in the file `path`."""
    found = {LEASE_FILE: str(path), LEASE_TOKEN: token}
    # Of an array's place another number than the one by which the chain knows it.
    number = os.environ.get("SLURM_JOB_ID")
    return {**found, LEASE_JOB: number} if number else found


def is_of_another_job(environment: Mapping[str, str]) -> bool:
    """True if a process has only inherited the variables of another job's link.

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
    """Refuse to continue where the lease of this process is lost; to be called at each commit.

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


def json_object(content: bytes) -> dict[str, Any]:
    """The JSON object in a file; empty while it is being written, or where it is damaged."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
