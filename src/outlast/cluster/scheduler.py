"""The simulated scheduler: its settings, its jobs and free nodes, and the kinds of backfill.

Sets of nodes are the bits of an integer.

EASY backfill: only the queue's head has a reservation (Lifka, "The ANL/IBM SP scheduling system",
JSSPP 1995). The head gets a shadow time, the first moment at which enough nodes are free if every
running job uses its whole limit, and the nodes that are left over then are extra. A later job may
start now if it ends before the shadow or fits into the extra nodes, so it cannot delay the head.

Conservative backfill: every pending job has a reservation, in the order of the queue (Mu'alem and
Feitelson, "Utilization, predictability, workloads, and user runtime estimates in scheduling the IBM
SP2 with backfilling", IEEE TPDS 12, 2001); Slurm's sched/backfill is of this kind. Each pass makes
all reservations anew: free nodes over time are a step function, and each job takes the earliest
span of its limit in which enough of them are free.

With named nodes it goes step by step as Slurm 22.05 does (`_attempt_backfill`, and the will-run
test of select/cons_tres), for one partition of equal nodes that jobs hold alone: reservations are
sets of nodes in a table over time, running jobs are none of them; a job is tried at each change of
the table, on the nodes that no reservation takes before its end; when those will be free is told
from the running jobs' limits in batches; and of free nodes the tightest run of consecutive ones is
taken, lowest first. So a job may be planned later than the numbers of free nodes alone would allow.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from outlast.errors import ClusterError


def best_fit(free: int, count: int) -> int:
    """`count` of the free nodes: out of the tightest run that is long enough, else the longest."""
    chosen = 0
    while count:
        # Length of each run of consecutive free nodes, and its first node.
        runs, rest, first = [], free, 0
        while rest:
            zeros = (rest & -rest).bit_length() - 1
            rest >>= zeros
            ones = (~rest & (rest + 1)).bit_length() - 1
            runs.append((ones, first + zeros))
            rest >>= ones
            first += zeros + ones
        enough = [run for run in runs if run[0] >= count]
        length, first = min(enough) if enough else max(runs, key=lambda run: (run[0], -run[1]))
        taken = ((1 << min(length, count)) - 1) << first
        chosen |= taken
        free &= ~taken
        count -= min(length, count)
    return chosen


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

    def add(self, jobs: Iterable[tuple[int, float, float, float, int]]) -> int:
        """Rows for jobs that are not in the queue yet; returns the number of the last one.

        Args:
            jobs: Nodes, limit, run time, priority and tier of each.
        """
        for need, limit, run, priority, tier in jobs:
            self.need.append(need)
            self.limit.append(limit)
            self.run.append(run)
            self.priority.append(priority)
            self.tier.append(tier)
        count = len(self.need) - len(self.job_state)
        for column in (self.submitted, self.eligible, self.start, self.end, self.release):
            column.extend([NEVER] * count)
        self.job_state += ["future"] * count
        return len(self.need) - 1

    def since(self, job: int) -> float:
        """Since when a job ages."""
        return self.submitted[job] if self.scheduler.ages_while_dependent else self.eligible[job]

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

    def enqueue(self, job: int) -> None:
        """Put a job into the queue."""
        self.job_state[job] = "pending"
        self.eligible[job] = self.now
        insort(self.pending, self.entry(job))

    def withdraw(self, job: int) -> None:
        """Take a job out of the queue."""
        place = len(self.pending) - 1
        while self.pending[place][3] != job:
            place -= 1
        del self.pending[place]

    def taken(self, places: list[int]) -> list[int]:
        """Take the jobs at these ascending places out of the queue, and return them."""
        jobs = [self.pending[place][3] for place in places]
        for place in reversed(places):
            del self.pending[place]
        return jobs

    def reorder(self) -> bool:
        """Read the ages again; whether the order changed."""
        before = [entry[3] for entry in self.pending]
        self.pending[:] = sorted(map(self.entry, before))
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
        del self.running[bisect_left(self.running, (self.release[job], job))]
        self.free += self.need[job]
        if self.all_nodes:
            self.free_nodes |= self.held.pop(job)

    def keep_until(self, job: int, release: float) -> None:
        """Say when a job's nodes are free at the latest."""
        del self.running[bisect_left(self.running, (self.release[job], job))]
        self.release[job] = release
        insort(self.running, (release, job))


class EasyBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._settled = False
        self._shadow = NEVER
        self._extra = 0

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._settled = False

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Where nothing but arrivals happened since the last call, no older job can start: time alone
        shortens the window that it did not fit. Then only what `arrived` behind the head is tested.
        """
        deep = len(state.pending) > state.scheduler.backfill_jobs
        if not self._settled or deep or state.pending[0][3] in arrived:
            return self._look_at_all(state)
        started = []
        for job in arrived if len(arrived) == 1 else sorted(arrived, key=state.entry):
            if self._fits(state, job):
                state.withdraw(job)
                state.begin(job)
                started.append(job)
        return started

    def window_seconds(self, state: SchedulerState, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > state.free:
            return 0.0
        shadow, extra = shadow_of(state)
        return NEVER if nodes <= extra else max(0.0, shadow - state.now)

    def _fits(self, state: SchedulerState, job: int) -> bool:
        nodes = state.need[job]
        if nodes > state.free:
            return False
        if state.now + state.limit[job] > self._shadow:
            if nodes > self._extra:
                return False
            self._extra -= nodes
        return True

    def _look_at_all(self, state: SchedulerState) -> list[int]:
        pending, need = state.pending, state.need
        started = start_in_order(state)
        # What lies too deep to be looked at may come within reach.
        self._settled = 0 < len(pending) <= state.scheduler.backfill_jobs
        if not pending:
            return started
        self._shadow, self._extra = shadow_of(state)
        chosen = []
        for place in range(1, min(len(pending), state.scheduler.backfill_jobs)):
            if not state.free:
                break
            job = pending[place][3]
            if need[job] <= state.free and self._fits(state, job):
                state.begin(job)
                chosen.append(place)
        return started + state.taken(chosen)


def start_in_order(state: SchedulerState) -> list[int]:
    """Start jobs from the front of the queue until one does not fit."""
    places = []
    for place, entry in enumerate(state.pending):
        if state.need[entry[3]] > state.free:
            break
        state.begin(entry[3])
        places.append(place)
    return state.taken(places)


def shadow_of(state: SchedulerState) -> tuple[float, int]:
    """Latest start of the queue's head, and nodes that are left over then.

    (inf, free nodes) if nothing is pending, or while too few nodes are up for the head.
    """
    if not state.pending:
        return NEVER, state.free
    need = state.need
    missing = need[state.pending[0][3]] - state.free
    if missing <= 0:
        return state.now, -missing
    shadow = NEVER
    for release, job in state.running:
        if missing <= 0 and release > shadow:
            break
        missing -= need[job]
        shadow = release
    if missing > 0:
        return NEVER, state.free
    return shadow, -missing


class Profile:
    """`free[k]` nodes from `times[k]` up to `times[k + 1]`, the last for ever.

    Attributes:
        times: Ascending seconds, the first is the present.
        free: Nodes.
    """

    __slots__ = ("_known", "free", "times")

    def __init__(self, now: float, free: int) -> None:
        self.times = [now]
        self.free = [free]
        self._known: dict[int, tuple[float, float]] = {}

    def free_from(self, time: float, nodes: int) -> None:
        """More nodes from a time on, not before the last step; not after `earliest`."""
        if time <= self.times[-1]:
            self.free[-1] += nodes
        else:
            self.times.append(time)
            self.free.append(self.free[-1] + nodes)

    def advance(self, now: float) -> None:
        """Forget what is past."""
        place = bisect_right(self.times, now) - 1
        del self.times[:place]
        del self.free[:place]
        self.times[0] = now

    def earliest(self, nodes: int, seconds: float) -> float:
        """First moment from which `nodes` are free for `seconds`; inf where there is none."""
        times, free, known = self.times, self.free, self._known
        count = len(times)
        place = 0
        # Spans are only taken out: no job starts before one of its size that was no longer.
        if nodes in known and known[nodes][0] <= seconds:
            place = bisect_left(times, known[nodes][1])
        while True:
            while place < count and free[place] < nodes:
                place += 1
            if place == count:
                return NEVER
            start = times[place]
            end = start + seconds
            place += 1
            while place < count and times[place] < end:
                if free[place] < nodes:
                    break
                place += 1
            else:
                known[nodes] = (seconds, start)
                return start
            place += 1

    def reserve(self, start: float, end: float, nodes: int) -> None:
        """Take nodes out of a span; what lies before the present is left out."""
        times, free = self.times, self.free
        if end <= times[0]:
            return
        first = self._step_at(max(start, times[0]))
        last = len(times) if end == NEVER else self._step_at(end)
        for place in range(first, last):
            free[place] -= nodes

    def window_seconds(self, nodes: int) -> float:
        """Seconds from now for which at least `nodes` are free."""
        for time, free in zip(self.times, self.free, strict=True):
            if free < nodes:
                return time - self.times[0]
        return NEVER

    def _step_at(self, time: float) -> int:
        """Index of a step that begins at a time, made if need be."""
        times = self.times
        place = bisect_left(times, time)
        if place == len(times) or times[place] != time:
            times.insert(place, time)
            self.free.insert(place, self.free[place - 1])
        return place


class ConservativeBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._profile: Profile | None = None

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._profile = None

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Reservations serve one purpose: to find what they leave to jobs behind them. So a pass makes
        none behind the last job that is small enough for the free nodes; and where all were made
        and nothing but arrivals happened since, they stand and only what `arrived` is planned.
        """
        pending = state.pending
        depth = min(len(pending), state.scheduler.backfill_jobs)
        first = len(pending) - len(arrived)
        profile, started = self._profile, []
        behind = profile is not None and first > 0
        if behind and {entry[3] for entry in pending[first:]} == set(arrived):
            assert profile is not None
            profile.advance(state.now)
            places = range(first, depth)
        else:
            started = start_in_order(state)
            last = self._last(state)
            self._profile = None
            if last <= 0:
                return started
            profile, places = profile_of(state), range(last + 1)
            scheduler = state.scheduler
            exact = not scheduler.end_window_seconds and scheduler.backfill_window_seconds == NEVER
            # Such plans stay right while time passes and jobs start.
            if last == len(pending) - 1 and exact:
                self._profile = profile
        chosen = [place for place in places if self._plan(state, profile, pending[place][3])]
        jobs = state.taken(chosen)
        for job in jobs:
            state.begin(job)
        return started + jobs

    def window_seconds(self, state: SchedulerState, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > state.free:
            return 0.0
        profile = profile_of(state)
        for entry in state.pending[: state.scheduler.backfill_jobs]:
            self._plan(state, profile, entry[3])
        return profile.window_seconds(nodes)

    def _last(self, state: SchedulerState) -> int:
        """Place of the last job that could start now; 0 for none but the head.

        What is reserved behind it decides nothing.
        """
        last = min(len(state.pending), state.scheduler.backfill_jobs) - 1
        while last > 0 and state.need[state.pending[last][3]] > state.free:
            last -= 1
        return last

    def _plan(self, state: SchedulerState, profile: Profile, job: int) -> bool:
        """Reserve nodes for a job; whether it starts now."""
        nodes, limit = state.need[job], state.limit[job]
        start = profile.earliest(nodes, limit)
        scheduler = state.scheduler
        if start > state.now + scheduler.backfill_window_seconds:
            return False
        end, step = start + limit, scheduler.backfill_resolution_seconds
        if step and start > state.now:
            # Slurm rounds a reservation's start down too, but on nodes that are busy until then.
            end = max(start, end // step * step)
        profile.reserve(start, end, nodes)
        return start <= state.now


def profile_of(state: SchedulerState) -> Profile:
    """Nodes that will be free if every running job uses its whole limit and none starts."""
    need, running = state.need, state.running
    profile, window = Profile(state.now, state.free), state.scheduler.end_window_seconds
    if not window:
        for release, job in running:
            profile.free_from(release, need[job])
        return profile
    place = 0
    while place < len(running):
        last, nodes = running[place][0] + window, 0
        while place < len(running) and running[place][0] <= last:
            release, job = running[place]
            nodes += need[job]
            place += 1
        profile.free_from(release, nodes)
        window *= 2
    return profile


class Table(Profile):
    """Nodes that no pending job has reserved, as bits."""

    def open(self, start: float, end: float) -> tuple[int, float | None]:
        """Nodes free of reservations from `start` to `end`, and when the table changes next."""
        found, change = -1, None
        for time, until, nodes in zip(self.times, [*self.times[1:], NEVER], self.free, strict=True):
            if until <= start:
                continue
            if change is None and until < NEVER:
                change = until
            if time > end:
                break
            found &= nodes
        return found, change

    def reserve_all(self, start: float, end: float, nodes: int) -> bool:
        """Take nodes out of a span; False, and nothing taken, where one of them is not open.

        As in Slurm, a reservation that begins at the span's very end is in its way.
        """
        first, last = self._step_at(max(start, self.times[0])), self._step_at(end)
        if any(nodes & ~self.free[place] for place in range(first, last + 1)):
            return False
        for place in range(first, last):
            self.free[place] &= ~nodes
        return True


class NamedBackfill(ConservativeBackfill):
    """Plans every pending job anew in each pass."""

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes."""
        started = start_in_order(state)
        table, last, chosen = Table(state.now, state.all_nodes), self._last(state), []
        for place in range(last + 1 if last > 0 else 0):
            job = state.pending[place][3]
            if nodes := self._nodes_now(state, table, job):
                state.begin(job, nodes)
                chosen.append(place)
        return started + state.taken(chosen)

    def _nodes_now(self, state: SchedulerState, table: Table, job: int) -> int:
        """Nodes on which a job starts now; 0 if it is planned for later or not at all."""
        need, limit, now = state.need[job], state.limit[job], state.now
        step = state.scheduler.backfill_resolution_seconds
        at: float | None = now
        while at is not None:
            tried = at
            open_nodes, at = table.open(tried, tried + limit)
            if open_nodes.bit_count() < need:
                continue
            start, nodes = _will_run(state, open_nodes, need)
            if not nodes:
                return 0
            start = max(start, tried)
            if start <= now:
                return nodes
            if at is not None and start > at:
                continue
            if start > now + state.scheduler.backfill_window_seconds:
                return 0
            begin, end = start, start + limit
            if step:
                begin, end = begin // step * step, end // step * step
            if table.reserve_all(begin, end, nodes):
                return 0
            at = start if start > tried else at
        return 0


def _will_run(state: SchedulerState, open_nodes: int, need: int) -> tuple[float, int]:
    """Earliest time at which so many of the open nodes are free by the limits, and the nodes."""
    free = open_nodes & state.free_nodes
    if free.bit_count() >= need:
        return state.now, best_fit(free, need)
    window = state.scheduler.end_window_seconds
    running = [(end, state.held[job]) for end, job in state.running if state.held[job] & open_nodes]
    place = 0
    while place < len(running):
        last = running[place][0] + window
        while place < len(running) and running[place][0] <= last:
            end, nodes = running[place]
            free |= nodes & open_nodes
            place += 1
        window *= 2
        if free.bit_count() >= need:
            return end, best_fit(free, need)
    return NEVER, 0


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
        if backfill not in ("easy", "conservative"):
            raise ClusterError(f"backfill = {backfill!r} must be 'easy' or 'conservative'")
        conservative = NamedBackfill if state.scheduler.named_nodes else ConservativeBackfill
        self._planner = EasyBackfill() if backfill == "easy" else conservative()
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
