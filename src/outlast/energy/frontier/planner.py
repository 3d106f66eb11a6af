"""Plans of clocks for a training step, and the whole time-energy frontier.

planner = EnergyPlanner(profile)
plan = planner.plan(schedule, deadline="+2%")
plan.saving, plan.gap                      # of top clocks' energy; above what any plan can reach
plan = planner.plan(schedule, "+5%", switches="per_stage")     # one clock per device
frontier = planner.frontier(schedule)      # 20 plans; frontier.at(seconds) is a look-up
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import TYPE_CHECKING

from outlast.energy.frontier.linear import DeadlineError, Programme, lower_hull
from outlast.energy.frontier.operations import SwitchDelays, baseline, curves_of, merged
from outlast.energy.frontier.plan import SWITCHES, ClockPlan, fingerprint
from outlast.energy.frontier.rounding import Choices, rounded
from outlast.energy.frontier.stragglers import Frontier
from outlast.energy.frontier.switches import Grouped, GroupedProgramme
from outlast.energy.profile import effective
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.frontier.plan import Switches
    from outlast.energy.profile import Point, Profile
    from outlast.energy.schedule.graph import Schedule

LONGEST = 1.1
"""A frontier ends at this multiple of the baseline's time, where not told otherwise."""


# By what share the deadlines differ whose prices help to round a plan.
_NEARBY = 0.005

# Halvings of the interval of deadlines in which a plan with delayed changes of clock is looked for.
_HALVINGS = 7


