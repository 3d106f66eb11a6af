"""What a picture of a schedule shows in which lane: nodes, transfers, and use of bandwidth."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.cluster.tasks.schedule import Row, Schedule

KINDS_SHOWN = ("stage-in", "train", "save", "drain", "move", "evaluate", "prune", "stage-out")

MOST_STEPS = 1000
"""Steps of a resource's use; more are averaged."""

MOST_LANES = 12
"""Lanes of one group of nodes, or of transfers; the rest is said to be left out."""


@dataclass(frozen=True)
class Bar:
    """A stretch in a lane.

    Attributes:
        start_seconds: Its start.
        end_seconds: Its end.
        kind: Of its tasks.
        words: What it is called.
        count: How many tasks it stands for.
    """

    start_seconds: float
    end_seconds: float
    kind: str
    words: str
    count: int = 1


@dataclass(frozen=True)
class Lane:
    """A labelled row of bars.

    Attributes:
        label: Its name.
        bars: By start; they do not overlap.
        left_out: Lanes that are not shown after this one.
    """

    label: str
    bars: tuple[Bar, ...]
    left_out: int = 0


@dataclass(frozen=True)
class Use:
    """How much of a resource is used over time.

    Attributes:
        label: Its name.
        bytes_per_s: Its bandwidth.
        kinds: The kinds of the layers, lowest first.
        times: Seconds; steps begin at each.
        layers: For each kind, bytes per second from each time to the next.
        busy: Share of the whole time that its bandwidth is used for.
    """

    label: str
    bytes_per_s: float
    kinds: tuple[str, ...]
    times: tuple[float, ...]
    layers: tuple[tuple[float, ...], ...]
    busy: float


def node_lanes(schedule: Schedule) -> list[Lane]:
    """One lane for all nodes that do the same, group by group."""
    names = list(schedule.graph.machine.nodes)
    by_node: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in schedule.rows:
        for node in row.nodes:
            by_node[row.group, node].append(row)
    found = []
    for group, name in enumerate(names):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for node in range(schedule.graph.machine.nodes[name]):
            alike[tuple(row.name for row in by_node[group, node])].append(node)
        lanes = sorted(alike.values())
        for nodes in lanes[:MOST_LANES]:
            rows = by_node[group, nodes[0]]
            left_out = len(lanes) - MOST_LANES if nodes is lanes[:MOST_LANES][-1] else 0
            word = name.removesuffix("s") if len(nodes) == 1 else name
            found.append(Lane(f"{word} {_ranges(nodes)}", _bars(rows), max(left_out, 0)))
    return found


def transfer_lanes(schedule: Schedule) -> list[Lane]:
    """What needs no nodes, by what it is; each in a lane of its like that is free."""
    sorts: dict[str, list[list[Row]]] = {}
    free: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for row in schedule.rows:
        if row.nodes:
            continue
        label = _sort(row)
        lanes, ends = sorts.setdefault(label, []), free[label]
        if ends and ends[0][0] <= row.start_seconds:
            number = heapq.heappop(ends)[1]
            lanes[number].append(row)
        else:
            number = len(lanes)
            lanes.append([row])
        heapq.heappush(ends, (row.end_seconds, number))
    most = max(MOST_LANES // max(len(sorts), 1), 1)
    found = []
    for label, lanes in sorts.items():
        shown = lanes[: max(most, MOST_LANES - sum(map(len, sorts.values())) + len(lanes))]
        for number, lane in enumerate(shown):
            left_out = len(lanes) - len(shown) if lane is shown[-1] else 0
            found.append(Lane(label if not number else "", _bars(lane), left_out))
    return found


def _sort(row: Row) -> str:
    """What a transfer is, with where it goes if its name says so."""
    if row.kind == "move":
        return "read"
    _, to, place = row.name.partition(" to ")
    return f"{row.kind}{to}{place}" if row.kind == "drain" else row.kind


def uses(schedule: Schedule) -> list[Use]:
    """How busy each resource is, by kind."""
    changes: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
    for number, activity in enumerate(schedule.graph.activities):
        kind = KINDS_SHOWN.index(activity.kind)
        for start, end, rate in schedule.rate_of(number) if activity.size_bytes else ():
            for resource in activity.via:
                changes[resource] += [(start, kind, rate), (end, kind, -rate)]
    found = []
    for resource, (name, capacity) in enumerate(schedule.graph.machine.bytes_per_s.items()):
        if found_changes := changes[resource]:
            found.append(_use(name, capacity, found_changes, schedule.makespan_seconds))
    return found


def _use(name: str, capacity: float, changes: list[tuple[float, int, float]], end: float) -> Use:
    kinds = sorted({kind for _, kind, _ in changes})
    now = dict.fromkeys(kinds, 0.0)
    times: list[float] = [0.0]
    layers: dict[int, list[float]] = {kind: [0.0] for kind in kinds}
    moved = 0.0
    for time, together in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        moved += sum(now.values()) * (time - times[-1])
        for _, kind, rate in together:
            # What rounding leaves when all flows have ended is none.
            now[kind] = now[kind] + rate if now[kind] + rate > 1e-9 * capacity else 0.0
        if time > times[-1]:
            times.append(time)
            for kind in kinds:
                layers[kind].append(now[kind])
        else:
            for kind in kinds:
                layers[kind][-1] = now[kind]
    if len(times) > MOST_STEPS:
        layers = {kind: _averaged(times, layers[kind], end) for kind in kinds}
        times = [number * end / MOST_STEPS for number in range(MOST_STEPS)]
    return Use(
        name,
        capacity,
        tuple(KINDS_SHOWN[kind] for kind in kinds),
        tuple(times),
        tuple(tuple(layers[kind]) for kind in kinds),
        moved / (capacity * end) if end else 0.0,
    )


def _averaged(times: Sequence[float], rates: Sequence[float], end: float) -> list[float]:
    """The mean rate in each of `MOST_STEPS` stretches of equal length."""
    width = end / MOST_STEPS
    found = [0.0] * MOST_STEPS
    for number, (start, rate) in enumerate(zip(times, rates, strict=True)):
        until = min(times[number + 1] if number + 1 < len(times) else end, end)
        last = min(int(until / width), MOST_STEPS - 1) if rate else -1
        for step in range(int(start / width), last + 1):
            within = min(until, (step + 1) * width) - max(start, step * width)
            found[step] += rate * max(within, 0.0) / width
    return found


def _bars(rows: Iterable[Row]) -> tuple[Bar, ...]:
    return tuple(Bar(row.start_seconds, row.end_seconds, row.kind, row.name) for row in rows)


def merged(bars: Sequence[Bar], shortest_seconds: float) -> list[Bar]:
    """Bars too short to be seen, made one with neighbours of their kind."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if (
            last is not None
            and last.kind == bar.kind
            and bar.start_seconds - last.end_seconds < shortest_seconds
            and bar.end_seconds - bar.start_seconds < shortest_seconds
        ):
            count = last.count + 1
            words = f"{count} x {bar.kind}"
            found[-1] = Bar(last.start_seconds, bar.end_seconds, bar.kind, words, count)
        else:
            found.append(bar)
    return found


def _ranges(nodes: Sequence[int]) -> str:
    """``1-4, 7``: nodes counted from 1."""
    parts = []
    for _, run in itertools.groupby(enumerate(nodes), key=lambda item: item[1] - item[0]):
        found = [node + 1 for _, node in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts) if len(parts) < 4 else f"{', '.join(parts[:3])}, ..."
