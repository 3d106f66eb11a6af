"""A cluster's scheduler, event by event."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Literal, Protocol

import numpy as np

from outlast.cluster.simulate.book import NEVER, WAITING, Book, Reason, State
from outlast.cluster.simulate.easy import shadow_of
from outlast.cluster.simulate.failures import Failures
from outlast.cluster.simulate.queue import Queue, queue_of
from outlast.cluster.simulate.scheduler import Scheduler
from outlast.cluster.simulate.settings import IDEAL, Settings
from outlast.cluster.workload.jobs import Workload
from outlast.errors import ClusterError

# Kinds of events, in the order in which those of one moment happen.
_END, _FREE, _REPAIR, _FAIL, _BEGIN, _SUBMIT, _PASS = range(7)


class Driver(Protocol):
    """A policy: told of events, acts through the simulation.

    Attributes:
        wants_ticks: Whether `tick` is called.
    """

    wants_ticks: bool

    def started(self, simulation: Simulation, job: int) -> None:
        """A job got its nodes."""

    def ended(self, simulation: Simulation, job: int, reason: Reason) -> None:
        """A job gave up its nodes, or was cancelled while it waited.

        After "preempted" or "failed" the state says whether it was queued again.
        """

    def tick(self, simulation: Simulation) -> None:
        """The scheduler has looked at the queue."""


class Simulation:
    """Jobs on a machine of equal nodes, each held by one job at a time.

    Numbers of jobs count up from 0, first those of the workload. Every run with the same calls and
    the same seed gives the same schedule.

    Attributes:
        nodes: Of the machine.
        backfill: "easy" reserves for the queue's head, "conservative" for every job.
        scheduler: Its configuration.
        seed: Of the failures of nodes.
        now: When it begins, if there is no workload; else with the first submission.
    """

    def __init__(
        self,
        nodes: int,
        *,
        backfill: Literal["easy", "conservative"] = "easy",
        scheduler: Settings = IDEAL,
        workload: Workload | None = None,
        seed: int = 0,
        now: float = 0.0,
    ) -> None:
        if nodes < 1:
            raise ClusterError(f"nodes = {nodes} must be at least 1")
        self.nodes = nodes
        self.backfill = backfill
        self.scheduler = scheduler
        self._book = Book(nodes, scheduler, now)
        self._scheduler = Scheduler(self._book, backfill, self._preempt, self._wake)
        self._failures = Failures(self._book, seed)
        self._driver: Driver | None = None
        self._agenda: list[tuple[float, int, int]] = []
        self._arrivals: list[float] = []
        self._next_arrival = 0
        self._arrived: list[int] = []
        self._disturbed = False
        self._owner: dict[int, str] = {}
        self._followers: dict[int, list[int]] = {}
        self._dependent: set[int] = set()
        self._notices: deque[tuple[int, Reason | None]] = deque()
        self._ended = 0
        if workload is not None:
            self._load(workload)
        if scheduler.node_failures_per_second:
            self._agenda.append((self._failures.next_failure(), _FAIL, -1))

    @property
    def now(self) -> float:
        """Seconds."""
        return self._book.now

    @property
    def free_nodes(self) -> int:
        """Nodes that are up, without a job."""
        return self._book.free

    def submit(
        self,
        nodes: int,
        limit_seconds: float,
        run_seconds: float,
        *,
        at: float | None = None,
        after: int | None = None,
        owner: str = "",
        priority: float = 0.0,
        tier: int = 0,
    ) -> int:
        """Put a job into the queue.

        Args:
            nodes: That it needs.
            limit_seconds: It is ended after these.
            run_seconds: Its program ends by itself after these.
            at: When it is submitted; None or a past time for now.
            after: It cannot start before this job has ended in whatever way (``afterany``).
            owner: Whose it is, for the caller.
            priority: The site's part of it.
            tier: Priority tier of its partition: goes before every priority, and may preempt.

        Returns:
            Its number.
        """
        if not 1 <= nodes <= self.nodes:
            raise ClusterError(f"nodes = {nodes} must lie in 1 to {self.nodes}")
        if not limit_seconds > 0:
            raise ClusterError(f"limit_seconds = {limit_seconds:g} must be above 0")
        if after is not None and not 0 <= after < len(self._book.need):
            raise ClusterError(f"after = {after} is no job")
        job = self._book.add(nodes, limit_seconds, max(0.0, run_seconds), priority, tier)
        if owner:
            self._owner[job] = owner
        if after is not None and self._unfinished(after):
            self._followers.setdefault(after, []).append(job)
            self._dependent.add(job)
        if at is None or at <= self.now:
            self._admit(job)
        elif at < NEVER:
            heapq.heappush(self._agenda, (at, _SUBMIT, job))
        return job

    def place(self, nodes: int, end_by_limit_seconds: float, end_seconds: float) -> int:
        """Add a job that runs already, with what is left of its limit and of its work."""
        limit = max(end_by_limit_seconds - self.now, 0.0)
        job = self._book.add(nodes, limit, max(end_seconds - self.now, 0.0), 0.0, 0)
        self._book.submitted[job] = self._book.eligible[job] = self.now
        self._begin(job)
        return job

    def cancel(self, job: int) -> None:
        """End a job that waits or runs; nothing happens to one that has ended."""
        book, state = self._book, self._book.state[job]
        if state == "running":
            self._finish(job, "cancelled")
        elif state in WAITING:
            if state == "pending":
                book.withdraw(job)
                self._disturbed = True
            if job in self._arrived:
                self._arrived.remove(job)
            self._close(job, "cancelled")

    def shorten(self, job: int, limit_seconds: float) -> None:
        """Lower a job's limit, waiting or running.

        Raises:
            ClusterError: The new limit is above the old one, or not above 0.
        """
        book = self._book
        if not 0 < limit_seconds <= book.limit[job]:
            raise ClusterError(
                f"limit_seconds = {limit_seconds:g} must lie above 0 and not above the job's "
                f"{book.limit[job]:g}: a limit can be lowered, never raised"
            )
        book.limit[job] = limit_seconds
        self._disturbed = True
        if book.state[job] == "running":
            book.keep_until(job, max(self.now, book.start[job] + limit_seconds))
            self._expect_end(job)

    def set_run_seconds(self, job: int, run_seconds: float) -> None:
        """Say how long a job's program runs, counted from its start; also while it runs."""
        self._book.run[job] = max(0.0, run_seconds)
        if self._book.state[job] == "running":
            self._expect_end(job)

    def shadow(self) -> tuple[float, int]:
        """When the queue's head can start at the latest, and nodes that are left over then.

        (inf, free nodes) if nothing is pending.
        """
        return shadow_of(self._book)

    def hole_seconds(self, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        return self._scheduler.hole_seconds(nodes)

    def nodes_of(self, job: int) -> int:
        """Nodes that the job asked for."""
        return self._book.need[job]

    def limit_of(self, job: int) -> float:
        """Seconds that the job may run."""
        return self._book.limit[job]

    def owner_of(self, job: int) -> str:
        """Whose job it is."""
        return self._owner.get(job, "")

    def submit_of(self, job: int) -> float:
        """When it was submitted; inf before."""
        return self._book.submitted[job]

    def start_of(self, job: int) -> float:
        """When it started last; inf before."""
        return self._book.start[job]

    def end_of(self, job: int) -> float:
        """When it ended; inf before."""
        return NEVER if self._unfinished(job) else self._book.end[job]

    def state_of(self, job: int) -> State:
        """What became of it."""
        return self._book.state[job]

    def starts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """When each job started last, (jobs,); inf where it has not."""
        return np.array(self._book.start, np.float64)

    def ends(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """When each job ended, (jobs,); inf where it has not."""
        unfinished = [state in WAITING or state == "running" for state in self._book.state]
        return np.where(unfinished, NEVER, np.array(self._book.end, np.float64))

    def run(self, until: float = NEVER, driver: Driver | None = None) -> None:
        """Go on until a time, or until every job has ended or none can start any more."""
        self._driver = driver
        self._settle()
        while True:
            coming = self._coming()
            if coming > until or coming == NEVER:
                break
            if until == NEVER and self._ended == len(self._book.need):
                break
            self._step(coming)
        if until < NEVER:
            self._book.now = max(self.now, until)

    def run_until_start(self, job: int) -> float:
        """Go on until a job starts; when that is, inf if it never can."""
        self._driver = None
        self._settle()
        while self.start_of(job) == NEVER and (coming := self._coming()) < NEVER:
            self._step(coming)
        return self.start_of(job)

    def snapshot(self) -> Queue:
        """What the queue shows now."""
        return queue_of(self._book)

    def _load(self, workload: Workload) -> None:
        book, count = self._book, len(workload)
        if count and int(workload.nodes.max()) > self.nodes:
            raise ClusterError(
                f"the workload has a job of {workload.nodes.max()} nodes, the machine {self.nodes}"
            )
        book.fill(workload)
        self._arrivals = workload.submit_seconds.tolist()
        if count:
            book.now = self._arrivals[0]

    def _unfinished(self, job: int) -> bool:
        state = self._book.state[job]
        return state == "running" or state in WAITING

    def _coming(self) -> float:
        """When something happens next."""
        coming = self._agenda[0][0] if self._agenda else NEVER
        if self._next_arrival < len(self._arrivals):
            return min(coming, self._arrivals[self._next_arrival])
        return coming

    def _step(self, now: float) -> None:
        book, agenda, arrivals = self._book, self._agenda, self._arrivals
        book.now = now
        while agenda and agenda[0][0] <= now:
            time, kind, job = heapq.heappop(agenda)
            if kind == _END:
                if book.state[job] == "running" and book.end[job] == time:
                    self._finish(job, "done" if book.run[job] <= book.limit[job] else "limit")
            else:
                self._happen(kind, job)
        while self._next_arrival < len(arrivals) and arrivals[self._next_arrival] <= now:
            job = self._next_arrival
            self._next_arrival += 1
            if book.state[job] == "future":
                self._admit(job)
        self._settle()

    def _happen(self, kind: int, job: int) -> None:
        book = self._book
        if kind == _SUBMIT:
            if book.state[job] == "future":
                self._admit(job)
        elif kind == _BEGIN:
            if book.state[job] == "held":
                self._enqueue(job)
        elif kind == _FREE:
            book.let_go(job)
            self._disturbed = True
        elif kind == _REPAIR:
            book.up += 1
            book.free += 1
            self._disturbed = True
        elif kind == _FAIL:
            self._fail_a_node()
        else:
            self._scheduler.wake_up()
            self._disturbed = True

    def _fail_a_node(self) -> None:
        book, failures = self._book, self._failures
        victim = failures.victim()
        if victim is not None and book.state[victim] == "running":
            self._stop(victim, "failed", again=self.scheduler.after_failure == "requeue")
        if book.free:  # a node that is still completing its last job fails unseen
            book.free -= 1
            book.up -= 1
            heapq.heappush(self._agenda, (failures.repaired(), _REPAIR, -1))
            self._disturbed = True
        heapq.heappush(self._agenda, (failures.next_failure(), _FAIL, -1))

    def _admit(self, job: int) -> None:
        """Submission: into the queue, unless another job must end first."""
        self._book.submitted[job] = self.now
        if job in self._dependent:
            self._book.state[job] = "held"
        else:
            self._enqueue(job)

    def _enqueue(self, job: int) -> None:
        self._book.enqueue(job)
        self._arrived.append(job)

    def _begin(self, job: int) -> None:
        heapq.heappush(self._agenda, (self._book.begin(job), _END, job))

    def _expect_end(self, job: int) -> None:
        book = self._book
        end = max(self.now, book.start[job] + min(book.run[job], book.limit[job]))
        book.end[job] = end
        heapq.heappush(self._agenda, (end, _END, job))

    def _give_back(self, job: int) -> None:
        """Nodes of a job that has stopped are free, now or when they have been cleaned up."""
        completing = self.scheduler.completing_seconds
        if completing:
            self._book.keep_until(job, self.now + completing)
            heapq.heappush(self._agenda, (self.now + completing, _FREE, job))
        else:
            self._book.let_go(job)
        self._disturbed = True

    def _finish(self, job: int, reason: Reason) -> None:
        self._give_back(job)
        self._close(job, reason)

    def _close(self, job: int, reason: Reason) -> None:
        book = self._book
        book.state[job] = reason
        book.end[job] = self.now
        self._ended += 1
        for follower in self._followers.pop(job, ()):
            self._dependent.discard(follower)
            if book.state[follower] == "held":
                self._enqueue(follower)
        if self._driver is not None:
            self._notices.append((job, reason))

    def _stop(self, job: int, reason: Reason, *, again: bool) -> None:
        """Take a running job's nodes at once; it ends, or is queued again after the delay."""
        self._book.let_go(job)
        self._disturbed = True
        if not again:
            self._close(job, reason)
            return
        self._book.state[job] = "held"
        self._book.start[job] = NEVER
        heapq.heappush(self._agenda, (self.now + self.scheduler.requeue_seconds, _BEGIN, job))
        if self._driver is not None:
            self._notices.append((job, reason))

    def _settle(self) -> None:
        """Tell the driver and schedule, until neither has anything to add at this moment."""
        if self._driver is None:
            self._schedule()
            return
        while True:
            self._tell(self._driver)
            started = self._schedule()
            self._notices.extend((job, None) for job in started)
            self._tell(self._driver)
            if self._driver.wants_ticks and not self._unsettled():
                self._driver.tick(self)
            if not self._unsettled() and not self._notices:
                return

    def _unsettled(self) -> bool:
        return self._disturbed or bool(self._arrived)

    def _tell(self, driver: Driver) -> None:
        while self._notices:
            job, reason = self._notices.popleft()
            if reason is None:
                driver.started(self, job)
            else:
                driver.ended(self, job, reason)

    def _schedule(self) -> list[int]:
        """Start what can start now."""
        arrived, disturbed = self._arrived, self._disturbed
        self._arrived, self._disturbed = [], False
        started = self._scheduler.starts(arrived, disturbed)
        # Nodes that preemption freed have been given away in the same pass.
        self._disturbed = False
        end = self._book.end
        for job in started:
            heapq.heappush(self._agenda, (end[job], _END, job))
        return started

    def _preempt(self, job: int) -> None:
        self._stop(job, "preempted", again=self.scheduler.preemption == "requeue")

    def _wake(self, time: float) -> None:
        heapq.heappush(self._agenda, (time, _PASS, -1))
