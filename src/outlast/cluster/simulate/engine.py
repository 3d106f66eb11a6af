"""Simulation of a cluster's scheduler, event by event.

`Scheduler` decides when the queue is looked at and in what order: main pass, backfill pass,
preemption, ages. `Queue` is what ``squeue`` shows at one moment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from outlast.cluster.simulate.backfill import (
    ConservativeBackfill,
    EasyBackfill,
    NamedBackfill,
    shadow_of,
    start_in_order,
)
from outlast.cluster.simulate.state import (
    IDEAL,
    NEVER,
    WAITING,
    Reason,
    SchedulerState,
    Settings,
    State,
)
from outlast.cluster.workload import Array, Integers, Workload
from outlast.errors import ClusterError


class Failures:
    """Independent failures of equal nodes at a constant rate, and exponential repairs."""

    def __init__(self, state: SchedulerState, seed: int) -> None:
        self._state = state
        self._source = np.random.default_rng(seed)

    def next_failure(self) -> float:
        """Time of the next failure among the nodes that are up, if nothing changes before."""
        rate = self._state.scheduler.node_failures_per_second * self._state.up
        return self._state.now + float(self._source.exponential(1 / rate)) if rate else NEVER

    def repaired(self) -> float:
        """Time at which the node that fails now is back."""
        mean = self._state.scheduler.repair_seconds
        return self._state.now + float(self._source.exponential(mean))

    def victim(self) -> int | None:
        """Job on the node that fails now; None if that node is free."""
        state = self._state
        node = int(self._source.integers(state.up)) - state.free
        if node < 0:
            return None
        for _, job in state.running:
            node -= state.need[job]
            if node < 0:
                return job
        return None


def victims(state: SchedulerState, job: int) -> list[int]:
    """Jobs of lower tiers whose nodes, with the free ones, are enough for `job`.

    Lowest tier first, then lowest priority, then the youngest, as Slurm's preempt/partition_prio
    with ``preempt_youngest_first``; empty where even all of them are not enough.
    """
    missing = state.need[job] - state.free
    tier = state.tier[job]
    lower = [
        running
        for _, running in state.running
        if state.tier[running] < tier and state.job_state[running] == "running"
    ]
    lower.sort(key=lambda item: (state.tier[item], state.priority[item], -state.start[item], item))
    chosen = []
    for running in lower:
        if missing <= 0:
            break
        missing -= state.need[running]
        chosen.append(running)
    return chosen if missing <= 0 else []


class Scheduler:
    """Decides what starts, whenever something has changed.

    Args:
        state: What it knows and changes.
        backfill: Of which kind.
        preempt: Called for a running job that must give up its nodes at once.
        wake: Called with the time at which `wake_up` is to be called.
    """

    def __init__(
        self,
        state: SchedulerState,
        backfill: Literal["easy", "conservative"],
        preempt: Callable[[int], None],
        wake: Callable[[float], None],
    ) -> None:
        self._state = state
        self._planner = _planner(backfill, state.scheduler.named_nodes)
        self._preempt = preempt
        self._wake = wake
        self._interval = state.scheduler.backfill_interval_seconds
        self._next_backfill = -NEVER
        self._expected = self._due = False
        self._next_reading = -NEVER

    def wake_up(self) -> None:
        """The next backfill pass is due."""
        self._expected, self._due = False, True

    def window_seconds(self, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        return self._planner.window_seconds(self._state, nodes)

    def starts(self, arrived: list[int], disturbed: bool) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Args:
            arrived: Jobs new in the queue since the last call.
            disturbed: Whether nodes, limits or the order changed since.
        """
        state, settings = self._state, self._state.scheduler
        if settings.age_weight and state.now >= self._next_reading:
            self._next_reading = state.now + settings.priority_seconds
            disturbed |= state.reorder()
        if not (arrived or disturbed) or not state.pending:
            if disturbed:
                self._planner.disturb()
            return []
        started = [] if settings.preemption == "off" else self._start_by_tier()
        if disturbed or started:
            self._planner.disturb()
        if not state.pending:
            return started
        if self._interval:
            return started + self._start_by_interval()
        return started + self._planner.starts(state, arrived)

    def _start_by_interval(self) -> list[int]:
        """Jobs at the front start at every event, others when the next backfill pass is due."""
        state, phase = self._state, self._state.scheduler.backfill_phase_seconds
        if self._due or (phase is None and state.now >= self._next_backfill):
            self._due = False
            self._next_backfill = state.now + self._interval
            self._planner.disturb()
            return self._planner.starts(state, [])
        started = start_in_order(state)
        if state.pending and not self._expected:
            self._expected = True
            if phase is not None:
                passed = math.ceil((state.now - phase) / self._interval)
                self._next_backfill = max(state.now, phase + self._interval * passed)
            self._wake(self._next_backfill)
        return started

    def _start_by_tier(self) -> list[int]:
        """Start jobs at the front, on the nodes of lower tiers where too few are free."""
        state = self._state
        started: list[int] = []
        while state.pending:
            job = state.pending[0][3]
            if state.need[job] > state.free:
                losers = victims(state, job)
                if not losers:
                    break
                for loser in losers:
                    self._preempt(loser)
            del state.pending[0]
            state.begin(job)
            started.append(job)
        return started


