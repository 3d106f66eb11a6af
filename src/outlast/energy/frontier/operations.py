"""What the operations of a step may run at, checked, and what a step takes without a plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.energy.profile import Curve, Point
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.profile import Key, Profile
    from outlast.energy.schedule.dag import Schedule

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
    if not any(operation.device >= 0 for operation in schedule.operations):
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
        place = (operation.key, operation.device < 0)
        if place not in known:
            curve = profile.curve(operation.key)
            _check(operation.key, curve)
            if operation.device < 0:
                fixed = curve.top
                joules = fixed.joules + watts * fixed.seconds
                curve = Curve((Point(0, fixed.seconds, joules),))
            known[place] = curve
    if not watts and not any(point.joules for curve in known.values() for point in curve.points):
        raise EnergyError("no operation of the schedule takes energy: there is nothing to save")
    return [known[operation.key, operation.device < 0] for operation in schedule.operations]


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


def _check(key: Key, curve: Curve) -> None:
    name = f"the profile's stage {key.stage} {key.phase}"
    if not curve.points:
        raise EnergyError(f"{name} has no points: measure it at one clock or more")
    for point in curve.points:
        if not (math.isfinite(point.seconds) and point.seconds > 0):
            raise EnergyError(
                f"{name} at {point.clock_mhz} MHz has seconds = {point.seconds:g}, which must be "
                "above 0: measure it again"
            )
        if not (math.isfinite(point.joules) and point.joules >= 0):
            raise EnergyError(
                f"{name} at {point.clock_mhz} MHz has joules = {point.joules:g}, which must not be "
                "below 0: measure it again"
            )
