"""Watching a run for hung, killed and slow ranks: by each process, and by their launcher.

`under_watch` gives a process its page and the thread that ends it when a step hangs. `Watcher`
looks at the pages from the launcher, for what a process cannot find out about itself: that it was
killed, that it is stopped, that it cannot run Python any more.

`CommunicationWait` measures how long a step waited for other ranks. Communication that overlaps
computation costs nothing; what counts is the time in which this process only waited. It is measured
at three places:

- after the backward pass under DDP: from the moment the last local gradient was ready to the end of
  ``backward``, which is when the reduction has ended;
- in ``torch.distributed.Work.wait``, where FSDP2, pipelining and plain collectives wait in Python;
- by the training loop itself around its agreement at the end of the step.

On CUDA the host does not wait for collectives (they are ordered on streams), so only what the host
waits for is seen there; the rest of an exposed collective counts as compute.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

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
    EnterPhase,
    PhasePage,
    ignore_phase,
    pages_folder,
    read_pages,
    remove_dead_pages,
    remove_old_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from outlast.distributed.ranks import Ranks
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.recover.phase_page import PhaseReading


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
    seconds, longest = job.recover.hang_seconds, job.launch.timeout_seconds
    deadline = StepDeadline(
        first_seconds=longest,
        fixed_seconds=None if seconds == "auto" else float(seconds),
        # A compiled model may be compiled anew in the middle of the run.
        least_seconds=longest if job.train.compile else LEAST_SECONDS,
    )
    monitor = HangMonitor(beacon, deadline, directory, ranks.rank, excused=excused)
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

    def __exit__(self, *_: object) -> None:
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
            if state == "stopped":
                self._stopped.setdefault(key, time.monotonic())
            else:
                self._stopped.pop(key, None)
        if fallen:
            # The others of this group end for the same reason.
            self._judged = dict.fromkeys(self._judged, True)
            records = RecordWriter(self._directory.path, 0, max(self._directory.attempts, 1))
            now = time.monotonic()
            for reading in fallen:
                lost, note = now - reading.marked, f"killed in phase {reading.phase}"
                records.write(MemberLost(reading.step, f"rank {reading.rank}", "dead", lost, note))
            records.close()
        if helpless := [item for item, state in found if self._is_helpless(item, state)]:
            limit = helpless[0].deadline_seconds
            tell_of_hang(self._directory, pages, 0, helpless[0].step, limit)
            end_helpless(pages, found, time.monotonic(), limit)

    def _is_helpless(self, page: PhaseReading, state: str) -> bool:
        """True if a process is stopped or holds Python's lock, for longer than a step may take."""
        limit, now = page.deadline_seconds, time.monotonic()
        if not limit:
            return False
        if state == "stopped":
            return now - self._stopped[page.pid, page.started] > limit
        silent = 0.0 < page.alive < now - limit
        return state == "running" and silent and page.phase in INSIDE


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


class CommunicationWait:
    """Sums up waiting seconds of the thread that made it; `take` returns and resets the sum.

    Args:
        mark: Told when a backward pass has only the reduction of its gradients left.
    """

    def __init__(self, mark: EnterPhase = ignore_phase) -> None:
        self._mark = mark
        self._watched = self._missing = 0
        self._reducing = True
        self._thread = threading.get_ident()
        self._seconds = 0.0
        self._last_gradient = 0.0

    def add(self, seconds: float) -> None:
        """Count `seconds` of waiting."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch_gradients(self, model: nn.Module) -> None:
        """Note when each local gradient of `model` alone is ready; costs 0.1 us a parameter."""

        def note(parameter: torch.Tensor) -> None:
            self._last_gradient = time.perf_counter()
            self._missing -= 1
            if self._missing == 0:
                self._begin_reduction()

        self._watched = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._watched += 1
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass that reduces gradients: count its waiting end."""
        self._last_gradient = 0.0
        self._missing, self._reducing = self._watched, False
        yield
        self._reducing = True
        if self._last_gradient:
            self.add(time.perf_counter() - self._last_gradient)

    @contextlib.contextmanager
    def in_collectives(self) -> Iterator[None]:
        """Count every ``Work.wait`` of this process while the context is open."""
        original = dist.Work.wait

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._begin_reduction()
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.add(time.perf_counter() - begun)

        dist.Work.wait = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]

    def _begin_reduction(self) -> None:
        """Once per backward pass: of DDP at the last gradient, of FSDP2 at the first wait."""
        if not self._reducing:
            self._reducing = True
            self._mark("reduce")
