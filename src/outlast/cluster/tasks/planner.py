"""The plan of a graph: list scheduling by upward rank, improved while that is cheap.

List scheduling with insertion: one task after the other into the first gap that ends earliest. A
transfer uses the bandwidth that those placed before it leave: a max-min fair fluid in which the
earlier placed are of a better level. So nothing that was placed is ever delayed, and the rates are
what caps can bring about. `run_greedily` simulates what happens without a plan: whatever is ready
starts, and transfers share max-min fairly.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.cluster.tasks.schedule import Fluid, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from outlast.cluster.tasks.graph import Activity, Graph, Option
    from outlast.cluster.tasks.schedule import Segment


_NOTHING = 1e-12


class Timeline:
    """Remaining amount of a resource from each moment on.

    Attributes:
        times: When a step begins; the first is 0.
        left: What is left from there to the next step; the last step has no end.
    """

    def __init__(self, capacity: float) -> None:
        self.times = [0.0]
        self.left = [float(capacity)]
        self._rounding = _NOTHING * capacity
        # For each amount that was asked for, the time before which less is left everywhere.
        self._full_until: dict[float, float] = {}

    def take(self, start: float, end: float, amount: float) -> None:
        """Use `amount` from `start` to `end`."""
        if end <= start:
            return
        first = self._split(start)
        last = self._split(end)
        left = self.left
        for step in range(first, last):
            rest = left[step] - amount
            left[step] = rest if rest > self._rounding else 0.0
        self._join(last)
        self._join(first)

    def first_fit(self, amount: float, start: float, seconds: float) -> float:
        """The first time, from `start` on, with `amount` left for so many seconds."""
        times, left = self.times, self.left
        begun = start
        start = max(start, self._full_until.get(amount, 0.0))
        step = bisect_right(times, start) - 1
        count = len(times)
        untouched = begun <= self._full_until.get(amount, 0.0)
        while True:
            while left[step] < amount:
                step += 1
                start = times[step]
            if untouched:
                # Nothing is given back, so no later search need look at what was full.
                self._full_until[amount] = start
                untouched = False
            end = start + seconds
            step += 1
            while step < count and times[step] < end and left[step] >= amount:
                step += 1
            if step == count or times[step] >= end:
                return start

    def _split(self, time: float) -> int:
        """Make a step begin at `time`; returns its number."""
        step = bisect_right(self.times, time) - 1
        if self.times[step] == time:
            return step
        self.times.insert(step + 1, time)
        self.left.insert(step + 1, self.left[step])
        return step + 1

    def _join(self, step: int) -> None:
        """Make one step of this and the one before if they are alike."""
        if step and self.left[step] == self.left[step - 1]:
            del self.times[step]
            del self.left[step]


def pour(timelines: Sequence[Timeline], cap: float, size: float, start: float) -> list[Segment]:
    """Send a flow through the remaining bandwidth from `start` on, as fast as it can go.

    Args:
        timelines: What is left of each resource that it goes through.
        cap: Most bytes per second; finite.
        size: Bytes; more than 0.
        start: Seconds.

    Returns:
        Its rates over time; the last segment ends when all bytes have moved.
    """
    steps = [bisect_right(timeline.times, start) - 1 for timeline in timelines]
    found: list[Segment] = []
    now, rest = start, size
    while True:
        rate, until, blocked = cap, math.inf, 0.0
        for number, timeline in enumerate(timelines):
            step = steps[number]
            left = timeline.left[step]
            end = timeline.times[step + 1] if step + 1 < len(timeline.times) else math.inf
            rate = min(rate, left)
            until = min(until, end)
            if not left:
                blocked = max(blocked, end)
        if rate > 0:
            end = now + rest / rate
            done = end <= until
            end = end if done else until
            if found and found[-1][1] == now and found[-1][2] == rate:
                found[-1] = (found[-1][0], end, rate)
            else:
                found.append((now, end, rate))
            if done:
                return found
            rest -= rate * (until - now)
            if rest <= _NOTHING * size:
                return found
            now = until
            for number, timeline in enumerate(timelines):
                step = steps[number]
                if step + 1 < len(timeline.times) and timeline.times[step + 1] <= now:
                    steps[number] += 1
        else:
            now = blocked
            steps = [bisect_right(timeline.times, now) - 1 for timeline in timelines]


def insert_all(
    graph: Graph, order: Sequence[int], best_seconds: float = math.inf
) -> Schedule | None:
    """Place all activities in an order in which each comes after those before it.

    Args:
        graph: What is to be done.
        order: Numbers of all activities.
        best_seconds: Give up, with None, once the makespan cannot be below this.
    """
    count = len(graph.activities)
    nodes = [Timeline(count) for count in graph.machine.nodes.values()]
    resources = [Timeline(rate) for rate in graph.machine.bytes_per_s.values()]
    starts, work_ends, ends = [0.0] * count, [0.0] * count, [0.0] * count
    chosen, levels = [0] * count, [0] * count
    segments: dict[int, list[Segment]] = {}
    for level, number in enumerate(order):
        activity = graph.activities[number]
        ready = activity.earliest_seconds
        for source in graph.before[number]:
            ready = max(ready, ends[source])
        lines = [resources[via] for via in activity.via]
        found = [_place(activity, option, ready, nodes, lines) for option in activity.options]
        option = min(range(len(found)), key=lambda index: found[index][1])
        start, end, rates = found[option]
        if end >= best_seconds:
            return None
        used = activity.options[option]
        starts[number], ends[number], chosen[number] = start, end, option
        work_ends[number], levels[number] = start + used.seconds, level
        if used.nodes:
            nodes[used.group].take(start, end, used.nodes)
        if rates:
            segments[number] = rates
            for line in lines:
                for since, until, rate in rates:
                    line.take(since, until, rate)

    def rate_of(number: int) -> tuple[Segment, ...]:
        return tuple(segments.get(number, ()))

    return Schedule(graph, starts, work_ends, ends, chosen, "capped", rate_of, levels)


def _place(
    activity: Activity, option: Option, ready: float, nodes: list[Timeline], lines: list[Timeline]
) -> tuple[float, float, list[Segment]]:
    """Start, end and rates of an activity that may start at `ready`, in one place."""
    if not option.nodes:
        work_end = ready + option.seconds
        if not activity.size_bytes:
            return ready, work_end, []
        rates = pour(lines, activity.cap_bytes_per_s, activity.size_bytes, work_end)
        # It need not begin before there is bandwidth for it.
        return rates[0][0] - option.seconds, rates[-1][1], rates
    group = nodes[option.group]
    seconds = option.seconds
    start = group.first_fit(option.nodes, ready, seconds)
    if not activity.size_bytes:
        return start, start + seconds, []
    while True:
        rates = pour(lines, activity.cap_bytes_per_s, activity.size_bytes, start + seconds)
        end = rates[-1][1]
        # With the bytes it takes longer than its work alone: look whether the gap is long enough.
        later = group.first_fit(option.nodes, start, end - start)
        if later == start:
            return start, end, rates
        start = later


_MOST_SHARES = 8


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the makespan, in seconds.

    Attributes:
        critical_path_seconds: The longest chain with all bandwidth for itself.
        bandwidth_seconds: The busiest resource: what comes first at the least, its bytes over its
            bandwidth, what comes last at the least.
        nodes_seconds: The busiest group, in the same way: node-seconds over nodes, or what cannot
            run side by side.
        slowest: Name of the resource or group that the longest of the last two is of.
    """

    critical_path_seconds: float
    bandwidth_seconds: float
    nodes_seconds: float
    slowest: str

    @property
    def seconds(self) -> float:
        """The longest of them."""
        return max(self.critical_path_seconds, self.bandwidth_seconds, self.nodes_seconds)


