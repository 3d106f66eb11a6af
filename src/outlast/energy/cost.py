"""Joules, money and carbon of a step, as pure functions; needs no torch.

The planner composes these. Every figure that comes out is modelled. Joules of a device are not
joules of a node: `node_joules` adds the rest when it is known, and applies the PUE last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.model import DeviceConstants

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Watts:
    """Power of a device in the states of a step.

    Attributes:
        busy: While it computes.
        blocked: While it waits for another device.
        idle: While nothing is asked of it.
    """

    busy: float
    blocked: float
    idle: float

    def __post_init__(self) -> None:
        for name in ("busy", "blocked", "idle"):
            _at_least(f"{name} watts", getattr(self, name))


def step_joules(
    busy_seconds: float, watts: Watts, *, blocked_seconds: float = 0.0, idle_seconds: float = 0.0
) -> float:
    """Joules of one device in a step: the sum of time by power.

    Args:
        busy_seconds: Computing.
        watts: Power in each state.
        blocked_seconds: Waiting for others.
        idle_seconds: Doing nothing.

    Raises:
        EnergyError: For a negative time.
    """
    _at_least("busy_seconds", busy_seconds)
    _at_least("blocked_seconds", blocked_seconds)
    _at_least("idle_seconds", idle_seconds)
    return busy_seconds * watts.busy + blocked_seconds * watts.blocked + idle_seconds * watts.idle


def node_joules(
    device_joules: float, seconds: float, *, other_watts: float = 0.0, pue: float = 1.0
) -> float:
    """Joules at the meter of the building.

    Args:
        device_joules: Of all accelerators of the node.
        seconds: Over which they were drawn.
        other_watts: Processors, memory, network and fans of the node.
        pue: Energy of the building over that of its computers; 1 leaves it out.

    Raises:
        EnergyError: For a negative value or a PUE below 1.
    """
    _at_least("device_joules", device_joules)
    _at_least("seconds", seconds)
    _at_least("other_watts", other_watts)
    return (device_joules + seconds * other_watts) * checked_pue(pue)


def checked_pue(pue: float) -> float:
    """The PUE.

    Raises:
        EnergyError: Below 1, or not finite.
    """
    if not (math.isfinite(pue) and pue >= 1.0):
        raise EnergyError(f"pue = {pue} is below 1: a building draws at least what its nodes draw")
    return pue


def kwh(joules: float) -> float:
    """Kilowatt-hours."""
    return joules / JOULES_PER_KWH


def money(joules: float, price_per_kwh: float) -> float:
    """Cost in the currency of a flat price, which may be negative."""
    return kwh(joules) * price_per_kwh


def carbon_grams(joules: float, grams_per_kwh: float) -> float:
    """Grams of CO2 equivalent at a grid intensity."""
    _at_least("grams_per_kwh", grams_per_kwh)
    return kwh(joules) * grams_per_kwh


def clock_effect(
    constants: DeviceConstants, activity: float, clock_mhz: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step at a clock, relative to the top clock (`outlast.energy.model`).

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        clock_mhz: Clock asked for.
        compute_share: Share of the step at the top clock that the clock governs.

    Raises:
        EnergyError: For a limit that static power alone exceeds.
    """
    import numpy as np

    from outlast.energy.model import Response, effective_clocks_mhz, evaluate

    if not clock_mhz > 0.0:
        raise EnergyError(f"clock_mhz = {clock_mhz} is not above 0")
    if not 0.0 <= compute_share <= 1.0:
        raise EnergyError(f"compute_share = {compute_share} is not in [0, 1]")
    _at_least("activity", activity)
    if not constants.power_limit_watts > constants.static_watts:
        raise EnergyError(
            f"power_limit_watts = {constants.power_limit_watts:g} is not above the static "
            f"{constants.static_watts:g} W of {constants.name}: raise the limit"
        )
    top = constants.top_clock_mhz
    reached = float(effective_clocks_mhz(constants, activity, np.array([top]))[0])
    # A step of 1 s at the top clock.
    response = Response(
        fixed_seconds=1.0 - compute_share,
        clock_seconds=compute_share * reached / top,
        activity_watts_per_mhz=activity,
    )
    clocks = (np.array([float(clock)]) for clock in (top, clock_mhz))
    whole, slower = (evaluate(response, constants, clock) for clock in clocks)
    return float(slower[0][0] / whole[0][0]), float(slower[1][0] / whole[1][0])


def _at_least(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise EnergyError(f"{name} = {value} is not a number of at least 0")
