"""State of the simulated scheduler: its settings, its jobs, and the free nodes.

Sets of nodes are the bits of an integer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

from outlast.cluster.workload import Workload
from outlast.errors import ClusterError


def best_fit(free: int, count: int) -> int:
    """`count` of the free nodes: out of the tightest run that is long enough, else the longest."""
    chosen = 0
    while count:
        runs = _runs(free)
        enough = [run for run in runs if run[1] >= count]
        if enough:
            first, length = min(enough, key=lambda pair: (pair[1], pair[0]))
        else:
            first, length = max(runs, key=lambda run: (run[1], -run[0]))
        taken = ((1 << min(length, count)) - 1) << first
        chosen |= taken
        free &= ~taken
        count -= min(length, count)
    return chosen


def _runs(free: int) -> list[tuple[int, int]]:
    """First node and length of each run of consecutive free nodes."""
    found, first = [], 0
    while free:
        zeros = (free & -free).bit_length() - 1
        free >>= zeros
        ones = (~free & (free + 1)).bit_length() - 1
        found.append((first + zeros, ones))
        free >>= ones
        first += zeros + ones
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A scheduler's configuration; the default is ideal: it looks at every event, at once.

    Attributes:
        backfill_interval_seconds: Least time between two backfill passes (``bf_interval``); 0 for
            a pass at every event. Jobs at the front of the queue start at once in any case.
        backfill_phase_seconds: Passes come at whole intervals before or after this moment, as in a
            busy Slurm; None for as soon as the interval is over.
        backfill_resolution_seconds: Conservative plans are made in steps of this length
            (``bf_resolution``): ends of reservations are rounded down to it; 0 for exact times.
        backfill_window_seconds: How far ahead reservations are made (``bf_window``).
        backfill_jobs: Most pending jobs that a backfill pass looks at (``bf_max_job_test``).
        end_window_seconds: Conservative plans count ends of running jobs in batches: all within
            this time of the batch's first count as its last, and each batch's time doubles
            (what ``bf_window_linear`` changes; 30 s in Slurm); 0 for exact ends.
        named_nodes: Conservative plans reserve certain nodes, as Slurm's do, not only a number of
            them; slower, and no nodes may fail.
        age_weight: Priority of a job that has waited `age_seconds` (``PriorityWeightAge``).
        age_seconds: Waiting beyond this adds nothing (``PriorityMaxAge``).
        size_weight: Priority of a job as large as the machine (``PriorityWeightJobSize``).
        ages_while_dependent: Age counts from submission, also while a job waits for another
            (``PriorityFlags=ACCRUE_ALWAYS``); otherwise from when it could start.
        priority_seconds: Ages are read this often (``PriorityCalcPeriod``).
        preemption: What becomes of a running job whose nodes a job of a higher tier takes
            (``PreemptMode``).
        requeue_seconds: A requeued job cannot start again sooner; Slurm's BeginTime adds 120 s.
        completing_seconds: Nodes are free again this long after their job's end.
        node_failures_per_second: Of each node.
        repair_seconds: Mean time until a failed node is back (exponential).
        after_failure: Whether a job whose node failed is queued again (``JobRequeue``) or ends.
    """

    backfill_interval_seconds: float = 0.0
    backfill_phase_seconds: float | None = None
    backfill_resolution_seconds: float = 0.0
    backfill_window_seconds: float = math.inf
    backfill_jobs: int = 1_000_000_000
    end_window_seconds: float = 0.0
    named_nodes: bool = False
    age_weight: float = 0.0
    age_seconds: float = 7 * 86400.0
    size_weight: float = 0.0
    ages_while_dependent: bool = False
    priority_seconds: float = 300.0
    preemption: Literal["off", "requeue", "cancel"] = "off"
    requeue_seconds: float = 120.0
    completing_seconds: float = 0.0
    node_failures_per_second: float = 0.0
    repair_seconds: float = 3600.0
    after_failure: Literal["requeue", "fail"] = "requeue"

    def __post_init__(self) -> None:
        for name in (
            "backfill_interval_seconds",
            "backfill_resolution_seconds",
            "end_window_seconds",
            "requeue_seconds",
            "completing_seconds",
            "node_failures_per_second",
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ClusterError(f"{name} = {value:g} must be finite and not below 0")
        for name in ("backfill_window_seconds", "age_seconds", "priority_seconds"):
            if not getattr(self, name) > 0:
                raise ClusterError(f"{name} = {getattr(self, name):g} must be above 0")
        if not 0 < self.repair_seconds < math.inf:
            raise ClusterError(f"repair_seconds = {self.repair_seconds:g} must be finite, above 0")
        if self.named_nodes and self.node_failures_per_second:
            raise ClusterError("named_nodes and node_failures_per_second exclude each other")
        if self.backfill_jobs < 1:
            raise ClusterError(f"backfill_jobs = {self.backfill_jobs} must be at least 1")


IDEAL = Settings()
"""Looks at every event, at once, over the whole queue."""
SLURM = Settings(
    backfill_interval_seconds=30.0,
    backfill_resolution_seconds=60.0,
    backfill_window_seconds=86400.0,
    backfill_jobs=500,
    end_window_seconds=30.0,
)
"""The defaults of ``SchedulerParameters`` in Slurm 22.05, with first in, first out."""
NEVER = math.inf
Reason = Literal["done", "limit", "cancelled", "failed", "preempted"]
State = Literal[
    "future", "held", "pending", "running", "done", "limit", "cancelled", "failed", "preempted"
]
WAITING: tuple[State, ...] = ("future", "held", "pending")
Entry = tuple[int, float, float, int]
"""A pending job: minus its tier, minus its priority, since when it ages, its number."""


class SchedulerState:
    """Columns with a row for each job, and the two orders that scheduling needs.

    Attributes:
        now: Seconds.
        nodes: Of the machine, also those that are down.
        up: Nodes that are not down.
        free: Nodes up without a job.
        need: Nodes of each job.
        limit: Seconds that each may run.
        run: Seconds that each one's program runs.
        submitted, eligible, start, end: When; inf before.
        release: When each running job's nodes are free at the latest.
        running: (release, job) ascending.
        pending: In the order in which they are taken.
        all_nodes, free_nodes: The machine's nodes and those without a job as bits, where nodes
            have names; else 0.
        held: Nodes of each running job as bits, likewise.
    """

    __slots__ = (
        "all_nodes",
        "eligible",
        "end",
        "free",
        "free_nodes",
        "held",
        "job_state",
        "limit",
        "need",
        "nodes",
        "now",
        "pending",
        "priority",
        "release",
        "run",
        "running",
        "scheduler",
        "start",
        "submitted",
        "tier",
        "up",
    )

    def __init__(self, nodes: int, scheduler: Settings, now: float) -> None:
        self.now = now
        self.nodes = self.up = self.free = nodes
        self.scheduler = scheduler
        self.need: list[int] = []
        self.limit: list[float] = []
        self.run: list[float] = []
        self.priority: list[float] = []
        self.tier: list[int] = []
        self.submitted: list[float] = []
        self.eligible: list[float] = []
        self.start: list[float] = []
        self.end: list[float] = []
        self.release: list[float] = []
        self.job_state: list[State] = []
        self.running: list[tuple[float, int]] = []
        self.pending: list[Entry] = []
        self.all_nodes = self.free_nodes = (1 << nodes) - 1 if scheduler.named_nodes else 0
        self.held: dict[int, int] = {}

    def add(self, need: int, limit: float, run: float, priority: float, tier: int) -> int:
        """A row for a job that is not in the queue yet; its number."""
        self.need.append(need)
        self.limit.append(limit)
        self.run.append(run)
        self.priority.append(priority)
        self.tier.append(tier)
        self.submitted.append(NEVER)
        self.eligible.append(NEVER)
        self.start.append(NEVER)
        self.end.append(NEVER)
        self.release.append(NEVER)
        self.job_state.append("future")
        return len(self.need) - 1

    def fill(self, jobs: Workload) -> None:
        """The first rows: the jobs of a workload."""
        count = len(jobs)
        self.need = jobs.nodes.tolist()
        self.limit = jobs.limit_seconds.tolist()
        self.run = jobs.run_seconds.tolist()
        self.priority = [0.0] * count if jobs.priority is None else jobs.priority.tolist()
        self.tier = [0] * count if jobs.tier is None else jobs.tier.tolist()
        for column in (self.submitted, self.eligible, self.start, self.end, self.release):
            column.extend([NEVER] * count)
        self.job_state = ["future"] * count

    def since(self, job: int) -> float:
        """Since when a job ages."""
        return self.submitted[job] if self.scheduler.ages_while_dependent else self.eligible[job]

    def priority_now(self, job: int) -> float:
        """Site's part, size and age, as Slurm's multifactor plugin adds them."""
        scheduler = self.scheduler
        age = min((self.now - self.since(job)) / scheduler.age_seconds, 1.0)
        size = self.need[job] / self.nodes
        return self.priority[job] + scheduler.size_weight * size + scheduler.age_weight * age

    def entry(self, job: int) -> Entry:
        """Position of a job in the queue.

        All jobs age alike, so what counts is the priority at a common moment, here 0: order changes
        only where an age reaches its greatest value.
        """
        scheduler = self.scheduler
        since = self.since(job)
        rank = self.priority[job]
        if scheduler.size_weight:
            rank += scheduler.size_weight * self.need[job] / self.nodes
        if scheduler.age_weight:
            oldest = max(since, self.now - scheduler.age_seconds)
            rank -= scheduler.age_weight * oldest / scheduler.age_seconds
        return (-self.tier[job], -rank, since, job)

    def enqueue(self, job: int) -> int:
        """Put a job into the queue; its place there."""
        self.job_state[job] = "pending"
        self.eligible[job] = self.now
        pending, entry = self.pending, self.entry(job)
        if not pending or entry > pending[-1]:
            pending.append(entry)
            return len(pending) - 1
        place = bisect_left(pending, entry)
        pending.insert(place, entry)
        return place

    def withdraw(self, job: int) -> None:
        """Take a job out of the queue."""
        pending = self.pending
        place = len(pending) - 1
        while pending[place][3] != job:
            place -= 1
        del pending[place]

    def reorder(self) -> bool:
        """Read the ages again; whether the order changed."""
        before = [entry[3] for entry in self.pending]
        self.pending.sort(key=lambda entry: self.entry(entry[3]))
        self.pending[:] = [self.entry(entry[3]) for entry in self.pending]
        return before != [entry[3] for entry in self.pending]

    def begin(self, job: int, nodes: int = 0) -> float:
        """Give a job its nodes, by name if they have names; when it will end."""
        now = self.now
        self.job_state[job] = "running"
        self.start[job] = now
        self.free -= self.need[job]
        limit, run = self.limit[job], self.run[job]
        self.release[job] = release = now + limit
        insort(self.running, (release, job))
        if self.all_nodes:
            nodes = nodes or best_fit(self.free_nodes, self.need[job])
            self.held[job] = nodes
            self.free_nodes &= ~nodes
        self.end[job] = end = now + (run if run < limit else limit)
        return end

    def let_go(self, job: int) -> None:
        """Take a job's nodes back."""
        running = self.running
        del running[bisect_left(running, (self.release[job], job))]
        self.free += self.need[job]
        if self.all_nodes:
            self.free_nodes |= self.held.pop(job)

    def keep_until(self, job: int, release: float) -> None:
        """Say when a job's nodes are free at the latest."""
        running = self.running
        del running[bisect_left(running, (self.release[job], job))]
        self.release[job] = release
        insort(running, (release, job))
