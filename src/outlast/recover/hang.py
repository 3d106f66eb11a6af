"""Detection of hung steps and slow ranks, and the end of a process that hangs.

A thread of each process looks at its page (see `outlast.recover.phase_page`). When a step takes
longer than its deadline, the first process of a node to notice asks all processes of the node for
their stacks by SIGUSR2, which `faulthandler` answers from C, also where the main thread never comes
back to Python or holds its lock; puts them below ``stacks/`` in the run; says in the event log who
it was; kills what cannot end itself; and ends. The others end a little later by themselves, so
whoever has started them can start them again.

Time in which this process could not run, because it was stopped or frozen, is not held against the
step: whoever wakes up late must not end for that reason. The same holds for phases that are excused
because whatever waits in them has a deadline of its own, as that of live groups for each other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import EXIT_HUNG, OutlastError
from outlast.records import MemberLost, RecordWriter
from outlast.recover.phase_page import INSIDE, WAITING, read_pages

if TYPE_CHECKING:
    from outlast.records import RunDirectory
    from outlast.recover.phase_page import PhasePage, PhaseReading


STACKS_SIGNAL = signal.SIGUSR2
"""Asks a process for the stacks of all its threads."""

LOOK_SECONDS = 0.25
_STALL_SECONDS = 4.0 * LOOK_SECONDS
_ANSWER_SECONDS = 2.0
_READ_SECONDS = 0.1
_GRACE_SECONDS = 5.0

MEDIANS = 10.0
"""A step may take so many times as long as the median of the last ones."""

SLACK = 3.0
"""It may also take so many times as long as the longest of them."""

LEAST_SECONDS = 60.0
"""No deadline that follows from measured steps is shorter: a machine's own hiccups take seconds."""

FIRST_STEPS = 10
"""Fewer measured steps say nothing; the deadline is the longest wait for another process."""

_REMEMBERED = 256
_REFRESHED = 16

SLOWNESS = 1.2
"""A rank is slow that takes so many times as long as the median one."""

WINDOW_SECONDS = 10.0
"""Of the median rank's own work, in which ranks are compared."""

WINDOWS = 5
"""A rank must be slow so many times in a row."""


class HangMonitor:
    """Ends this process when a step of it hangs.

    Args:
        beacon: The page of this process.
        deadline: How long a step may take; told of every step here.
        run: Where stacks and events go.
        rank: This process.
        excused: Phases whose time is not held against a step.
    """

    def __init__(
        self,
        beacon: PhasePage,
        deadline: StepDeadline,
        run: RunDirectory,
        rank: int,
        *,
        excused: tuple[str, ...] = (),
    ) -> None:
        self._beacon = beacon
        self._deadline = deadline
        self._run = run
        self._rank = rank
        self._excused = excused
        self._began: float | None = None
        self._excused_since: float | None = None
        self._excused_seconds = 0.0
        self._stalled = 0.0
        self._ended = threading.Event()
        self._stacks: Any = None
        self._thread = threading.Thread(target=self._watch, name="hang monitor", daemon=True)

    def mark(self, phase: str, step: int | None = None) -> None:
        """See `Mark`: passes it to the page, and measures the steps."""
        now = time.monotonic()
        since = self._excused_since
        if since is not None:
            self._excused_seconds += now - since
        if step is not None or phase not in INSIDE:
            began = self._began
            if began is not None:
                self._deadline.observe(now - began - self._excused_seconds)
            # In this order: the thread that watches must not find an old step unexcused.
            self._began = now if phase in INSIDE else None
            self._stalled = self._excused_seconds = 0.0
        # Last: until then, the thread that watches takes the whole phase for excused.
        self._excused_since = now if phase in self._excused else None
        self._beacon.mark(phase, step)

    def start(self) -> None:
        """Begin to watch, and to answer those who ask for stacks."""
        path = _answers(self._beacon.path.parent, self._rank)
        # Without a file there are no answers, but hangs are found all the same.
        with contextlib.suppress(OSError):
            self._stacks = path.open("w", encoding="utf-8")
            faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._beacon.alive(self._deadline.seconds, answers=self._stacks is not None)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        self._thread.join()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._stacks.close()
            with contextlib.suppress(OSError):
                Path(self._stacks.name).unlink()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > _STALL_SECONDS:
                self._stalled += now - looked
            looked = now
            limit = self._deadline.seconds
            self._beacon.alive(limit, answers=self._stacks is not None)
            is_excused = self._excused_since is not None
            forgiven = self._stalled + self._excused_seconds
            began = self._began
            if limit and began is not None and not is_excused and now - began - forgiven > limit:
                self._end(limit)

    def _end(self, limit: float) -> None:
        # Telling may hang as well, for example on the disk for which the step waits.
        threading.Timer(_GRACE_SECONDS, self._exit).start()
        own = self._beacon.read()
        told = tell_of_hang(self._run, self._beacon.path.parent, self._rank, own.step, limit)
        if not told:
            # Another process of the node is at it, and its end is the end of this one.
            time.sleep(_GRACE_SECONDS)
        self._exit()

    def _exit(self) -> None:
        with contextlib.suppress(OSError):
            self._beacon.path.unlink()
        os._exit(EXIT_HUNG)


