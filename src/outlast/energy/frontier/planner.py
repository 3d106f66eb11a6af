"""Plans of clocks for a training step, and the whole time-energy frontier.

planner = EnergyPlanner(profile)
plan = planner.plan(schedule, deadline="+2%")
plan.saving, plan.gap                      # of top clocks' energy; above what any plan can reach
frontier = planner.frontier(schedule)      # 20 plans; frontier.at(seconds) is a look-up
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.energy.frontier.hull import lower_hull
from outlast.energy.frontier.linear import Programme
from outlast.energy.frontier.plan import ClockPlan
from outlast.energy.frontier.rounding import Choices, rounded
from outlast.energy.profile import effective
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.profile import Point, Profile
    from outlast.energy.schedule.dag import Schedule

LONGEST = 1.1
"""A frontier ends at this multiple of the top clocks' time, where not told otherwise."""


@dataclass(frozen=True)
class Frontier:
    """Plans from the shortest to the longest deadline.

    Attributes:
        plans: By rising deadline.
    """

    plans: tuple[ClockPlan, ...]

    def at(self, deadline_seconds: float) -> ClockPlan:
        """The plan that uses a deadline best: the slowest one that meets it. A look-up.

        Raises:
            EnergyError: When the deadline is shorter than that of any plan; names the shortest.
        """
        place = bisect_right([plan.seconds for plan in self.plans], deadline_seconds)
        if not place:
            raise EnergyError(
                f"deadline = {deadline_seconds:g} s cannot be met: the fastest plan of this "
                f"frontier takes {self.plans[0].seconds:.6g} s"
            )
        return self.plans[place - 1]


class EnergyPlanner:
    """Chooses clocks; never touches hardware.

    Args:
        profile: Time and energy of the operations.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def plan(self, schedule: Schedule, deadline: float | str = "+0%") -> ClockPlan:
        """Clocks with the least energy that meet a deadline.

        Args:
            schedule: The step.
            deadline: In seconds, or above the time of top clocks, as in "+2%".

        Raises:
            EnergyError: For a deadline that cannot be read or met.
        """
        return _Solver(self.profile, schedule).plan(deadline)

    def frontier(
        self, schedule: Schedule, points: int = 20, longest: float | str = f"+{LONGEST - 1:.0%}"
    ) -> Frontier:
        """Plans for evenly spaced deadlines, from that of top clocks to the longest."""
        solver = _Solver(self.profile, schedule)
        first, last = solver.top_seconds, solver.seconds_of(longest)
        step = (last - first) / max(points - 1, 1)
        return Frontier(tuple(solver.plan(first + step * i) for i in range(points)))


class _Solver:
    """The programme of one schedule, kept for all its deadlines."""

    def __init__(self, profile: Profile, schedule: Schedule) -> None:
        self._profile, self._schedule = profile, schedule
        watts = profile.blocking_watts
        curves = {each.key: profile.curve(each.key) for each in schedule.operations}
        pareto = {key: curve.pareto(watts) for key, curve in curves.items()}
        hulls = {key: lower_hull(points, watts) for key, points in pareto.items()}
        keys = [each.key for each in schedule.operations]
        self._choices = Choices([pareto[key] for key in keys], [hulls[key] for key in keys], watts)
        self._top = [curves[key].top for key in keys]
        self._programme = Programme(schedule, self._choices.hulls, watts)
        self.top_seconds = schedule.makespan([point.seconds for point in self._top])

    def seconds_of(self, deadline: float | str) -> float:
        """A deadline in seconds."""
        if not isinstance(deadline, str):
            return deadline
        try:
            share = float(deadline.strip().removesuffix("%")) / 100
        except ValueError:
            share = float("nan")
        if not deadline.strip().endswith("%") or not share > -1:
            raise EnergyError(
                f'deadline = "{deadline}" is neither seconds nor a percentage: say e.g. 3.2 or '
                '"+2%" above the time of top clocks'
            )
        return self.top_seconds * (1 + share)

    def plan(self, deadline: float | str) -> ClockPlan:
        """The plan for one deadline."""
        seconds = self.seconds_of(deadline)
        relaxed = self._programme.solve(seconds)
        points = rounded(self._schedule, self._choices, relaxed, seconds)
        return ClockPlan(
            clocks_mhz=tuple(point.clock_mhz for point in points),
            seconds=self._schedule.makespan([point.seconds for point in points]),
            deadline_seconds=seconds,
            joules=self._joules(points, seconds),
            bound_joules=relaxed.joules + self._blocked(seconds),
            fastest_joules=self._joules(self._top, seconds),
            switches=self._switches(points),
            kind=self._profile.kind,
        )

    def _blocked(self, seconds: float) -> float:
        return self._schedule.devices * self._profile.blocking_watts * seconds

    def _joules(self, points: list[Point], seconds: float) -> float:
        watts = self._profile.blocking_watts
        return sum(effective(point, watts) for point in points) + self._blocked(seconds)

    def _switches(self, points: list[Point]) -> int:
        last: dict[int, int] = {}
        count = 0
        for index in self._schedule.order:
            device, clock = self._schedule.operations[index].device, points[index].clock_mhz
            if clock:
                count += last.get(device, clock) != clock
                last[device] = clock
        return count
