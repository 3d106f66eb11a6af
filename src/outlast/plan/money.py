"""What a run costs in money and carbon: rent or energy at a price, grams at an intensity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.cost import carbon_grams, kwh, money
from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.estimate import Interval, Source, Term, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import ArrayLike

    from outlast.plan.cases import Array
    from outlast.plan.cluster import Prices

_GIVEN = "the cluster's [prices]"


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
        """Whether `money` is a rent, which follows the time, or else a price of the joules."""
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
        """What one case costs, with its term.

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
            Source(price, f"{prices.currency} {unit}", "given", _GIVEN),
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
    """What runs cost.

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
        region: Two letters, EU or WORLD (`outlast.energy.account.carbon`).

    Raises:
        EnergyError: For an unknown region.
    """
    from outlast.energy.account.carbon import intensity

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