def upward_ranks(graph: Graph) -> list[float]:
    """Time from the start of each activity to the end of all, when nothing is shared.

    ``rank(u) = w(u) + max over v after u of (c(u, v) + rank(v))`` with the mean w over the places
    of u (Topcuoglu, Hariri and Wu 2002, Performance-effective and low-complexity task scheduling
    for heterogeneous computing, equation 5); movements of data are activities of their own here.
    """
    ranks = [0.0] * len(graph.activities)
    for number in reversed(graph.order):
        activity = graph.activities[number]
        rest = max((ranks[item] for item in graph.after[number]), default=0.0)
        work = math.fsum(option.seconds for option in activity.options) / len(activity.options)
        ranks[number] = work + activity.flow_seconds + rest
    return ranks


def lower_bounds(graph: Graph) -> Bounds:
    """Lower bounds of any schedule, however rates are chosen."""
    activities = graph.activities
    heads, tails = heads_and_tails(graph)
    shortest = map(_shortest, activities)
    critical = max(map(sum, zip(heads, shortest, tails, strict=True)), default=0.0)
    bandwidth, resource = 0.0, ""
    for number, (name, rate) in enumerate(graph.machine.bytes_per_s.items()):
        users = [n for n, user in enumerate(activities) if user.size_bytes and number in user.via]
        if not users:
            continue
        moved = math.fsum(activities[n].size_bytes for n in users) / rate
        first = min(heads[n] + _least_work(activities[n]) for n in users)
        found = first + moved + min(tails[n] for n in users)
        if found > bandwidth:
            bandwidth, resource = found, name
    nodes, group = 0.0, ""
    for number, (name, count) in enumerate(graph.machine.nodes.items()):
        # Only what can run nowhere else must run here.
        users = [
            n for n, user in enumerate(activities) if {o.group for o in user.options} == {number}
        ]
        if not users:
            continue
        first, last = min(heads[n] for n in users), min(tails[n] for n in users)
        for shares in node_shares(count, {o.nodes for n in users for o in activities[n].options}):
            work = math.fsum(
                min(shares[o.nodes] * (o.seconds + user.flow_seconds) for o in user.options)
                for user in (activities[n] for n in users)
            )
            if first + work + last > nodes:
                nodes, group = first + work + last, name
    return Bounds(critical, bandwidth, nodes, resource if bandwidth >= nodes else group)


