"""Ranks of tasks, and what no schedule can be shorter than."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from outlast.cluster.tasks.graph import Activity, Graph

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
    """How long it takes from the start of each activity to the end of all, when nothing is shared.

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
    """What no schedule can be shorter than, however rates are chosen."""
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
    return _heads(graph, shortest), _tails(graph, shortest)


def _shortest(activity: Activity) -> float:
    return _least_work(activity) + activity.flow_seconds


def _least_work(activity: Activity) -> float:
    return min(option.seconds for option in activity.options)


def _heads(graph: Graph, shortest: list[float]) -> list[float]:
    """The earliest that each activity can start."""
    heads = [0.0] * len(shortest)
    for number in graph.order:
        earliest = graph.activities[number].earliest_seconds
        before = (heads[item] + shortest[item] for item in graph.before[number])
        heads[number] = max([earliest, *before])
    return heads


def _tails(graph: Graph, shortest: list[float]) -> list[float]:
    """The least that comes after the end of each activity."""
    tails = [0.0] * len(shortest)
    for number in reversed(graph.order):
        tails[number] = max((shortest[n] + tails[n] for n in graph.after[number]), default=0.0)
    return tails
