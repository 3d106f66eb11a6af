"""Joules, money and carbon of a step, as pure functions; needs no torch.

The planner composes these. Every figure that comes out is modelled. Joules of a device are not
joules of a node: `node_joules` adds the rest when it is known, and applies the PUE last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.model.equations import DeviceConstants, Work

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
    times = (busy_seconds, blocked_seconds, idle_seconds)
    for name, value in zip(("busy_seconds", "blocked_seconds", "idle_seconds"), times, strict=True):
        _at_least(name, value)
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


def metering_seconds(
    windows: int, *, read_seconds: float = 2e-4, devices: int = 1, samples: int = 0
) -> float:
    """Seconds that metering adds to a rank: two reads per device and window, and samples.

    Args:
        windows: Windows that are opened.
        read_seconds: One read of a device's counter.
        devices: Read by this rank.
        samples: Reads in between, for power and temperature.
    """
    for name, value in (("windows", windows), ("devices", devices), ("samples", samples)):
        _at_least(name, value)
    return (2 * windows + samples) * devices * read_seconds


def power_at(constants: DeviceConstants, activity: float, clock_mhz: float) -> float:
    """Watts at a clock without a cap (`model.response`).

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        clock_mhz: SM clock.
    """
    uncapped = replace(constants, power_limit_watts=math.inf)
    return _evaluated(uncapped, (1.0, 0.0, activity), clock_mhz)[1]


def clock_effect(
    constants: DeviceConstants, activity: float, clock_mhz: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step at a clock, relative to the top clock (`model.response`).

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        clock_mhz: Clock asked for.
        compute_share: Share of the step at the top clock that the clock governs.

    Raises:
        EnergyError: For a limit that static power alone exceeds.
    """
    if not clock_mhz > 0.0:
        raise EnergyError(f"clock_mhz = {clock_mhz} is not above 0")
    step = _step(constants, activity, compute_share)
    seconds, joules = _evaluated(constants, step, constants.top_clock_mhz)
    slower_seconds, slower_joules = _evaluated(constants, step, clock_mhz)
    return slower_seconds / seconds, slower_joules / joules


def cap_effect(
    constants: DeviceConstants, activity: float, cap_watts: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step under a lower power limit, relative to the one in force.

    Raises:
        EnergyError: For a limit that static power alone exceeds.
    """
    capped = replace(constants, power_limit_watts=min(cap_watts, constants.power_limit_watts))
    _check_limit(capped)
    step = _step(constants, activity, compute_share)
    seconds, joules = _evaluated(constants, step, constants.top_clock_mhz)
    slower_seconds, slower_joules = _evaluated(capped, step, constants.top_clock_mhz)
    return slower_seconds / seconds, slower_joules / joules


def roofline(
    constants: DeviceConstants,
    work: Work,
    *,
    compute_watts: float,
    memory_watts: float,
    rate_factor: float = 1.0,
) -> tuple[float, float]:
    """Seconds and joules of work at the top clock (`model.roofline`).

    Energy is static power over that time, and what the units draw while they work; links draw
    nothing of their own.

    Args:
        constants: Of the device, with the rates that the work needs.
        work: Operations, bytes, kernels and bytes over links.
        compute_watts: What the arithmetic units draw at full rate, above static power.
        memory_watts: What the memory draws at full bandwidth, above static power.
        rate_factor: Rate of the arithmetic over `peak_flop_per_s`: 2 for half the bits.

    Raises:
        EnergyError: When a rate that the work needs is not known.
    """
    import numpy as np

    from outlast.energy.model.equations import roofline_seconds

    if not rate_factor > 0.0:
        raise EnergyError(f"rate_factor = {rate_factor} is not above 0")
    _at_least("compute_watts", compute_watts)
    _at_least("memory_watts", memory_watts)
    rated = replace(constants, peak_flop_per_s=constants.peak_flop_per_s * rate_factor)
    found = roofline_seconds(work, rated, np.array([constants.top_clock_mhz]))
    if isinstance(found, Unavailable):
        raise EnergyError(f"{found.reason}: measure or set it")
    seconds = float(found[0])
    joules = constants.static_watts * seconds
    if work.flops:
        joules += compute_watts * work.flops / rated.peak_flop_per_s
    if work.memory_bytes:
        joules += memory_watts * work.memory_bytes / rated.memory_bytes_per_s
    return seconds, joules


def _step(
    constants: DeviceConstants, activity: float, compute_share: float
) -> tuple[float, float, float]:
    """Fixed seconds, clock seconds and activity of a step of 1 s at the top clock."""
    import numpy as np

    from outlast.energy.model.equations import effective_clocks_mhz

    _in_unit("compute_share", compute_share)
    _at_least("activity", activity)
    _check_limit(constants)
    top = constants.top_clock_mhz
    reached = float(effective_clocks_mhz(constants, activity, np.array([top]))[0])
    return 1.0 - compute_share, compute_share * reached / top, activity


def _evaluated(
    constants: DeviceConstants, step: tuple[float, float, float], clock_mhz: float
) -> tuple[float, float]:
    """Seconds and joules by `model.response.evaluate`; numpy is imported when this is called."""
    import numpy as np

    from outlast.energy.model.equations import Response, evaluate

    fixed, clock, activity = step
    response = Response(fixed_seconds=fixed, clock_seconds=clock, activity_watts_per_mhz=activity)
    seconds, joules = evaluate(response, constants, np.array([float(clock_mhz)]))
    return float(seconds[0]), float(joules[0])


def _check_limit(constants: DeviceConstants) -> None:
    if not constants.power_limit_watts > constants.static_watts:
        raise EnergyError(
            f"power_limit_watts = {constants.power_limit_watts:g} is not above the static "
            f"{constants.static_watts:g} W of {constants.name}: raise the limit"
        )


def _at_least(name: str, value: float, bound: float = 0.0) -> None:
    if not (math.isfinite(value) and value >= bound):
        raise EnergyError(f"{name} = {value} is not a number of at least {bound:g}")


def _in_unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise EnergyError(f"{name} = {value} is not in [0, 1]")
