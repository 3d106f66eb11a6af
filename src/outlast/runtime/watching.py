"""Watching a run for hung, killed and slow ranks: by each process, and by their launcher.

`under_watch` gives a process its page and the thread that ends it when a step hangs. `Watcher`
looks at the pages from the launcher, for what a process cannot find out about itself: that it was
killed, that it is stopped, that it cannot run Python any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from outlast.errors import OutlastError
from outlast.records import MemberLost, RecordWriter, Warned
from outlast.recover.hang import (
    LEAST_SECONDS,
    WINDOW_SECONDS,
    WINDOWS,
    HangMonitor,
    SlowRanks,
    StepDeadline,
    end_helpless,
    tell_of_hang,
)
from outlast.recover.phase_page import (
    INSIDE,
    PhasePage,
    pages_folder,
    read_pages,
    remove_dead_pages,
    remove_old_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from outlast.distributed.ranks import Ranks
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.recover.phase_page import EnterPhase, PhaseReading


_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def under_watch(job: Job, ranks: Ranks, directory: RunDirectory) -> Iterator[EnterPhase]:
    """Keep this process's page while the context is open, and end it when a step hangs.

    Raises:
        RecoverError: When the page cannot be made.
    """
    if ranks.local_rank == 0:
        remove_old_pages(job.recover.memory)
    beacon = PhasePage(pages_folder(job.recover.memory, directory), ranks.rank)
    # Live groups wait for each other, each time for a limited time; who hangs is another one.
    excused = ("reduce",) if job.recover.mode == "live" else ()
    monitor = HangMonitor(beacon, _deadline(job), directory, ranks.rank, excused=excused)
    monitor.start()
    try:
        yield monitor.mark
    finally:
        monitor.stop()
        beacon.close()


def steps_before(job: Job, ranks: Ranks, directory: RunDirectory) -> int:
    """Steps that the process with this rank had done when it was killed; 0 where it left no page.

    Asked before `under_watch`, which takes the page over.
    """
    pages = read_pages(pages_folder(job.recover.memory, directory))
    return next((page.done for page in pages if page.rank == ranks.rank), 0)


def _deadline(job: Job) -> StepDeadline:
    seconds, longest = job.recover.hang_seconds, job.launch.timeout_seconds
    return StepDeadline(
        first_seconds=longest,
        fixed_seconds=None if seconds == "auto" else float(seconds),
        # A compiled model may be compiled anew in the middle of the run.
        least_seconds=longest if job.train.compile else LEAST_SECONDS,
    )


class Watcher:
    """A thread of the launcher that notes who was killed, and kills who is stopped for too long.

    While it looks, no process is forked: a fork in the middle would inherit its locks.

    Args:
        job: The job.
        directory: Of its run, which need not be there yet.
    """

    def __init__(self, job: Job, directory: RunDirectory) -> None:
        self._memory = job.recover.memory
        self._directory = directory
        self._judged: dict[tuple[int, int], bool] = {}
        self._stopped: dict[tuple[int, int], float] = {}
        self._ended = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        os.register_at_fork(
            before=self._looking.acquire,
            after_in_parent=self._looking.release,
            after_in_child=self._looking.release,
        )

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OutlastError):
            remove_dead_pages(pages_folder(self._memory, self._directory))

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            with self._looking, contextlib.suppress(OutlastError, OSError):
                self.look()

    def look(self) -> None:
        """Judge all pages once."""
        pages = pages_folder(self._memory, self._directory)
        found = [(beacon, beacon.state) for beacon in read_pages(pages)]
        fallen = []
        for item, state in found:
            key = (item.pid, item.started)
            if key not in self._judged:
                # What was dead at first sight is of an earlier run.
                self._judged[key] = state == "dead"
            if state == "dead" and not self._judged[key]:
                fallen.append(item)
            self._look_at(item, state)
        if fallen:
            # The others of this group end for the same reason.
            self._judged = dict.fromkeys(self._judged, True)
            self._note(fallen)
        if helpless := [item for item, state in found if self._is_helpless(item, state)]:
            limit = helpless[0].deadline_seconds
            tell_of_hang(self._directory, pages, 0, helpless[0].step, limit)
            end_helpless(pages, found, time.monotonic(), limit)

    def _look_at(self, each: PhaseReading, state: str) -> None:
        key = (each.pid, each.started)
        if state == "stopped":
            self._stopped.setdefault(key, time.monotonic())
        else:
            self._stopped.pop(key, None)

    def _is_helpless(self, each: PhaseReading, state: str) -> bool:
        """True if `each` is stopped, or holds Python's lock, for longer than a step may take."""
        limit, now = each.deadline_seconds, time.monotonic()
        if not limit:
            return False
        if state == "stopped":
            return now - self._stopped[each.pid, each.started] > limit
        silent = 0.0 < each.alive < now - limit
        return state == "running" and silent and each.phase in INSIDE

    def _note(self, fallen: list[PhaseReading]) -> None:
        records = RecordWriter(self._directory.path, 0, max(self._directory.attempts, 1))
        now = time.monotonic()
        for reading in fallen:
            note = f"killed in phase {reading.phase}"
            records.write(
                MemberLost(reading.step, f"rank {reading.rank}", "dead", now - reading.marked, note)
            )
        records.close()


class SlownessWatch:
    """Compares the ranks' own time; all of them share theirs with each record of steps.

    Args:
        rank: This process.
        ranks: All that do equal work.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._seconds = 0.0
        self._slow = SlowRanks(ranks)

    def add(self, seconds: float) -> None:
        """A step took this process `seconds`, waiting for others left out."""
        self._seconds += seconds

    def share(self) -> list[float]:
        """This rank's time since the last call at its place, 0 elsewhere: ranks sum them up."""
        shares = [0.0] * self._ranks
        shares[self._rank], self._seconds = self._seconds, 0.0
        return shares

    def observe(self, seconds: list[float]) -> Warned | None:
        """Take in the sum of all ranks' shares; a warning if a rank has been slow for long."""
        found = self._slow.observe(seconds)
        if not found:
            return None
        names = ", ".join(f"rank {rank} ({ratio:.2f} times)" for rank, ratio in found)
        return Warned(
            f"slower than the median rank for {WINDOWS * WINDOW_SECONDS:.0f} s of work: {names}; "
            'look at that node, or let the others take work over with coding.scheme = "coverage"'
        )
