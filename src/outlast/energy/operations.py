"""Clocks that the operations of a step may run at, and the time of a step without a plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.linear_program import slopes
from outlast.energy.profile import Curve, Point, effective
from outlast.energy.schedule import LINK
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.linear_program import Relaxed
    from outlast.energy.profile import Key, Profile
    from outlast.energy.schedule import Schedule


# Times that differ by less are taken for equal: the top clock is then the baseline.
_ALIKE = 1e-3


def curves_of(profile: Profile, schedule: Schedule) -> list[Curve]:
    """(operations,) curves, equal ones shared.

    A link frees no device from waiting, and has no clock: its operations get one point of clock 0,
    whose joules hold blocking power in addition, so that `effective` gives the plain ones.

    Raises:
        EnergyError: When an operation is not in the profile, or a value there is no time, energy
            or power; and when nothing takes energy.
    """
    if not any(operation.device != LINK for operation in schedule.operations):
        raise EnergyError(
            "the schedule has no operations on devices: there is nothing to plan for links alone"
        )
    watts = profile.blocking_watts
    if not math.isfinite(watts) or watts < 0:
        raise EnergyError(
            f"blocking_watts = {watts:g} must be the power of a waiting device in W, e.g. 84"
        )
    known: dict[tuple[Key, bool], Curve] = {}
    for operation in schedule.operations:
        place = (operation.key, operation.device == LINK)
        if place not in known:
            curve = profile.curve(operation.key)
            name = f"the profile's stage {operation.stage} {operation.phase}"
            if not curve.points:
                raise EnergyError(f"{name} has no points: measure it at one clock or more")
            for point in curve.points:
                if not (math.isfinite(point.seconds) and point.seconds > 0):
                    raise EnergyError(
                        f"{name} at {point.clock_mhz} MHz has seconds = {point.seconds:g}, which "
                        "must be above 0: measure it again"
                    )
                if not (math.isfinite(point.joules) and point.joules >= 0):
                    raise EnergyError(
                        f"{name} at {point.clock_mhz} MHz has joules = {point.joules:g}, which "
                        "must not be below 0: measure it again"
                    )
            if operation.device == LINK:
                fixed = curve.top
                joules = fixed.joules + watts * fixed.seconds
                curve = Curve((Point(0, fixed.seconds, joules),))
            known[place] = curve
    if not watts and not any(point.joules for curve in known.values() for point in curve.points):
        raise EnergyError("no operation of the schedule takes energy: there is nothing to save")
    return [known[operation.key, operation.device == LINK] for operation in schedule.operations]


def baseline(schedule: Schedule, curves: list[Curve]) -> list[Point]:
    """(operations,) points of a step that nobody planned, with which plans are compared.

    All operations run at their top clock. Where a lower clock is faster by more than 0.1 % (a
    device that throttles, a noisy profile), all run so many clocks below the top that the step is
    fastest: a top clock that is slower and takes more energy would flatter the plans.
    """
    top = [curve.top for curve in curves]
    fastest = [min(point.seconds for point in curve.points) for curve in curves]
    limit = schedule.makespan(fastest) * (1 + _ALIKE)
    if schedule.makespan([point.seconds for point in top]) <= limit:
        return top
    rivals = []
    for below in range(max(len(curve.points) for curve in curves)):
        points = [curve.points[max(len(curve.points) - 1 - below, 0)] for curve in curves]
        rivals.append((schedule.makespan([point.seconds for point in points]), points))
    limit = min(seconds for seconds, _ in rivals) * (1 + _ALIKE)
    return next(points for seconds, points in rivals if seconds <= limit)


Places = list[int]
"""A plan: of each operation, which of its points it runs at; 0 is the fastest one."""


class Choices:
    """Clocks, times and energies that every operation may have; equal operations share theirs.

    Args:
        points: (operations,) Pareto points, fastest first.
        hulls: (operations,) those of them that are corners of the lower hull.
        blocking_watts: Power of a waiting device.

    Attributes:
        seconds: (operations,) arrays of (points,), rising.
        joules: (operations,) arrays of (points,) effective energy, falling.
        corners: (operations,) which places are corners of the lower hull.
    """

    def __init__(
        self,
        points: Sequence[Sequence[Point]],
        hulls: Sequence[Sequence[Point]],
        blocking_watts: float,
    ) -> None:
        self.points, self.hulls, self.blocking_watts = points, hulls, blocking_watts
        known: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]]] = {}
        for own, hull in zip(points, hulls, strict=True):
            if id(own) not in known:
                corners = set(hull)
                known[id(own)] = (
                    np.array([point.seconds for point in own]),
                    np.array([effective(point, blocking_watts) for point in own]),
                    [place for place, point in enumerate(own) if point in corners],
                )
        found = [known[id(own)] for own in points]
        self.seconds, self.joules, self.corners = map(list, zip(*found, strict=True))

    def durations(self, places: Sequence[int]) -> list[float]:
        """(operations,) seconds of a plan."""
        return [float(own[place]) for own, place in zip(self.seconds, places, strict=True)]

    def energy(self, places: Sequence[int]) -> float:
        """Effective joules of a plan."""
        return float(sum(own[place] for own, place in zip(self.joules, places, strict=True)))

    def below(self, seconds: Sequence[float]) -> Places:
        """The slowest corners of the hulls that are not slower than given durations."""
        return [
            max((c for c in corners if own[c] <= limit * (1 + 1e-9)), default=0)
            for own, corners, limit in zip(self.seconds, self.corners, seconds, strict=True)
        ]


class SwitchDelays:
    """Delays of operations by changes of clock.

    Args:
        schedule: The step.
        switch_seconds: Of one change.
    """

    def __init__(self, schedule: Schedule, switch_seconds: float) -> None:
        self._schedule, self.switch_seconds = schedule, switch_seconds

    def before(self, clocked: Sequence[bool]) -> list[int]:
        """(operations,) the operation that sets the clock which each finds; itself if none does.

        Args:
            clocked: (operations,) whether a clock changes its time.
        """
        on_device: dict[int, list[int]] = {}
        for index in self._schedule.order:
            if clocked[index]:
                on_device.setdefault(self._schedule.operations[index].device, []).append(index)
        found = list(range(len(self._schedule.operations)))
        for indices in on_device.values():
            # The first operation of a step finds the clock of the last one of the step before.
            for last, index in zip([indices[-1], *indices], indices, strict=False):
                found[index] = last
        return found

    def changes(self, points: Sequence[Point]) -> list[bool]:
        """(operations,) whether the clock changes before each."""
        before = self.before([bool(point.clock_mhz) for point in points])
        return [
            points[last].clock_mhz != point.clock_mhz
            for last, point in zip(before, points, strict=True)
        ]

    def seconds(self, points: Sequence[Point]) -> list[float]:
        """(operations,) durations with the changes before them."""
        return [
            point.seconds + self.switch_seconds * change
            for point, change in zip(points, self.changes(points), strict=True)
        ]


def merged(
    schedule: Schedule,
    curves: Sequence[Curve],
    choices: Choices,
    relaxed: Relaxed,
    switch_seconds: float,
) -> list[Point]:
    """(operations,) points where clocks change only when that pays at the programme's prices.

    The optimum of the linear programme prices each operation's time: where its duration lies on a
    segment of the hull, one more second is worth minus that segment's slope in watts. On each
    device the clocks with the least energy plus priced time, changes included, are a shortest
    path over (operation, clock), found by dynamic programming (Viterbi 1967). It heeds prices, not
    the deadline, which the caller must check.
    """
    points = [curve.points[-1] for curve in curves]
    # (operations,) watts that one more second of each is worth.
    prices = []
    for hull, seconds in zip(choices.hulls, relaxed.seconds.tolist(), strict=True):
        falls = [-slope for slope in slopes(hull, choices.blocking_watts)]
        if not falls:
            prices.append(0.0)
            continue
        # Beyond the ends the price is only known to be higher or lower: twice and half are guesses.
        segments = [2 * falls[0], *falls, falls[-1] / 2]
        inner = [corner.seconds for corner in hull]
        slack = 1e-9 * inner[-1]
        left = int(np.searchsorted(inner, seconds - slack, side="right"))
        right = int(np.searchsorted(inner, seconds + slack, side="right"))
        prices.append((segments[min(left, right)] + segments[max(left, right)]) / 2)
    sequences: dict[int, list[int]] = {}
    for index in schedule.order:
        if any(point.clock_mhz for point in curves[index].points):
            sequences.setdefault(schedule.operations[index].device, []).append(index)
    for indices in sequences.values():
        clocks = sorted({point.clock_mhz for index in indices for point in curves[index].points})
        place = {clock: i for i, clock in enumerate(clocks)}
        total = np.zeros(len(clocks))
        came_from = []
        for index in indices:
            price = prices[index]
            own = np.full(len(clocks), np.inf)
            for point in curves[index].points:
                joules = effective(point, choices.blocking_watts)
                own[place[point.clock_mhz]] = joules + price * point.seconds
            best = int(np.argmin(total))
            changed = total[best] + price * switch_seconds
            came_from.append(np.where(total <= changed, np.arange(len(clocks)), best))
            total = np.minimum(total, changed) + own
        at = int(np.argmin(total))
        for index, before in zip(reversed(indices), reversed(came_from), strict=True):
            points[index] = curves[index].at(clocks[at])
            at = int(before[at])
    return points
