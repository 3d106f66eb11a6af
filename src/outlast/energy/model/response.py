"""Time and energy of one operation as a function of the clock: the equations of the model.

``t = fixed + clock * top / f_eff`` and ``E = t * (static + activity * f_eff * V(f_eff)^2)``.
``f_eff`` is the smooth minimum of the clock asked for and of the one at which the power limit is
reached. The form of P(f), linear up to a transition clock and steeper above it, is that of "Sweet
spots" (arXiv 2607.00819); the cap is what profiles of A40 and A100 show above some clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.model.deviation import Deviation
    from outlast.energy.profile import Point

    Array = npt.NDArray[np.float64]

NEWTON_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a clock does to one operation on one kind of device.

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
