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

    def at(self, time: float) -> int:
        """The step that a time is in."""
        return bisect_right(self.times, time) - 1

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


@dataclass(frozen=True)
class Placed:
    """Times of all activities, as in a `Schedule`."""

    starts: list[float]
    work_ends: list[float]
    ends: list[float]
    chosen: list[int]
    segments: dict[int, list[Segment]]
    makespan_seconds: float
    order: list[int]


def insert_all(
    graph: Graph, order: Sequence[int], best_seconds: float | None = None
) -> Placed | None:
    """Place all activities in an order in which each comes after those before it.

    Args:
        graph: What is to be done.
        order: Numbers of all activities.
        best_seconds: Give up, with None, once the makespan cannot be below this.
    """
    count = len(graph.activities)
    nodes = [Timeline(count) for count in graph.machine.nodes.values()]
    resources = [Timeline(rate) for rate in graph.machine.bytes_per_s.values()]
    starts, work_ends, ends, chosen = [0.0] * count, [0.0] * count, [0.0] * count, [0] * count
    segments: dict[int, list[Segment]] = {}
    makespan = 0.0
    for number in order:
        activity = graph.activities[number]
        ready = activity.earliest_seconds
        for source in graph.before[number]:
            ready = max(ready, ends[source])
        lines = [resources[via] for via in activity.via]
        if len(activity.options) == 1:
            option, place = 0, _place(activity, activity.options[0], ready, nodes, lines)
        else:
            found = [_place(activity, option, ready, nodes, lines) for option in activity.options]
            option = min(range(len(found)), key=lambda index: found[index][1])
            place = found[option]
        start, end, rates = place
        used = activity.options[option]
        starts[number], ends[number], chosen[number] = start, end, option
        work_ends[number] = start + used.seconds
        if used.nodes:
            nodes[used.group].take(start, end, used.nodes)
        if rates:
            segments[number] = rates
            for line in lines:
                for since, until, rate in rates:
                    line.take(since, until, rate)
        makespan = max(makespan, end)
        if best_seconds is not None and makespan >= best_seconds:
            return None
    return Placed(starts, work_ends, ends, chosen, segments, makespan, list(order))


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
    shortest = [_shortest(activity) for activity in graph.activities]
    heads, tails = heads_and_tails(graph)
    critical = max(map(sum, zip(heads, shortest, tails, strict=True)), default=0.0)
    bandwidth, resource = 0.0, ""
    for number, (name, rate) in enumerate(graph.machine.bytes_per_s.items()):
        users = [
            n
            for n, activity in enumerate(graph.activities)
            if activity.size_bytes and number in activity.via
        ]
        if not users:
            continue
        moved = math.fsum(graph.activities[user].size_bytes for user in users) / rate
        first = min(heads[n] + _least_work(graph.activities[n]) for n in users)
        found = first + moved + min(tails[user] for user in users)
        if found > bandwidth:
            bandwidth, resource = found, name
    nodes, group = 0.0, ""
    for number, (name, count) in enumerate(graph.machine.nodes.items()):
        # Only what can run nowhere else must run here.
        users = [
            n
            for n, activity in enumerate(graph.activities)
            if all(o.group == number for o in activity.options)
        ]
        if not users:
            continue
        sizes = {n: graph.activities[n].options for n in users}
        first, last = min(heads[n] for n in users), min(tails[n] for n in users)
        for shares in node_shares(count, {o.nodes for size in sizes.values() for o in size}):
            work = math.fsum(
                min(shares[o.nodes] * (o.seconds + graph.activities[n].flow_seconds) for o in size)
                for n, size in sizes.items()
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
    found = [{size: size / count for size in sizes}]
    found.extend(
        {
            size: 1.0 if size > count - least else size / count if size >= least else 0.0
            for size in sizes
        }
        for least in sorted(size for size in sizes if 0 < 2 * size <= count)[:_MOST_SHARES]
    )
    # Of two that take more than half, one at a time runs.
    found.append(
        {size: 1.0 if 2 * size > count else 0.5 if 2 * size == count else 0.0 for size in sizes}
    )
    return found


def heads_and_tails(graph: Graph) -> tuple[list[float], list[float]]:
    """The earliest that each activity can start, and the least that comes after its end."""
    shortest = [_shortest(activity) for activity in graph.activities]
    # The earliest that each activity can start.
    heads = [0.0] * len(shortest)
    for number in graph.order:
        earliest = graph.activities[number].earliest_seconds
        before = (heads[item] + shortest[item] for item in graph.before[number])
        heads[number] = max([earliest, *before])
    # The least that comes after the end of each activity.
    tails = [0.0] * len(shortest)
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
    return _Run(graph, priorities).run()


class _Run:
    def __init__(self, graph: Graph, priorities: Sequence[float] | None) -> None:
        count = len(graph.activities)
        self.graph = graph
        self.key = (
            [float(n) for n in range(count)] if priorities is None else [-p for p in priorities]
        )
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
        for number, count in enumerate(self.missing):
            if not count:
                self._released(number)
        self._start_what_fits()
        while True:
            next_flow = self.fluid.next_end()
            next_clock = self.clock[0][0] if self.clock else math.inf
            now = min(next_flow, next_clock)
            if math.isinf(now):
                break
            self.now = now
            for flow in self.fluid.advance(now):
                self._ended(flow)
            while self.clock and self.clock[0][0] <= now:
                _, number, earliest = heapq.heappop(self.clock)
                if earliest:
                    self._queue(number)
                else:
                    self._worked(number)
            self._start_what_fits()
        return Schedule(
            self.graph,
            self.starts,
            self.work_ends,
            self.ends,
            self.chosen,
            "fair",
            self._rates,
            [0] * len(self.starts),
        )

    def _rates(self, number: int) -> tuple[tuple[float, float, float], ...]:
        return self.fluid.profile(number) if self.graph.activities[number].size_bytes else ()

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
            if not fitting:
                heapq.heappop(heads)
                continue
            # The first may be another than when the round began: what ends at once releases more.
            ended |= self._start(heapq.heappop(heap)[1], fitting)
            if heap:
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
    order = by_priority(graph, ranks)
    best = insert_all(graph, order)
    assert best is not None
    fair = run_greedily(graph, ranks) if _sharing_is_quick(graph) else None
    found = best.makespan_seconds
    shortest = found if fair is None else min(found, fair.makespan_seconds)
    enough = bound * (1 + _ENOUGH)
    if effort and shortest > enough:
        tries = effort // len(graph.activities)
        best = _bettered(graph, best, fair, enough, tries, seed=seed)
    if fair is not None and fair.makespan_seconds < best.makespan_seconds * (1 - _ENOUGH):
        return replace(fair, bound_seconds=bound)
    segments = best.segments
    levels = [0] * len(best.order)
    for level, number in enumerate(best.order):
        levels[number] = level
    return Schedule(
        graph,
        best.starts,
        best.work_ends,
        best.ends,
        best.chosen,
        "capped",
        lambda number: tuple(segments.get(number, ())),
        levels,
        bound,
    )


def by_priority(graph: Graph, priorities: Sequence[float]) -> list[int]:
    """The order of activities by falling priority in which each comes after those before it."""
    missing = [len(sources) for sources in graph.before]
    ready = [(-priorities[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[1]
        order.append(number)
        for target in graph.after[number]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (-priorities[target], target))
    return order


def _sharing_is_quick(graph: Graph) -> bool:
    """True if fair sharing is quickly simulated: it takes long with very many kinds of flows."""
    if len(graph.activities) <= SMALL:
        return True
    return (
        len({(activity.via, activity.cap_bytes_per_s) for activity in graph.activities})
        <= FEW_KINDS
    )


def _bettered(
    graph: Graph, best: Placed, fair: Schedule | None, enough: float, tries: int, *, seed: int
) -> Placed:
    """The best schedule that a bounded search finds; as good as `best` at least."""
    order = best.order
    chance = random.Random(seed)
    for starts in [*([] if fair is None else [fair.starts]), best.starts][:tries]:
        other = by_priority(graph, [-start for start in starts])
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
