"""When what happens: the times of all tasks and transfers, and whether they are possible."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outlast.cluster.tasks.fluid import Segment
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
        """When the last task ends."""
        return max(self.ends, default=0.0)

    @property
    def gap(self) -> float:
        """How much longer it is than the lower bound, as a share of the bound, at most."""
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
    """What is impossible in a schedule, one sentence each; none where it can be carried out.

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
