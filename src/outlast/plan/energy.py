"""Watts, joules, money and carbon of a run; busy, blocked and idle joules apart.

Rates are those of `outlast.energy.cost`, which takes single numbers; energy is linear in time and
in watts, so each rate is asked for once and multiplied by arrays of many configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from outlast.energy.cost import (
    Watts,
    carbon_grams,
    clock_effect,
    money,
    node_joules,
    step_joules,
)
from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.batch import once_each, texts
from outlast.plan.estimate import NORMAL_90, Interval, Source, Term, Total

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


def busy_watts(power: Power, activity: ArrayLike) -> BusyWatts:
    """Power draw of computing devices, by how much they compute.

    `idle + (limit - idle) * (1 - exp(-activity / 0.12))`, an own prior: nothing published relates
    the two for single devices. Replace it with `measured_watts` as soon as there is a meter.

    Args:
        power: Of the cluster.
        activity: (cases,) FLOP/s while busy over the device's peak, in [0, 1].
    """
    share = np.atleast_1d(np.asarray(activity, dtype=float))
    rise = -np.expm1(-share / ACTIVITY.value)
    watts = power.idle_watts + (power.limit_watts - power.idle_watts) * rise
    formula = "idle + (limit - idle) (1 - exp(-activity / scale))"
    return BusyWatts(watts, share, BUSY_DEVIATION, formula, ACTIVITY)


def measured_watts(watts: float, text: str) -> BusyWatts:
    """Measured power draw of computing devices.

    Args:
        watts: Of each.
        text: Words that let a reader find the measurement.

    Raises:
        PlanError: For watts below 0.
    """
    if not 0.0 <= watts < math.inf:
        raise PlanError(f"watts = {watts:g}: give a finite number of at least 0")
    source = Source(watts, "W", "measured", text)
    return BusyWatts(np.array([watts]), None, MEASURED_DEVIATION, "busy watts", source)


def clock_factors(
    constants: DeviceConstants,
    activity_watts_per_mhz: float,
    clocks_mhz: ArrayLike,
    compute_share: ArrayLike = 1.0,
) -> Factors:
    """Factors of clocks on busy seconds and busy watts (`outlast.energy.cost.clock_effect`).

    Args:
        constants: Of the device.
        activity_watts_per_mhz: At the voltage below the knee; see `activity_at`.
        clocks_mhz: (cases,) asked for; few different ones.
        compute_share: (cases,) share of the busy time at the top clock that the clock governs.

    Raises:
        EnergyError: What `clock_effect` raises.
    """
    share = np.asarray(compute_share, dtype=float)
    # Time is linear in the share, and power depends on the setting alone: two calls for each
    # setting say all.
    effect = partial(clock_effect, constants, activity_watts_per_mhz)
    slower, weaker = (
        once_each(partial(effect, compute_share=share), np.atleast_1d(clocks_mhz))[:, column]
        for column, share in enumerate((1.0, 0.0))
    )
    return 1.0 + share * (slower - 1.0), weaker * np.ones(share.shape)


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


WAITING_DEVIATION = 0.1
"""Own prior, relative, of blocked and idle watts."""
NODE_DEVIATION = 0.15
"""Own prior, relative, of a node's rest that follows from its rating."""
_UNITS = dict.fromkeys(("limit_watts", "blocked_watts", "idle_watts", "node_watts"), "W")
_UNITS["pue"] = "1"
_GIVEN_POWER = "the cluster's [power]"
_TEXTS = texts("energy")


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
        watts = self.draw.watts
        given = {
            name: self.sources.get(
                f"power.{name}", Source(getattr(power, name), unit, "given", _GIVEN_POWER)
            )
            for name, unit in _UNITS.items()
        }
        busy = {
            "busy seconds": seconds["busy"],
            "busy watts": weaker * float(watts[row if watts.size > 1 else 0]),
            "clock's factor of seconds": slower,
            "clock's factor of watts": weaker,
        }
        rest = {
            "step seconds": math.fsum(seconds.values()),
            "devices_per_node": self.devices_per_node,
        }
        drawn = {"busy watts": self.draw.source}
        if (activity := self.draw.activity) is not None:
            busy["activity"] = float(activity[row if activity.size > 1 else 0])
            drawn = {"scale": self.draw.source}
            drawn |= {"limit": given["limit_watts"], "idle": given["idle_watts"]}
        blocked, idle = ({f"{name} seconds": seconds[name]} for name in ("blocked", "idle"))
        # Of each term of `_TEXTS`: joules, and the inputs and constants of its formula.
        parts: tuple[tuple[Array, dict[str, float], dict[str, Source]], ...] = (
            (self.busy, busy, drawn),
            (self.blocked, blocked, {"blocked watts": given["blocked_watts"]}),
            (self.idle, idle, {"idle watts": given["idle_watts"]}),
            (self.node, rest, {"node watts": given["node_watts"]}),
            (self.building, {}, {"PUE": given["pue"]}),
        )
        return [
            Term(
                name,
                devices * float(joules[row]),
                f"{text.formula} {self.draw.formula}" if name == "busy" else text.formula,
                {"devices": devices, **inputs},
                constants,
                text.source,
            )
            for (name, text), (joules, inputs, constants) in zip(_TEXTS.items(), parts, strict=True)
        ]


