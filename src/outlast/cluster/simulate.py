"""Simulation of a cluster's scheduler, event by event.

from outlast.cluster.simulate import SLURM, Simulation
simulation = Simulation(10_000, backfill="conservative", scheduler=SLURM, workload=jobs)
simulation.run()
waits = simulation.starts() - jobs.submit_seconds

`Queue` is what ``squeue`` shows at one moment, of a simulation, of a log or of the live cluster;
`forward` lets a simulation continue from there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from outlast.cluster.scheduler import (
    IDEAL,
    NEVER,
    SLURM,
    WAITING,
    Reason,
    Scheduler,
    SchedulerState,
    Settings,
    State,
    shadow_of,
)
from outlast.cluster.workload import Array, Integers, Workload
from outlast.errors import ClusterError

__all__ = ["IDEAL", "SLURM", "Driver", "Queue", "Settings", "Simulation", "forecast_start"]

Backfill: TypeAlias = Literal["easy", "conservative"]


@dataclass(frozen=True, eq=False)
class Queue:
    """Running and pending jobs, as ``squeue`` shows them.

    Attributes:
        now_seconds: The moment, on the same clock as the ends.
        nodes: Nodes of the machine that are up, busy or free.
        running_nodes: (running,)
        running_start_seconds: (running,) when each started.
        running_end_seconds: (running,) when each will have reached its limit.
        running_jobs: (running,) their numbers; -1 where they are not known.
        pending_nodes: (pending,) in the order in which the scheduler takes them; only jobs that
            could start now, were there room (no dependency, no begin time ahead).
        pending_limit_seconds: (pending,)
        pending_jobs: (pending,) their numbers; -1 where they are not known.
    """

    now_seconds: float
    nodes: int
    running_nodes: Integers
    running_start_seconds: Array
    running_end_seconds: Array
    running_jobs: Integers
    pending_nodes: Integers
    pending_limit_seconds: Array
    pending_jobs: Integers

    @classmethod
    def of_jobs(
        cls,
        now_seconds: float,
        nodes: int,
        running: Sequence[tuple[int, float, float, int]],
        pending: Sequence[tuple[int, float, int]],
    ) -> Queue:
        """A queue of rows.

        Args:
            now_seconds: The moment.
            nodes: That are up.
            running: Nodes, start, end by the limit and number of each job.
            pending: Nodes, limit and number of each job.
        """
        held, starts, ends, numbers = zip(*running, strict=True) if running else ((),) * 4
        wanted, limits, waiting = zip(*pending, strict=True) if pending else ((),) * 3
        whole, real = np.int64, np.float64
        runs = (np.array(held, whole), np.array(starts, real), np.array(ends, real))
        waits = (np.array(wanted, whole), np.array(limits, real), np.array(waiting, whole))
        return cls(now_seconds, nodes, *runs, np.array(numbers, whole), *waits)

    @property
    def free_nodes(self) -> int:
        """Nodes without a job."""
        return max(0, self.nodes - int(self.running_nodes.sum()))


def forecast_start(
    queue: Queue, nodes: int, limit_seconds: float, *, backfill: Backfill = "easy"
) -> float:
    """Start of a job submitted now, behind all that are pending, if no other came after it.

    Simulates the queue forward. Every job uses its whole limit, which is what the scheduler itself
    believes.

    Args:
        queue: What is running and pending.
        nodes: That the job asks for.
        limit_seconds: That the job asks for.
        backfill: Kind of the scheduler.

    Returns:
        Seconds on the queue's clock, at least `queue.now_seconds`.

    Raises:
        ClusterError: The machine has fewer nodes than are asked for.
    """
    if nodes > queue.nodes:
        raise ClusterError(f"nodes = {nodes} is more than the {queue.nodes} that are up")
    simulation = forward(queue, backfill)
    return simulation.run_until_start(simulation.submit(nodes, limit_seconds, limit_seconds))


def forward(
    queue: Queue,
    backfill: Backfill,
    running_end_seconds: Array | None = None,
    pending_run_seconds: Array | None = None,
) -> Simulation:
    """A simulation in the queue's state, on a scheduler without ages and failures.

    The first pending job has as its priority the number of those that are pending, the last one 1,
    and a job that is submitted without a priority comes after them.

    Args:
        queue: What is running and pending.
        backfill: Kind of the scheduler.
        running_end_seconds: (running,) when each running job really ends; None: at its limit.
        pending_run_seconds: (pending,) how long each pending job really runs; None: its limit.
    """
    simulation = Simulation(queue.nodes, backfill=backfill, now=queue.now_seconds)
    limits = queue.running_end_seconds
    ends = limits if running_end_seconds is None else running_end_seconds
    for nodes, limit, end in zip(
        queue.running_nodes.tolist(), limits.tolist(), ends.tolist(), strict=True
    ):
        simulation.place(nodes, limit, end)
    runs = queue.pending_limit_seconds if pending_run_seconds is None else pending_run_seconds
    columns = (queue.pending_nodes, queue.pending_limit_seconds, runs)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for rank, (nodes, limit, run) in enumerate(rows):
        simulation.submit(nodes, limit, run, priority=len(queue.pending_nodes) - rank)
    return simulation


# Kinds of events, in the order in which those of one moment happen.
_END, _FREE, _REPAIR, _FAIL, _BEGIN, _SUBMIT, _PASS = range(7)


class Driver(Protocol):
    """A policy: told of events, acts through the simulation."""

    @property
    def wants_ticks(self) -> bool:
        """True if `tick` is called."""

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
        backfill: Backfill = "easy",
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
        self._state = SchedulerState(nodes, scheduler, now)
        self._scheduler = Scheduler(self._state, backfill, self._preempt, self._wake)
        self._source = np.random.default_rng(seed)
        self._driver: Driver | None = None
        self._agenda: list[tuple[float, int, int]] = []
        self._arrivals: list[float] = []
        self._next_arrival = 0
        self._arrived: list[int] = []
        self._disturbed = False
        self._followers: dict[int, list[int]] = {}
        self._dependent: set[int] = set()
        self._notices: deque[tuple[int, Reason | None]] = deque()
        self._ended = 0
        if workload is not None and len(workload):
            most, none = int(workload.nodes.max()), np.zeros(len(workload))
            if most > nodes:
                raise ClusterError(f"the workload has a job of {most} nodes, the machine {nodes}")
            priority = none if workload.priority is None else workload.priority
            tier = none.astype(np.int64) if workload.tier is None else workload.tier
            columns = (workload.nodes, workload.limit_seconds, workload.run_seconds, priority, tier)
            self._state.add(zip(*(column.tolist() for column in columns), strict=True))
            self._arrivals = workload.submit_seconds.tolist()
            self._state.now = self._arrivals[0]
        if scheduler.node_failures_per_second:
            self._expect_failure()

    @property
    def now(self) -> float:
        """Seconds."""
        return self._state.now

    @property
    def free_nodes(self) -> int:
        """Nodes that are up, without a job."""
        return self._state.free

    def submit(
        self,
        nodes: int,
        limit_seconds: float,
        run_seconds: float,
        *,
        at: float | None = None,
        after: int | None = None,
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
            priority: The site's part of it.
            tier: Priority tier of its partition: goes before every priority, and may preempt.

        Returns:
            Its number.
        """
        if not 1 <= nodes <= self.nodes:
            raise ClusterError(f"nodes = {nodes} must lie in 1 to {self.nodes}")
        if not limit_seconds > 0:
            raise ClusterError(f"limit_seconds = {limit_seconds:g} must be above 0")
        if after is not None and not 0 <= after < len(self._state.need):
            raise ClusterError(f"after = {after} is no job")
        job = self._state.add([(nodes, limit_seconds, max(0.0, run_seconds), priority, tier)])
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
        job = self._state.add([(nodes, limit, max(end_seconds - self.now, 0.0), 0.0, 0)])
        self._state.submitted[job] = self._state.eligible[job] = self.now
        heapq.heappush(self._agenda, (self._state.begin(job), _END, job))
        return job

    def cancel(self, job: int) -> None:
        """End a job that waits or runs; nothing happens to one that has ended."""
        state, job_state = self._state, self._state.job_state[job]
        if job_state == "running":
            self._finish(job, "cancelled")
        elif job_state in WAITING:
            if job_state == "pending":
                state.withdraw(job)
                self._disturbed = True
            if job in self._arrived:
                self._arrived.remove(job)
            self._close(job, "cancelled")

    def shorten(self, job: int, limit_seconds: float) -> None:
        """Lower a job's limit, waiting or running.

        Raises:
            ClusterError: The new limit is above the old one, or not above 0.
        """
        state = self._state
        if not 0 < limit_seconds <= state.limit[job]:
            raise ClusterError(
                f"limit_seconds = {limit_seconds:g} must lie above 0 and not above the job's "
                f"{state.limit[job]:g}: a limit can be lowered, never raised"
            )
        state.limit[job] = limit_seconds
        self._disturbed = True
        if state.job_state[job] == "running":
            state.keep_until(job, max(self.now, state.start[job] + limit_seconds))
            self._expect_end(job)

    def set_run_seconds(self, job: int, run_seconds: float) -> None:
        """Say how long a job's program runs, counted from its start; also while it runs."""
        self._state.run[job] = max(0.0, run_seconds)
        if self._state.job_state[job] == "running":
            self._expect_end(job)

    def shadow(self) -> tuple[float, int]:
        """Latest start of the queue's head, and nodes that are left over then.

        (inf, free nodes) if nothing is pending.
        """
        return shadow_of(self._state)

    def window_seconds(self, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        return self._scheduler.window_seconds(nodes)

    def start_of(self, job: int) -> float:
        """Its last start; inf before."""
        return self._state.start[job]

    def end_of(self, job: int) -> float:
        """Its end; inf before."""
        return NEVER if self._unfinished(job) else self._state.end[job]

    def state_of(self, job: int) -> State:
        """Its state."""
        return self._state.job_state[job]

    def starts(self) -> Array:
        """Last start of each job, (jobs,); inf where it has not started."""
        return np.array(self._state.start, np.float64)

    def ends(self) -> Array:
        """End of each job, (jobs,); inf where it has not ended."""
        unfinished = list(map(self._unfinished, range(len(self._state.end))))
        return np.where(unfinished, NEVER, np.array(self._state.end, np.float64))

    def run(self, until: float = NEVER, driver: Driver | None = None) -> None:
        """Continue until a time, or until every job has ended or none can start any more."""
        self._driver = driver
        self._settle()
        while (coming := self._coming()) <= until and coming < NEVER:
            if until == NEVER and self._ended == len(self._state.need):
                break
            self._step(coming)
        if until < NEVER:
            self._state.now = max(self.now, until)

    def run_until_start(self, job: int) -> float:
        """Continue until a job starts; when that is, inf if it never can."""
        self._driver = None
        self._settle()
        while self.start_of(job) == NEVER and (coming := self._coming()) < NEVER:
            self._step(coming)
        return self.start_of(job)

    def snapshot(self) -> Queue:
        """The present queue."""
        state = self._state
        return Queue.of_jobs(
            self.now,
            state.up,
            [(state.need[job], state.start[job], end, job) for end, job in state.running],
            [(state.need[entry[3]], state.limit[entry[3]], entry[3]) for entry in state.pending],
        )

    def _unfinished(self, job: int) -> bool:
        job_state = self._state.job_state[job]
        return job_state == "running" or job_state in WAITING

    def _coming(self) -> float:
        """Time of the next event."""
        coming = self._agenda[0][0] if self._agenda else NEVER
        if self._next_arrival < len(self._arrivals):
            return min(coming, self._arrivals[self._next_arrival])
        return coming

    def _step(self, now: float) -> None:
        state, agenda, arrivals = self._state, self._agenda, self._arrivals
        state.now = now
        while agenda and agenda[0][0] <= now:
            time, kind, job = heapq.heappop(agenda)
            if kind == _END:
                if state.job_state[job] == "running" and state.end[job] == time:
                    self._finish(job, "done" if state.run[job] <= state.limit[job] else "limit")
            elif kind in (_SUBMIT, _BEGIN):
                # Neither where it was cancelled before.
                if state.job_state[job] == "future":
                    self._admit(job)
                elif state.job_state[job] == "held":
                    self._enqueue(job)
            elif kind == _FREE:
                state.let_go(job)
                self._disturbed = True
            elif kind == _REPAIR:
                state.up += 1
                state.free += 1
                self._disturbed = True
            elif kind == _FAIL:
                self._fail_a_node()
            else:
                self._scheduler.wake_up()
                self._disturbed = True
        while self._next_arrival < len(arrivals) and arrivals[self._next_arrival] <= now:
            job = self._next_arrival
            self._next_arrival += 1
            if state.job_state[job] == "future":
                self._admit(job)
        self._settle()

    def _expect_failure(self) -> None:
        """Draw the next failure among the nodes that are up, if nothing changes before."""
        rate = self.scheduler.node_failures_per_second * self._state.up
        at = self.now + float(self._source.exponential(1 / rate)) if rate else NEVER
        heapq.heappush(self._agenda, (at, _FAIL, -1))

    def _fail_a_node(self) -> None:
        state = self._state
        # Of the nodes that are up, free ones come first, then those of each running job.
        node = int(self._source.integers(state.up)) - state.free
        victim = None
        for _, job in state.running if node >= 0 else ():
            node -= state.need[job]
            if node < 0:
                victim = job
                break
        if victim is not None and state.job_state[victim] == "running":
            self._stop(victim, "failed", again=self.scheduler.after_failure == "requeue")
        if state.free:  # a node that is still completing its last job fails unseen
            state.free -= 1
            state.up -= 1
            back = self.now + float(self._source.exponential(self.scheduler.repair_seconds))
            heapq.heappush(self._agenda, (back, _REPAIR, -1))
            self._disturbed = True
        self._expect_failure()

    def _admit(self, job: int) -> None:
        """Submission: into the queue, unless another job must end first."""
        self._state.submitted[job] = self.now
        if job in self._dependent:
            self._state.job_state[job] = "held"
        else:
            self._enqueue(job)

    def _enqueue(self, job: int) -> None:
        self._state.enqueue(job)
        self._arrived.append(job)

    def _expect_end(self, job: int) -> None:
        state = self._state
        end = max(self.now, state.start[job] + min(state.run[job], state.limit[job]))
        state.end[job] = end
        heapq.heappush(self._agenda, (end, _END, job))

    def _finish(self, job: int, reason: Reason) -> None:
        # Nodes of a job that has stopped are free, now or when they have been cleaned up.
        completing = self.scheduler.completing_seconds
        if completing:
            self._state.keep_until(job, self.now + completing)
            heapq.heappush(self._agenda, (self.now + completing, _FREE, job))
        else:
            self._state.let_go(job)
        self._disturbed = True
        self._close(job, reason)

    def _close(self, job: int, reason: Reason) -> None:
        state = self._state
        state.job_state[job] = reason
        state.end[job] = self.now
        self._ended += 1
        for follower in self._followers.pop(job, ()):
            self._dependent.discard(follower)
            if state.job_state[follower] == "held":
                self._enqueue(follower)
        if self._driver is not None:
            self._notices.append((job, reason))

    def _stop(self, job: int, reason: Reason, *, again: bool) -> None:
        """Take a running job's nodes at once; it ends, or is queued again after the delay."""
        self._state.let_go(job)
        self._disturbed = True
        if not again:
            self._close(job, reason)
            return
        self._state.job_state[job] = "held"
        self._state.start[job] = NEVER
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
        end = self._state.end
        for job in started:
            heapq.heappush(self._agenda, (end[job], _END, job))
        return started

    def _preempt(self, job: int) -> None:
        self._stop(job, "preempted", again=self.scheduler.preemption == "requeue")

    def _wake(self, time: float) -> None:
        heapq.heappush(self._agenda, (time, _PASS, -1))
