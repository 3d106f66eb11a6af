"""A cluster's troubles as a table: what the simulator plays, read from TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cluster import FailureCause
from outlast.plan.reliability.recovery import (
    Guard,
    Pace,
    Reliability,
    Replicas,
    Restart,
    Tier,
    require,
)

Part = TypeVar("Part", FailureCause, Tier, Restart, Replicas, Guard, Pace, "Lemons")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemons:
    """Nodes that fail more often than others.

    Attributes:
        share: Of all nodes.
        factor: How many times as often they fail.
        removed_after: Failures after which such a node is taken out for good; 0 for never.
    """

    share: float = 0.0
    factor: float = 1.0
    removed_after: int = 0

    def __post_init__(self) -> None:
        require("share of lemons", self.share, 0.0, 1.0)
        require("factor of lemons", self.factor, 1.0)
        require("removed_after of lemons", self.removed_after, 0.0)

    @property
    def mean_factor(self) -> float:
        """By how much they raise the failures of all nodes together."""
        return 1.0 + self.share * (self.factor - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run to simulate.

    Attributes:
        reliability: One run: all numbers are single ones.
        productive_days: Time that the run takes when nothing befalls it and nothing is saved.
        limit_days: Wall time after which the simulation gives up.
        lemons: Nodes that fail more often.
        trials: Runs to simulate.
        seed: Of the random numbers.
    """

    reliability: Reliability
    productive_days: float
    limit_days: float = 3650.0
    lemons: Lemons = Lemons()
    trials: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require("productive_days", self.productive_days, 0.0, above=True)
        require("limit_days", self.limit_days, 0.0, above=True)
        require("trials", self.trials, 1.0, 100_000.0)
        require("seed", self.seed, 0.0)
        run = self.reliability
        require("nodes of a simulated run", run.nodes, 1.0, 1_000_000.0)
        parts: tuple[Any, ...] = (run, run.restart, run.replicas, run.guard, run.pace, *run.tiers)
        for part in parts:
            for name in part.__slots__:
                value = getattr(part, name)
                if isinstance(value, np.ndarray) and value.size != 1:
                    raise PlanError(f"{name} has {value.size} values: a scenario takes one")
        self._require_whole()

    def _require_whole(self) -> None:
        """Refuse fractions of what is counted one by one."""
        run = self.reliability
        counts = {
            "nodes": run.nodes,
            "spares": run.restart.spares,
            "groups": run.replicas.groups,
            "minimum": run.replicas.minimum,
        }
        for name, count in counts.items():
            if not float(np.max(count)).is_integer():
                raise PlanError(
                    f"{name} = {float(np.max(count)):g} of a simulated run: give a whole number"
                )


RUN_KEYS = ("nodes", "interval_seconds", "productive_days", "limit_days", "trials", "seed")
YES_NO = ("silent", "rolls_back", "kept")
COUNTS = ("trials", "seed", "nodes_hit", "removed_after")
SECTIONS: Mapping[str, type[Any]] = {
    "restart": Restart,
    "replicas": Replicas,
    "guard": Guard,
    "pace": Pace,
}
LISTS: Mapping[str, type[Any]] = {"failure": FailureCause, "tier": Tier}


def load_scenario(path: Path) -> Scenario:
    """The scenario of a TOML file; see `scenario_from_text`.

    Raises:
        PlanError: The file cannot be read, or what `scenario_from_text` raises.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"scenario {path} cannot be read: {error}") from error
    return scenario_from_text(text, source=str(path))


def scenario_from_text(text: str, *, source: str = "the scenario") -> Scenario:
    """The scenario of a TOML text.

    Tables: [run] with nodes, interval_seconds and productive_days; any number of [[failure]] and at
    least one [[tier]]; and, where wanted, [restart], [replicas], [guard], [pace] and [lemons] with
    the fields of the classes of those names.

    Raises:
        PlanError: Names the table, the key, its value and what would be right.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is no TOML: {error}") from error
    _known(table, ("run", "lemons", *SECTIONS, *LISTS), source)
    run = _table(table, "run", source)
    _known(run, RUN_KEYS, f"[run] of {source}")
    for key in ("nodes", "interval_seconds", "productive_days"):
        if key not in run:
            raise PlanError(f"[run] of {source} lacks {key}")
    for key, value in run.items():
        _number(key, value, f"[run] of {source}")
    many = {name: _parts(kind, table, name, source) for name, kind in LISTS.items()}
    single = {
        name: _part(kind, _table(table, name, source), f"[{name}] of {source}")
        for name, kind in SECTIONS.items()
    }
    return Scenario(
        reliability=Reliability(
            nodes=run.pop("nodes"),
            interval_seconds=run.pop("interval_seconds"),
            causes=many["failure"],
            tiers=many["tier"],
            **single,
        ),
        lemons=_part(Lemons, _table(table, "lemons", source), f"[lemons] of {source}"),
        **run,
    )


def _table(table: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise PlanError(f"{name} = {found!r} of {source}: write it as a table [{name}]")
    return dict(found)


def _parts(kind: type[Part], table: Mapping[str, Any], name: str, source: str) -> tuple[Part, ...]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise PlanError(f"{name} of {source}: write each one as a table [[{name}]]")
    return tuple(_part(kind, entry, f"[[{name}]] of {source}") for entry in found)


def _part(kind: type[Part], values: Mapping[str, Any], where: str) -> Part:
    """`values` as the dataclass `kind`."""
    names = [field.name for field in fields(kind)]
    _known(values, names, where)
    for key, value in values.items():
        wanted = str if key == "name" else bool if key in YES_NO else float
        if wanted is float:
            _number(key, value, where)
        elif not isinstance(value, wanted):
            what = "a text" if wanted is str else "true or false"
            raise PlanError(f"{key} = {value!r} in {where}: give {what}")
    if "name" in names and "name" not in values:
        raise PlanError(f"{where} lacks a name")
    if "per_node_day" in names and "per_node_day" not in values:
        raise PlanError(f"{where} lacks per_node_day, the failures of one node in one day")
    return kind(**values)


def _number(key: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{key} = {value!r} in {where}: give a number")
    if key in COUNTS and not isinstance(value, int):
        raise PlanError(f"{key} = {value!r} in {where}: give a whole number")


def _known(values: Mapping[str, Any], names: Any, where: str) -> None:
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, list(names), 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise PlanError(f"{key} in {where} is unknown: {hint}")