def node_shares(count: int, sizes: Collection[int]) -> list[dict[int, float]]:
    """Ways to count what a task takes of a group, so that at most 1 can be taken at a time.

    The first is its nodes over all nodes. In the others, tasks that leave less than e nodes free
    count whole and those of less than e nodes not at all, as nothing that counts fits beside the
    former (dual feasible functions; Fekete and Schepers 2001, New classes of fast lower bounds for
    bin packing problems).

    Args:
        count: Nodes of the group.
        sizes: Nodes that tasks take of it.
    """
    plain = {size: size / count for size in sizes}
    small = sorted(size for size in sizes if 0 < 2 * size <= count)[:_MOST_SHARES]
    found = [plain]
    for least in small:
        counted = {size: share if size >= least else 0.0 for size, share in plain.items()}
        found.append({size: 1.0 if size > count - least else counted[size] for size in sizes})
    # Of two that take more than half, one at a time runs.
    halves = {size: 0.5 if 2 * size == count else 0.0 for size in sizes}
    return [*found, {size: 1.0 if 2 * size > count else halves[size] for size in sizes}]


def heads_and_tails(graph: Graph) -> tuple[list[float], list[float]]:
    """The earliest that each activity can start, and the least that comes after its end."""
    shortest = [_shortest(activity) for activity in graph.activities]
    heads, tails = [0.0] * len(shortest), [0.0] * len(shortest)
    for task in graph.order:
        earliest = graph.activities[task].earliest_seconds
        heads[task] = max([earliest, *(heads[n] + shortest[n] for n in graph.before[task])])
    for task in reversed(graph.order):
        tails[task] = max((shortest[n] + tails[n] for n in graph.after[task]), default=0.0)
    return heads, tails


def _shortest(activity: Activity) -> float:
    return _least_work(activity) + activity.flow_seconds


