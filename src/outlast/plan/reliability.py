"""Fault tolerance of a run: tiers, spares, replicas, guard, pace; scenarios to simulate, from TOML.

Every number may be an array, one value per candidate: all arrays of one `Reliability` broadcast to
one shape (candidates,). A `Scenario`, which the simulator plays, has one number each.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import Array
from outlast.plan.cluster import FailureCause

Number: TypeAlias = float | Array
"""One number, or one for each candidate."""
DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0


def column(value: Number) -> Array:
    """`value` as an array of shape (candidates,) or (1,)."""
    return np.atleast_1d(np.asarray(value, dtype=np.float64))


def require(
    name: str, value: Number, low: float, high: float = np.inf, *, above: bool = False
) -> None:
    """Refuses values that are too small, too large or no finite numbers.

    Raises:
        PlanError: Names the setting, the first wrong value and what would be right.
    """
    values = column(value)
    wrong = ~np.isfinite(values) | (values < low) | (values > high)
    if above:
        wrong |= values == low
    if wrong.any():
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = f" and at most {high:g}" if np.isfinite(high) else ""
        raise PlanError(f"{name} = {values[wrong][0]:g}: give a finite number {least}{most}")


def _require_fields(part: Any, **ranges: tuple[float, float]) -> None:
    """Refuses fields of a dataclass out of their ranges, which begin at 0 where none is named."""
    for field in fields(part):
        if not isinstance(value := getattr(part, field.name), bool):
            require(field.name, value, *ranges.get(field.name, (0.0, np.inf)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One store of checkpoints.

    Attributes:
        name: memory, peer, local or shared, or one of one's own.
        survives_nodes: Most nodes lost at once that it survives: 0 for the memory or disk of the
            node itself, 1 for a peer's memory, infinite for shared storage.
        every: Base intervals from save to save, a multiple of that of the tiers before; 0 where
            the tier is not used.
        blocked_seconds: How long a save stops training.
        write_seconds: From then until the version can be restored; 0 for a synchronous save.
        slowdown: By how much steps are longer during the write; 0.02 is 2 %.
        restore_seconds: To load a version.
        kept: Whether it is the nodes' own memory after so many steps, and no checkpoint.
    """

    name: str
    survives_nodes: float = np.inf
    every: Number = 1
    blocked_seconds: Number = 0.0
    write_seconds: Number = 0.0
    slowdown: Number = 0.0
    restore_seconds: Number = 0.0
    kept: bool = False

    def __post_init__(self) -> None:
        if not self.survives_nodes >= 0.0:
            raise PlanError(
                f"survives_nodes = {self.survives_nodes} of tier {self.name!r}: give at least 0"
            )
        for field in ("every", "blocked_seconds", "write_seconds", "slowdown", "restore_seconds"):
            require(f"{field} of tier {self.name!r}", getattr(self, field), 0.0)
        every = column(self.every)
        if (every != np.floor(every)).any():
            wrong = every[every != np.floor(every)][0]
            raise PlanError(f"every = {wrong:g} of tier {self.name!r}: give a whole number")

    @property
    def latency_seconds(self) -> Array:
        """Running time, at full speed, from the start of the write until it can be restored."""
        return column(self.write_seconds) / (1.0 + column(self.slowdown))

    @property
    def overhead_seconds(self) -> Array:
        """By how much a save lengthens the run."""
        return column(self.blocked_seconds) + self.write_seconds - self.latency_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The way back after a stop.

    Attributes:
        restart_seconds: To start all processes again, up to the restore.
        replace_seconds: To put a spare in the place of a lost node; a node that comes back from
            repair takes as long.
        spares: Nodes that stand by; without a free one the run waits for a repair.
    """

    restart_seconds: Number = 120.0
    replace_seconds: Number = 0.0
    spares: Number = 0

    def __post_init__(self) -> None:
        _require_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Groups that hold the whole state each, and go on when some of them are gone.

    The same numbers describe a gradient code: its groups are the workers, of which it may lose all
    but `minimum` without a restart.

    Attributes:
        groups: How many there are when all is well; 1 for none.
        minimum: Fewest that may go on.
        step_seconds: A failure costs the step under way, half of one on average.
        regroup_seconds: For which all stand still when a group goes.
        rejoin_seconds: For which all stand still when a group comes back.
        recovery_seconds: To load the state from another group.
        detection_seconds: Until the others act, where that is sooner than a failure's cause says;
            0 for the cause's own.
    """

    groups: Number = 1
    minimum: Number = 1
    step_seconds: Number = 0.0
    regroup_seconds: Number = 0.0
    rejoin_seconds: Number = 0.0
    recovery_seconds: Number = 0.0
    detection_seconds: Number = 0.0

    def __post_init__(self) -> None:
        _require_fields(self, groups=(1.0, np.inf), minimum=(1.0, np.inf))
        if (column(self.minimum) > column(self.groups)).any():
            raise PlanError(
                f"minimum = {self.minimum} replica groups of {self.groups}: give at most as many "
                "as there are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Detection and correction of silent data corruption.

    Attributes:
        coverage: Share of silent errors that the guard finds.
        overhead: Share of a step's time that it adds.
        latency_seconds: Work thrown away from the error to the alarm.
        correction_seconds: To put it right in place.
        rolls_back: Found errors are answered by a restart from a checkpoint and not in place.
        false_alarms_per_day: Of the whole run.
        alarm_seconds: That one costs.
        noticed: Share of the errors the guard does not find that people notice later.
        noticed_hours: How much later, in wall time.
    """

    coverage: Number = 0.0
    overhead: Number = 0.0
    latency_seconds: Number = 0.0
    correction_seconds: Number = 0.0
    rolls_back: bool = False
    false_alarms_per_day: Number = 0.0
    alarm_seconds: Number = 0.0
    noticed: Number = 0.0
    noticed_hours: Number = 48.0

    def __post_init__(self) -> None:
        _require_fields(self, coverage=(0.0, 1.0), noticed=(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """By how much steps are longer than those of equal, punctual workers.

    Attributes:
        straggler_factor: Mean step that waits for the slowest worker, to one without stragglers.
        coding_ratio: Mean step of the gradient code to the one that waits, its own overhead left
            out; 1 without a code.
        coding_overhead: Share of a step that the code adds when nobody straggles.
    """

    straggler_factor: Number = 1.0
    coding_ratio: Number = 1.0
    coding_overhead: Number = 0.0

    def __post_init__(self) -> None:
        _require_fields(self, straggler_factor=(1.0, np.inf))

    @property
    def straggling(self) -> Array:
        """Factor on a step that stragglers leave, with the code."""
        return np.maximum(1.0, column(self.straggler_factor) * self.coding_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """A run, what may befall it, and what it does about that.

    Attributes:
        nodes: That the run uses, spares not counted.
        causes: Why nodes stop; none for a run that nothing befalls.
        interval_seconds: Running time between two saves of the tier that saves most often, the
            saves themselves not counted.
        tiers: From the cheapest to the safest. The last one is always used and survives all. A
            failure is answered with the newest version that is left; of equal ones with that of the
            tier listed first.
        restart: The way back.
        replicas: Groups that go on without each other.
        guard: Against wrong numbers.
        pace: Stragglers and gradient codes.
        days_from_new: Days from the first use of all nodes over which failures with a Weibull
            shape are averaged; infinite for a cluster so old that their mean rate holds.
    """

    nodes: Number
    causes: tuple[FailureCause, ...]
    interval_seconds: Number
    tiers: tuple[Tier, ...]
    restart: Restart = Restart()
    replicas: Replicas = Replicas()
    guard: Guard = Guard()
    pace: Pace = Pace()
    days_from_new: float = np.inf

    def __post_init__(self) -> None:
        sizes: dict[int, str] = {}
        for name, size in self.sizes():
            sizes.setdefault(size, name)
        if len(sizes) > 1:
            (size, name), (other, second) = sorted(sizes.items())[:2]
            raise PlanError(
                f"{name} and {second} have {size} and {other} values: give one value for each "
                "candidate, or one for all"
            )
        require("nodes", self.nodes, 1.0)
        if not self.days_from_new > 0.0:
            raise PlanError(f"days_from_new = {self.days_from_new}: give more than 0")
        require("interval_seconds", self.interval_seconds, 0.0, above=True)
        if not self.tiers:
            raise PlanError("tiers = none: give at least one store of checkpoints")
        self._require_order()
        for tier in self.tiers:
            between = column(tier.every) * self.interval_seconds
            late = (tier.latency_seconds > between * (1.0 + 1e-9)) & (between > 0.0)
            if late.any():
                seconds = np.broadcast_to(between, late.shape)[late][0]
                raise PlanError(
                    f"write_seconds of tier {tier.name!r}: a version is not durable before the "
                    f"next save, {seconds:g} s later; save it less often"
                )
        last = self.tiers[-1]
        for cause in self.causes:
            if last.survives_nodes < lost_nodes(cause):
                raise PlanError(
                    f"survives_nodes = {last.survives_nodes:g} of the last tier {last.name!r}: "
                    f"nothing is left after {cause.name!r}, which takes {lost_nodes(cause)} "
                    "nodes; add a tier on shared storage"
                )

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and number of values of each setting that has other than one."""
        parts: tuple[Any, ...] = (self, self.restart, self.replicas, self.guard, self.pace)
        for part in (*parts, *self.tiers):
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, np.ndarray) and value.size != 1:
                    yield field.name, value.size

    def _require_order(self) -> None:
        """Tiers are nested: each later one survives more and is saved at some of the same times."""
        before = np.zeros(1)
        for index, tier in enumerate(self.tiers):
            every = column(tier.every)
            if index and tier.survives_nodes < self.tiers[index - 1].survives_nodes:
                raise PlanError(
                    f"tiers: {tier.name!r} survives less than {self.tiers[index - 1].name!r} "
                    "before it; list them from the cheapest to the safest"
                )
            rest = np.mod(every, np.maximum(before, 1.0))
            if (rest != 0.0).any():
                wrong = np.broadcast_to(every, rest.shape)[rest != 0.0][0]
                raise PlanError(
                    f"every = {wrong:g} of tier {tier.name!r} is no multiple of the tier before"
                )
            before = np.where(every > 0.0, every, before)
        if (column(self.tiers[-1].every) < 1.0).any():
            raise PlanError(f"every = 0 of the last tier {self.tiers[-1].name!r}: give at least 1")


