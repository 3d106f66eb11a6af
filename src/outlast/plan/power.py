"""What devices and nodes draw: by how much they compute, at which clocks, under which caps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from outlast.energy.cost import cap_effect, checked_pue, clock_effect
from outlast.errors import EnergyError, PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.estimate import Interval, Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from outlast.energy.model.constants import DeviceConstants
    from outlast.plan.cases import Array
    from outlast.plan.cluster import Power

ACTIVITY = Source(
    0.12,
    "1",
    "prior",
    "own: share of the peak FLOP/s at which a busy device has 63 % of its way from idle to its "
    "limit. Anchors: A100 and A40 pipelines of Perseus (SOSP'24) draw their limit while busy; one "
    "H200 drew 662 of 700 W in matrix products (vendor's page)",
)
BUSY_DEVIATION = 0.08
"""Own prior, relative: busy pipelines of Perseus drew 0 to 13 % more than their boards' limit."""
MEASURED_DEVIATION = 0.03
"""Own prior, relative, of busy watts that somebody measured on another run."""
HEAVY_TRAINING = Source(
    0.76,
    "1",
    "published",
    "arXiv 2506.14551, abstract: a node of 8 H100 draws 76 % of its rating in heavy training",
)
PEAK_TRAINING = Source(
    8.4 / 10.2, "1", "published", "arXiv 2412.08602, abstract: at most 8.4 of 10.2 kW were seen"
)
HEAVY_ACTIVITY = 0.35
"""Share of the peak that large models reach in training, for the two shares above."""

Factors: TypeAlias = "tuple[Array, Array]"
"""(cases,) of busy seconds and (cases,) of busy watts, over those at the top clock."""


@dataclass(frozen=True, slots=True)
class BusyWatts:
    """What a device draws while it computes.

    Attributes:
        watts: (cases,) or (1,).
        activity: (cases,) that they follow from, or None where they were measured.
        deviation: Relative standard deviation.
        formula: As a reader would write it down.
        source: Where it comes from.
    """

    watts: Array
    activity: Array | None
    deviation: float
    formula: str
    source: Source


def busy_watts(power: Power | None, activity: ArrayLike) -> BusyWatts | Unavailable:
    """What devices draw while they compute, by how much they compute.

    `idle + (limit - idle) * (1 - exp(-activity / 0.12))`, an own prior: nothing published relates
    the two for single devices. Replace it with `measured_watts` as soon as there is a meter.

    Args:
        power: Of the cluster; None where unknown.
        activity: (cases,) FLOP/s while busy over the device's peak, in [0, 1].

    Returns:
        The watts, or why they are not known; never the limit in place of them.

    Raises:
        PlanError: For watts that contradict each other, or an activity out of range.
    """
    if power is None:
        return unknown_power()
    check_power(power)
    share = row_of("activity", activity)
    if np.any(share > 1.0):
        raise PlanError(f"activity = {share.max():g} is above 1: give FLOP/s over the peak")
    formula = "idle + (limit - idle) (1 - exp(-activity / scale))"
    return BusyWatts(_risen(power, share), share, BUSY_DEVIATION, formula, ACTIVITY)


def measured_watts(watts: ArrayLike, text: str) -> BusyWatts:
    """What devices were measured to draw while they computed.

    Args:
        watts: (cases,) or one.
        text: Words that let a reader find the measurement.

    Raises:
        PlanError: For watts below 0.
    """
    row = row_of("watts", watts)
    source = Source(float(row.mean()), "W", "measured", text)
    return BusyWatts(row, None, MEASURED_DEVIATION, "busy watts", source)


def node_rest_watts(rating_watts: float, devices: int, power: Power) -> Interval:
    """Prior of what a node draws beside its devices in training.

    What is left of 76 % of the node's rating when its busy devices are taken off; at most what is
    left of the highest draw seen. Both shares are of nodes with 8 H100 and are flagged elsewhere.

    Args:
        rating_watts: Of the node's power supplies, by its maker.
        devices: Of a node.
        power: Of the devices.

    Raises:
        PlanError: When the devices alone exceed the share, so that the rating says nothing.
    """
    check_power(power)
    busy = _risen(power, np.array([HEAVY_ACTIVITY]))[0]
    low = rating_watts * HEAVY_TRAINING.value - devices * power.limit_watts
    middle = rating_watts * HEAVY_TRAINING.value - devices * float(busy)
    high = rating_watts * PEAK_TRAINING.value - devices * float(busy)
    if not middle > 0.0:
        raise PlanError(
            f"rating_watts = {rating_watts:g} of a node with {devices} devices of "
            f"{power.limit_watts:g} W leaves nothing for its rest: measure node_watts"
        )
    known = math.isclose(rating_watts, 10_200.0) and devices == 8
    flags = () if known else ("shares of the rating seen on nodes with 8 H100 only",)
    return Interval(max(low, 0.0), middle, high, 0.9, flags)


