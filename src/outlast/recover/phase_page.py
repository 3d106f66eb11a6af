"""Phase pages: a page of shared memory per process says where it is, to whoever watches.

page = PhasePage(pages_folder(memory, run), rank=0)
page.mark("forward", step=7)             # under 2 us: four stores into a mapped page
read_pages(pages_folder(memory, run))     # from any process of the same node

A page outlives its process, so it still says in which phase of which step a killed process was. A
drill *arms* a page: the process then sends itself the signal when it comes to the phase, which is
exact where a signal from outside would come at some moment near it.

All fields are 64-bit and written by one process each, so a reader sees no half of one. Times are
those of the monotonic clock, which the processes of a node share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from outlast.errors import RecoverError
from outlast.records.process import started_seconds

if TYPE_CHECKING:
    from outlast.records import RunDirectory


OUTSIDE = ("idle", "heal", "save", "evaluate")


"""Phases that are no part of a step: set-up and end, taking over a state, saves, evaluations."""


INSIDE = ("data", "forward", "backward", "reduce", "vote", "optimizer", "agree", "memory", "parity")


"""Phases of a step in their usual order; ``vote`` is between the gradient and its use."""


PHASES = OUTSIDE + INSIDE


WAITING = ("reduce", "vote", "agree", "parity")


"""Phases in which a process may have to wait for the others."""


_UPDATED = "agree"


"""Who is here has made the update of the step."""


_CODES = {name: code for code, name in enumerate(PHASES)}


_MAGIC = 0x0142454143304E31


_BYTES = mmap.PAGESIZE


_FIELDS = 16


(
    _KIND,
    _PID,
    _STARTED,
    _RANK,
    _WHERE,
    _MARKED,
    _WALL,
    _BEGAN,
    _ALIVE,
    _DEADLINE,
    _ARMED,
    _SIGNAL,
    _FIRED,
    _ANSWERS,
    _DONE,
) = range(15)


_NS = 1e9


_LEFTOVER_SECONDS = 86400.0


class EnterPhase(Protocol):
    """Says that a phase begins, and with `step` (the steps done) that a step does."""

    def __call__(self, phase: str, step: int | None = None) -> None:
        """`phase` is one of `PHASES`."""


def ignore_phase(phase: str, step: int | None = None) -> None:
    """The `EnterPhase` of a run that nobody watches."""


@dataclass(frozen=True)
class PhaseReading:
    """Content of a page.

    Attributes:
        rank: Of the process in the run.
        pid: The process.
        started: When it was started, in hundredths of a second after the boot.
        step: Steps done when it was last marked.
        phase: One of `PHASES`.
        marked: When the phase began, seconds of the monotonic clock.
        wall: The same, seconds since the epoch.
        began: When the step began, seconds of the monotonic clock.
        alive: When the process last showed that it can run Python; 0 if it does not do so.
        deadline_seconds: How long a step of it may take now; 0 for no limit.
        fired: When an armed signal was sent, seconds of the monotonic clock; 0 for never.
        answers: Whether it writes its stacks when asked to.
        done: Steps whose update was made; until a process has taken over a state, those of the
            process of its rank before it, which may be more than it will take over.
    """

    rank: int
    pid: int
    started: int
    step: int
    phase: str
    marked: float
    wall: float
    began: float
    alive: float
    deadline_seconds: float
    fired: float
    answers: bool
    done: int

    @property
    def state(self) -> str:
        """``running``, ``stopped`` (by a signal) or ``dead``, as the kernel sees it."""
        try:
            process = psutil.Process(self.pid)
            if _hundredths(process) != self.started:
                return "dead"
            status = process.status()
        except psutil.Error:
            return "dead"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "dead"
        return "stopped" if status == psutil.STATUS_STOPPED else "running"


class PhasePage:
    """The page of this process.

    Args:
        directory: Where the pages of this node's processes are; made if need be.
        rank: Of this process in the run. A page that an earlier process of this rank has left is
            taken over, with what it is armed for and the steps that were done.

    Raises:
        RecoverError: When the page cannot be made.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"rank-{rank}"
        self._step = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._map = _mapped(self.path, os.O_CREAT)
        except OSError as error:
            raise RecoverError(
                f"{self.path}, which says where this process is, cannot be written "
                f"({error.strerror}); set recover.memory to a directory that can"
            ) from None
        self._fields = memoryview(self._map).cast("q")
        fields = self._fields
        if fields[_KIND] != _MAGIC:
            fields[_ARMED] = fields[_SIGNAL] = fields[_FIRED] = fields[_DONE] = 0
        fields[_PID], fields[_STARTED] = os.getpid(), _hundredths(psutil.Process())
        fields[_RANK] = rank
        fields[_ALIVE] = fields[_DEADLINE] = fields[_ANSWERS] = 0
        fields[_BEGAN] = time.monotonic_ns()
        # Without a step: who is killed again in its set-up leaves the steps that were done before.
        self.mark("idle")
        fields[_KIND] = _MAGIC

    def mark(self, phase: str, step: int | None = None) -> None:
        """See `EnterPhase`."""
        fields, now = self._fields, time.monotonic_ns()
        if step is not None:
            self._step = step
            fields[_BEGAN], fields[_DONE] = now, step
        elif phase == _UPDATED:
            fields[_DONE] = self._step + 1
        # The time first: a phase must never look older than it is.
        fields[_MARKED], fields[_WALL] = now, time.time_ns()
        fields[_WHERE] = self._step << 8 | _CODES[phase]
        if fields[_ARMED]:
            self._fire(_CODES[phase])

    def alive(self, deadline_seconds: float, *, answers: bool) -> None:
        """Say that this process can run Python, and how long a step of it may take."""
        fields = self._fields
        fields[_DEADLINE], fields[_ANSWERS] = int(deadline_seconds * _NS), int(answers)
        fields[_ALIVE] = time.monotonic_ns()

    def read(self) -> PhaseReading:
        """Return the page's content now."""
        return _reading(self._fields.tobytes())

    def close(self) -> None:
        """Take the page away: the process ends in order, and nobody need look for it."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()
        self._fields.release()
        self._map.close()

    def _fire(self, code: int) -> None:
        fields = self._fields
        armed = fields[_ARMED]
        if armed & 0xFF != code + 1 or self._step < armed >> 8:
            return
        fields[_ARMED], fields[_FIRED] = 0, time.monotonic_ns()
        os.kill(os.getpid(), fields[_SIGNAL])


def pages_folder(memory: str, run: RunDirectory) -> Path:
    """Folder of this node's pages of the run: in `memory` (tmpfs) if there is one, else in the run.

    Raises:
        RunError: When the run has no directory yet.
    """
    if Path(memory).is_dir() and os.access(memory, os.W_OK):
        return Path(memory) / f"outlast-{os.getuid()}-{run.identifier}-beacons"
    return run.path / "beacons"


def read_pages(directory: Path) -> list[PhaseReading]:
    """The pages in `directory`, by rank; those that are not whole yet are left out."""
    found = []
    for path in directory.glob("rank-*"):
        with contextlib.suppress(OSError, ValueError):
            found.append(_reading(path.read_bytes()))
    return sorted(found, key=lambda found_item: found_item.rank)


def arm(
    directory: Path, rank: int, phase: str, *, step: int = 0, number: int = signal.SIGKILL
) -> None:
    """Let the process of `rank` send itself signal `number` when it next comes to `phase`.

    Once, by itself or whoever takes its rank after it.

    Args:
        directory: Where the pages are.
        rank: Whose.
        phase: One of `PHASES`.
        step: Not before so many steps are done.
        number: SIGKILL or SIGSTOP, say.

    Raises:
        RecoverError: When there is no such phase, or no process of that rank.
    """
    if phase not in _CODES:
        raise RecoverError(f"phase = {phase!r} is none of {', '.join(PHASES)}")
    try:
        page = _mapped(directory / f"rank-{rank}", 0)
    except OSError as error:
        raise RecoverError(
            f"rank {rank} has no page in {directory} ({error.strerror}): the run is not there"
        ) from None
    with page, memoryview(page) as view, view.cast("q") as fields:
        fields[_SIGNAL], fields[_FIRED] = number, 0
        fields[_ARMED] = step << 8 | (_CODES[phase] + 1)


def disarm(directory: Path, rank: int) -> None:
    """Take back what `arm` has asked for, if it has not come to it yet."""
    with (
        contextlib.suppress(OSError),
        _mapped(directory / f"rank-{rank}", 0) as page,
        memoryview(page) as view,
        view.cast("q") as fields,
    ):
        fields[_ARMED] = 0


def remove_dead_pages(directory: Path) -> None:
    """Take away what killed processes have left, when their run ends and needs it no more."""
    with contextlib.suppress(OSError):
        for beacon in read_pages(directory):
            if beacon.state == "dead":
                (directory / f"rank-{beacon.rank}").unlink()
                (directory / f"stacks-{beacon.rank}.txt").unlink(missing_ok=True)
        directory.rmdir()


def remove_old_pages(memory: str) -> None:
    """Take away what this user's runs, all of whose processes are dead, have left for a day."""
    for folder in Path(memory).glob(f"outlast-{os.getuid()}-*-beacons"):
        with contextlib.suppress(OSError):
            pages = read_pages(folder)
            newest = max([page.wall for page in pages], default=folder.stat().st_mtime)
            is_used = any(page.state != "dead" for page in pages)
            if not is_used and time.time() - newest > _LEFTOVER_SECONDS:
                shutil.rmtree(folder)


def _mapped(path: Path, flags: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.fstat(descriptor).st_size < _BYTES:
            os.ftruncate(descriptor, _BYTES)
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def _reading(content: bytes) -> PhaseReading:
    if len(content) < _BYTES:
        raise ValueError("this page is not whole yet")
    fields = struct.unpack_from(f"={_FIELDS}q", content)
    if fields[_KIND] != _MAGIC or fields[_WHERE] & 0xFF >= len(PHASES):
        raise ValueError("this is no page of a process, or of another version")
    return PhaseReading(
        rank=fields[_RANK],
        pid=fields[_PID],
        started=fields[_STARTED],
        step=fields[_WHERE] >> 8,
        phase=PHASES[fields[_WHERE] & 0xFF],
        marked=fields[_MARKED] / _NS,
        wall=fields[_WALL] / _NS,
        began=fields[_BEGAN] / _NS,
        alive=fields[_ALIVE] / _NS,
        deadline_seconds=fields[_DEADLINE] / _NS,
        fired=fields[_FIRED] / _NS,
        answers=bool(fields[_ANSWERS]),
        done=fields[_DONE],
    )


def _hundredths(process: psutil.Process) -> int:
    return round(started_seconds(process) * 100.0)
