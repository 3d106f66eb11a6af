"""What a step costs in joules, money and carbon, as pure functions; needs no torch.

The planner composes these. Every figure that comes out is modelled. Joules of a device are not
joules of a node: `node_joules` adds the rest when it is known, and applies the PUE last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.model.work import Work

JOULES_PER_KWH = 3.6e6
COUNTER_SECONDS = 0.1
"""How often the energy counter of a data-centre GPU changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watts:
    """What a device draws in the states of a step.

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
    """What metering adds to a rank: two reads per device and window, and samples in between.

    Args:
        windows: Windows that are opened.
        read_seconds: One read of a device's counter.
        devices: Read by this rank.
        samples: Reads in between, for power and temperature.
    """
    for name, value in (("windows", windows), ("devices", devices), ("samples", samples)):
        _at_least(name, value)
    return (2 * windows + samples) * devices * read_seconds


def counter_error(window_seconds: float, counter_seconds: float = COUNTER_SECONDS) -> float:
    """Largest relative error of a window from the counter's period; at most 1."""
    if not window_seconds > 0.0:
        raise EnergyError(f"window_seconds = {window_seconds} is not above 0")
    return min(1.0, counter_seconds / window_seconds)


def power_at(constants: DeviceConstants, activity: float, clock_mhz: float) -> float:
    """Watts at a clock without a cap: static + activity f V(f)^2.

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        clock_mhz: SM clock.
    """
    return constants.static_watts + activity * clock_mhz * constants.voltage(clock_mhz) ** 2


def effective_clock(constants: DeviceConstants, activity: float, clock_mhz: float) -> float:
    """The clock that runs, in MHz: the one asked for, or that at which power meets the limit.

    Raises:
        EnergyError: For a limit that static power alone exceeds.
    """
    _at_least("activity", activity)
    if not clock_mhz > 0.0:
        raise EnergyError(f"clock_mhz = {clock_mhz} is not above 0")
    limit = constants.power_limit_watts
    if power_at(constants, activity, clock_mhz) <= limit:
        return clock_mhz
    if limit <= constants.static_watts:
        raise EnergyError(
            f"power_limit_watts = {limit:g} is not above the static "
            f"{constants.static_watts:g} W of {constants.name}: raise the limit"
        )
    low, high = 0.0, clock_mhz
    for _ in range(60):
        middle = (low + high) / 2.0
        if power_at(constants, activity, middle) > limit:
            high = middle
        else:
            low = middle
    return low


def clock_effect(
    constants: DeviceConstants, activity: float, clock_mhz: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step at a clock, relative to the top clock.

    Time is ``a + b / f`` at the effective clock, and power applies to all of it.

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        clock_mhz: Clock asked for.
        compute_share: Share of the step at the top clock that the clock governs.
    """
    _in_unit("compute_share", compute_share)
    top = effective_clock(constants, activity, constants.top_clock_mhz)
    clock = effective_clock(constants, activity, clock_mhz)
    seconds = 1.0 - compute_share + compute_share * top / clock
    watts = power_at(constants, activity, clock) / power_at(constants, activity, top)
    return seconds, seconds * watts


def cap_effect(
    constants: DeviceConstants, activity: float, cap_watts: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step under a lower power limit, relative to the one in force."""
    capped = replace(constants, power_limit_watts=min(cap_watts, constants.power_limit_watts))
    clock = effective_clock(capped, activity, constants.top_clock_mhz)
    return clock_effect(constants, activity, clock, compute_share=compute_share)


def roofline(
    constants: DeviceConstants,
    work: Work,
    *,
    compute_watts: float,
    memory_watts: float,
    rate_factor: float = 1.0,
) -> tuple[float, float]:
    """Seconds and joules of work at the top clock.

    Time is the longer of arithmetic and memory, plus launches. Energy is static power over that
    time, and what the units draw while they work.

    Args:
        constants: Of the device, with its rate and bandwidth.
        work: Operations, bytes and kernels.
        compute_watts: What the arithmetic units draw at full rate, above static power.
        memory_watts: What the memory draws at full bandwidth, above static power.
        rate_factor: Rate of the arithmetic over `peak_flop_per_s`: 2 for half the bits.

    Raises:
        EnergyError: When rate or bandwidth are not known.
    """
    for name in ("peak_flop_per_s", "memory_bytes_per_s"):
        if not getattr(constants, name) > 0.0:
            raise EnergyError(f"{name} of {constants.name} is not known: measure or set it")
    if not rate_factor > 0.0:
        raise EnergyError(f"rate_factor = {rate_factor} is not above 0")
    _at_least("compute_watts", compute_watts)
    _at_least("memory_watts", memory_watts)
    compute = work.flops / (constants.peak_flop_per_s * rate_factor)
    memory = work.memory_bytes / constants.memory_bytes_per_s
    seconds = max(compute, memory) + work.launches * constants.launch_seconds
    joules = constants.static_watts * seconds + compute_watts * compute + memory_watts * memory
    return seconds, joules


def _at_least(name: str, value: float, bound: float = 0.0) -> None:
    if not (math.isfinite(value) and value >= bound):
        raise EnergyError(f"{name} = {value} is not a number of at least {bound:g}")


def _in_unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise EnergyError(f"{name} = {value} is not in [0, 1]")
