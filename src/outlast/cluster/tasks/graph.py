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

The graph of a run, or of one link of it, comes from the run's figures (`run_graph`) or a TOML file
with the keys of `RunFigures`, `TierFigures`, `Evaluation`, `Task` and `Edge`:

    [run]                              # or [nodes] with [[task]] and [[edge]]
    steps = 6000
    step_seconds = 2.0
    nodes = 8
    save_bytes = 120e9
    save_every_steps = 600

    [bytes_per_s]
    "shared file system" = 1e9
    "node-local disks" = 8e9

    [[tier]]
    name = "pfs"
    via = ["node-local disks", "shared file system"]
    keep = 3

    [evaluation]
    every = 2
    seconds = 600
    nodes = 2
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import math
import tomllib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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
        numbers: dict[str, int] = {}
        found: list[Activity] = []
        for task in self.tasks:
            if task.name in numbers:
                raise ClusterError(f'two tasks have the name "{task.name}": rename one of them')
            numbers[task.name] = len(found)
            where = f'task "{task.name}"'
            if task.kind not in KINDS or task.kind == "move":
                raise ClusterError(
                    f'{where} is of kind "{task.kind}": give one of {_listed(KINDS[:-1])}'
                )
            options = tuple(_option(where, place, machine) for place in task.places)
            found.append(_activity(where, task, options, machine))
        before: list[list[int]] = [[] for _ in found]
        seen: set[tuple[str, str]] = set()
        for edge in self.edges:
            for name in (edge.source, edge.target):
                if name not in numbers:
                    raise ClusterError(
                        f'the edge "{edge.name}" names "{name}", and no task is called so'
                    )
            if (edge.source, edge.target) in seen:
                raise ClusterError(f'the edge "{edge.name}" is there twice: give it once')
            seen.add((edge.source, edge.target))
            source, target = numbers[edge.source], numbers[edge.target]
            move = _activity(f'edge "{edge.name}"', edge, (Option(-1, 0, 0.0),), machine)
            if move.size_bytes:
                before[target].append(len(found))
                before.append([source])
                found.append(move)
            else:
                before[target].append(source)
        after: list[list[int]] = [[] for _ in found]
        for number, sources in enumerate(before):
            for source in sources:
                after[source].append(number)
        put(self, "activities", tuple(found))
        put(self, "before", tuple(map(tuple, before)))
        put(self, "after", tuple(map(tuple, after)))
        # Of the possible orders the one nearest to the given order.
        put(self, "order", tuple(self.ordered([0.0] * len(found))))
        if len(self.order) < len(found):
            raise ClusterError(f"tasks wait for each other in a circle: {self._circle()}")

    def ordered(self, keys: Sequence[float]) -> list[int]:
        """Activities, each after all those before it; of those possible, the smallest key first."""
        missing = [len(sources) for sources in self.before]
        ready = [(keys[number], number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[1]
            order.append(number)
            for target in self.after[number]:
                missing[target] -= 1
                if not missing[target]:
                    heapq.heappush(ready, (keys[target], target))
        return order

    def _circle(self) -> str:
        """The names along one circle among the activities that no order has."""
        done = set(self.order)
        at = next(number for number in range(len(self.activities)) if number not in done)
        path: list[int] = []
        while at not in path:
            path.append(at)
            at = next(item for item in self.before[at] if item not in done)
        circle = [self.activities[item] for item in (at, *reversed(path[path.index(at) :]))]
        return " -> ".join(item.name for item in circle if item.kind != "move")


def _option(where: str, place: Place, machine: Machine) -> Option:
    _not_negative(where, "seconds", place.seconds)
    if place.nodes < 0:
        raise ClusterError(f"{where} has nodes = {place.nodes}: give 0 or more")
    if place.nodes == 0:
        return Option(-1, 0, place.seconds)
    if place.group not in machine.nodes:
        raise ClusterError(
            f'{where} asks for nodes of "{place.group}", which the machine has not: it has '
            f"{_listed(machine.nodes)}"
        )
    if place.nodes > machine.nodes[place.group]:
        raise ClusterError(
            f'{where} asks for {place.nodes} nodes of "{place.group}", which has '
            f"{machine.nodes[place.group]}"
        )
    return Option(list(machine.nodes).index(place.group), place.nodes, place.seconds)


def _activity(
    where: str, what: Task | Edge, options: tuple[Option, ...], machine: Machine
) -> Activity:
    kind: Kind = what.kind if isinstance(what, Task) else "move"
    earliest = what.earliest_seconds if isinstance(what, Task) else 0.0
    _not_negative(where, "size_bytes", what.size_bytes)
    _not_negative(where, "earliest_seconds", earliest)
    if not what.cap_bytes_per_s > 0:
        raise ClusterError(
            f"{where} has cap_bytes_per_s = {what.cap_bytes_per_s}: give a number above 0, or "
            "leave it out for no cap"
        )
    rates = machine.bytes_per_s
    for item in what.via:
        if item not in rates:
            raise ClusterError(
                f'{where} goes through "{item}", which the machine has not: it has {_listed(rates)}'
            )
    via = tuple(number for number, name in enumerate(rates) if name in what.via)
    cap = min([what.cap_bytes_per_s, *(rates[name] for name in what.via)])
    if what.size_bytes and math.isinf(cap):
        raise ClusterError(
            f"{where} moves bytes at no known rate: name the resources that they go through (via)"
        )
    return Activity(what.name, kind, options, float(what.size_bytes), via, cap, earliest)


def _not_negative(where: str, name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ClusterError(f"{where} has {name} = {value}: give a finite number, 0 or more")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


NODES = "nodes"
EVALUATORS = "evaluators"
SHARED, NETWORK, DISKS = "shared file system", "network", "node-local disks"
MOST_SEGMENTS = 5000


@dataclass(frozen=True)
class TierFigures:
    """A place that checkpoints are copied on to.

    Attributes:
        name: For people, e.g. "pfs".
        via: Resources that the copy goes through.
        every: Every how many-th save is copied here.
        cap_bytes_per_s: Most that the copy takes.
        keep: Newest versions kept; older ones are pruned after each copy. 0: all.
    """

    name: str
    via: tuple[str, ...]
    every: int = 1
    cap_bytes_per_s: float = math.inf
    keep: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a run.

    Attributes:
        every: After every how many-th save.
        seconds: What one takes.
        nodes: Nodes of the group `EVALUATORS` that it needs; 0: it stops the training and uses its
            nodes.
        read_bytes: Read from the nearest tier that has the save; only with nodes of its own.
        read_via: Resources that this goes through.
    """

    every: int
    seconds: float
    nodes: int = 0
    read_bytes: float = 0.0
    read_via: tuple[str, ...] = (SHARED,)


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run.

    Attributes:
        steps: How many are to be done.
        step_seconds: What one takes.
        nodes: Of the run.
        save_bytes: Size of a checkpoint; 0: none is saved.
        save_every_steps: Steps between two saves.
        save_seconds: What a save takes before its bytes move, e.g. to collect them.
        save_via: Resources that a save goes through while training waits.
        tiers: Where saves are copied on to in the background, nearest first; a tier whose `every`
            is a multiple of that of the tier before copies from there.
        evaluation: None: the run is not evaluated.
        stage_in_bytes: Read before the first step.
        stage_out_bytes: Written after the last step.
        stage_via: Resources that staging goes through.
        queue_seconds: Until the nodes are there; data are staged meanwhile.
        bytes_per_s: Bandwidth by resource.
    """

    steps: int
    step_seconds: float
    nodes: int
    save_bytes: float = 0.0
    save_every_steps: int = 0
    save_seconds: float = 0.0
    save_via: tuple[str, ...] = (DISKS,)
    tiers: tuple[TierFigures, ...] = ()
    evaluation: Evaluation | None = None
    stage_in_bytes: float = 0.0
    stage_out_bytes: float = 0.0
    stage_via: tuple[str, ...] = (SHARED,)
    queue_seconds: float = 0.0
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


def run_graph(figures: RunFigures) -> Graph:
    """The tasks of a run: stage-in, segments and saves in turn, copies, evaluations, stage-out.

    Training stands still while it saves, and continues while tiers copy and other nodes evaluate. A
    copy to a tier waits for the one before to that tier.

    Raises:
        ClusterError: For figures without a meaning, with the figure's name.
    """
    _check(figures)
    return _Builder(figures).graph()


class _Builder:
    def __init__(self, figures: RunFigures) -> None:
        self.figures = figures
        self.tasks: list[Task] = []
        self.edges: list[Edge] = []
        # The copies to each tier.
        self.copies: dict[str, list[str]] = {}

    def graph(self) -> Graph:
        figures = self.figures
        before: list[str] = []
        if figures.stage_in_bytes:
            before = ["stage-in"]
            size = figures.stage_in_bytes
            self.work(Task("stage-in", "stage-in", size_bytes=size, via=figures.stage_via), [])
        interval = figures.save_every_steps if figures.save_bytes else figures.steps
        segments = -(-figures.steps // interval)
        last = ""
        for number in range(1, segments + 1):
            steps = min(interval, figures.steps - (number - 1) * interval)
            last = f"train {number}"
            task = Task(last, "train", seconds=steps * figures.step_seconds, nodes=figures.nodes)
            earliest = figures.queue_seconds if number == 1 else 0.0
            self.work(replace(task, earliest_seconds=earliest), before)
            if figures.save_bytes:
                last = self.save(number, last)
            before = [last]
            if figures.evaluation and number % figures.evaluation.every == 0:
                before = self.evaluate(number, last, figures.evaluation)
        if figures.stage_out_bytes:
            size = figures.stage_out_bytes
            out = Task("stage-out", "stage-out", size_bytes=size, via=figures.stage_via)
            self.work(out, [last])
        machine = {NODES: figures.nodes}
        if figures.evaluation and figures.evaluation.nodes:
            machine[EVALUATORS] = figures.evaluation.nodes
        return Graph(self.tasks, self.edges, Machine(machine, dict(figures.bytes_per_s)))

    def work(self, task: Task, before: list[str]) -> None:
        self.tasks.append(task)
        self.edges += [Edge(source, task.name) for source in dict.fromkeys(before)]

    def save(self, number: int, segment: str) -> str:
        """A save and the copies of it; returns the save."""
        figures = self.figures
        source = save = f"save {number}"
        task = Task(save, "save", seconds=figures.save_seconds, nodes=figures.nodes)
        size = figures.save_bytes
        self.work(replace(task, size_bytes=size, via=figures.save_via), [segment])
        for tier in figures.tiers:
            if number % tier.every:
                continue
            copy = f"drain {number} to {tier.name}"
            copies = self.copies.setdefault(tier.name, [])
            task = Task(copy, "drain", size_bytes=size, via=tier.via)
            # A copy to a tier waits for the one before to that tier.
            self.work(replace(task, cap_bytes_per_s=tier.cap_bytes_per_s), [source, *copies[-1:]])
            source = copy
            copies.append(copy)
            if tier.keep and len(copies) > tier.keep:
                old = copies[-tier.keep - 1].split()[1]
                self.work(Task(f"prune {old} from {tier.name}", "prune"), [copy])
        return save

    def evaluate(self, number: int, save: str, evaluation: Evaluation) -> list[str]:
        """An evaluation; returns what the next segment waits for."""
        name, own = f"evaluate {number}", evaluation.nodes
        task = Task(name, "evaluate", seconds=evaluation.seconds, nodes=own or self.figures.nodes)
        if not own:
            self.work(task, [save])
            return [name]
        self.tasks.append(replace(task, group=EVALUATORS))
        tier = next((tier for tier in self.figures.tiers if number % tier.every == 0), None)
        source = save if tier is None else f"drain {number} to {tier.name}"
        self.edges.append(Edge(source, name, evaluation.read_bytes, evaluation.read_via))
        return [save]


def _check(figures: RunFigures) -> None:
    if figures.steps < 1 or figures.nodes < 1:
        raise ClusterError(
            f"steps = {figures.steps} and nodes = {figures.nodes} of a run: give 1 or more"
        )
    if not (figures.step_seconds > 0 and math.isfinite(figures.step_seconds)):
        raise ClusterError(f"step_seconds = {figures.step_seconds}: give a finite number above 0")
    if figures.save_bytes:
        if figures.save_every_steps < 1:
            raise ClusterError(
                f"save_every_steps = {figures.save_every_steps} with save_bytes = "
                f"{figures.save_bytes:g}: give 1 or more"
            )
        segments = -(-figures.steps // figures.save_every_steps)
        if segments > MOST_SEGMENTS:
            raise ClusterError(
                f"{figures.steps} steps with a save after every {figures.save_every_steps} are "
                f"{segments} segments, and at most {MOST_SEGMENTS} are planned: plan one link"
            )
    for tier in figures.tiers:
        if tier.every < 1 or tier.keep < 0:
            raise ClusterError(
                f'tier "{tier.name}" has every = {tier.every} and keep = {tier.keep}: give 1 or '
                "more, and 0 or more"
            )
    if figures.evaluation and figures.evaluation.every < 1:
        raise ClusterError(f"every = {figures.evaluation.every} of the evaluation: give 1 or more")


_Made = TypeVar("_Made")
_OF_RUN = ("run", "bytes_per_s", "tier", "evaluation")
_OF_TASKS = ("nodes", "bytes_per_s", "task", "edge")


def graph_from_toml(text: str, source: str) -> Graph:
    """The graph that a file describes.

    Args:
        text: Its content.
        source: Its name, for errors.

    Raises:
        ClusterError: With the key that is wrong, unknown or missing.
    """
    content = _content(text, source)
    if "run" in content:
        return run_graph(_figures(content, source))
    _known(content, _OF_TASKS, source)
    tasks, edges = _list(content, "task", Task, source), _list(content, "edge", Edge, source)
    if not tasks:
        raise ClusterError(f"{source} has neither a [run] nor a [[task]]: give one of them")
    nodes = _table(content, "nodes", source)
    for name, count in nodes.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise ClusterError(f"{source}: {name} = {count!r} in [nodes]: give a whole number")
    return Graph(tasks, edges, Machine(nodes, _rates(content, source)))


def figures_from_toml(text: str, source: str) -> RunFigures:
    """The figures of a run that a file gives.

    Args:
        text: Its content.
        source: Its name, for errors.

    Raises:
        ClusterError: With the key that is wrong, unknown or missing, also where the file lists
            tasks in place of a run.
    """
    content = _content(text, source)
    if "run" not in content:
        raise ClusterError(f"{source} has no [run]: give the figures of the run there")
    return _figures(content, source)


def _content(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source} is no TOML file: {error}") from error


def _figures(content: Mapping[str, Any], source: str) -> RunFigures:
    _known(content, _OF_RUN, source)
    run = _table(content, "run", source)
    for key in ("tiers", "evaluation", "bytes_per_s"):
        if key in run:
            raise ClusterError(f"{source}: {key} of [run] is a table of its own in the file")
    run["tiers"] = tuple(_list(content, "tier", TierFigures, source))
    if "evaluation" in content:
        table = _table(content, "evaluation", source)
        run["evaluation"] = _made(Evaluation, table, f"{source}: [evaluation]")
    run["bytes_per_s"] = _rates(content, source)
    return _made(RunFigures, run, f"{source}: [run]")


def _rates(content: Mapping[str, Any], source: str) -> dict[str, float]:
    rates = _table(content, "bytes_per_s", source)
    for name, rate in rates.items():
        if not _is_number(rate):
            raise ClusterError(f"{source}: {name} = {rate!r} in [bytes_per_s]: give a number")
    return {name: float(rate) for name, rate in rates.items()}


def _made(kind: type[_Made], values: Mapping[str, Any], where: str) -> _Made:
    """A dataclass from a table: strict about names, numbers, words and lists of words."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _known(values, fields, where)
    for name, key in fields.items():
        no_default = key.default is dataclasses.MISSING
        if no_default and key.default_factory is dataclasses.MISSING and name not in values:
            raise ClusterError(f"{where} has no {name}: give one")
    return kind(**{n: _value(fields[n].type, v, f"{where}: {n}") for n, v in values.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value as its field needs it; tables that were made before pass through."""
    match kind:
        case "float" if _is_number(value):
            return float(value)
        case "int" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "str" | "Kind" if isinstance(value, str):
            return value
        case "tuple[str, ...]" if isinstance(value, list) and set(map(type, value)) <= {str}:
            return tuple(value)
        case "float" | "int" | "str" | "Kind" | "tuple[str, ...]":
            wanted = {"float": "a number", "int": "a whole number", "str": "a word"}
            words = "a list of words" if kind == "tuple[str, ...]" else wanted.get(kind, "a word")
            raise ClusterError(f"{where} = {value!r}: give {words}")
        case "tuple[Place, ...]":
            raise ClusterError(f"{where} cannot be given in a file: leave it out")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table(content: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise ClusterError(f"{source}: {name} = {found!r} is to be a table, [{name}]")
    return found


def _list(content: Mapping[str, Any], name: str, kind: type[_Made], source: str) -> list[_Made]:
    """The dataclasses of a list of tables."""
    found = content.get(name, [])
    if not (isinstance(found, list) and all(isinstance(item, dict) for item in found)):
        raise ClusterError(f"{source}: {name} is to be a list of tables, [[{name}]]")
    return [_made(kind, item, f"{source}: [[{name}]]") for item in found]


def _known(values: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, list(names), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ClusterError(f"{where} has an unknown key, {name}: {hint}")