def _least_work(activity: Activity) -> float:
    return min(option.seconds for option in activity.options)


def run_greedily(graph: Graph, priorities: Sequence[float] | None = None) -> Schedule:
    """Let time pass: at each event, start what is ready and fits, and share the bandwidth anew.

    Args:
        graph: What is to be done.
        priorities: By activity; larger ones start first. None: the order of the graph.

    Returns:
        A schedule in which rates are those of a max-min fair file system.
    """
    return _GreedyRun(graph, priorities).run()


class _GreedyRun:
    def __init__(self, graph: Graph, priorities: Sequence[float] | None) -> None:
        count = len(graph.activities)
        self.graph = graph
        self.key = list(range(count)) if priorities is None else [-p for p in priorities]
        self.free = list(graph.machine.nodes.values())
        self.fluid = Fluid(list(graph.machine.bytes_per_s.values()))
        self.missing = [len(sources) for sources in graph.before]
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.work_ends, self.chosen = [0.0] * count, [0] * count
        # Activities of the same demand wait in one heap: if the first does not fit, none does.
        self.waiting: dict[tuple[tuple[int, int], ...], list[tuple[float, int]]] = {}
        # (seconds, activity, whether it waits for its earliest time).
        self.clock: list[tuple[float, int, bool]] = []
        self.now = 0.0

    def run(self) -> Schedule:
        graph, fluid, clock = self.graph, self.fluid, self.clock
        for number, count in enumerate(self.missing):
            if not count:
                self._released(number)
        self._start_what_fits()
        while (now := min(fluid.next_end(), clock[0][0] if clock else math.inf)) < math.inf:
            self.now = now
            for flow in fluid.advance(now):
                self._ended(flow)
            while clock and clock[0][0] <= now:
                _, number, earliest = heapq.heappop(clock)
                if earliest:
                    self._queue(number)
                else:
                    self._worked(number)
            self._start_what_fits()

        def rate_of(number: int) -> tuple[Segment, ...]:
            return fluid.profile(number) if graph.activities[number].size_bytes else ()

        times = (self.starts, self.work_ends, self.ends)
        return Schedule(graph, *times, self.chosen, "fair", rate_of, [0] * len(self.starts))

    def _released(self, number: int) -> None:
        """All that was before an activity has ended."""
        earliest = self.graph.activities[number].earliest_seconds
        if earliest > self.now:
            heapq.heappush(self.clock, (earliest, number, True))
        else:
            self._queue(number)

    def _queue(self, number: int) -> None:
        options = self.graph.activities[number].options
        demand = tuple((option.group, option.nodes) for option in options)
        heapq.heappush(self.waiting.setdefault(demand, []), (self.key[number], number))

    def _start_what_fits(self) -> None:
        # An activity without work or bytes ends at once and may release others.
        while self._start_round():
            pass
        self.fluid.share()

    def _start_round(self) -> bool:
        heads = sorted((heap[0], demand) for demand, heap in self.waiting.items() if heap)
        ended = False
        while heads:
            demand = heads[0][1]
            fitting = [
                option
                for option, (group, nodes) in enumerate(demand)
                if not nodes or self.free[group] >= nodes
            ]
            heap = self.waiting[demand]
            if fitting:
                # The first may be another than when the round began: what ends at once releases
                # more.
                ended |= self._start(heapq.heappop(heap)[1], fitting)
            if fitting and heap:
                heapq.heapreplace(heads, (heap[0], demand))
            else:
                heapq.heappop(heads)
        return ended

    def _start(self, number: int, fitting: list[int]) -> bool:
        """Start an activity; returns whether it has ended at once."""
        options = self.graph.activities[number].options
        chosen = min(fitting, key=lambda number: options[number].seconds)
        option = options[chosen]
        self.starts[number], self.chosen[number] = self.now, chosen
        self.work_ends[number] = self.now + option.seconds
        if option.nodes:
            self.free[option.group] -= option.nodes
        if option.seconds:
            heapq.heappush(self.clock, (self.work_ends[number], number, False))
            return False
        return self._worked(number)

    def _worked(self, number: int) -> bool:
        """The work of an activity is done; returns whether it has ended."""
        activity = self.graph.activities[number]
        if activity.size_bytes:
            self.fluid.add(number, activity.via, activity.cap_bytes_per_s, activity.size_bytes)
            return False
        self._ended(number)
        return True

    def _ended(self, number: int) -> None:
        self.ends[number] = self.now
        option = self.graph.activities[number].options[self.chosen[number]]
        if option.nodes:
            self.free[option.group] += option.nodes
        for target in self.graph.after[number]:
            self.missing[target] -= 1
            if not self.missing[target]:
                self._released(target)