class EnergyPlanner:
    """Chooses clocks; never touches hardware.

    Args:
        profile: Time and energy of the operations.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def plan(
        self,
        schedule: Schedule,
        deadline: float | str = "+0%",
        *,
        switches: Switches = "free",
        switch_seconds: float = 0.0,
        margin: float = 0.0,
    ) -> ClockPlan:
        """Clocks with the least energy that meet a deadline.

        Args:
            schedule: The step.
            deadline: In seconds, or above the baseline's time, as in "+2%". The baseline is the
                step at top clocks; where lower ones are faster, see `baseline`.
            switches: "none" (one clock for all devices), "per_stage" (one for each device),
                "per_phase" (one for each device and phase) or "free" (one for each operation).
            switch_seconds: What a change of a device's clock takes; the device then waits at
                blocking power.
            margin: Share of the deadline to keep free, because the profile is not exact; see
                `margin_for`.

        Raises:
            EnergyError: For a setting that cannot be read or a deadline that cannot be met.
        """
        solver = _Solver(self.profile, schedule, switches, switch_seconds)
        return solver.plan(deadline, margin)

    def frontier(
        self,
        schedule: Schedule,
        points: int = 20,
        longest: float | str = f"+{LONGEST - 1:.0%}",
        *,
        switches: Switches = "free",
        switch_seconds: float = 0.0,
        margin: float = 0.0,
    ) -> Frontier:
        """Plans for evenly spaced deadlines, from the baseline's time to the longest.

        Args:
            schedule: The step.
            points: Number of plans.
            longest: The last deadline, as in `plan`; "least energy" ends where slowing down no
                longer pays.
            switches: As in `plan`.
            switch_seconds: As in `plan`.
            margin: As in `plan`; the deadlines then begin later by as much.

        Raises:
            EnergyError: As `plan` does, and for fewer than one point.
        """
        if points < 1:
            raise EnergyError(f"points = {points} is below 1: a frontier needs at least one plan")
        solver = _Solver(self.profile, schedule, switches, switch_seconds)
        first = solver.shortest_seconds / (1 - _checked(margin, "margin", 1.0))
        if longest == "least energy":
            longest = solver.longest_useful_seconds / (1 - margin)
        last = solver.seconds_of(longest)
        if last < first:
            raise EnergyError(
                f"longest = {longest} is {last:.6g} s, which is below the shortest deadline of "
                f"{first:.6g} s: make it longer"
            )
        step = (last - first) / max(points - 1, 1)
        return Frontier(
            tuple(solver.plan(first + step * i, margin) for i in range(points)),
            longest_useful_seconds=solver.longest_useful_seconds,
        )


class _Solver:
    """The programmes of one schedule, kept for all its deadlines."""

    def __init__(
        self, profile: Profile, schedule: Schedule, switches: Switches, switch_seconds: float
    ) -> None:
        if switches not in SWITCHES:
            near = get_close_matches(str(switches), SWITCHES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"say {', '.join(SWITCHES)}"
            raise EnergyError(f'switches = "{switches}" is unknown: {hint}')
        if not schedule.operations:
            raise EnergyError("the schedule has no operations: there is nothing to plan")
        schedule.check()
        self._profile, self._schedule = profile, schedule
        self._switches_allowed = switches
        self._delays = SwitchDelays(schedule, _checked(switch_seconds, "switch_seconds", math.inf))
        watts = profile.blocking_watts
        self._curves = curves_of(profile, schedule)
        pareto = {id(curve): curve.pareto(watts) for curve in self._curves}
        hulls = {curve: lower_hull(points, watts) for curve, points in pareto.items()}
        keys = [id(curve) for curve in self._curves]
        self._choices = Choices([pareto[key] for key in keys], [hulls[key] for key in keys], watts)
        self._baseline = baseline(schedule, self._curves)
        self._programme = Programme(schedule, self._choices.hulls, watts)
        self._grouped = self._grouped_programmes()
        self._fingerprint = fingerprint(schedule)
        self.baseline_seconds = schedule.makespan([point.seconds for point in self._baseline])

    @property
    def shortest_seconds(self) -> float:
        """Of the baseline, changes between operations with different top clocks included."""
        return self._schedule.makespan(self._delays.seconds(self._baseline))

    @property
    def longest_useful_seconds(self) -> float:
        """The step's time with the least effective energy: a slower one only takes more."""
        return self._schedule.makespan([points[-1].seconds for points in self._choices.points])

    def seconds_of(self, deadline: float | str) -> float:
        """A deadline in seconds."""
        if not isinstance(deadline, str):
            if isinstance(deadline, bool) or not isinstance(deadline, int | float):
                raise EnergyError(f'deadline = {deadline} is not a time: say e.g. 3.2 or "+2%"')
            if not 0 < deadline < math.inf:
                raise EnergyError(f"deadline = {deadline:g} s is not a time: say e.g. 3.2")
            return deadline
        try:
            share = float(deadline.strip().removesuffix("%")) / 100
        except ValueError:
            share = float("nan")
        if not deadline.strip().endswith("%") or not -1 < share < math.inf:
            raise EnergyError(
                f'deadline = "{deadline}" is neither seconds nor a percentage: say e.g. 3.2 or '
                '"+2%" above the time of top clocks'
            )
        return self.baseline_seconds * (1 + share)

    def plan(self, deadline: float | str, margin: float = 0.0) -> ClockPlan:
        """The plan for one deadline."""
        seconds = self.seconds_of(deadline)
        usable = seconds * (1 - _checked(margin, "margin", 1.0))
        try:
            relaxed = self._programme.solve(usable)
            found = self._within(relaxed, usable)
        except DeadlineError as error:
            if not margin:
                raise
            raise EnergyError(
                f"deadline = {seconds:g} s cannot be met with margin = {margin:g} and switches = "
                f'"{self._switches_allowed}": the shortest feasible deadline is '
                f"{error.shortest_seconds / (1 - margin):.6g} s; allow it, or a smaller margin"
            ) from error
        blocked = self._blocked(seconds)
        bound = self._programme.solve(seconds).joules if margin else relaxed.joules
        own = found.bound_joules if not margin else bound
        return ClockPlan(
            clocks_mhz=tuple(point.clock_mhz for point in found.points),
            seconds=self._schedule.makespan(self._delays.seconds(found.points)),
            deadline_seconds=seconds,
            joules=self._joules(found.points, seconds),
            bound_joules=bound + blocked,
            fastest_joules=self._joules(self._baseline, seconds),
            switches=sum(self._delays.changes(found.points)),
            kind=self._profile.kind,
            budget=self._switches_allowed,
            budget_bound_joules=max(own, bound) + blocked,
            switch_seconds=self._delays.switch_seconds,
            margin=margin,
            blocking_watts=self._profile.blocking_watts,
            devices=self._schedule.devices,
            device=self._profile.device,
            schedule=self._fingerprint,
        )

    def _within(self, relaxed: Relaxed, seconds: float) -> Grouped:
        if self._switches_allowed == "free" and not self._delays.switch_seconds:
            nearby = [self._programme.solve(value) for value in self._near(seconds)]
            points = rounded(self._schedule, self._choices, relaxed, seconds, nearby)
            return Grouped(points, relaxed.joules)
        if self._switches_allowed != "free":
            return self._grouped[0].solve(seconds)
        return self._free_with_delays(seconds, relaxed.joules)

    def _near(self, seconds: float) -> list[float]:
        """Deadlines a little shorter and longer, whose prices help to round."""
        shorter = max(seconds * (1 - _NEARBY), self._programme.fastest_seconds)
        return [shorter, seconds * (1 + _NEARBY)]

    def _free_with_delays(self, seconds: float, bound: float) -> Grouped:
        """The best of plans per device, per part of the step, and with merged changes."""
        best: list[Point] | None = None
        problem = None
        for grouped in self._grouped:
            try:
                points = grouped.solve(seconds).points
            except EnergyError as error:
                problem = error
                continue
            if best is None or self._joules(points, seconds) < self._joules(best, seconds):
                best = points
        low, high = self._programme.fastest_seconds, seconds
        for halving in range(_HALVINGS):
            middle = high if not halving else (low + high) / 2
            relaxed = self._programme.solve(middle)
            points = merged(
                self._schedule, self._curves, self._choices, relaxed, self._delays.switch_seconds
            )
            if self._schedule.makespan(self._delays.seconds(points)) > seconds * (1 + 1e-9):
                high = middle
                continue
            low = middle
            if best is None or self._joules(points, seconds) < self._joules(best, seconds):
                best = points
        if best is None:
            raise problem or EnergyError(f"deadline = {seconds:g} s cannot be met")
        return Grouped(best, bound)

    def _grouped_programmes(self) -> list[GroupedProgramme]:
        budgets: list[Switches] = [self._switches_allowed]
        if self._switches_allowed == "free":
            budgets = ["per_stage", "free"] if self._delays.switch_seconds else []
        return [
            GroupedProgramme(self._schedule, self._profile, budget, self._delays.switch_seconds)
            for budget in budgets
        ]

    def _blocked(self, seconds: float) -> float:
        return self._schedule.devices * self._profile.blocking_watts * seconds

    def _joules(self, points: list[Point], seconds: float) -> float:
        watts = self._profile.blocking_watts
        return sum(effective(point, watts) for point in points) + self._blocked(seconds)


def _checked(value: float, name: str, below: float) -> float:
    """A number in [0, below)."""
    if not 0 <= value < below:
        limit = "finite" if math.isinf(below) else f"below {below:g}"
        raise EnergyError(f"{name} = {value:g} must be {limit} and not below 0")
    return value
