"""What a scheduler knows: every job, which of them run and which wait, and the free nodes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import Literal

from outlast.cluster.simulate.placement import best_fit
from outlast.cluster.simulate.settings import Settings
from outlast.cluster.workload.jobs import Workload

NEVER = math.inf

Reason = Literal["done", "limit", "cancelled", "failed", "preempted"]
State = Literal[
    "future",
    "held",
    "pending",
    "running",
    "done",
    "limit",
    "cancelled",
    "failed",
    "preempted",
]
WAITING: tuple[State, ...] = ("future", "held", "pending")

Entry = tuple[int, float, float, int]
"""A pending job: minus its tier, minus its priority, since when it ages, its number."""


class Book:
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
        "state",
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
        self.state: list[State] = []
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
        self.state.append("future")
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
        self.state = ["future"] * count

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
        """Where a job stands in the queue.

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
        self.state[job] = "pending"
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
        self.state[job] = "running"
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
