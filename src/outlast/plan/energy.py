"""Watts, joules, money and carbon of a run; busy, blocked and idle joules apart.

Rates are those of `outlast.energy.cost`, which takes single numbers; energy is linear in time and
in watts, so each rate is asked for once and multiplied by arrays of many configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from outlast.energy.cost import (
    Watts,
    cap_effect,
    carbon_grams,
    checked_pue,
    clock_effect,
    kwh,
    money,
    node_joules,
    step_joules,
)
from outlast.errors import EnergyError, PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.estimate import Interval, Source, Term, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import ArrayLike

    from outlast.energy.model import DeviceConstants
    from outlast.plan.batch import Array
    from outlast.plan.cluster import Power, Prices


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
    """Power draw of a device while it computes.

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
    """Power draw of computing devices, by how much they compute.

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
    """Measured power draw of computing devices.

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
    """Factors of clocks on busy seconds and busy watts (`outlast.energy.cost.clock_effect`).

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
    """Factors of power caps on busy seconds and busy watts (`outlast.energy.cost.cap_effect`).

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


NORMAL_90 = 1.6448536269514722
"""Standard deviations on either side of a normal mean that hold 90 %."""
WAITING_DEVIATION = 0.1
"""Own prior, relative, of blocked and idle watts."""
NODE_DEVIATION = 0.15
"""Own prior, relative, of a node's rest that follows from its rating (`power.node_rest_watts`)."""
_UNITS = dict.fromkeys(("limit_watts", "blocked_watts", "idle_watts", "node_watts"), "W")
_UNITS["pue"] = "1"
_GIVEN_POWER = "the cluster's [power]"
_ABOUT_DEVICE = "outlast.energy.cost.step_joules"
_ABOUT_NODE = "outlast.energy.cost.node_joules"


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Joules of one device in a step, by what they are spent on.

    Attributes:
        busy: (cases,) computing.
        blocked: (cases,) waiting for others inside communication kernels.
        idle: (cases,) with nothing asked of the device: bubbles, data, the host.
        node: (cases,) the device's share of its node's rest.
        building: (cases,) cooling and conversion: PUE - 1 of all above.
        deviation: (cases,) standard deviation of the sum.
        seconds: By state (cases,).
        power: That was assumed.
        draw: What busy devices draw.
        clocks: (cases,) factors of seconds and watts that were applied to busy time.
        devices_per_node: That share the node's rest.
        flags: What is left out, a phrase each.
        sources: Of the watts and the PUE, as `Cluster.sources` names them.
    """

    busy: Array
    blocked: Array
    idle: Array
    node: Array
    building: Array
    deviation: Array
    seconds: Mapping[str, Array]
    power: Power
    draw: BusyWatts
    clocks: Factors
    devices_per_node: float
    flags: tuple[str, ...]
    sources: Mapping[str, Source]

    @property
    def joules(self) -> Array:
        """(cases,) of the device with its share of node and building."""
        return self.device_joules + self.node + self.building

    @property
    def device_joules(self) -> Array:
        """(cases,) of the device alone."""
        return self.busy + self.blocked + self.idle

    def total(self, row: int = 0, devices: float = 1.0) -> Total:
        """Joules of one case with its terms.

        Args:
            row: Which case.
            devices: That the step takes; the figure is of all of them.
        """
        terms = tuple(self._terms(row, devices))
        middle = math.fsum(term.value for term in terms)
        half = NORMAL_90 * devices * float(self.deviation[row])
        low = max(middle - half, 0.0)
        return Total("J", Interval(low, middle, middle + half, 0.9, self.flags), terms)

    def _terms(self, row: int, devices: float) -> list[Term]:
        power = self.power
        seconds = {name: float(values[row]) for name, values in self.seconds.items()}
        slower, weaker = (float(clock[row]) for clock in self.clocks)
        share = {"devices": devices, "step seconds": math.fsum(seconds.values())}
        watts = self.draw.watts
        busy = {
            "devices": devices,
            "busy seconds": seconds["busy"],
            "busy watts": weaker * float(watts[row if watts.size > 1 else 0]),
            "clock's factor of seconds": slower,
            "clock's factor of watts": weaker,
        }
        given = {
            name: self.sources.get(
                f"power.{name}", Source(getattr(power, name), unit, "given", _GIVEN_POWER)
            )
            for name, unit in _UNITS.items()
        }
        own = {"busy watts": self.draw.source}
        activity = self.draw.activity
        if activity is not None:
            busy["activity"] = float(activity[row if activity.size > 1 else 0])
            own = {"scale": self.draw.source}
            own |= {"limit": given["limit_watts"], "idle": given["idle_watts"]}
        return [
            Term(
                "busy",
                devices * float(self.busy[row]),
                f"devices * busy seconds * busy watts, the latter {self.draw.formula}",
                busy,
                own,
                _ABOUT_DEVICE,
            ),
            *(
                Term(
                    name,
                    devices * float(getattr(self, name)[row]),
                    f"devices * {name} seconds * {name} watts",
                    {"devices": devices, f"{name} seconds": seconds[name]},
                    {f"{name} watts": given[f"{name}_watts"]},
                    _ABOUT_DEVICE,
                )
                for name in ("blocked", "idle")
            ),
            Term(
                "node's rest",
                devices * float(self.node[row]),
                "devices / devices_per_node * step seconds * node watts",
                share | {"devices_per_node": self.devices_per_node},
                {"node watts": given["node_watts"]},
                _ABOUT_NODE,
            ),
            Term(
                "building",
                devices * float(self.building[row]),
                "(PUE - 1) * all of the above",
                {"devices": devices},
                {"PUE": given["pue"]},
                _ABOUT_NODE,
            ),
        ]


def step_energy(
    power: Power | None,
    draw: BusyWatts | Unavailable,
    seconds: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    devices_per_node: float = 1.0,
    clocks: Factors | None = None,
    sources: Mapping[str, Source] | None = None,
) -> StepEnergy | Unavailable:
    """Joules of a step per device.

    Args:
        power: Of the cluster; None where unknown.
        draw: What a busy device draws, by `busy_watts` or `measured_watts`.
        seconds: (cases,) each: busy, blocked and idle in a step; at other clocks than the top ones
            busy seconds are those at the top clocks.
        devices_per_node: That share the node's rest.
        clocks: Of `clock_factors` or `cap_factors`; None for the top clocks.
        sources: Of the watts and the PUE, as `Cluster.sources` names them.

    Returns:
        The joules, or why they are not known.

    Raises:
        PlanError: For watts that contradict each other, or a number out of range.
    """
    if isinstance(draw, Unavailable):
        return draw
    if power is None:
        return unknown_power()
    check_power(power)
    if not devices_per_node > 0.0:
        raise PlanError(f"devices_per_node = {devices_per_node:g}: give at least 1")
    ones = np.ones(1)
    slower, weaker = clocks or (ones, ones)
    names = ("busy", "blocked", "idle")
    rows = [row_of(f"{name} seconds", second) for name, second in zip(names, seconds, strict=True)]
    rows[0] = rows[0] * slower
    *rows, watts, slower, weaker = np.broadcast_arrays(*rows, draw.watts, slower, weaker)
    watts = watts * weaker
    rates = Watts(busy=1.0, blocked=power.blocked_watts, idle=power.idle_watts)
    busy = rows[0] * watts * step_joules(1.0, rates)
    blocked = rows[1] * step_joules(0.0, rates, blocked_seconds=1.0)
    idle = rows[2] * step_joules(0.0, rates, idle_seconds=1.0)
    node = np.add.reduce(rows) * node_joules(0.0, 1.0, other_watts=power.node_watts)
    node /= devices_per_node
    building = (busy + blocked + idle + node) * (node_joules(1.0, 0.0, pue=power.pue) - 1.0)
    sources = sources or {}
    guessed = "power.node_watts" in sources and sources["power.node_watts"].origin == "prior"
    waiting = WAITING_DEVIATION * np.hypot(blocked, idle)
    deviation = np.hypot(draw.deviation * busy, waiting)
    deviation = np.hypot(deviation, (NODE_DEVIATION if guessed else 0.0) * node) * power.pue
    flags = []
    if not power.node_watts:
        flags.append("devices alone: node_watts is not given")
    if power.pue == 1.0:
        flags.append("without the building: pue is 1")
    return StepEnergy(
        busy=busy,
        blocked=blocked,
        idle=idle,
        node=node,
        building=building,
        deviation=deviation,
        seconds=dict(zip(names, rows, strict=True)),
        power=power,
        draw=draw,
        clocks=(slower, weaker),
        devices_per_node=devices_per_node,
        flags=tuple(flags),
        sources=sources,
    )


_GIVEN_PRICES = "the cluster's [prices]"


@dataclass(frozen=True, slots=True)
class Bill:
    """Of (cases,) runs.

    Attributes:
        rent: Of the devices, their energy included, or why it is not known.
        energy: Price of the joules, or why it is not known; part of `rent` where that is known.
        carbon_grams: CO2 equivalent of the joules, or why it is not known.
        device_hours: (cases,) of all devices.
        joules: (cases,) at the building's meter, or why they are not known.
        prices: That were used.
        sources: Of the prices, as `Cluster.sources` names them.
    """

    rent: Array | Unavailable
    energy: Array | Unavailable
    carbon_grams: Array | Unavailable
    device_hours: Array
    joules: Array | Unavailable
    prices: Prices
    sources: Mapping[str, Source]

    @property
    def rented(self) -> bool:
        """True if `money` is a rent, which follows the time, or else a price of the joules."""
        return not isinstance(self.rent, Unavailable)

    @property
    def money(self) -> Array | Unavailable:
        """(cases,) to pay: the rent, or the energy where the devices are one's own."""
        if not isinstance(self.rent, Unavailable):
            return self.rent
        if not isinstance(self.energy, Unavailable):
            return self.energy
        if self.prices.per_kwh is not None:
            return self.energy
        return Unavailable(
            "neither rent nor price of energy is given",
            "give per_device_hour or per_kwh under [prices] of the cluster file",
        )

    def total(self, row: int = 0, low: float = 1.0, high: float = 1.0) -> Total | Unavailable:
        """Cost of one case, with its term.

        Args:
            row: Which case.
            low: Lower end of hours or joules over their best guess.
            high: Upper end likewise.
        """
        paid, prices = self.money, self.prices
        if isinstance(paid, Unavailable):
            return paid
        if prices.per_device_hour is not None:
            name, formula, unit = "rent", "device hours * price of a device hour", "per hour"
            inputs = {"device hours": float(self.device_hours[row])}
            price = prices.per_device_hour
        else:
            if isinstance(self.joules, Unavailable) or prices.per_kwh is None:
                return _missing("price of energy", "per_kwh")
            name, formula, unit = "energy", "kWh * price of a kWh", "per kWh"
            inputs, price = {"kWh": kwh(float(self.joules[row]))}, prices.per_kwh
        constant = self.sources.get(
            "prices.per_device_hour" if name == "rent" else "prices.per_kwh",
            Source(price, f"{prices.currency} {unit}", "given", _GIVEN_PRICES),
        )
        term = Term(name, float(paid[row]), formula, inputs, {"price": constant})
        ends = term.value * low, term.value * high
        return Total(prices.currency, Interval(min(ends), term.value, max(ends)), (term,))