def clock_factors(
    constants: DeviceConstants | None,
    activity_watts_per_mhz: float,
    clocks_mhz: ArrayLike,
    compute_share: ArrayLike = 1.0,
) -> Factors | Unavailable:
    """What clocks do to busy seconds and busy watts (`outlast.energy.cost.clock_effect`).

    Args:
        constants: Of the device; None where nobody fitted them.
        activity_watts_per_mhz: At the voltage below the knee; see `activity_at`.
        clocks_mhz: (cases,) asked for; few different ones.
        compute_share: (cases,) share of the busy time at the top clock that the clock governs.

    Raises:
        PlanError: For a number out of range.
        EnergyError: What `clock_effect` raises.
    """

    def effect(device: DeviceConstants, clock: float, share: float) -> tuple[float, float]:
        return clock_effect(device, activity_watts_per_mhz, clock, compute_share=share)

    return _factors(constants, effect, row_of("clocks_mhz", clocks_mhz), compute_share)


def cap_factors(
    constants: DeviceConstants | None,
    activity_watts_per_mhz: float,
    caps_watts: ArrayLike,
    compute_share: ArrayLike = 1.0,
) -> Factors | Unavailable:
    """What power caps do to busy seconds and busy watts (`outlast.energy.cost.cap_effect`).

    Args:
        constants: Of the device; None where nobody fitted them.
        activity_watts_per_mhz: At the voltage below the knee; see `activity_at`.
        caps_watts: (cases,); few different ones.
        compute_share: (cases,) share of the busy time at the top clock that the clock governs.

    Raises:
        PlanError: For a number out of range.
        EnergyError: What `cap_effect` raises.
    """

    def effect(device: DeviceConstants, cap: float, share: float) -> tuple[float, float]:
        return cap_effect(device, activity_watts_per_mhz, cap, compute_share=share)

    return _factors(constants, effect, row_of("caps_watts", caps_watts), compute_share)


def activity_at(constants: DeviceConstants, busy_watts: float, clock_mhz: float) -> float:
    """Watts per MHz at the voltage below the knee of work that draws `busy_watts` at a clock.

    Args:
        constants: Of the device.
        busy_watts: Below the power limit: a device at its limit runs below the clock asked for.
        clock_mhz: At which the device really ran.

    Raises:
        PlanError: For watts that are not between the static ones and the limit.
    """
    if not constants.static_watts < busy_watts < constants.power_limit_watts:
        raise PlanError(
            f"busy_watts = {busy_watts:g} of {constants.name} at {clock_mhz:g} MHz is not between "
            f"its static {constants.static_watts:g} W and its limit of "
            f"{constants.power_limit_watts:g} W: measure at a lower clock"
        )
    return (busy_watts - constants.static_watts) / clock_mhz / constants.voltage(clock_mhz) ** 2


def _factors(
    constants: DeviceConstants | None,
    effect: Callable[[DeviceConstants, float, float], tuple[float, float]],
    settings: Array,
    compute_share: ArrayLike,
) -> Factors | Unavailable:
    if constants is None:
        return Unavailable(
            "what clocks do to this device is not known", "fit it with outlast.energy.calibrate"
        )
    share = row_of("compute_share", compute_share)
    if np.any(share > 1.0):
        raise PlanError(f"compute_share = {share.max():g} is above 1: give a share of busy time")
    different, places = np.unique(settings, return_inverse=True)
    # Time is linear in the share, and power depends on the setting alone: two calls for each
    # setting say all.
    slower = np.array([effect(constants, float(item), 1.0)[0] for item in different])
    weaker = np.array([effect(constants, float(item), 0.0)[1] for item in different])
    places = places.reshape(settings.shape)
    return 1.0 + share * (slower[places] - 1.0), weaker[places] * np.ones(share.shape)


def _risen(power: Power, activity: Array) -> Array:
    rise = -np.expm1(-activity / ACTIVITY.value)
    return np.asarray(power.idle_watts + (power.limit_watts - power.idle_watts) * rise)


def unknown_power() -> Unavailable:
    """Why there are no joules without the cluster's power."""
    return Unavailable(
        "what the devices draw is not known",
        "give limit_watts, blocked_watts and idle_watts under [power] of the cluster file",
    )


def check_power(power: Power) -> None:
    """Refuse watts that contradict each other.

    Raises:
        PlanError: With the setting, its value and what would be right.
    """
    for name in ("limit_watts", "blocked_watts", "idle_watts", "node_watts"):
        value = getattr(power, name)
        if not (math.isfinite(value) and value >= 0.0):
            raise PlanError(f"{name} = {value:g} of the cluster: give watts of at least 0")
    for name in ("blocked_watts", "idle_watts"):
        if getattr(power, name) > power.limit_watts:
            raise PlanError(
                f"{name} = {getattr(power, name):g} of the cluster exceeds its limit_watts = "
                f"{power.limit_watts:g}: correct one of them"
            )
    if power.blocked_watts < power.idle_watts:
        raise PlanError(
            f"blocked_watts = {power.blocked_watts:g} of the cluster is below its idle_watts = "
            f"{power.idle_watts:g}: correct one of them"
        )
    try:
        checked_pue(power.pue)
    except EnergyError as error:
        raise PlanError(str(error)) from None


def row_of(name: str, values: ArrayLike) -> Array:
    """(cases,) or (1,) finite numbers of at least 0.

    Raises:
        PlanError: For any other number, by its name.
    """
    row = np.atleast_1d(np.asarray(values, dtype=float))
    if not np.all(np.isfinite(row) & (row >= 0.0)):
        wrong = row[~(np.isfinite(row) & (row >= 0.0))][0]
        raise PlanError(f"{name} = {wrong:g}: give a finite number of at least 0")
    return row