def tell_of_hang(
    run: RunDirectory, pages: Path, writer: int, step: int, limit_seconds: float
) -> bool:
    """Write the stacks of this node's processes into the run, and an event; end what is stopped.

    Args:
        run: The run.
        pages: Where the pages of the node's processes are.
        writer: Rank in whose event log it is noted.
        step: Steps done.
        limit_seconds: The deadline that was passed.

    Returns:
        False where another process of the node has done so in this attempt, or does so now.
    """
    attempt = run.attempts
    folder = run.path / "stacks" / f"attempt-{attempt}.{socket.gethostname()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir()
        folder.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        print(f"outlast: {folder} cannot be made: {error.strerror}", file=sys.stderr)
    found = [(beacon, beacon.state) for beacon in read_pages(pages)]
    _collect_stacks(pages, found)
    now = time.monotonic()
    with contextlib.suppress(OSError):
        for item, state in found:
            (folder / f"rank-{item.rank}.txt").write_text(
                _stacks(pages, item, state, now), encoding="utf-8"
            )
    members, cause = _culprits(found)
    places = ", ".join(
        f"rank {item.rank} is {'' if state == 'running' else state + ' '}in {item.phase} since "
        f"{now - item.marked:.1f} s"
        for item, state in found
    )
    note = (
        f"{places}; the step may take {limit_seconds:.3g} s (recover.hang_seconds); "
        f"stacks of all threads: {folder}"
    )
    silent = max((now - member.marked for member in members), default=0.0)
    ranks = [str(member.rank) for member in members]
    named = f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks) or 'unknown'}"
    print(f"outlast: {named} {cause} at step {step}: {note}", file=sys.stderr, flush=True)
    with contextlib.suppress(OutlastError):
        records = RecordWriter(run.path, writer, attempt)
        records.write(MemberLost(step, named, cause, silent, note))
        records.close()
    end_helpless(pages, found, now, limit_seconds)
    return True


def end_helpless(
    pages: Path, found: list[tuple[PhaseReading, str]], now: float, limit_seconds: float
) -> None:
    """Kill those that are stopped, or have not been able to run Python for `limit_seconds`."""
    for item, state in found:
        silent = 0.0 < item.alive < now - limit_seconds
        if state == "stopped" or (state == "running" and silent):
            with contextlib.suppress(OSError):
                # It is told already: without its page, nobody finds it dead as well.
                (pages / f"rank-{item.rank}").unlink()
                os.kill(item.pid, signal.SIGKILL)


def _collect_stacks(pages: Path, found: list[tuple[PhaseReading, str]]) -> None:
    """Ask for stacks and wait until all are there and grow no more, but not for long."""
    asked = []
    for item, state in found:
        if item.answers and state == "running":
            with contextlib.suppress(OSError):
                os.kill(item.pid, STACKS_SIGNAL)
                asked.append(item.rank)
    deadline = time.monotonic() + _ANSWER_SECONDS
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(_READ_SECONDS)
        sizes = []
        for rank in asked:
            with contextlib.suppress(OSError):
                sizes.append(_answers(pages, rank).stat().st_size)
        if len(sizes) == len(asked) and all(sizes) and sizes == before:
            return
        before = sizes


