"""The cheapest power cap from at most three probed ones.

The highest cap is probed first: its draw says where caps begin to bite. The second probe is just
below that draw. Between the two, time above the uncapped one grows with the square of the distance
from the highest cap, and below the second with its fourth power, since the voltage can then fall no
further. That model chooses the third probe, a neighbour of the second or, where the second was too
slow, the lowest cap that it holds fast enough. The choice is the best of the probed caps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COST_SHARE, LIMIT_SHARE = 0.85, 0.95
"""Second probe relative to the uncapped draw: to balance energy and time, to stay within a limit.

Chosen on the Zeus NSDI'23 traces of A40 and V100; 0.80 to 0.90 and 0.93 to 1.00 do about as well.
"""
ABOVE, BELOW = 2.0, 4.0
"""Powers of the time model above and below the second probe."""


@dataclass(frozen=True, slots=True)
class CapPoint:
    """Work under a power cap.

    Attributes:
        cap_watts: The cap.
        seconds: Time of a fixed amount of work.
        watts: Average draw over it.
    """

    cap_watts: float
    seconds: float
    watts: float

    def __post_init__(self) -> None:
        for name in ("cap_watts", "seconds", "watts"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise EnergyError(f"{name} = {value} of a probed cap is not above 0: measure again")

    @property
    def joules(self) -> float:
        """Of the work."""
        return self.seconds * self.watts


@dataclass(frozen=True, slots=True)
class CapGoal:
    """What a cap should minimise.

    Attributes:
        eta: Weight of energy against time in ``eta E + (1 - eta) P_top t`` (Zeus, NSDI'23); 1 is
            energy alone.
        slowdown: Longest time allowed, relative to that at the highest cap; infinite for no limit.
    """

    eta: float = 0.5
    slowdown: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.eta <= 1.0:
            raise EnergyError(f"eta = {self.eta} is not in [0, 1]: 1 is energy alone")
        if not self.slowdown >= 1.0:
            raise EnergyError(f"slowdown = {self.slowdown} is below 1: 1.03 allows 3 % more time")

    def cost(self, point: CapPoint, top: CapPoint) -> float:
        """Joules, weighted; infinite for a point that is too slow."""
        if point.seconds > self.slowdown * top.seconds:
            return math.inf
        return self.eta * point.joules + (1.0 - self.eta) * top.cap_watts * point.seconds


@dataclass(frozen=True, slots=True)
class CapChoice:
    """The best of the probed caps.

    Attributes:
        point: The chosen cap, as measured.
        top: The highest cap, as measured.
        points: All that was probed, by ascending cap.
        bites: Whether any cap lies below the uncapped draw; else all differ only by noise.
    """

    point: CapPoint
    top: CapPoint
    points: tuple[CapPoint, ...]
    bites: bool

    @property
    def seconds_factor(self) -> float:
        """Time relative to the highest cap."""
        return self.point.seconds / self.top.seconds

    @property
    def joules_factor(self) -> float:
        """Energy relative to the highest cap."""
        return self.point.joules / self.top.joules

    def __str__(self) -> str:
        probed = ", ".join(f"{point.cap_watts:g}" for point in self.points)
        if not self.bites:
            return f"no cap bites: the work draws {self.top.watts:.0f} W (probed {probed} W)"
        return (
            f"{self.point.cap_watts:g} W: {self.joules_factor - 1:+.1%} energy, "
            f"{self.seconds_factor - 1:+.1%} time (probed {probed} W)"
        )


def model_caps(
    top: CapPoint, probed: CapPoint, caps_watts: Sequence[float]
) -> tuple[CapPoint, ...]:
    """Time and draw at every cap from the uncapped point and one below, by this module's model."""
    excess = max(0.0, probed.seconds / top.seconds - 1.0)
    fall = max(0.0, top.watts - probed.watts)
    modelled = []
    for cap in caps_watts:
        distance = (top.cap_watts - cap) / (top.cap_watts - probed.cap_watts)
        if distance <= 1.0:
            power, watts = ABOVE, top.watts - fall * distance**ABOVE
        else:
            power, watts = BELOW, probed.watts * cap / probed.cap_watts
        slowing = 1.0 + excess * distance**power
        modelled.append(CapPoint(cap, top.seconds * slowing, min(watts, top.watts)))
    return tuple(modelled)


def next_cap(
    points: Sequence[CapPoint], caps_watts: Sequence[float], goal: CapGoal
) -> float | None:
    """The cap to probe next; None when the probed ones and the model leave nothing to ask.

    Args:
        points: Probed so far, in order: the highest cap comes first.
        caps_watts: Caps that the device supports.
        goal: What to minimise.

    Raises:
        EnergyError: For fewer than two caps, or a probe that is not of the highest cap first.
    """
    caps = sorted(set(caps_watts))
    if len(caps) < 2:
        raise EnergyError(f"caps = {caps} leave nothing to choose: name at least two")
    if not points:
        return caps[-1]
    top = points[0]
    if top.cap_watts != caps[-1]:
        raise EnergyError(f"the first probe is {top.cap_watts:g} W: probe {caps[-1]:g} W first")
    limited = math.isfinite(goal.slowdown)
    if len(points) == 1:
        aim = (LIMIT_SHARE if limited else COST_SHARE) * top.watts
        return min(caps[:-1], key=lambda cap: abs(cap - aim))
    probed = {point.cap_watts for point in points}
    anchor = min(points[1:], key=lambda point: (goal.cost(point, top), -point.cap_watts))
    place = caps.index(anchor.cap_watts)
    if limited:
        if goal.cost(anchor, top) < math.inf:
            near = caps[max(0, place - 1) : place]
        else:
            near = caps[place + 1 : -1]
    else:
        near = caps[max(0, place - 1) : place + 2]
    open_caps = [cap for cap in near if cap not in probed]
    if not open_caps:
        return None
    costs = {p.cap_watts: goal.cost(p, top) for p in model_caps(top, anchor, open_caps)}
    if min(costs.values()) == math.inf:
        return open_caps[-1]
    return min(costs, key=lambda cap: (costs[cap], -cap))


def choose_cap(
    points: Sequence[CapPoint], goal: CapGoal | None = None, *, lowest_watts: float = 0.0
) -> CapChoice:
    """The best of the probed caps; the highest of those that are equal.

    Args:
        points: Probed, the highest cap among them.
        goal: What to minimise; by default energy and time with equal weight.
        lowest_watts: Lowest cap of the device, to tell whether any cap can bite.

    Raises:
        EnergyError: For no points, or a cap that was probed twice.
    """
    goal = goal or CapGoal()
    caps = [point.cap_watts for point in points]
    if not caps:
        raise EnergyError("no cap was probed: probe the highest one first")
    if len(set(caps)) < len(caps):
        raise EnergyError(f"caps {caps} were probed twice: take the median of each first")
    ordered = tuple(sorted(points, key=lambda point: point.cap_watts))
    top = ordered[-1]
    best = min(ordered, key=lambda point: (goal.cost(point, top), -point.cap_watts))
    return CapChoice(best, top, ordered, top.watts > (lowest_watts or ordered[0].cap_watts))


def search_cap(
    probe: Callable[[float], CapPoint],
    caps_watts: Sequence[float],
    goal: CapGoal | None = None,
    *,
    probes: int = 3,
) -> CapChoice:
    """Probes at most so many caps and returns the best.

    Args:
        probe: Runs a fixed amount of work under a cap (in watts) and measures it.
        caps_watts: Caps that the device supports.
        goal: What to minimise; by default energy and time with equal weight.
        probes: How often `probe` may be called.

    Raises:
        EnergyError: For fewer than two caps or probes.
    """
    if probes < 2:
        raise EnergyError(f"probes = {probes} is below 2: a choice needs the highest cap and one")
    goal = goal or CapGoal()
    points: list[CapPoint] = []
    while len(points) < probes:
        cap = next_cap(points, caps_watts, goal)
        if cap is None:
            break
        points.append(probe(cap))
    return choose_cap(points, goal, lowest_watts=min(caps_watts))
