"""Tasks of a run, the data that flow between them, and the machine that they share.

    machine = Machine(nodes={"nodes": 4}, bytes_per_s={"pfs": 2e9, "disk": 4e9})
    graph = Graph(
        [
            Task("train 1", "train", seconds=3600, nodes=4),
            Task("save 1", "save", nodes=4, size_bytes=40e9, via=("disk",)),
            Task("drain 1", "drain", size_bytes=40e9, via=("disk", "pfs"), cap_bytes_per_s=1e9),
        ],
        [Edge("train 1", "save 1"), Edge("save 1", "drain 1")],
        machine,
    )

A task holds its nodes from its start to its end: first it works for `seconds`, then it moves
`size_bytes` through its resources. The data of an edge begin to move when its source has ended, and
its target may start when they have arrived.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Kind = Literal["stage-in", "train", "save", "drain", "evaluate", "prune", "stage-out", "move"]
"""What a task is; "move" is the way of an edge's data, which no task may be."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Place:
    """Alternative place of a task.

    Attributes:
        group: Group of nodes.
        nodes: How many of them.
        seconds: What its work takes there.
    """

    group: str
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do.

    Attributes:
        name: Its own, within the graph.
        kind: One of `KINDS`, without "move".
        seconds: What its work takes.
        nodes: Nodes that nobody else uses meanwhile; 0: none, as for a copy in the background.
        group: Whose nodes.
        size_bytes: Bytes that it moves after its work.
        via: Resources that every one of these bytes goes through.
        cap_bytes_per_s: Most that it moves per second, whatever is free.
        earliest_seconds: It does not start before.
        elsewhere: Other places for it; the plan takes the one that ends first.
    """

    name: str
    kind: Kind
    seconds: float = 0.0
    nodes: int = 0
    group: str = "nodes"
    size_bytes: float = 0.0
    via: tuple[str, ...] = ()
    cap_bytes_per_s: float = math.inf
    earliest_seconds: float = 0.0
    elsewhere: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """All places where it may run, its own first."""
        return (Place(self.group, self.nodes, self.seconds), *self.elsewhere)


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` needs what `source` has made.

    Attributes:
        source: Name of a task.
        target: Name of another.
        size_bytes: Bytes that must move between them; 0: only the order counts.
        via: Resources that every one of these bytes goes through.
        cap_bytes_per_s: Most that moves per second.
    """

    source: str
    target: str
    size_bytes: float = 0.0
    via: tuple[str, ...] = ()
    cap_bytes_per_s: float = math.inf

    @property
    def name(self) -> str:
        """Name of the movement of its data."""
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True)
class Machine:
    """Shared resources of the tasks.

    Attributes:
        nodes: Number of nodes by group; the nodes of a group are alike.
        bytes_per_s: Bandwidth by resource: the shared file system, the network, all node-local
            disks together.
    """

    nodes: Mapping[str, int]
    bytes_per_s: Mapping[str, float]

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        for name, count in self.nodes.items():
            if count < 1:
                raise ClusterError(f'nodes["{name}"] = {count}: a group has at least one node')
        for name, rate in self.bytes_per_s.items():
            if not (rate > 0 and math.isfinite(rate)):
                raise ClusterError(
                    f'bytes_per_s["{name}"] = {rate}: a bandwidth is a finite number above 0'
                )


@dataclass(frozen=True, slots=True)
class Option:
    """A place with the group as a number."""

    group: int
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Activity:
    """A task, or the way of an edge's data, with numbers instead of names.

    Attributes:
        name: Of the task or edge.
        kind: Of the task; "move" for an edge.
        options: Places; the first is the task's own.
        size_bytes: What it moves, after its work.
        via: Numbers of the resources.
        cap_bytes_per_s: Most that it could move per second if it were alone.
        earliest_seconds: It does not start before.
    """

    name: str
    kind: Kind
    options: tuple[Option, ...]
    size_bytes: float
    via: tuple[int, ...]
    cap_bytes_per_s: float
    earliest_seconds: float

    @property
    def flow_seconds(self) -> float:
        """Duration of its transfer when it is alone."""
        return self.size_bytes / self.cap_bytes_per_s if self.size_bytes else 0.0