def _culprits(found: list[tuple[PhaseReading, str]]) -> tuple[list[PhaseReading], str]:
    """Processes that keep the others waiting: those stopped, else those that do not wait."""
    stopped = [item for item, state in found if state == "stopped"]
    if stopped:
        return stopped, "stopped"
    running = [item for item, state in found if state == "running"]
    busy = [job for job in running if job.phase in INSIDE and job.phase not in WAITING]
    return busy or running, "hung"


def _stacks(pages: Path, item: PhaseReading, state: str, now: float) -> str:
    head = (
        f"rank {item.rank}, process {item.pid}, {state}: phase {item.phase} after {item.step} "
        f"steps, since {now - item.marked:.1f} s\n\n"
    )
    try:
        stacks = _answers(pages, item.rank).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        stacks = ""
    return head + (stacks or "It did not answer with its stacks.\n")


def _answers(pages: Path, rank: int) -> Path:
    return pages / f"stacks-{rank}.txt"


@dataclass
class StepDeadline:
    """Longest time that a step may take.

    ``max(60 s, 10 median, 3 longest)`` over the last 256 steps. The next of n + 1 interchangeable
    step times is the longest with probability 1 / (n + 1), whatever their distribution; the
    factor 3 beyond it, and the 10 medians, are slack for what is no longer the same distribution.
    The first step of an attempt may take `first_seconds` in any case, since it compiles and
    connects.

    Args:
        first_seconds: While fewer than `FIRST_STEPS` steps are measured.
        fixed_seconds: In the place of all that from the second step on; 0 for no limit at all.
        least_seconds: In the place of `LEAST_SECONDS`, for steps that may compile anew.
    """

    first_seconds: float
    fixed_seconds: float | None = None
    least_seconds: float = LEAST_SECONDS
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _count: int = 0
    _measured: float = 0.0

    def observe(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._steps.append(seconds)
        self._count += 1
        if self._count <= FIRST_STEPS or self._count % _REFRESHED == 0:
            typical, longest = statistics.median(self._steps), max(self._steps)
            self._measured = max(self.least_seconds, MEDIANS * typical, SLACK * longest)
        self._measured = max(self._measured, SLACK * seconds)

    @property
    def seconds(self) -> float:
        """Longest time that the step under way may take; 0 for no limit."""
        if self.fixed_seconds == 0.0:
            return 0.0
        if self._count == 0:
            return max(self.first_seconds, self.fixed_seconds or 0.0)
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        return self.first_seconds if self._count < FIRST_STEPS else self._measured


@dataclass
class SlowRanks:
    """Finds ranks that are slower than the others for long: each of 5 windows of 10 s in a row.

    Args:
        ranks: How many there are.
    """

    ranks: int
    _seconds: list[float] = field(default_factory=list)
    _windows: list[int] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)

    def observe(self, seconds: list[float]) -> list[tuple[int, float]]:
        """Take in some steps.

        Args:
            seconds: Each rank's own time for these steps, waiting left out.

        Returns:
            Ranks that are slow for `WINDOWS` windows now, with the ratio of their time to the
            median; each rank once.
        """
        total = [a + b for a, b in zip(self._seconds or [0.0] * self.ranks, seconds, strict=True)]
        # Of two, the faster one is typical: their mean would hide what is slow.
        typical = statistics.median_low(total)
        if typical < WINDOW_SECONDS:
            self._seconds = total
            return []
        self._seconds = []
        windows = self._windows or [0] * self.ranks
        self._windows = [
            count + 1 if item > SLOWNESS * typical else 0
            for count, item in zip(windows, total, strict=True)
        ]
        news = [
            (rank, total[rank] / typical)
            for rank, count in enumerate(self._windows)
            if count >= WINDOWS and rank not in self._told
        ]
        self._told.update(rank for rank, _ in news)
        return news
