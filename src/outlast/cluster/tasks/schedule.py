"""Schedules: the times of all tasks and transfers, shared bandwidth, and checks of feasibility.

Transfers are flows. A flow goes through several resources at one rate, and may have a cap. Rates
are max-min fair: none can grow without taking from a flow that has no more (Bertsekas and Gallager,
Data Networks, section 6.5.2; *progressive filling*). Flows of a better level are served before all
others, as a copier with bandwidth caps can do it and a file system by itself cannot. `fair_rates`
gives the rates of one moment. `Fluid` lets time pass and knows when a flow ends.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outlast.cluster.tasks.graph import Activity, Graph, Option


Sharing = Literal["capped", "fair"]
"""Who says how fast a transfer is: caps that the executor keeps, or the file system itself."""
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Row:
    """One task or movement in a schedule.

    Attributes:
        name: Of the task or edge.
        kind: Of the task; "move" for an edge's data.
        start_seconds: From the beginning of the schedule.
        work_end_seconds: When its work ends and its bytes begin to move.
        end_seconds: When all is done.
        group: Number of the group of nodes that it holds; -1: none.
        nodes: Which nodes of the group; none where it takes no time.
    """

    name: str
    kind: str
    start_seconds: float
    work_end_seconds: float
    end_seconds: float
    group: int
    nodes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Schedule:
    """A plan.

    Attributes:
        graph: What is planned.
        starts: Seconds, by activity of the graph.
        work_ends: Seconds, by activity.
        ends: Seconds, by activity.
        chosen: The number of its place (`Activity.options`), by activity.
        sharing: "capped": rates are those of caps that the executor keeps; "fair": rates are
            what a max-min fair file system gives.
        rate_of: The rates of an activity's bytes over time.
        levels: By activity; transfers of a smaller level get bandwidth first, equal ones share.
        bound_seconds: No schedule of this graph is shorter.
    """

    graph: Graph
    starts: Sequence[float]
    work_ends: Sequence[float]
    ends: Sequence[float]
    chosen: Sequence[int]
    sharing: Sharing
    rate_of: Callable[[int], tuple[Segment, ...]]
    levels: Sequence[int]
    bound_seconds: float = 0.0

    @property
    def makespan_seconds(self) -> float:
        """End of the last task."""
        return max(self.ends, default=0.0)

    @property
    def gap(self) -> float:
        """Excess over the lower bound, as a share of the bound, at most."""
        return self.makespan_seconds / self.bound_seconds - 1.0 if self.bound_seconds else 0.0

    def option(self, number: int) -> Option:
        """The place that an activity has been given."""
        return self.graph.activities[number].options[self.chosen[number]]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All tasks and movements by start."""
        nodes = self._node_numbers()
        found = [
            Row(
                activity.name,
                activity.kind,
                self.starts[number],
                self.work_ends[number],
                self.ends[number],
                self.option(number).group,
                nodes.get(number, ()),
            )
            for number, activity in enumerate(self.graph.activities)
        ]
        return tuple(sorted(found, key=lambda row: (row.start_seconds, row.end_seconds)))

    def row(self, name: str) -> Row:
        """The row of a task, or of an edge by its `Edge.name`."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    def _node_numbers(self) -> dict[int, tuple[int, ...]]:
        """Nodes of the group for each activity; the smallest that are free when it starts."""
        found: dict[int, tuple[int, ...]] = {}
        counts = list(self.graph.machine.nodes.values())
        free = [list(range(count)) for count in counts]
        running: list[tuple[float, int]] = []
        # What takes no time holds no nodes.
        by_start = sorted(
            (
                n
                for n in range(len(self.starts))
                if self.option(n).nodes and self.ends[n] > self.starts[n]
            ),
            key=lambda number: (self.starts[number], self.ends[number]),
        )
        for number in by_start:
            option = self.option(number)
            late = self.starts[number] + _SAME * max(self.makespan_seconds, 1.0)
            while running and running[0][0] <= late:
                _, ended = heapq.heappop(running)
                for node in found[ended]:
                    heapq.heappush(free[self.option(ended).group], node)
            found[number] = tuple(
                heapq.heappop(free[option.group])
                for _ in range(min(option.nodes, len(free[option.group])))
            )
            heapq.heappush(running, (self.ends[number], number))
        return found


def problems(schedule: Schedule) -> list[str]:
    """Violations in a schedule, one sentence each; none where it can be carried out.

    Checks the order of edges, the nodes of each group, the capacity of each resource, caps, and
    that every transfer moves all of its bytes.
    """
    graph = schedule.graph
    slack = _SAME * max(schedule.makespan_seconds, 1e-9)
    return [
        *_order_problems(schedule, slack),
        *_node_problems(schedule, slack),
        *_rate_problems(graph, schedule, slack),
    ]


def _order_problems(schedule: Schedule, slack: float) -> Iterable[str]:
    graph = schedule.graph
    for number, activity in enumerate(graph.activities):
        start, end = schedule.starts[number], schedule.ends[number]
        if start < activity.earliest_seconds - slack:
            yield f'"{activity.name}" starts at {start:g} s, before {activity.earliest_seconds:g} s'
        if abs(schedule.work_ends[number] - start - schedule.option(number).seconds) > slack:
            seconds = schedule.option(number).seconds
            yield f'the work of "{activity.name}" does not take its {seconds} s'
        if end < schedule.work_ends[number] - slack:
            yield f'"{activity.name}" ends before its work does'
        for source in graph.before[number]:
            if start < schedule.ends[source] - slack:
                yield f'"{activity.name}" starts before "{graph.activities[source].name}" has ended'


def _node_problems(schedule: Schedule, slack: float) -> Iterable[str]:
    for group, (name, count) in enumerate(schedule.graph.machine.nodes.items()):
        changes: list[tuple[float, int]] = []
        for number in range(len(schedule.starts)):
            option = schedule.option(number)
            if (
                option.group == group
                and schedule.ends[number] - schedule.starts[number] > 2 * slack
            ):
                changes.append((schedule.starts[number] + slack, option.nodes))
                changes.append((schedule.ends[number] - slack, -option.nodes))
        used = 0
        for time, change in sorted(changes):
            used += change
            if used > count:
                yield f'{used} nodes of "{name}" are used at {time:g} s, and it has {count}'
                return


def _rate_problems(graph: Graph, schedule: Schedule, slack: float) -> Iterable[str]:
    capacities = list(graph.machine.bytes_per_s.items())
    changes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number, activity in enumerate(graph.activities):
        if not activity.size_bytes:
            continue
        segments = schedule.rate_of(number)
        yield from _flow_problems(activity, segments, schedule, number, slack)
        for start, end, rate in segments:
            for resource in activity.via:
                changes[resource] += [(start, rate), (end, -rate)]
    for resource, found in changes.items():
        name, capacity = capacities[resource]
        rate = 0.0
        found.sort()
        for (time, change), (until, _) in itertools.pairwise(found):
            rate += change
            if rate > capacity * (1 + 1e-6) and until - time > slack:
                yield f'"{name}" carries {rate:g} bytes/s at {time:g} s, and it has {capacity:g}'
                break


def _flow_problems(
    each: Activity, segments: Sequence[Segment], schedule: Schedule, number: int, slack: float
) -> Iterable[str]:
    moved = math.fsum((end - start) * rate for start, end, rate in segments)
    rounding = 1e-6 * each.size_bytes + slack * each.cap_bytes_per_s
    if abs(moved - each.size_bytes) > rounding:
        yield f'"{each.name}" moves {moved:g} of {each.size_bytes:g} bytes'
    if any(rate > each.cap_bytes_per_s * (1 + 1e-6) for _, _, rate in segments):
        yield f'"{each.name}" is faster than its cap of {each.cap_bytes_per_s:g} bytes/s'
    if segments and (
        segments[0][0] < schedule.work_ends[number] - slack
        or segments[-1][1] > schedule.ends[number] + slack
    ):
        yield f'"{each.name}" moves bytes when it is not its time'


Segment = tuple[float, float, float]
"""Seconds from, seconds to, bytes per second."""
_NOTHING = 1e-12
"""Share of a capacity below which what is left is rounding."""
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Flow:
    """A transfer at one moment.

    Attributes:
        via: Names of the resources that it goes through.
        cap_bytes_per_s: Most that it takes.
        level: Flows of a smaller level are served first; equal ones share.
    """

    via: tuple[str, ...]
    cap_bytes_per_s: float = math.inf
    level: float = 0.0


def fair_rates(flows: Sequence[Flow], bytes_per_s: Mapping[str, float]) -> list[float]:
    """The max-min fair rates of flows, level by level.

    Args:
        flows: Each goes through a resource or has a cap.
        bytes_per_s: Capacity by resource.

    Returns:
        Bytes per second of each flow.

    Raises:
        ClusterError: For a flow that nothing limits, or a resource that is not known.
    """
    names = {name: number for number, name in enumerate(bytes_per_s)}
    for flow in flows:
        for name in flow.via:
            if name not in names:
                raise ClusterError(f'a flow goes through "{name}", which has no bandwidth given')
        if not flow.via and math.isinf(flow.cap_bytes_per_s):
            raise ClusterError("a flow has neither a resource nor a cap: nothing limits its rate")
    left = list(bytes_per_s.values())
    rates = [0.0] * len(flows)
    for level in sorted({flow.level for flow in flows}):
        chosen = [number for number, flow in enumerate(flows) if flow.level == level]
        vias = [tuple({names[via] for via in flows[number].via}) for number in chosen]
        caps = [flows[number].cap_bytes_per_s for number in chosen]
        found = filled(vias, caps, [1] * len(chosen), left)
        for number, via, rate in zip(chosen, vias, found, strict=True):
            rates[number] = rate
            for item in via:
                left[item] = max(left[item] - rate, 0.0)
    return rates


def filled(
    vias: Sequence[tuple[int, ...]],
    caps: Sequence[float],
    counts: Sequence[int],
    capacities: Sequence[float],
) -> list[float]:
    """Progressive filling: all rates grow alike until a cap or a full resource stops some.

    Args:
        vias: Resources of each class of flows.
        caps: Most that one flow of each class takes.
        counts: Flows in each class; a class without flows gets rate 0.
        capacities: Of the resources.

    Returns:
        The rate of one flow of each class.
    """
    rates = [0.0] * len(vias)
    left = list(capacities)
    users = [0] * len(left)
    through: list[list[int]] = [[] for _ in left]
    by_cap = sorted((number for number, count in enumerate(counts) if count), key=caps.__getitem__)
    for number in by_cap:
        for item in vias[number]:
            users[item] += counts[number]
            through[item].append(number)
    growing = set(by_cap)
    next_cap = 0
    while growing:
        share, full = math.inf, -1
        for item, count in enumerate(users):
            if count and left[item] < share * count:
                share, full = left[item] / count, item
        while by_cap[next_cap] not in growing:
            next_cap += 1
        if caps[by_cap[next_cap]] <= share:
            share, stopped = caps[by_cap[next_cap]], [by_cap[next_cap]]
        else:
            stopped = [number for number in through[full] if number in growing]
        for number in stopped:
            growing.discard(number)
            rates[number] = share
            for item in vias[number]:
                users[item] -= counts[number]
                rest = left[item] - share * counts[number]
                left[item] = rest if rest > _NOTHING * capacities[item] else 0.0
    return rates


class Fluid:
    """Flows that share resources max-min fairly while time passes.

    Flows with the same resources and cap always have the same rate; such a class counts how much
    each of its flows could have moved since the beginning, so that an event costs as much as there
    are classes, however many flows there are.

    Args:
        capacities: Bytes per second by resource number.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now_seconds = 0.0
        self._capacities = list(capacities)
        self._classes: dict[tuple[tuple[int, ...], float], int] = {}
        self._vias: list[tuple[int, ...]] = []
        self._caps: list[float] = []
        self._counts: list[int] = []
        self._served: list[float] = []
        # Per class, a heap of (served when the flow will be done, flow).
        self._ends: list[list[tuple[float, int]]] = []
        self._rates: list[float] = []
        self._histories: list[tuple[list[float], list[float]]] = []
        self._active: set[int] = set()
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        self._lives: dict[int, tuple[int, float, float]] = {}

    def add(self, flow: int, via: tuple[int, ...], cap_bytes_per_s: float, size: float) -> None:
        """A flow of `size` bytes begins now; `flow` is its number, which comes back from `advance`.

        Call `share` after the last one that begins now.
        """
        key = (via, cap_bytes_per_s)
        number = self._classes.get(key)
        if number is None:
            number = self._classes[key] = len(self._vias)
            self._vias.append(via)
            self._caps.append(cap_bytes_per_s)
            self._counts.append(0)
            self._served.append(0.0)
            self._ends.append([])
            self._rates.append(0.0)
            self._histories.append(([], []))
        if not self._counts[number]:
            self._served[number] = 0.0
            self._active.add(number)
        heapq.heappush(self._ends[number], (self._served[number] + size, flow))
        self._counts[number] += 1
        self._lives[flow] = (number, self.now_seconds, math.inf)

    def share(self) -> None:
        """Share the bandwidth anew among the flows that are there now."""
        active = sorted(self._active)
        counts = tuple(self._counts[number] for number in active)
        key = (tuple(active), counts)
        rates = self._known.get(key)
        if rates is None:
            vias = [self._vias[number] for number in active]
            caps = [self._caps[number] for number in active]
            rates = filled(vias, caps, counts, self._capacities)
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            self._known[key] = rates
        for number, rate in zip(active, rates, strict=True):
            if rate != self._rates[number]:
                self._rates[number] = rate
                times, values = self._histories[number]
                if times and times[-1] == self.now_seconds:
                    values[-1] = rate
                else:
                    times.append(self.now_seconds)
                    values.append(rate)

    def next_end(self) -> float:
        """End of the next flow to end if none begins before; infinite without flows."""
        soonest = math.inf
        for number in self._active:
            rate = self._rates[number]
            if rate:
                left = (self._ends[number][0][0] - self._served[number]) / rate
                soonest = min(soonest, left)
        return self.now_seconds + max(soonest, 0.0)

    def advance(self, now_seconds: float) -> list[int]:
        """Let time pass, at most until `next_end`; returns the flows that have ended.

        Call `share` when flows have ended or begun.
        """
        elapsed = now_seconds - self.now_seconds
        self.now_seconds = now_seconds
        done: list[int] = []
        for number in sorted(self._active):
            ends, rate = self._ends[number], self._rates[number]
            self._served[number] += rate * elapsed
            # What rounding leaves of a flow is done too, or time would stand still.
            reached = self._served[number] * (1 + _NOTHING) + rate * now_seconds * 1e-15
            while ends and ends[0][0] <= reached:
                flow = heapq.heappop(ends)[1]
                self._counts[number] -= 1
                self._lives[flow] = (number, self._lives[flow][1], now_seconds)
                done.append(flow)
            if not ends:
                self._active.discard(number)
                # Whoever begins next finds no rate left over from these.
                self._rates[number] = 0.0
                times, values = self._histories[number]
                if times and times[-1] < self.now_seconds:
                    times.append(self.now_seconds)
                    values.append(0.0)
        return done

    def profile(self, flow: int) -> tuple[Segment, ...]:
        """Rate of a flow over time, from its beginning to its end."""
        number, start, end = self._lives[flow]
        times, values = self._histories[number]
        found: list[Segment] = []
        at = bisect_right(times, start) - 1
        while at < len(times) and times[at] < end:
            until = times[at + 1] if at + 1 < len(times) else math.inf
            if values[at] and min(until, end) > max(times[at], start):
                found.append((max(times[at], start), min(until, end), values[at]))
            at += 1
        return tuple(found)