def _planner(backfill: str, named: bool) -> EasyBackfill | ConservativeBackfill:
    if backfill not in ("easy", "conservative"):
        raise ClusterError(f"backfill = {backfill!r} must be 'easy' or 'conservative'")
    if backfill == "easy":
        return EasyBackfill()
    return NamedBackfill() if named else ConservativeBackfill()


@dataclass(frozen=True, eq=False, kw_only=True)
class Queue:
    """Running and pending jobs, as ``squeue`` shows them.

    Attributes:
        now_seconds: The moment, on the same clock as the ends.
        nodes: Nodes of the machine that are up, busy or free.
        running_nodes: (running,)
        running_end_seconds: (running,) when each will have reached its limit.
        pending_nodes: (pending,) in the order in which the scheduler takes them; only jobs that
            could start now, were there room (no dependency, no begin time ahead).
        pending_limit_seconds: (pending,)
        pending_priority: (pending,) descending; a candidate without a priority comes last.
        pending_age_seconds: (pending,) since each could have started.
        running_start_seconds: (running,) when each started, where that is known.
        running_jobs: (running,) their numbers, where they are known; pending_jobs likewise.
    """

    now_seconds: float
    nodes: int
    running_nodes: Integers
    running_end_seconds: Array
    pending_nodes: Integers
    pending_limit_seconds: Array
    pending_priority: Array
    pending_age_seconds: Array
    running_start_seconds: Array | None = None
    running_jobs: Integers | None = None
    pending_jobs: Integers | None = None

    @property
    def free_nodes(self) -> int:
        """Nodes without a job."""
        return max(0, self.nodes - int(self.running_nodes.sum()))


def queue_of(state: SchedulerState) -> Queue:
    """Present queue of a simulation."""
    pending = [entry[3] for entry in state.pending]
    running = [job for _, job in state.running]
    return Queue(
        now_seconds=state.now,
        nodes=state.up,
        running_nodes=np.array([state.need[job] for job in running], np.int64),
        running_end_seconds=np.array([state.release[job] for job in running], np.float64),
        pending_nodes=np.array([state.need[job] for job in pending], np.int64),
        pending_limit_seconds=np.array([state.limit[job] for job in pending], np.float64),
        pending_priority=np.array([state.priority_now(job) for job in pending], np.float64),
        pending_age_seconds=np.array([state.now - state.since(job) for job in pending], np.float64),
        running_start_seconds=np.array([state.start[job] for job in running], np.float64),
        running_jobs=np.array(running, np.int64),
        pending_jobs=np.array(pending, np.int64),
    )


def forecast_start(
    queue: Queue,
    nodes: int,
    limit_seconds: float,
    *,
    backfill: Literal["easy", "conservative"] = "easy",
    scheduler: Settings = IDEAL,
    priority: float | None = None,
    running_end_seconds: Array | None = None,
    pending_run_seconds: Array | None = None,
) -> float:
    """Start of a job submitted now, if no other came after it.

    Simulates the queue forward. Without the last two arguments every job uses its whole limit,
    which is what the scheduler itself believes.

    Args:
        queue: What is running and pending.
        nodes: That the job asks for.
        limit_seconds: That the job asks for.
        backfill: Kind of the scheduler.
        scheduler: Its configuration; ages and failures play no part.
        priority: The job's; None for behind all that are pending.
        running_end_seconds: (running,) when each running job really ends, at most its limit.
        pending_run_seconds: (pending,) how long each pending job really runs.

    Returns:
        Seconds on the queue's clock, at least `queue.now_seconds`.

    Raises:
        ClusterError: The machine has fewer nodes than are asked for.
    """
    if nodes > queue.nodes:
        raise ClusterError(f"nodes = {nodes} is more than the {queue.nodes} that are up")
    simulation, before = forward(
        queue, backfill, scheduler, running_end_seconds, pending_run_seconds
    )
    rank = (
        len(queue.pending_nodes)
        if priority is None
        else int(np.searchsorted(-queue.pending_priority, -priority, side="right"))
    )
    job = simulation.submit(nodes, limit_seconds, limit_seconds, priority=before - rank + 0.5)
    return simulation.run_until_start(job)


