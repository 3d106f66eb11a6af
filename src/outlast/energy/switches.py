"""Plans that change clocks seldom: one clock for a group of operations, chosen exactly.

With one binary w_gc for each group g and clock c, group g's operations last sum_c w_gc * t_i(c).
A step meets the deadline T when every path through the schedule does. Paths are too many to list,
so the integer programme knows only those that a former solution broke; each solution is checked on
the whole schedule, and its longest path is added until none is too long (cutting planes; Dantzig,
Fulkerson and Johnson 1954). The last solution is then optimal within `RELATIVE_GAP`, or as far from
it as `ClockPlan.budget_gap` says where the search ended after `NODES` nodes.

A change of clock delays the operation after it. Between two groups g and h of a device it happens
when their clocks differ: z_gh >= w_gc - w_hc for every clock c, and z_gh enters the paths.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from scipy.sparse import csc_array, vstack

from outlast.energy.linear_program import DeadlineError, highs_model, unit_of
from outlast.energy.operations import SwitchDelays, curves_of
from outlast.energy.profile import effective
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.plan import Switches
    from outlast.energy.profile import Point, Profile
    from outlast.energy.schedule import Schedule

Floats: TypeAlias = "npt.NDArray[np.float64]"

RELATIVE_GAP = 5e-4
"""The integer programme stops when its solution is this near its bound."""
NODES = 100
"""Or after so many nodes of its search tree; the bound that is then given is a wider, true one."""
_ROUNDS = 500
# HiGHS' primal solution status.
_FEASIBLE = 2
# A path that is longer than the deadline by this share is an error of floating point.
_TOLERANCE = 1e-9
# How far HiGHS lets whole numbers be off; the fastest step takes 500 to 2000 of the units in which
# paths are given, so that its absolute tolerance of 1e-6 for them is about `_TOLERANCE`.
_WHOLE = 1e-9
_LEAST_UNITS = 500.0


@dataclass(frozen=True, eq=False)
class Grouped:
    """The best plan of a budget.

    Attributes:
        points: (operations,) what each runs at.
        bound_joules: Effective energy below which no plan of the budget is.
    """

    points: list[Point]
    bound_joules: float


class GroupedProgram:
    """The integer programme of a budget of switches; knows more paths after each deadline.

    Args:
        schedule: The step.
        profile: Time and energy of its operations.
        budget: "none", "per_stage" or "per_phase"; for "free", each device has one clock for its
            warm-up, one for the steady part and one for its cool-down, and all changes between
            these are taken to happen.
        switch_seconds: What a change of clock takes.

    Raises:
        EnergyError: When operations that must share a clock have none in common.
    """

    def __init__(
        self, schedule: Schedule, profile: Profile, budget: Switches, switch_seconds: float = 0.0
    ) -> None:
        self._schedule, self._budget = schedule, budget
        self._delays = SwitchDelays(schedule, switch_seconds)
        operations = schedule.operations
        curves = [curve.points for curve in curves_of(profile, schedule)]
        clocked = [any(point.clock_mhz for point in curve) for curve in curves]
        parts = _parts(schedule) if budget == "free" else [""] * len(operations)
        labels: list[tuple[object, ...]] = []
        for index, operation in enumerate(operations):
            # The common trait of the operations of one clock.
            if not clocked[index]:
                labels.append((index,))
            elif budget == "none":
                labels.append(("all",))
            elif budget == "per_stage":
                labels.append(("device", operation.device))
            else:
                part = operation.phase if budget == "per_phase" else parts[index]
                labels.append(("device", operation.device, part))
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        self._group = np.array([numbers[label] for label in labels])
        shared: dict[int, set[int]] = {}
        for curve, group in zip(curves, self._group.tolist(), strict=True):
            own_clocks = {point.clock_mhz for point in curve}
            shared[group] = shared[group] & own_clocks if group in shared else own_clocks
        if not all(shared.values()):
            raise EnergyError(
                f'switches = "{budget}" needs a clock that all operations of a group have, and '
                "some have none in common: measure them at the same clocks, or allow more switches"
            )
        self._columns = [(g, clock) for g in range(len(shared)) for clock in sorted(shared[g])]
        self._first = np.cumsum([0, *(len(shared[g]) for g in range(len(shared)))])
        tables = [{point.clock_mhz: point for point in curve} for curve in curves]
        # (operations,) the points of each at its group's clocks.
        self._points = [
            [table[clock] for _, clock in self._columns[self._first[g] : self._first[g + 1]]]
            for table, g in zip(tables, self._group.tolist(), strict=True)
        ]
        # (columns,) sums over the operations of each group.
        self._costs = np.zeros(len(self._columns))
        for group, points in zip(self._group.tolist(), self._points, strict=True):
            joules = [effective(point, profile.blocking_watts) for point in points]
            self._costs[self._first[group] : self._first[group + 1]] += joules
        fastest = schedule.makespan([min(p.seconds for p in own) for own in self._points])
        self._unit = unit_of(fastest, _LEAST_UNITS)
        self._joules_unit = unit_of(fastest, 2.0)
        self._before = self._delays.before(clocked)
        self._pairs: list[tuple[int, int]] = []
        if switch_seconds and budget != "free":
            groups = self._group.tolist()
            met = zip((groups[last] for last in self._before), groups, strict=True)
            self._pairs = sorted({(min(two), max(two)) for two in met if two[0] != two[1]})
        self._fixed_seconds = np.zeros(len(operations))
        if budget == "free":
            self._fixed_seconds[self._group != self._group[self._before]] = switch_seconds
        self._paths: list[Floats] = []
        self._path_seconds: list[float] = []

    def solve(self, deadline_seconds: float) -> Grouped:
        """The plan with the least energy.

        Raises:
            DeadlineError: When no plan of the budget meets the deadline; says the shortest.
            EnergyError: When the search finds none.
        """
        found = self._until_feasible(deadline_seconds)
        if found is None:
            shortest = self._until_feasible(None)
            assert shortest is not None, "without a deadline there is always a plan"
            takes = self._schedule.makespan(self._delays.seconds(shortest.points))
            raise DeadlineError(
                f"deadline = {deadline_seconds:g} s cannot be met with switches = "
                f'"{self._budget}": the shortest feasible deadline is {takes:.6g} s; allow it, or '
                "more switches",
                takes,
            )
        return found

    def _until_feasible(self, deadline: float | None) -> Grouped | None:
        # Fractions first: their paths are cheap to find, and most of what the integers need.
        for integral in (False, True):
            known: set[tuple[int, ...]] = set()
            for _ in range(_ROUNDS):
                solved = self._solved(deadline, integral)
                if solved is None:
                    return None
                weights, bound, limit = solved
                seconds = self._seconds(weights)
                path = self._longest_path(seconds)
                if sum(seconds[index] for index in path) <= limit * (1 + _TOLERANCE):
                    break
                if tuple(path) in known:
                    if not integral:
                        break
                    raise EnergyError(
                        f'switches = "{self._budget}": plans take the deadline of '
                        f"{limit:.9g} s up to errors of rounding: make it 0.01 % longer or shorter"
                    )
                known.add(tuple(path))
                self._paths.append(self._row(path) / self._unit)
                self._path_seconds.append(float(self._fixed_seconds[path].sum()) / self._unit)
            else:
                raise EnergyError(
                    f'switches = "{self._budget}": no plan was found in {_ROUNDS} rounds for '
                    f"deadline = {deadline or 0:g} s: try another deadline"
                )
        best = [
            int(np.argmax(weights[start:end])) for start, end in itertools.pairwise(self._first)
        ]
        chosen = zip(self._points, self._group.tolist(), strict=True)
        return Grouped([points[best[group]] for points, group in chosen], bound)

    def _solved(self, deadline: float | None, integral: bool) -> tuple[Floats, float, float] | None:
        """Weights, the bound of the cost and the time that paths may take; None if infeasible."""
        columns, pairs = len(self._columns), len(self._pairs)
        costs = np.zeros(columns + pairs + 1)
        costs[-1] = deadline is None
        if deadline is not None:
            costs[:columns] = self._costs / self._joules_unit
        lower, upper = np.zeros(len(costs)), np.ones(len(costs))
        upper[-1] = np.inf
        if deadline is not None:
            lower[-1] = upper[-1] = deadline / self._unit
        whole = np.ones(len(costs))
        whole[-1] = 0
        matrix, limits = self._rules()
        highs = highs_model(
            costs, (lower, upper), matrix, limits, integral=whole if integral else None
        )
        highs.setOptionValue("mip_feasibility_tolerance", _WHOLE)
        highs.setOptionValue("mip_rel_gap", RELATIVE_GAP)
        highs.setOptionValue("mip_max_nodes", NODES)
        highs.run()
        status = highs.modelStatusToString(highs.getModelStatus())
        if status == "Infeasible":
            return None
        info = highs.getInfo()
        if info.primal_solution_status != _FEASIBLE:
            raise EnergyError(
                f'switches = "{self._budget}": no plan was found within {NODES} nodes of the '
                f"search for deadline = {deadline or 0:g} s ({status}): try a longer deadline"
            )
        found = np.asarray(highs.getSolution().col_value)
        bound = info.mip_dual_bound if integral else info.objective_function_value
        limit = deadline or float(found[-1]) * self._unit
        if integral:
            found = np.round(found)
        return found, float(bound) * self._joules_unit, limit

    def _rules(self) -> tuple[csc_array, tuple[Floats, Floats]]:
        """One clock for each group, paths within the time, and what a switch takes."""
        width = len(self._columns) + len(self._pairs) + 1
        one_each = np.zeros((len(self._first) - 1, width))
        for group, (start, end) in enumerate(itertools.pairwise(self._first)):
            one_each[group, start:end] = 1
        blocks = [csc_array(one_each)]
        lower, upper = [np.ones(len(one_each))], [np.ones(len(one_each))]
        if self._paths:
            blocks.append(csc_array(np.array([[*path, -1.0] for path in self._paths])))
            lower.append(np.full(len(self._paths), -np.inf))
            upper.append(-np.array(self._path_seconds))
        places = {column: i for i, column in enumerate(self._columns)}
        rules = []
        for number, (one, other) in enumerate(self._pairs):
            # Both ways, for clocks that only one of the two groups has.
            for first, second in ((one, other), (other, one)):
                for clock in [clock for group, clock in self._columns if group == first]:
                    row = np.zeros(width)
                    row[places[first, clock]] = 1
                    if (second, clock) in places:
                        row[places[second, clock]] = -1
                    row[len(self._columns) + number] = -1
                    rules.append(row)
        if rules:
            blocks.append(csc_array(np.array(rules)))
            lower.append(np.full(len(rules), -np.inf))
            upper.append(np.zeros(len(rules)))
        return csc_array(vstack(blocks)), (np.concatenate(lower), np.concatenate(upper))

    def _row(self, path: Sequence[int]) -> Floats:
        """(columns + pairs,) what each variable adds to the length of a path."""
        row = np.zeros(len(self._columns) + len(self._pairs))
        places = {pair: len(self._columns) + i for i, pair in enumerate(self._pairs)}
        for index in path:
            group, last = int(self._group[index]), int(self._group[self._before[index]])
            row[self._first[group] : self._first[group + 1]] += [
                point.seconds for point in self._points[index]
            ]
            place = places.get((min(group, last), max(group, last)))
            if place is not None:
                row[place] += self._delays.switch_seconds
        return row

    def _seconds(self, weights: Floats) -> list[float]:
        """(operations,) durations of possibly fractional weights, changes of clock included."""
        columns = len(self._columns)
        switched = dict(
            zip(self._pairs, weights[columns : columns + len(self._pairs)], strict=True)
        )
        first = itertools.pairwise(self._first.tolist())
        shares = [weights[start:end].tolist() for start, end in first]
        groups = self._group.tolist()
        found = []
        for index, group in enumerate(groups):
            last = groups[self._before[index]]
            delay = switched.get((min(group, last), max(group, last)), 0.0)
            own = sum(
                share * point.seconds
                for share, point in zip(shares[group], self._points[index], strict=True)
            )
            delayed = float(delay) * self._delays.switch_seconds
            found.append(own + delayed + float(self._fixed_seconds[index]))
        return found

    def _longest_path(self, seconds: Sequence[float]) -> list[int]:
        schedule = self._schedule
        starts = schedule.earliest_starts(seconds)
        index = max(range(len(starts)), key=lambda i: starts[i] + seconds[i])
        path = [index]
        while schedule.predecessors[index]:
            index = max(schedule.predecessors[index], key=lambda i: starts[i] + seconds[i])
            path.append(index)
        return path


def _parts(schedule: Schedule) -> list[str]:
    """(operations,) warm-up until a device's first backward, cool-down after its last forward."""
    on_device: dict[int, list[int]] = {}
    for index in schedule.order:
        on_device.setdefault(schedule.operations[index].device, []).append(index)
    found = [""] * len(schedule.operations)
    for indices in on_device.values():
        forward = [schedule.operations[index].phase.startswith("forward") for index in indices]
        backward = [schedule.operations[index].phase.startswith("backward") for index in indices]
        first = backward.index(True) if any(backward) else len(indices)
        last = len(indices) - 1 - forward[::-1].index(True) if any(forward) else len(indices)
        for place, index in enumerate(indices):
            if place < first:
                found[index] = "warm-up"
            else:
                found[index] = "cool-down" if place > last else "steady"
    return found
