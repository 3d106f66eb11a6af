"""List scheduling with insertion: one task after the other into the first gap that ends earliest.

A transfer uses the bandwidth that those placed before it leave: a max-min fair fluid in which the
earlier placed are of a better level. So nothing that was placed is ever delayed, and the rates are
what caps can bring about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.tasks.timeline import Timeline, pour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.fluid import Segment
    from outlast.cluster.tasks.graph import Activity, Graph, Option


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
    nodes = [Timeline(node) for node in graph.machine.nodes.values()]
    resources = [Timeline(value) for value in graph.machine.bytes_per_s.values()]
    starts, work_ends, ends, chosen = [0.0] * count, [0.0] * count, [0.0] * count, [0] * count
    segments: dict[int, list[Segment]] = {}
    makespan = 0.0
    for number in order:
        activity = graph.activities[number]
        ready = activity.earliest_seconds
        for source in graph.before[number]:
            ready = max(ready, ends[source])
        lines = [resources[name] for name in activity.via]
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
    activity: Activity,
    option: Option,
    ready: float,
    nodes: list[Timeline],
    lines: list[Timeline],
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