def lost_nodes(cause: FailureCause) -> int:
    """Nodes whose memory and disk are gone: none where a restart is enough."""
    return cause.nodes_hit if cause.repair_hours > 0.0 and not cause.silent else 0


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
        for name, size in run.sizes():
            raise PlanError(f"{name} has {size} values: a scenario takes one")
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
    "lemons": Lemons,
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
    _known(table, ("run", *SECTIONS, *LISTS), source)
    tables = {name: table.get(name, {}) for name in ("run", *SECTIONS)}
    for name, found in tables.items():
        if not isinstance(found, dict):
            raise PlanError(f"{name} = {found!r} of {source}: write it as a table [{name}]")
    run = tables.pop("run")
    _known(run, RUN_KEYS, f"[run] of {source}")
    for key in ("nodes", "interval_seconds", "productive_days"):
        if key not in run:
            raise PlanError(f"[run] of {source} lacks {key}")
    for key, value in run.items():
        _number(key, value, f"[run] of {source}")
    many = {}
    for name, kind in LISTS.items():
        entries = table.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise PlanError(f"{name} of {source}: write each one as a table [[{name}]]")
        many[name] = tuple(_part(kind, entry, f"[[{name}]] of {source}") for entry in entries)
    single = {
        name: _part(SECTIONS[name], values, f"[{name}] of {source}")
        for name, values in tables.items()
    }
    lemons = single.pop("lemons")
    own = {key: value for key, value in run.items() if key not in ("nodes", "interval_seconds")}
    reliability = Reliability(
        nodes=run["nodes"],
        interval_seconds=run["interval_seconds"],
        causes=many["failure"],
        tiers=many["tier"],
        **single,
    )
    return Scenario(reliability=reliability, lemons=lemons, **own)


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


def _known(values: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, list(names), 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise PlanError(f"{key} in {where} is unknown: {hint}")