EFFORT = 20_000
"""Activities that are placed in search of a better order; what is larger gets fewer tries."""
SMALL, FEW_KINDS = 2_000, 50
"""Of activities, and of kinds of flows in larger graphs: what sharing fairly is tried for, too."""
_ENOUGH = 1e-9


def plan(graph: Graph, *, effort: int = EFFORT, seed: int = 0) -> Schedule:
    """A short schedule, with the bound that says how short any could be.

    The order is that of the upward ranks (HEFT); each task goes into the gap in which it ends
    first, and each transfer gets the bandwidth that those before it leave. What starts greedily
    with fair sharing is tried too, and then better orders are searched for: the schedule is laid
    from its end, and tasks are moved in the order. The shortest that was found is returned.

    Args:
        graph: What is to be done.
        effort: About how many activities are placed in search of a better order; 0: no search.
        seed: Of the search; the same seed gives the same plan.

    Returns:
        A schedule whose transfers have caps ("capped"), or one that needs none ("fair").
    """
    bound = lower_bounds(graph).seconds
    ranks = upward_ranks(graph)
    order = graph.ordered([-rank for rank in ranks])
    best = insert_all(graph, order)
    assert best is not None
    # Fair sharing is quickly simulated, but with very many kinds of flows.
    kinds = {(activity.via, activity.cap_bytes_per_s) for activity in graph.activities}
    fair = None
    if len(graph.activities) <= SMALL or len(kinds) <= FEW_KINDS:
        fair = run_greedily(graph, ranks)
    shortest = min(found.makespan_seconds for found in (best, fair) if found is not None)
    enough = bound * (1 + _ENOUGH)
    if effort and shortest > enough:
        tries = effort // len(graph.activities)
        best = _bettered(order, best, fair, enough=enough, tries=tries, seed=seed)
    if fair is not None and fair.makespan_seconds < best.makespan_seconds * (1 - _ENOUGH):
        best = fair
    return replace(best, bound_seconds=bound)


def _bettered(
    order: list[int], best: Schedule, fair: Schedule | None, *, enough: float, tries: int, seed: int
) -> Schedule:
    """The best schedule that a bounded search finds; as good as `best`, of `order`, at least."""
    graph, chance = best.graph, random.Random(seed)
    for starts in [*([] if fair is None else [fair.starts]), best.starts][:tries]:
        other = graph.ordered(starts)
        found = insert_all(graph, other, best.makespan_seconds)
        if found is not None:
            best, order = found, other
    for _ in range(tries - 2):
        if best.makespan_seconds <= enough:
            break
        other = _moved(graph, order, chance)
        found = insert_all(graph, other, best.makespan_seconds * (1 + _ENOUGH))
        if found is not None:
            order = other
            if found.makespan_seconds < best.makespan_seconds:
                best = found
    return best


def _moved(graph: Graph, order: list[int], chance: random.Random) -> list[int]:
    """One activity, or a few, at another place in the order that its edges allow."""
    moved = list(order)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(moved))
        number = moved.pop(at)
        before, after = graph.before[number], graph.after[number]
        low = max((moved.index(number) + 1 for number in before), default=0)
        high = min((moved.index(pair) for pair in after), default=len(moved))
        moved.insert(chance.randint(low, high), number)
    return moved
