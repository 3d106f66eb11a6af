"""The graph of a run, or of one link of it, from the run's figures or a TOML file.

As TOML, with the keys of `RunFigures`, `TierFigures`, `Evaluation`, `Task` and `Edge`:

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
import math
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.cluster.tasks.graph import Edge, Graph, Machine, Task
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


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

    Training stands still while it saves, and goes on while tiers copy and other nodes evaluate. A
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
        # The last copy to each tier, and the saves that it holds.
        self.last_copy: dict[str, str] = {}
        self.copies: dict[str, list[str]] = {}

    def graph(self) -> Graph:
        figures = self.figures
        before: list[str] = []
        if figures.stage_in_bytes:
            self.add("stage-in", "stage-in", [], figures.stage_in_bytes, figures.stage_via)
            before = ["stage-in"]
        interval = figures.save_every_steps if figures.save_bytes else figures.steps
        segments = -(-figures.steps // interval)
        last = ""
        for number in range(1, segments + 1):
            steps = min(interval, figures.steps - (number - 1) * interval)
            name = f"train {number}"
            earliest = figures.queue_seconds if number == 1 else 0.0
            self.work(
                Task(
                    name,
                    "train",
                    seconds=steps * figures.step_seconds,
                    nodes=figures.nodes,
                    earliest_seconds=earliest,
                ),
                before,
            )
            last = name
            if figures.save_bytes:
                last = self.save(number, name)
            before = [last]
            if figures.evaluation and number % figures.evaluation.every == 0:
                before = self.evaluate(number, last, figures.evaluation)
        if figures.stage_out_bytes:
            self.add("stage-out", "stage-out", [last], figures.stage_out_bytes, figures.stage_via)
        machine = {NODES: figures.nodes}
        if figures.evaluation and figures.evaluation.nodes:
            machine[EVALUATORS] = figures.evaluation.nodes
        return Graph(self.tasks, self.edges, Machine(machine, dict(figures.bytes_per_s)))

    def add(
        self, name: str, kind: str, before: list[str], size: float, via: tuple[str, ...]
    ) -> None:
        """A transfer without nodes."""
        self.work(Task(name, kind, size_bytes=size, via=via), before)  # type: ignore[arg-type]

    def work(self, task: Task, before: list[str]) -> None:
        self.tasks.append(task)
        self.edges += [Edge(source, task.name) for source in dict.fromkeys(before)]

    def save(self, number: int, segment: str) -> str:
        """A save and the copies of it; returns the save."""
        figures = self.figures
        save = f"save {number}"
        self.work(
            Task(
                save,
                "save",
                seconds=figures.save_seconds,
                nodes=figures.nodes,
                size_bytes=figures.save_bytes,
                via=figures.save_via,
            ),
            [segment],
        )
        source = save
        for tier in figures.tiers:
            if number % tier.every:
                continue
            copy = f"drain {number} to {tier.name}"
            before = [source, *filter(None, [self.last_copy.get(tier.name)])]
            self.work(
                Task(
                    copy,
                    "drain",
                    size_bytes=figures.save_bytes,
                    via=tier.via,
                    cap_bytes_per_s=tier.cap_bytes_per_s,
                ),
                before,
            )
            source = self.last_copy[tier.name] = copy
            kept = self.copies.setdefault(tier.name, [])
            kept.append(copy)
            if tier.keep and len(kept) > tier.keep:
                old = kept.pop(0).split()[1]
                self.work(Task(f"prune {old} from {tier.name}", "prune"), [copy])
        return save

    def evaluate(self, number: int, save: str, evaluation: Evaluation) -> list[str]:
        """An evaluation; returns what the next segment waits for."""
        name = f"evaluate {number}"
        if not evaluation.nodes:
            self.work(
                Task(name, "evaluate", seconds=evaluation.seconds, nodes=self.figures.nodes), [save]
            )
            return [name]
        self.tasks.append(
            Task(
                name,
                "evaluate",
                seconds=evaluation.seconds,
                nodes=evaluation.nodes,
                group=EVALUATORS,
            )
        )
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
    tasks = [_made(Task, item, f"{source}: [[task]]") for item in _list(content, "task", source)]
    edges = [_made(Edge, item, f"{source}: [[edge]]") for item in _list(content, "edge", source)]
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
    tiers = tuple(
        _made(TierFigures, item, f"{source}: [[tier]]") for item in _list(content, "tier", source)
    )
    evaluation = None
    if "evaluation" in content:
        where = f"{source}: [evaluation]"
        evaluation = _made(Evaluation, _table(content, "evaluation", source), where)
    more = {"tiers": tiers, "evaluation": evaluation, "bytes_per_s": _rates(content, source)}
    return _made(RunFigures, {**run, **more}, f"{source}: [run]")


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
    return kind(
        **{
            name: _value(fields[name].type, value, f"{where}: {name}")
            for name, value in values.items()
        }
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value as its field needs it; tables that were made before pass through."""
    match kind:
        case "float" if _is_number(value):
            return float(value)
        case "int" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "str" | "Kind" if isinstance(value, str):
            return value
        case "tuple[str, ...]" if isinstance(value, list) and all(
            isinstance(v, str) for v in value
        ):
            return tuple(value)
        case "float" | "int" | "str" | "Kind" | "tuple[str, ...]":
            words = {
                "float": "a number",
                "int": "a whole number",
                "tuple[str, ...]": "a list of words",
            }
            raise ClusterError(f"{where} = {value!r}: give {words.get(kind, 'a word')}")
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


def _list(content: Mapping[str, Any], name: str, source: str) -> list[dict[str, Any]]:
    found = content.get(name, [])
    if not (isinstance(found, list) and all(isinstance(item, dict) for item in found)):
        raise ClusterError(f"{source}: {name} is to be a list of tables, [[{name}]]")
    return found


def _known(values: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, list(names), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ClusterError(f"{where} has an unknown key, {name}: {hint}")
