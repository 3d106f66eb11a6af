"""Carbon intensity of electricity: yearly national averages that ship, or a provider of your own.

Nothing here uses the network. The shipped table is rounded and unverified, and an average over a
year says little about an hour or a contract: pass a provider where it matters.
"""

from __future__ import annotations

import csv
import difflib
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from outlast.energy.account.tariff import time_average
from outlast.energy.cost import JOULES_PER_KWH
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class Intensity:
    """Yearly average of a region.

    Attributes:
        region: ISO 3166 code of two letters, or EU, WORLD.
        name: In English.
        grams_per_kwh: CO2 equivalent per kilowatt-hour.
        year: Of the average.
        kind: "published" or "unverified".
        source: Where the figure comes from.
    """

    region: str
    name: str
    grams_per_kwh: float
    year: int
    kind: str
    source: str


class Provider(Protocol):
    """Carbon intensity at a time; may ask a service, which this package never does."""

    def __call__(self, moment: datetime, region: str) -> float:
        """Grams of CO2 equivalent per kWh at a moment that has a time zone."""


@cache
def table() -> Mapping[str, Intensity]:
    """The shipped table, by region."""
    # Imported here: it is slow, and most runs name no region.
    from importlib import resources

    file = resources.files("outlast.energy.account").joinpath("intensity.csv")
    with file.open(encoding="utf-8") as lines:
        return {
            row["region"]: Intensity(
                row["region"],
                row["name"],
                float(row["grams_per_kwh"]),
                int(row["year"]),
                row["kind"],
                row["source"],
            )
            for row in csv.DictReader(lines)
        }


def intensity(region: str) -> Intensity:
    """The yearly average of a region.

    Raises:
        EnergyError: When the table has no such region, with those that look like it.
    """
    found = table().get(region.upper())
    if found is not None:
        return found
    names = {row.name.lower(): row.region for row in table().values()}
    named = difflib.get_close_matches(region.lower(), names, 1)
    near = [names[name] for name in named] or difflib.get_close_matches(
        region.upper(), list(table()), 1, 0.4
    )
    hint = f"did you mean {near[0]}?" if near else "use a code of two letters, EU or WORLD"
    raise EnergyError(f'region = "{region}" is not in the carbon table: {hint}')


def yearly_average(moment: datetime, region: str) -> float:
    """The provider that is used by default: the shipped table, the same all year."""
    del moment
    return intensity(region).grams_per_kwh


def carbon(
    joules: float,
    begin: datetime,
    seconds: float,
    region: str,
    provider: Provider = yearly_average,
) -> float:
    """Grams of CO2 equivalent of joules that were drawn evenly over a time.

    A provider is asked once per quarter of an hour.

    Args:
        joules: Drawn.
        begin: When, with a time zone.
        seconds: For how long.
        region: Where.
        provider: Intensity at a time.

    Raises:
        EnergyError: For an unknown region, or a provider that returns no number of at least 0.
    """

    def at(moment: datetime) -> float:
        grams = provider(moment, region)
        if not (math.isfinite(grams) and grams >= 0.0):
            raise EnergyError(
                f"the carbon provider gave {grams} g/kWh for {region} at {moment}: "
                "it must return a number of at least 0"
            )
        return grams

    return joules / JOULES_PER_KWH * time_average(at, begin, seconds)
