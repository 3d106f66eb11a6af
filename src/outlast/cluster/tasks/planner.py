"""The plan of a graph: list scheduling by upward rank, bettered while that is cheap."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from outlast.cluster.tasks.bounds import lower_bounds, upward_ranks
from outlast.cluster.tasks.forward import run_greedily
from outlast.cluster.tasks.insertion import Placed, insert_all
from outlast.cluster.tasks.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.graph import Graph

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
    return _schedule(graph, best, bound)


def by_priority(graph: Graph, priorities: Sequence[float]) -> list[int]:
    """The order of activities by falling priority in which each comes after those before it."""
    missing = [len(name) for name in graph.before]
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


def _schedule(graph: Graph, placed: Placed, bound: float) -> Schedule:
    segments = placed.segments
    levels = [0] * len(placed.order)
    for level, number in enumerate(placed.order):
        levels[number] = level
    return Schedule(
        graph,
        placed.starts,
        placed.work_ends,
        placed.ends,
        placed.chosen,
        "capped",
        lambda number: tuple(segments.get(number, ())),
        levels,
        bound,
    )


def _sharing_is_quick(graph: Graph) -> bool:
    """Whether fair sharing is quickly simulated: it takes long with very many kinds of flows."""
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
