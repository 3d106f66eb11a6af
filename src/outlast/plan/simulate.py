"""Monte Carlo of a run's life, event by event, for all trials at once; scenarios from TOML.

Independent of the closed forms, which it checks: it shares the settings with them and no formula.
Between two events all trials advance to their own next one: a failure, a silent error that is
noticed, a replica group that comes back, the end. Repair times are exponential; all other
durations are as given. Failures strike while the run computes, saves, restarts and restores; what
is cut short begins anew, the longest of what is still to be made good.

Times are seconds of exposure: of the run's life in which failures can strike. Each block of nodes
that fail together renews itself: after a failure it is as good as new.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.paths import read_text
from outlast.plan.batch import Array
from outlast.plan.cluster import FailureCause
from outlast.plan.reliability import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Guard,
    Number,
    Pace,
    Reliability,
    Replicas,
    Restart,
    Tier,
    lost_nodes,
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
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PlanError(f"scenario {path} cannot be read: {reason}; give another file") from None
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


def _one(setting: Number) -> float:
    """The single number of a setting."""
    return float(np.max(setting))


class Schedule:
    """Saves at every multiple of the interval, of those tiers whose turn it is.

    The clock counts running time and what saves add to it. A version is named by its round: the
    number of base intervals before it.
    """

    def __init__(self, run: Reliability) -> None:
        tiers = [tier for tier in run.tiers if _one(tier.every) > 0.0]
        self.tiers = tiers
        self.interval = _one(run.interval_seconds)
        self.every = np.array([_one(tier.every) for tier in tiers])
        self.latency = np.array([_one(tier.latency_seconds) for tier in tiers])
        self.survives = np.array([tier.survives_nodes for tier in tiers])
        self.restore = np.array([_one(tier.restore_seconds) for tier in tiers])
        self._overhead = np.array([_one(tier.overhead_seconds) for tier in tiers])
        self._kept = np.array([float(tier.kept) for tier in tiers])
        self._rounds = int(self.every[-1])
        rounds = np.arange(self._rounds + 1.0)
        self._table = rounds * self.interval + self.saved(rounds)

    def saved(self, rounds: Array) -> Array:
        """Clock time that all saves up to a round have taken."""
        return np.asarray(np.floor(rounds[..., None] / self.every) @ self._overhead)

    def kept(self, clock: Array) -> Array:
        """Of a clock's time, what keeping states in the nodes' memory has taken."""
        rounds, _ = self.position(clock)
        whole = np.floor(rounds[..., None] / self.every)
        return np.asarray(whole @ (self._overhead * self._kept))

    def clock(self, rounds: Array) -> Array:
        """Time at which the saves of a round are over."""
        cycles, rest = np.divmod(rounds, self._rounds)
        return np.asarray(cycles * self._table[-1] + self._table[rest.astype(np.int64)])

    def clock_of_work(self, running_seconds: float) -> float:
        """Time at which so much running is done."""
        rounds = np.array([np.floor(running_seconds / self.interval)])
        return float(running_seconds + self.saved(rounds)[0])

    def position(self, clock: Array) -> tuple[Array, Array]:
        """The last round whose saves are over, and the running time done."""
        cycles, rest = np.divmod(clock, self._table[-1])
        inside = np.searchsorted(self._table, rest, side="right") - 1
        inside = np.minimum(inside, self._rounds - 1)
        rounds: Array = cycles * self._rounds + inside
        begun = np.minimum(rest - self._table[inside], self.interval)
        return rounds, rounds * self.interval + begun

    def durable(self, rounds: Array, work: Array) -> Array:
        """Of each tier, the newest version that can be restored: (rows, tiers)."""
        newest = np.floor(rounds[:, None] / self.every) * self.every
        late = work[:, None] < newest * self.interval + self.latency
        return np.asarray(np.maximum(newest - np.where(late, self.every, 0.0), 0.0))


Indices = NDArray[np.int64]
END = -1
"""Cause of the entry that ends a trial's events in a chunk."""
EVENTS_PER_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Failures of a stretch of exposure, (trials, events), in order; each row ends with END.

    Attributes:
        seconds: When.
        cause: Index of the cause; the number of causes for a false alarm.
        first_node: Of the nodes hit.
    """

    seconds: Array
    cause: Indices
    first_node: Indices


Drawn = tuple[Indices, Array, Indices]
"""Trial, time and block of each event."""


class FailureSampler:
    """Draws one chunk after the other."""

    def __init__(self, scenario: Scenario, generator: np.random.Generator) -> None:
        self._run, self._trials = scenario.reliability, scenario.trials
        self._nodes = int(_one(self._run.nodes))
        self._generator = generator
        self._sources: list[_Memoryless | _Renewed] = []
        per_second = 1e-12
        for cause in self._run.causes:
            each = float(cause.per_day(self._nodes)) / DAY_SECONDS
            per_second += each * scenario.lemons.mean_factor
            blocks = max(1, round(self._nodes / cause.nodes_hit))
            if cause.shape == 1.0 and scenario.lemons.share == 0.0:
                self._sources.append(_Memoryless(each, blocks))
            else:
                shape = (scenario.trials, blocks)
                self._sources.append(_Renewed(cause, each, shape, scenario.lemons, generator))
        alarms = _one(self._run.guard.false_alarms_per_day) / DAY_SECONDS
        self._sources.append(_Memoryless(alarms, 1))
        expected = (per_second + alarms) * scenario.trials
        self._length = min(EVENTS_PER_CHUNK / expected, scenario.limit_days * DAY_SECONDS)
        self._start = 0.0

    def next_chunk(self) -> Chunk:
        """The failures of the next stretch of exposure."""
        start, end = self._start, self._start + self._length
        self._start = end
        drawn = [s.draw(start, end, self._trials, self._generator) for s in self._sources]
        last = np.arange(self._trials, dtype=np.int64)
        trial = np.concatenate([*(item[0] for item in drawn), last])
        seconds = np.concatenate([*(item[1] for item in drawn), np.full(self._trials, end)])
        cause = np.concatenate(
            [np.full(item[0].size, index, dtype=np.int64) for index, item in enumerate(drawn)]
            + [np.full(self._trials, END, dtype=np.int64)]
        )
        hits = [cause.nodes_hit for cause in self._run.causes] + [1]
        first = np.concatenate(
            [item[2] * hit for item, hit in zip(drawn, hits, strict=True)] + [last * 0]
        )
        order = np.lexsort((seconds, trial))
        counts = np.bincount(trial, minlength=self._trials)
        column = np.arange(trial.size) - np.repeat(np.cumsum(counts) - counts, counts)
        shape, row = (self._trials, int(counts.max())), trial[order]
        times, kinds = np.full(shape, end), np.full(shape, END, dtype=np.int64)
        places = np.zeros(shape, dtype=np.int64)
        times[row, column], kinds[row, column] = seconds[order], cause[order]
        places[row, column] = first[order]
        return Chunk(times, kinds, places)


class _Memoryless:
    """Exponential times: all blocks together are one Poisson process."""

    def __init__(self, per_second: float, blocks: int) -> None:
        self._per_second, self._blocks = per_second, blocks

    def draw(self, start: float, end: float, trials: int, generator: np.random.Generator) -> Drawn:
        counts = generator.poisson(self._per_second * (end - start), trials)
        total = int(counts.sum())
        return (
            np.repeat(np.arange(trials, dtype=np.int64), counts),
            generator.uniform(start, end, total),
            generator.integers(0, self._blocks, total),
        )


class _Renewed:
    """Weibull times of every block, some of which are lemons."""

    def __init__(
        self,
        cause: FailureCause,
        per_second: float,
        shape: tuple[int, int],
        lemons: Lemons,
        generator: np.random.Generator,
    ) -> None:
        self._shape = cause.shape
        self._scale = math.inf
        if per_second > 0.0:
            self._scale = shape[1] / per_second / math.gamma(1.0 + 1.0 / cause.shape)
        self._lemons = lemons
        chosen = generator.permutation(shape[1])[: round(lemons.share * shape[1])]
        self._factor = np.ones(shape)
        self._factor[:, chosen] = lemons.factor
        self._failed = np.zeros(shape, dtype=np.int32)
        self._next = generator.weibull(self._shape, shape) * self._scale / self._factor

    def draw(self, start: float, end: float, trials: int, generator: np.random.Generator) -> Drawn:
        found: list[Drawn] = []
        trial, block = np.nonzero(self._next < end)
        while trial.size:
            found.append((trial, self._next[trial, block], block))
            self._failed[trial, block] += 1
            factor = self._factor[trial, block]
            if self._lemons.removed_after:
                gone = self._failed[trial, block] >= self._lemons.removed_after
                factor = np.where(gone, 1.0, factor)
            drawn = generator.weibull(self._shape, trial.size) * self._scale / factor
            self._next[trial, block] += drawn
            again = self._next[trial, block] < end
            trial, block = trial[again], block[again]
        if not found:
            found.append((trial, np.zeros(0), block))
        trials_of, seconds, blocks = zip(*found, strict=True)
        return np.concatenate(trials_of), np.concatenate(seconds), np.concatenate(blocks)


class Repairs:
    """Nodes in repair of every trial, and the trials that wait for them.

    A lost node is replaced from the stock, or by the first one to come back for which nobody waits
    yet. What comes back and is not waited for goes to the stock.
    """

    def __init__(self, trials: int, spares: float) -> None:
        self._spares = spares
        self._ends = np.full((trials, 8), -np.inf)
        self._unclaimed = np.zeros((trials, 8))

    def replace(self, rows: Indices, now: Array, ends: Array, nodes: Array) -> Array:
        """Sends nodes to repair and says when there is one for each of them.

        Args:
            rows: Trials, each once; all arrays (rows,).
            now: When the nodes are lost.
            ends: When they will have been repaired, all of a trial together.
            nodes: How many.

        Returns:
            When the trial has enough nodes again.
        """
        here = self._ends[rows] > now[:, None]
        self._unclaimed[rows] *= here
        stock = self._spares - self._unclaimed[rows].sum(axis=1)
        slot = self._ends[rows].argmin(axis=1)
        if (self._ends[rows, slot] > now).any():
            slot = np.full(rows.size, self._ends.shape[1])
            more = np.full_like(self._ends, -np.inf)
            self._ends = np.concatenate([self._ends, more], axis=1)
            self._unclaimed = np.concatenate([self._unclaimed, np.zeros_like(more)], axis=1)
        self._ends[rows, slot], self._unclaimed[rows, slot] = ends, nodes
        missing = np.maximum(nodes - stock, 0.0)
        ready = now.copy()
        if not (missing > 0.0).any():
            return ready
        order = np.argsort(self._ends[rows], axis=1)
        free = np.take_along_axis(self._unclaimed[rows], order, 1)
        before = free.cumsum(axis=1) - free
        claimed = np.clip(missing[:, None] - before, 0.0, free)
        comes = np.take_along_axis(self._ends[rows], order, 1)
        latest = np.where(claimed > 0.0, comes, -np.inf).max(axis=1)
        left = np.empty_like(free)
        np.put_along_axis(left, order, free - claimed, 1)
        self._unclaimed[rows] = left
        return np.asarray(np.maximum(ready, latest))


LOSSES = (
    "checkpoint saves",
    "keeping in memory",
    "lost work",
    "detection",
    "restart",
    "waiting for nodes",
    "regrouping",
    "degraded running",
    "guard",
    "pace",
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Outcome of a simulation; all figures are simulated.

    Attributes:
        ettr: Progress over wall time, all trials together.
        standard_error: Of `ettr`.
        finish_seconds: (trials,) wall time at the end of the run; infinite where the limit came
            first.
        lost_share: Share of the wall time, by kind of loss; with `ettr` they add up to 1.
        cause_share: Share of the wall time that each cause took: detection, waiting, recovery,
            repeated work and running without a group.
        failures: Failures per trial that were not silent.
        unseen: Silent errors per trial that nobody noticed.
    """

    ettr: float
    standard_error: float
    finish_seconds: Array
    lost_share: Mapping[str, float]
    cause_share: Mapping[str, float]
    failures: float
    unseen: float

    @property
    def finished(self) -> float:
        """Share of the trials that ended before the limit."""
        return float(np.isfinite(self.finish_seconds).mean())

    def quantile_seconds(self, share: float) -> float:
        """Wall time within which that share of the trials ended; infinite where fewer did."""
        return float(np.quantile(self.finish_seconds, share, method="inverted_cdf"))


