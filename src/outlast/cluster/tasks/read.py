"""A graph from a TOML file: of a run's figures, or task by task.

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

Keys are those of `RunFigures`, `TierFigures`, `Evaluation`, `Task` and `Edge`.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.cluster.tasks.build import Evaluation, RunFigures, TierFigures, run_graph
from outlast.cluster.tasks.graph import Edge, Graph, Machine, Task
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING
        if no_default and field.default_factory is dataclasses.MISSING and name not in values:
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
    if not (isinstance(found, list) and all(isinstance(name, dict) for name in found)):
        raise ClusterError(f"{source}: {name} is to be a list of tables, [[{name}]]")
    return found


def _known(values: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, list(names), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ClusterError(f"{where} has an unknown key, {name}: {hint}")