def bill(
    prices: Prices,
    device_hours: ArrayLike,
    joules: ArrayLike | Unavailable,
    sources: Mapping[str, Source] | None = None,
) -> Bill:
    """Cost of runs in money and carbon.

    Args:
        prices: Of the cluster.
        device_hours: (cases,) of all devices of a run, waiting for repairs included.
        joules: (cases,) of a run at the building's meter, or why they are not known.
        sources: Of the prices, as `Cluster.sources` names them.

    Raises:
        PlanError: For hours, joules, a rent or an intensity below 0, or a number that is none.
    """
    for name in ("per_device_hour", "grams_per_kwh", "per_kwh"):
        value = getattr(prices, name)
        if value is None:
            continue
        # A price of energy may fall below 0.
        if not math.isfinite(value) or (value < 0.0 and name != "per_kwh"):
            least = "" if name == "per_kwh" else " of at least 0"
            raise PlanError(f"{name} = {value:g} of the cluster: give a finite number{least}")
    hours = _row("device_hours", device_hours)
    drawn: Array | Unavailable
    if isinstance(joules, Unavailable):
        drawn = joules
    else:
        hours, drawn = np.broadcast_arrays(hours, _row("joules", joules))
    if prices.per_device_hour is None:
        rent: Array | Unavailable = _missing("rent of a device", "per_device_hour")
    else:
        rent = hours * prices.per_device_hour
    return Bill(
        rent,
        _per_joule(drawn, prices.per_kwh, money, "price of energy", "per_kwh"),
        _per_joule(drawn, prices.grams_per_kwh, carbon_grams, "carbon of energy", "grams_per_kwh"),
        hours,
        drawn,
        prices,
        sources or {},
    )


