"""Time and energy of one operation at any clock: work, device constants, response and roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.model.fit import Deviation
    from outlast.energy.profile import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of an operator, a phase or a step on one device.

    Attributes:
        flops: Floating-point operations of matrix products.
        memory_bytes: Bytes that device memory reads and writes, after fusion.
        link_bytes: Bytes that leave the device over links.
        launches: Kernels.
    """

    flops: float
    memory_bytes: float
    link_bytes: float = 0.0
    launches: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            launches=self.launches + other.launches,
        )


Array: TypeAlias = NDArray[np.float64]


NEWTON_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Effect of the clock on one operation on one kind of device.

    Attributes:
        fixed_seconds: Time that no clock changes: memory, links, launches.
        clock_seconds: The rest, at the top clock.
        activity_watts_per_mhz: Switching power by clock at the voltage below the knee.
        probes: Points that the response was fitted to; predicted times go through them.
        deviation: What like operations of this device do beyond the equations.
        time_spread: Relative standard error of predicted time, away from probes.
        energy_spread: Likewise of energy.
        flags: What a reader must know, one sentence each.
    """

    fixed_seconds: float
    clock_seconds: float
    activity_watts_per_mhz: float
    probes: tuple[Point, ...] = ()
    deviation: Deviation | None = None
    time_spread: float = 0.0
    energy_spread: float = 0.0
    flags: tuple[str, ...] = ()


def cap_clock_mhz(constants: DeviceConstants, activity_watts_per_mhz: float) -> float:
    """The clock at which an operation draws the power limit; infinite where there is none.

    Power is linear up to the knee. Above, it is convex, so that Newton's method from the linear
    solution, which is too high, comes down to the root without overshooting.
    """
    spare_watts = constants.power_limit_watts - constants.static_watts
    if not math.isfinite(spare_watts) or activity_watts_per_mhz <= 0:
        return math.inf
    clock = target = max(spare_watts / activity_watts_per_mhz, 1.0)
    slope = constants.knee_per_ghz / 1000
    if clock <= constants.knee_mhz:
        return clock
    for _ in range(NEWTON_STEPS):
        volts = constants.voltage(clock)
        clock -= (clock * volts**2 - target) / (volts**2 + 2 * clock * volts * slope)
    return clock


def effective_clocks_mhz(
    constants: DeviceConstants, activity_watts_per_mhz: float, clocks_mhz: Array
) -> Array:
    """(clocks,) at which the device really runs when asked for `clocks_mhz`."""
    cap = cap_clock_mhz(constants, activity_watts_per_mhz)
    if math.isinf(cap):
        return clocks_mhz
    sharpness = constants.cap_sharpness
    lows = np.logaddexp(-sharpness * np.log(clocks_mhz), -sharpness * math.log(cap))
    return np.asarray(np.exp(-lows / sharpness))


def evaluate(
    response: Response, constants: DeviceConstants, clocks_mhz: Array
) -> tuple[Array, Array]:
    """Seconds and joules by the equations alone.

    Args:
        response: Of the operation.
        constants: Of the device.
        clocks_mhz: (clocks,).

    Returns:
        (clocks,) seconds and (clocks,) joules.
    """
    clocks = effective_clocks_mhz(constants, response.activity_watts_per_mhz, clocks_mhz)
    volts = 1 + constants.knee_per_ghz * np.maximum(0.0, clocks - constants.knee_mhz) / 1000
    seconds = response.fixed_seconds + response.clock_seconds * constants.top_clock_mhz / clocks
    watts = constants.static_watts + response.activity_watts_per_mhz * clocks * volts**2
    return seconds, seconds * watts


SHARPNESS = 8.0
"""Exponent of the smooth maximum of compute and memory time: 9 % above both where they meet."""


LOW_SHARE = 0.7
"""The response agrees with the roofline at the top clock and at this share of it."""


LOWEST_CROSSOVER = 0.5
"""Below this share of the top clock, caches and instruction rate slow memory-bound work too."""


COMPUTE_POWER, MEMORY_POWER = 1.1, 0.55
"""Switching power at the top clock of work bound by one of the two, as a share of what the limit
leaves above static power. Assumed, from matrix products that reach the cap; hence the spread."""


TIME_SPREAD, ENERGY_SPREAD = 0.15, 0.20


NOT_PROBED = "modelled from flops and bytes alone: nothing of this work was measured"


def roofline_seconds(
    work: Work, constants: DeviceConstants, clocks_mhz: Array
) -> Array | Unavailable:
    """``smoothmax(F / (R f / f_top), B / BW) + n t_launch + C / link``.

    Compute scales with the clock, memory and links do not (Williams et al., Roofline, 2009).

    Args:
        work: Of the operation.
        constants: With its rates.
        clocks_mhz: (clocks,) effective clocks.

    Returns:
        (clocks,) seconds; `Unavailable` where a rate that the work needs is not known.
    """
    needed = {
        "peak_flop_per_s": work.flops,
        "memory_bytes_per_s": work.memory_bytes,
        "link_bytes_per_s": work.link_bytes,
    }
    total = []
    for name, amount in needed.items():
        rate = getattr(constants, name)
        if amount and not rate > 0:
            return Unavailable(f"{name} of {constants.name} is not known", "measure it once")
        total.append(amount / rate if amount else 0.0)
    compute = total[0] * constants.top_clock_mhz / clocks_mhz
    largest = np.maximum(np.maximum(compute, total[1]), 1e-300)
    bound = (compute / largest) ** SHARPNESS + (total[1] / largest) ** SHARPNESS
    launches = work.launches * constants.launch_seconds
    return np.asarray(largest * bound ** (1 / SHARPNESS) + launches + total[2])


def roofline_response(work: Work, constants: DeviceConstants) -> Response | Unavailable:
    """The response of work without any probe.

    Args:
        work: Of the operation.
        constants: With rates and a power limit.

    Returns:
        A response with wide spreads and a flag; `Unavailable` without rates or limit.
    """
    top = constants.top_clock_mhz
    seconds = roofline_seconds(work, constants, np.array([top, LOW_SHARE * top]))
    if isinstance(seconds, Unavailable):
        return seconds
    if not math.isfinite(constants.power_limit_watts):
        return Unavailable(
            f"the power of unmeasured work on {constants.name} is not known without a power limit",
            "probe the work at one clock",
        )
    if seconds[0] <= 0:
        return Unavailable("there is no work", "capture the step first")
    clock_seconds = float(seconds[1] - seconds[0]) / (1 / LOW_SHARE - 1)
    share = min(clock_seconds / float(seconds[0]), 1.0)
    spare_watts = constants.power_limit_watts - constants.static_watts
    power = MEMORY_POWER + (COMPUTE_POWER - MEMORY_POWER) * share
    return Response(
        fixed_seconds=max(float(seconds[0]) - clock_seconds, 0.0),
        clock_seconds=clock_seconds,
        activity_watts_per_mhz=power * spare_watts / (top * constants.voltage(top) ** 2),
        time_spread=TIME_SPREAD,
        energy_spread=ENERGY_SPREAD,
        flags=(NOT_PROBED,),
    )


def crossover_mhz(work: Work, constants: DeviceConstants) -> float | Unavailable:
    """Above this clock a memory-bound phase gets no faster: f_top * AI / AI_ridge (roofline).

    Returns:
        The clock, no more than the top one (compute-bound); `Unavailable` where the constants have
        no rates, nothing is computed, or it lies below half the top clock, where other parts of
        the chip than its memory become the bottleneck.
    """
    ridge = constants.peak_flop_per_s / constants.memory_bytes_per_s
    if not math.isfinite(ridge):
        return Unavailable(
            f"compute and memory rates of {constants.name} are not known",
            "give peak_flop_per_s and memory_bytes_per_s",
        )
    if work.memory_bytes <= 0:
        return constants.top_clock_mhz
    share = work.flops / work.memory_bytes / ridge
    if share < LOWEST_CROSSOVER:
        return Unavailable(
            f"the phase stays memory-bound below {LOWEST_CROSSOVER:.0%} of the top clock, where "
            "the model does not hold",
            f"measure it at {LOWEST_CROSSOVER * constants.top_clock_mhz:g} MHz",
        )
    return min(share, 1.0) * constants.top_clock_mhz


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """Fitted once for a kind of device, then used for every model on it.

    ``P(f) = static + activity * f * V(f)^2`` with ``V(f) = 1 + knee_per_ghz * max(0, f - knee)``,
    and no more than the power limit: above it the effective clock stays behind the one asked for.
    The activity is the operation's, in watts per MHz at the voltage below the knee.

    Attributes:
        name: The device, in words.
        top_clock_mhz: Highest SM clock.
        static_watts: Power at work without switching, at steady temperature.
        knee_mhz: Clock above which the voltage must rise.
        knee_per_ghz: How steeply it rises, relative to the voltage below the knee.
        power_limit_watts: Cap in force; infinite where there is none.
        blocking_watts: Power while waiting for another device.
        peak_flop_per_s: Achieved rate of matrix products at the top clock.
        memory_bytes_per_s: Achieved memory bandwidth.
        launch_seconds: Time that a kernel costs at least.
        link_bytes_per_s: Achieved bandwidth of the links to other devices.
        cap_sharpness: How abruptly the cap takes hold: exponent of the smooth minimum of the clock
            asked for and the one that the cap allows. Kernels of an operation differ in power, so
            the cap bites some of them earlier than the mean power says.
        standard_errors: (name, standard error in the constant's unit) of what was fitted.
    """

    name: str
    top_clock_mhz: float
    static_watts: float
    knee_mhz: float
    knee_per_ghz: float
    power_limit_watts: float
    blocking_watts: float
    peak_flop_per_s: float = float("nan")
    memory_bytes_per_s: float = float("nan")
    launch_seconds: float = 5e-6
    link_bytes_per_s: float = float("nan")
    cap_sharpness: float = 40.0
    standard_errors: tuple[tuple[str, float], ...] = ()

    def voltage(self, clock_mhz: float) -> float:
        """Relative voltage: 1 up to the knee."""
        return 1.0 + self.knee_per_ghz * max(0.0, clock_mhz - self.knee_mhz) / 1000.0