def forward(
    queue: Queue,
    backfill: Literal["easy", "conservative"],
    scheduler: Settings,
    running_end_seconds: Array | None,
    pending_run_seconds: Array | None,
) -> tuple[Simulation, int]:
    """A simulation in the queue's state, and the priority of its first pending job."""
    from dataclasses import replace

    still = replace(
        scheduler, age_weight=0.0, size_weight=0.0, preemption="off", node_failures_per_second=0.0
    )
    simulation = Simulation(queue.nodes, backfill=backfill, scheduler=still, now=queue.now_seconds)
    limits = queue.running_end_seconds
    ends = limits if running_end_seconds is None else running_end_seconds
    for nodes, limit, end in zip(
        queue.running_nodes.tolist(), limits.tolist(), ends.tolist(), strict=True
    ):
        simulation.place(nodes, limit, end)
    runs = queue.pending_limit_seconds if pending_run_seconds is None else pending_run_seconds
    before = len(queue.pending_nodes)
    for rank, (nodes, limit, run) in enumerate(
        zip(
            queue.pending_nodes.tolist(),
            queue.pending_limit_seconds.tolist(),
            runs.tolist(),
            strict=True,
        )
    ):
        simulation.submit(nodes, limit, run, priority=before - rank)
    return simulation, before


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
        self._state = SchedulerState(nodes, scheduler, now)
        self._scheduler = Scheduler(self._state, backfill, self._preempt, self._wake)
        self._failures = Failures(self._state, seed)
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
            state, count = self._state, len(workload)
            if count and int(workload.nodes.max()) > self.nodes:
                raise ClusterError(
                    f"the workload has a job of {workload.nodes.max()} nodes, "
                    f"the machine {self.nodes}"
                )
            state.fill(workload)
            self._arrivals = workload.submit_seconds.tolist()
            if count:
                state.now = self._arrivals[0]
        if scheduler.node_failures_per_second:
            self._agenda.append((self._failures.next_failure(), _FAIL, -1))

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
        if after is not None and not 0 <= after < len(self._state.need):
            raise ClusterError(f"after = {after} is no job")
        job = self._state.add(nodes, limit_seconds, max(0.0, run_seconds), priority, tier)
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
        job = self._state.add(nodes, limit, max(end_seconds - self.now, 0.0), 0.0, 0)
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

    def nodes_of(self, job: int) -> int:
        """Nodes that the job asked for."""
        return self._state.need[job]

    def limit_of(self, job: int) -> float:
        """Seconds that the job may run."""
        return self._state.limit[job]

    def owner_of(self, job: int) -> str:
        """Whose job it is."""
        return self._owner.get(job, "")

    def start_of(self, job: int) -> float:
        """Its last start; inf before."""
        return self._state.start[job]

    def end_of(self, job: int) -> float:
        """Its end; inf before."""
        return NEVER if self._unfinished(job) else self._state.end[job]

    def state_of(self, job: int) -> State:
        """Its state."""
        return self._state.job_state[job]

    def starts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Last start of each job, (jobs,); inf where it has not started."""
        return np.array(self._state.start, np.float64)

    def ends(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """End of each job, (jobs,); inf where it has not ended."""
        unfinished = [
            job_state in WAITING or job_state == "running" for job_state in self._state.job_state
        ]
        return np.where(unfinished, NEVER, np.array(self._state.end, np.float64))

    def run(self, until: float = NEVER, driver: Driver | None = None) -> None:
        """Go on until a time, or until every job has ended or none can start any more."""
        self._driver = driver
        self._settle()
        while True:
            coming = self._coming()
            if coming > until or coming == NEVER:
                break
            if until == NEVER and self._ended == len(self._state.need):
                break
            self._step(coming)
        if until < NEVER:
            self._state.now = max(self.now, until)

    def run_until_start(self, job: int) -> float:
        """Go on until a job starts; when that is, inf if it never can."""
        self._driver = None
        self._settle()
        while self.start_of(job) == NEVER and (coming := self._coming()) < NEVER:
            self._step(coming)
        return self.start_of(job)

    def snapshot(self) -> Queue:
        """The present queue."""
        return queue_of(self._state)

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
            else:
                self._happen(kind, job)
        while self._next_arrival < len(arrivals) and arrivals[self._next_arrival] <= now:
            job = self._next_arrival
            self._next_arrival += 1
            if state.job_state[job] == "future":
                self._admit(job)
        self._settle()

    def _happen(self, kind: int, job: int) -> None:
        state = self._state
        if kind == _SUBMIT:
            if state.job_state[job] == "future":
                self._admit(job)
        elif kind == _BEGIN:
            if state.job_state[job] == "held":
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

    def _fail_a_node(self) -> None:
        state, failures = self._state, self._failures
        victim = failures.victim()
        if victim is not None and state.job_state[victim] == "running":
            self._stop(victim, "failed", again=self.scheduler.after_failure == "requeue")
        if state.free:  # a node that is still completing its last job fails unseen
            state.free -= 1
            state.up -= 1
            heapq.heappush(self._agenda, (failures.repaired(), _REPAIR, -1))
            self._disturbed = True
        heapq.heappush(self._agenda, (failures.next_failure(), _FAIL, -1))

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