def with_region(prices: Prices, region: str) -> Prices:
    """Prices with the yearly average intensity of a region's grid, where none is given.

    Args:
        prices: As they are.
        region: Two letters, EU or WORLD (`outlast.energy.prices`).

    Raises:
        EnergyError: For an unknown region.
    """
    from outlast.energy.prices import intensity

    if prices.grams_per_kwh is not None:
        return prices
    return replace(prices, grams_per_kwh=intensity(region).grams_per_kwh)


def _per_joule(
    joules: Array | Unavailable,
    price: float | None,
    of_joules: Callable[[float, float], float],
    what: str,
    setting: str,
) -> Array | Unavailable:
    if price is None:
        return _missing(what, setting)
    return joules if isinstance(joules, Unavailable) else joules * of_joules(1.0, price)


def _missing(what: str, setting: str) -> Unavailable:
    return Unavailable(
        f"the {what} is not given", f"give {setting} under [prices] of the cluster file"
    )


def _row(name: str, values: ArrayLike) -> Array:
    row = np.atleast_1d(np.asarray(values, dtype=float))
    if not np.all(np.isfinite(row) & (row >= 0.0)):
        wrong = row[~(np.isfinite(row) & (row >= 0.0))][0]
        raise PlanError(f"{name} = {wrong:g}: give a finite number of at least 0")
    return row
