"""Process faults: what happens to a whole process at the beginning of a step."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from typing import TYPE_CHECKING

from outlast.guard.inject.fault import ProcessFault

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from outlast.guard.inject.fault import Fault


class ProcessFaults:
    """Executes the process faults of one rank.

    Args:
        faults: Those of other ranks, and wrong numbers, are left out.
        rank: This process.
        marks: Folder that outlives the process; what has happened is noted there first, so that a
            process that comes back to the step does not meet it again. None: it would.

    Attributes:
        happened: The faults of this process so far.
    """

    def __init__(
        self, faults: Iterable[Fault | ProcessFault], *, rank: int = 0, marks: Path | None = None
    ) -> None:
        self.happened: list[ProcessFault] = []
        self._faults = [
            (number, fault)
            for number, fault in enumerate(faults)
            if isinstance(fault, ProcessFault) and fault.rank == rank
        ]
        self._marks = marks
        self._full_until: int | None = None
        self._limit = resource.RLIM_INFINITY

    def at(self, step: int) -> None:
        """Let happen what is due before `step`; to be called once before every step.

        A killed process does not return from this; a stopped one later.
        """
        if self._full_until is not None and step >= self._full_until:
            self.end()
        for number, fault in self._faults:
            if fault.step == step and self._first_time(number):
                self.happened.append(fault)
                self._execute(fault)

    def end(self) -> None:
        """Give the disk its room back, if it is full."""
        if self._full_until is not None:
            self._full_until = None
            free_disk(self._limit)

    def _execute(self, fault: ProcessFault) -> None:
        if fault.kind == "kill":
            kill()
        elif fault.kind == "stop":
            stop(fault.seconds)
        else:
            self.end()
            self._limit = fill_disk(fault.room_bytes)
            self._full_until = fault.step + fault.steps

    def _first_time(self, number: int) -> bool:
        if self._marks is None:
            return True
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            (self._marks / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def kill() -> None:
    """End this process as the kernel ends one without memory, or a node without power."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """Stop all threads of this process for so many seconds, as a frozen node would be."""
    process = os.getpid()
    # A shell of its own wakes the process up, twice in case the first call comes before the stop.
    wake = f"sleep {seconds:.3f}; kill -CONT {process}; sleep 1; kill -CONT {process}"
    subprocess.run(
        ["/bin/sh", "-c", f"({wake}) >/dev/null 2>&1 &"], check=True, start_new_session=True
    )
    os.kill(process, signal.SIGSTOP)


def fill_disk(room_bytes: int = 0) -> int:
    """Let writes of this process fail wherever a file would grow beyond so many bytes.

    By the soft limit RLIMIT_FSIZE, which needs no rights. Writes fail with EFBIG where a full disk
    gives ENOSPC; pipes, sockets, devices and processes started before are not concerned, and a
    limit of 0 also refuses to overwrite what a full disk would still hold.

    Returns:
        The limit before, for `free_disk`.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ from its start, so that the write fails and the process goes on.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    return before


def free_disk(limit: int) -> None:
    """Undo `fill_disk`, which gave the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