def simulate(scenario: Scenario) -> Simulated:
    """Plays `scenario.trials` runs; the same seed gives the same figures."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Trials(scenario).play()


class _Trials:
    """The state of all trials; arrays (trials,) unless said otherwise."""

    def __init__(self, scenario: Scenario) -> None:
        run = scenario.reliability
        self.scenario, self.run = scenario, run
        self.random = np.random.default_rng(scenario.seed)
        self.schedule = Schedule(run)
        self.strikes = FailureSampler(scenario, self.random)
        self.chunk = self.strikes.next_chunk()
        count = scenario.trials
        self.names = [*(cause.name for cause in run.causes), "false alarms"]
        self.lost_nodes = np.array([*(lost_nodes(cause) for cause in run.causes), 0])
        self.detection = np.array([*(c.detection_seconds for c in run.causes), 0.0])
        self.repair = np.array([*(cause.repair_hours * HOUR_SECONDS for cause in run.causes), 0.0])
        self.hit = np.array([*(cause.nodes_hit for cause in run.causes), 1])
        self.silent = np.array([*(cause.silent for cause in run.causes), False])
        self.groups = int(_one(run.replicas.groups))
        self.factor = float(
            (1.0 + np.max(run.guard.overhead))
            * (1.0 + np.max(run.pace.coding_overhead))
            * np.max(run.pace.straggling)
        )
        self.target = self.schedule.clock_of_work(
            scenario.productive_days * DAY_SECONDS * self.factor
        )
        self.limit = scenario.limit_days * DAY_SECONDS
        self.wall, self.clock, self.exposure = np.zeros((3, count))
        self.pending, self.recovery, self.failures, self.unseen = np.zeros((4, count))
        self.pointer = np.zeros(count, dtype=np.int64)
        self.blamed = np.zeros(count, dtype=np.int64)
        self.versions = np.zeros((count, len(self.schedule.tiers)))
        self.tainted, self.notice, self.finish = np.full((3, count), np.inf)
        self.returns = np.full((count, self.groups), -np.inf)
        self.repairs = Repairs(count, _one(run.restart.spares))
        self.lost = {name: np.zeros(count) for name in LOSSES}
        self.by_cause = np.zeros((count, len(self.names)))
        self.active = np.ones(count, dtype=bool)

    def play(self) -> Simulated:
        every = np.arange(self.scenario.trials)
        while self.active.any():
            ended = self.chunk.cause[every, self.pointer] == END
            spent = ended & (self.chunk.seconds[every, self.pointer] <= self.exposure)
            rows = np.nonzero(self.active & ~spent)[0]
            if rows.size:
                self._step(rows)
            else:
                self.chunk = self.strikes.next_chunk()
                self.pointer[:] = 0
        return self._result()

    def _step(self, rows: Indices) -> None:
        """Every trial of `rows` continues to its next event."""
        returns = self.returns[rows]
        down = returns > self.wall[rows, None]
        up = self.groups - down.sum(axis=1)
        enough = up >= _one(self.run.replicas.minimum)
        speed = np.where(enough, up / self.groups, 0.0)
        until = np.stack(
            [
                self.chunk.seconds[rows, self.pointer[rows]] - self.exposure[rows],
                self.notice[rows] - self.wall[rows],
                np.where(down, returns, np.inf).min(axis=1) - self.wall[rows],
                self.pending[rows] + (self.target - self.clock[rows]) / speed,
                self.limit - self.wall[rows],
            ]
        )
        kind = np.argmin(until, axis=0)
        passed = np.maximum(until.min(axis=0), 0.0)
        back = np.minimum(self.pending[rows], passed)
        running = passed - back
        self.pending[rows] -= back
        self.clock[rows] += running * speed
        self.wall[rows] += passed
        self.exposure[rows] += passed
        self.lost["restart"][rows] += back
        idle = running * (1.0 - speed)
        self.lost["degraded running"][rows] += idle
        self.by_cause[rows, self.blamed[rows]] += back + idle
        self._strike(rows[kind == 0])
        self._noticed(rows[kind == 1])
        self._rejoin(rows[kind == 2])
        done = rows[kind == 3]
        self.clock[done], self.finish[done] = self.target, self.wall[done]
        self.active[rows[kind >= 3]] = False

    def _pause(self, rows: Indices, seconds: Array | float, kind: str, cause: Indices) -> None:
        """Time in which all stand still and nothing fails."""
        self.wall[rows] += seconds
        self.lost[kind][rows] += seconds
        self.by_cause[rows, cause] += seconds

    def _strike(self, rows: Indices) -> None:
        """The failures that the pointers show, by what they do."""
        cause = self.chunk.cause[rows, self.pointer[rows]]
        first = self.chunk.first_node[rows, self.pointer[rows]]
        ended = cause == END
        # The last entry of a chunk only says that the next chunk is needed.
        self.exposure[rows[ended]] = self.chunk.seconds[rows[ended], self.pointer[rows[ended]]]
        rows, cause, first = rows[~ended], cause[~ended], first[~ended]
        self.pointer[rows] += 1
        alarm = cause == len(self.names) - 1
        computing = self.pending[rows] == 0.0
        seconds = _one(self.run.guard.alarm_seconds)
        self._pause(rows[alarm & computing], seconds, "guard", cause[alarm & computing])
        # Nodes of groups that are gone make no errors.
        there = (self.returns[rows] <= self.wall[rows, None]).mean(axis=1)
        silent = self.silent[cause] & computing & (self.random.random(rows.size) < there)
        self._corrupt(rows[silent], cause[silent])
        loud = ~self.silent[cause] & ~alarm
        rows, cause, first = rows[loud], cause[loud], first[loud]
        if self.groups == 1:
            self._stop(rows, cause)
        elif rows.size:
            self._shrink(rows, cause, first)

    def _corrupt(self, rows: Indices, cause: Indices) -> None:
        """Silent errors: found by the guard, noticed later, or never."""
        guard = self.run.guard
        chance = self.random.random((2, rows.size))
        found = chance[0] < np.max(guard.coverage)
        late = ~found & (chance[1] < np.max(guard.noticed))
        self.unseen[rows[~found & ~late]] += 1.0
        caught, seconds = rows[found], _one(guard.latency_seconds)
        if guard.rolls_back:
            self._pause(caught, seconds, "lost work", cause[found])
            self._roll_back(caught, cause[found], np.zeros(caught.size))
        else:
            seconds += _one(guard.correction_seconds)
            self._pause(caught, seconds, "guard", cause[found])
        clean = np.isinf(self.tainted[rows]) & late
        tainted = rows[clean]
        self.tainted[tainted] = self.schedule.position(self.clock[tainted])[1]
        self.notice[tainted] = self.wall[tainted] + _one(guard.noticed_hours) * HOUR_SECONDS
        self.blamed[tainted] = cause[clean]

    def _noticed(self, rows: Indices) -> None:
        """Somebody sees that the numbers are wrong: back to a version from before the error."""
        if not rows.size:
            return
        apart = self.schedule.every[-1]
        clean = np.floor(self.tainted[rows] / self.schedule.interval / apart) * apart
        self.versions[rows] = np.minimum(self.versions[rows], clean[:, None])
        self._restore(rows, clean, np.nonzero(self.silent)[0][0] + np.zeros_like(rows))
        restart = _one(self.run.restart.restart_seconds)
        self._go_back(rows, restart + self.schedule.restore[-1])
        self.tainted[rows] = self.notice[rows] = np.inf

    def _stop(self, rows: Indices, cause: Indices) -> None:
        """A failure that ends all processes."""
        if not rows.size:
            return
        self.failures[rows] += 1.0
        self._pause(rows, self.detection[cause], "detection", cause)
        wait = self._nodes_ready(rows, cause) - self.wall[rows]
        self._pause(rows, wait, "waiting for nodes", cause)
        self._roll_back(rows, cause, self.lost_nodes[cause])

    def _nodes_ready(self, rows: Indices, cause: Indices) -> Array:
        """Time at which there is a node for each lost one, which go to repair."""
        ready = self.wall[rows]
        broken = self.lost_nodes[cause] > 0
        rows, cause = rows[broken], cause[broken]
        if rows.size:
            now, nodes = self.wall[rows], self.lost_nodes[cause]
            ends = now + self.random.exponential(self.repair[cause])
            ready[broken] = self.repairs.replace(rows, now, ends, nodes)
        return ready

    def _roll_back(self, rows: Indices, cause: Indices, nodes: Array) -> None:
        """Back to the newest version that so many lost nodes leave."""
        if not rows.size:
            return
        plan = self.schedule
        rounds, work = plan.position(self.clock[rows])
        versions = np.maximum(self.versions[rows], plan.durable(rounds, work))
        left = plan.survives >= nodes[:, None]
        newest = np.where(left, versions, -1.0).max(axis=1)
        # Of equal versions the one in the tier that is listed first.
        choice = plan.restore[(left & (versions == newest[:, None])).argmax(axis=1)]
        self.versions[rows] = np.where(left, np.minimum(versions, newest[:, None]), newest[:, None])
        self._restore(rows, newest, cause)
        back = self.run.restart
        seconds = _one(back.restart_seconds) + choice
        self._go_back(rows, seconds + np.where(nodes > 0, np.max(back.replace_seconds), 0.0))
        erased = newest * plan.interval <= self.tainted[rows]
        self.tainted[rows[erased]] = self.notice[rows[erased]] = np.inf

    def _go_back(self, rows: Indices, seconds: Array | float) -> None:
        """Begins a recovery, or one that was cut short anew: what was to be made good still is."""
        under_way = np.where(self.pending[rows] > 0.0, self.recovery[rows], 0.0)
        self.recovery[rows] = np.maximum(under_way, seconds)
        self.pending[rows] = self.recovery[rows]

    def _restore(self, rows: Indices, version: Array, cause: Indices) -> None:
        clock = np.minimum(self.schedule.clock(version), self.clock[rows])
        redone = self.clock[rows] - clock
        self.lost["lost work"][rows] += redone
        self.by_cause[rows, cause] += redone
        self.clock[rows] = clock
        self.blamed[rows] = cause

    def _shrink(self, rows: Indices, cause: Indices, first: Indices) -> None:
        """Replica groups of the nodes hit go; the others continue, if there are any."""
        nodes = _one(self.run.nodes)
        group = np.arange(self.groups)
        low = np.minimum(np.floor(first * self.groups / nodes), self.groups - 1.0)
        width = np.ceil(self.hit[cause] * self.groups / nodes - 1e-9)
        high = low + np.maximum(width, 1.0)
        hit = (group >= low[:, None]) & (group < high[:, None])
        # A block beyond the last group wraps to the first.
        hit |= group < (high - self.groups)[:, None]
        up = self.returns[rows] <= self.wall[rows, None]
        felt = (hit & up).any(axis=1)
        rows, cause, hit, up = rows[felt], cause[felt], hit[felt], up[felt]
        total = ~(up & ~hit).any(axis=1)
        self.returns[rows[total]] = -np.inf
        self._stop(rows[total], cause[total])
        rows, cause, hit, up = rows[~total], cause[~total], hit[~total], up[~total]
        if not rows.size:
            return
        self.failures[rows] += 1.0
        replicas, back = self.run.replicas, self.run.restart
        seen, own = self.detection[cause], _one(replicas.detection_seconds)
        self._pause(rows, np.minimum(seen, own) if own else seen, "detection", cause)
        ready = self._nodes_ready(rows, cause)
        ready += float(np.max(back.restart_seconds) + np.max(replicas.recovery_seconds))
        ready += np.where(self.lost_nodes[cause] > 0, np.max(back.replace_seconds), 0.0)
        self.returns[rows] = np.where(hit & up, ready[:, None], self.returns[rows])
        lost = self.random.random(rows.size) * np.max(replicas.step_seconds)
        self._pause(rows, lost + np.max(replicas.regroup_seconds), "regrouping", cause)
        self.blamed[rows] = cause

    def _rejoin(self, rows: Indices) -> None:
        if not rows.size:
            return
        back = np.abs(self.returns[rows] - self.wall[rows, None]) < 1e-3
        self.returns[rows] = np.where(back, -np.inf, self.returns[rows])
        seconds = _one(self.run.replicas.rejoin_seconds)
        self._pause(rows, seconds, "regrouping", self.blamed[rows])

    def _result(self) -> Simulated:
        _, work = self.schedule.position(self.clock)
        progress = work / self.factor
        self.lost["pace"] = work - progress
        kept = self.schedule.kept(self.clock)
        self.lost["keeping in memory"] = kept
        self.lost["checkpoint saves"] = self.clock - work - kept
        wall = float(self.wall.sum())
        ettr = float(progress.sum()) / wall
        spread = (progress - ettr * self.wall).std(ddof=1) if self.wall.size > 1 else 0.0
        error = float(spread) / np.sqrt(self.wall.size) / float(self.wall.mean())
        shares = {name: float(seconds.sum()) / wall for name, seconds in self.lost.items()}
        causes = zip(self.names, self.by_cause.sum(axis=0) / wall, strict=True)
        return Simulated(
            ettr,
            float(error),
            self.finish,
            shares,
            {name: float(share) for name, share in causes},
            float(self.failures.mean()),
            float(self.unseen.mean()),
        )
