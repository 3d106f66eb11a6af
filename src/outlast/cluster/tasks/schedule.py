"""Schedules: the times of all tasks and transfers, and shared bandwidth.

Transfers are flows. A flow goes through several resources at one rate, and may have a cap. Rates
are max-min fair: none can grow without taking from a flow that has no more (Bertsekas and Gallager,
Data Networks, section 6.5.2; *progressive filling*). Flows of a better level are served before all
others, as a copier with bandwidth caps can do it and a file system by itself cannot. `fair_rates`
gives the rates of one moment. `Fluid` lets time pass and knows when a flow ends.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.cluster.tasks.graph import Graph, Option


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

    def flow_of(self, number: int) -> Flow:
        """Flow of an activity that moves bytes."""
        activity, names = self.graph.activities[number], list(self.graph.machine.bytes_per_s)
        via = tuple(names[resource] for resource in activity.via)
        return Flow(via, activity.cap_bytes_per_s, self.levels[number])

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All tasks and movements by start."""
        nodes = self._node_numbers()
        found = []
        for number, activity in enumerate(self.graph.activities):
            times = (self.starts[number], self.work_ends[number], self.ends[number])
            group, held = self.option(number).group, nodes.get(number, ())
            found.append(Row(activity.name, activity.kind, *times, group, held))
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
        free = [list(range(count)) for count in self.graph.machine.nodes.values()]
        running: list[tuple[float, int]] = []
        numbers = range(len(self.starts))
        for number in sorted(numbers, key=lambda n: (self.starts[n], self.ends[n])):
            option = self.option(number)
            # What takes no time holds no nodes.
            if not option.nodes or self.ends[number] <= self.starts[number]:
                continue
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
    vias = [tuple({names[via] for via in flow.via}) for flow in flows]
    for level in sorted({flow.level for flow in flows}):
        chosen = [number for number, flow in enumerate(flows) if flow.level == level]
        caps = [flows[number].cap_bytes_per_s for number in chosen]
        found = filled([vias[number] for number in chosen], caps, [1] * len(chosen), left)
        for number, rate in zip(chosen, found, strict=True):
            rates[number] = rate
            for item in vias[number]:
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


@dataclass
class _Class:
    """Flows with the same resources and cap, which always have the same rate.

    Attributes:
        via: Numbers of the resources.
        cap_bytes_per_s: Of each flow.
        served_bytes: How much each of its flows could have moved since it was last without any.
        ends: Heap of (`served_bytes` when the flow will be done, flow).
        rate: Bytes per second of each flow now.
        times: When the rate changed.
        rates: To what it changed then.
    """

    via: tuple[int, ...]
    cap_bytes_per_s: float
    served_bytes: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    rate: float = 0.0
    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Fluid:
    """Flows that share resources max-min fairly while time passes.

    Flows are counted by class, so that an event costs as much as there are classes, however many
    flows there are.

    Args:
        capacities: Bytes per second by resource number.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now_seconds = 0.0
        self._capacities = list(capacities)
        self._numbers: dict[tuple[tuple[int, ...], float], int] = {}
        self._classes: list[_Class] = []
        self._active: set[int] = set()
        self._known: dict[tuple[tuple[int, int], ...], list[float]] = {}
        # Of each flow its class, begin and end.
        self._lives: dict[int, tuple[int, float, float]] = {}

    def add(self, flow: int, via: tuple[int, ...], cap_bytes_per_s: float, size: float) -> None:
        """A flow of `size` bytes begins now; `flow` is its number, which comes back from `advance`.

        Call `share` after the last one that begins now.
        """
        number = self._numbers.setdefault((via, cap_bytes_per_s), len(self._classes))
        if number == len(self._classes):
            self._classes.append(_Class(via, cap_bytes_per_s))
        kind = self._classes[number]
        if not kind.ends:
            kind.served_bytes = 0.0
            self._active.add(number)
        heapq.heappush(kind.ends, (kind.served_bytes + size, flow))
        self._lives[flow] = (number, self.now_seconds, math.inf)

    def share(self) -> None:
        """Share the bandwidth anew among the flows that are there now."""
        active = sorted(self._active)
        kinds = [self._classes[number] for number in active]
        counts = [len(kind.ends) for kind in kinds]
        key = tuple(zip(active, counts, strict=True))
        rates = self._known.get(key)
        if rates is None:
            vias, caps = [kind.via for kind in kinds], [kind.cap_bytes_per_s for kind in kinds]
            rates = filled(vias, caps, counts, self._capacities)
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            self._known[key] = rates
        for kind, rate in zip(kinds, rates, strict=True):
            if rate != kind.rate:
                kind.rate = rate
                if kind.times and kind.times[-1] == self.now_seconds:
                    kind.rates[-1] = rate
                else:
                    kind.times.append(self.now_seconds)
                    kind.rates.append(rate)

    def next_end(self) -> float:
        """End of the next flow to end if none begins before; infinite without flows."""
        soonest = math.inf
        for number in self._active:
            kind = self._classes[number]
            if kind.rate:
                soonest = min(soonest, (kind.ends[0][0] - kind.served_bytes) / kind.rate)
        return self.now_seconds + max(soonest, 0.0)

    def advance(self, now_seconds: float) -> list[int]:
        """Let time pass, at most until `next_end`; returns the flows that have ended.

        Call `share` when flows have ended or begun.
        """
        elapsed = now_seconds - self.now_seconds
        self.now_seconds = now_seconds
        done: list[int] = []
        for number in sorted(self._active):
            kind = self._classes[number]
            kind.served_bytes += kind.rate * elapsed
            # What rounding leaves of a flow is done too, or time would stand still.
            reached = kind.served_bytes * (1 + _NOTHING) + kind.rate * now_seconds * 1e-15
            while kind.ends and kind.ends[0][0] <= reached:
                flow = heapq.heappop(kind.ends)[1]
                self._lives[flow] = (number, self._lives[flow][1], now_seconds)
                done.append(flow)
            if not kind.ends:
                self._active.discard(number)
                # Whoever begins next finds no rate left over from these.
                kind.rate = 0.0
                if kind.times and kind.times[-1] < now_seconds:
                    kind.times.append(now_seconds)
                    kind.rates.append(0.0)
        return done

    def profile(self, flow: int) -> tuple[Segment, ...]:
        """Rate of a flow over time, from its beginning to its end."""
        number, start, end = self._lives[flow]
        times, rates = self._classes[number].times, self._classes[number].rates
        found: list[Segment] = []
        for at in range(bisect_right(times, start) - 1, bisect_left(times, end)):
            until = times[at + 1] if at + 1 < len(times) else math.inf
            if rates[at] and min(until, end) > max(times[at], start):
                found.append((max(times[at], start), min(until, end), rates[at]))
        return tuple(found)
