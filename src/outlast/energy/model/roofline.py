"""Time and energy of work that was never measured: roofline and arithmetic intensity alone.

Wide intervals: good for comparing options before a first run, not for planning clocks. One probe
makes it much better (`fit_response`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.model.response import Response
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.model.work import Work

    Array = npt.NDArray[np.float64]

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