@dataclass(frozen=True)
class Graph:
    """Tasks, their order and data, and the machine; checked when it is made.

    Attributes:
        tasks: In any order.
        edges: At most one between two tasks.
        machine: What they share.
        activities: The tasks in their order, then the edges that move bytes in theirs.
        before: For each activity, those that must have ended.
        after: For each activity, those that wait for it.
        order: Activities, each after all those before it.

    Raises:
        ClusterError: With one sentence, for a cycle, a name that is unknown or there twice, a
            negative figure, more nodes than a group has, or bytes that no resource and no cap
            limits.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    machine: Machine
    activities: tuple[Activity, ...] = field(init=False, repr=False, compare=False)
    before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    after: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __init__(self, tasks: Iterable[Task], edges: Iterable[Edge], machine: Machine) -> None:
        put = object.__setattr__
        put(self, "tasks", tuple(tasks))
        put(self, "edges", tuple(edges))
        put(self, "machine", machine)
        groups = {name: number for number, name in enumerate(machine.nodes)}
        resources = {name: number for number, name in enumerate(machine.bytes_per_s)}
        rates = list(machine.bytes_per_s.values())
        rated = _Rated(resources, rates)
        numbers: dict[str, int] = {}
        found: list[Activity] = []
        for task in self.tasks:
            if task.name in numbers:
                raise ClusterError(f'two tasks have the name "{task.name}": rename one of them')
            numbers[task.name] = len(found)
            options = tuple(_option(task, place, machine, groups) for place in task.places)
            found.append(_activity(task.name, task.kind, task, options, rated))
        before: list[list[int]] = [[] for _ in found]
        seen: set[tuple[int, int]] = set()
        for edge in self.edges:
            ends = (_task_of(edge, edge.source, numbers), _task_of(edge, edge.target, numbers))
            if ends in seen:
                raise ClusterError(f'the edge "{edge.name}" is there twice: give it once')
            seen.add(ends)
            move = _activity(edge.name, "move", edge, (Option(-1, 0, 0.0),), rated)
            if move.size_bytes:
                before[ends[1]].append(len(found))
                before.append([ends[0]])
                found.append(move)
            else:
                before[ends[1]].append(ends[0])
        after: list[list[int]] = [[] for _ in found]
        for target, sources in enumerate(before):
            for source in sources:
                after[source].append(target)
        put(self, "activities", tuple(found))
        put(self, "before", tuple(map(tuple, before)))
        put(self, "after", tuple(map(tuple, after)))
        put(self, "order", tuple(_sorted(found, before, after)))

    @property
    def total_bytes(self) -> float:
        """Bytes that move in all."""
        return math.fsum(activity.size_bytes for activity in self.activities)


class _Rated(NamedTuple):
    """Resources by name, and their bandwidths by number."""

    numbers: Mapping[str, int]
    rates: Sequence[float]


def _option(task: Task, place: Place, machine: Machine, groups: Mapping[str, int]) -> Option:
    where = f'task "{task.name}"'
    _not_negative(where, "seconds", place.seconds)
    if place.nodes < 0:
        raise ClusterError(f"{where} has nodes = {place.nodes}: give 0 or more")
    if place.nodes == 0:
        return Option(-1, 0, place.seconds)
    if place.group not in groups:
        raise ClusterError(
            f'{where} asks for nodes of "{place.group}", which the machine has not: it has '
            f"{_listed(machine.nodes)}"
        )
    if place.nodes > machine.nodes[place.group]:
        raise ClusterError(
            f'{where} asks for {place.nodes} nodes of "{place.group}", which has '
            f"{machine.nodes[place.group]}"
        )
    return Option(groups[place.group], place.nodes, place.seconds)


def _activity(
    name: str, kind: Kind, what: Task | Edge, options: tuple[Option, ...], rated: _Rated
) -> Activity:
    where = f'edge "{name}"' if isinstance(what, Edge) else f'task "{name}"'
    if isinstance(what, Task) and (kind not in KINDS or kind == "move"):
        raise ClusterError(f'{where} is of kind "{kind}": give one of {_listed(KINDS[:-1])}')
    earliest = what.earliest_seconds if isinstance(what, Task) else 0.0
    _not_negative(where, "size_bytes", what.size_bytes)
    _not_negative(where, "earliest_seconds", earliest)
    if not what.cap_bytes_per_s > 0:
        raise ClusterError(
            f"{where} has cap_bytes_per_s = {what.cap_bytes_per_s}: give a number above 0, or "
            "leave it out for no cap"
        )
    for item in what.via:
        if item not in rated.numbers:
            raise ClusterError(
                f'{where} goes through "{item}", which the machine has not: it has '
                f"{_listed(rated.numbers)}"
            )
    via = tuple(sorted({rated.numbers[resource] for resource in what.via}))
    cap = min([what.cap_bytes_per_s, *(rated.rates[number] for number in via)])
    if what.size_bytes and math.isinf(cap):
        raise ClusterError(
            f"{where} moves bytes at no known rate: name the resources that they go through (via)"
        )
    return Activity(name, kind, options, float(what.size_bytes), via, cap, earliest)


def _not_negative(where: str, name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ClusterError(f"{where} has {name} = {value}: give a finite number, 0 or more")


def _task_of(edge: Edge, name: str, numbers: Mapping[str, int]) -> int:
    if name not in numbers:
        raise ClusterError(f'the edge "{edge.name}" names "{name}", and no task is called so')
    return numbers[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _sorted(
    activities: list[Activity], before: list[list[int]], after: list[list[int]]
) -> list[int]:
    """A topological order, of those possible the one nearest to the given order."""
    missing = [len(row) for row in before]
    ready = [number for number, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for target in after[number]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, target)
    if len(order) < len(activities):
        done = set(order)
        # The names along one circle among the activities that are not done.
        at = next(number for number in range(len(activities)) if number not in done)
        path: list[int] = []
        while at not in path:
            path.append(at)
            at = next(item for item in before[at] if item not in done)
        circle = path[path.index(at) :] + [at]
        raise ClusterError(
            "tasks wait for each other in a circle: "
            + " -> ".join(
                [
                    activities[item].name
                    for item in reversed(circle)
                    if activities[item].kind != "move"
                ]
            )
        )
    return order