def step_energy(
    power: Power,
    draw: BusyWatts,
    seconds: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    devices_per_node: float = 1.0,
    clocks: Factors | None = None,
    sources: Mapping[str, Source] | None = None,
) -> StepEnergy:
    """Joules of a step per device.

    Args:
        power: Of the cluster.
        draw: What a busy device draws, by `busy_watts` or `measured_watts`.
        seconds: (cases,) each: busy, blocked and idle in a step; at other clocks than the top ones
            busy seconds are those at the top clocks.
        devices_per_node: That share the node's rest.
        clocks: Of `clock_factors`; None for the top clocks.
        sources: Of the watts and the PUE, as `Cluster.sources` names them.
    """
    ones = np.ones(1)
    slower, weaker = clocks or (ones, ones)
    names = ("busy", "blocked", "idle")
    computing, *others = (np.asarray(second, dtype=float) for second in seconds)
    *rows, watts, slower, weaker = np.broadcast_arrays(
        computing * slower, *others, draw.watts, slower, weaker
    )
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


@dataclass(frozen=True, slots=True)
class Bill:
    """Of (cases,) runs.

    Attributes:
        money: To pay: the rent, or the energy where the devices are one's own; or why it is not
            known.
        rented: True if `money` is a rent, which follows the time, or else a price of the joules.
        carbon_grams: CO2 equivalent of the joules, or why it is not known.
    """

    money: Array | Unavailable
    rented: bool
    carbon_grams: Array | Unavailable


def bill(prices: Prices, device_hours: Array, joules: Array | Unavailable) -> Bill:
    """Cost of runs in money and carbon.

    Args:
        prices: Of the cluster.
        device_hours: (cases,) of all devices of a run, waiting for repairs included.
        joules: (cases,) of a run at the building's meter, or why they are not known.
    """

    def per_joule(
        price: float | None, of_joules: Callable[[float, float], float], reason: str, names: str
    ) -> Array | Unavailable:
        if price is None:
            return Unavailable(reason, f"give {names} under [prices] of the cluster file")
        return joules if isinstance(joules, Unavailable) else joules * of_joules(1.0, price)

    rent = prices.per_device_hour
    why = "neither rent nor price of energy is given"
    paid = per_joule(prices.per_kwh, money, why, "per_device_hour or per_kwh")
    why = "the carbon of energy is not given"
    grams = per_joule(prices.grams_per_kwh, carbon_grams, why, "grams_per_kwh")
    return Bill(paid if rent is None else device_hours * rent, rent is not None, grams)


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
