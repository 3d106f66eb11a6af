"""Electricity prices from a TOML file: flat, or by time of use.

    currency = "EUR"
    time_zone = "Europe/Berlin"
    price_per_kwh = 0.22            # where no band applies

    [[bands]]
    days = ["mon", "tue", "wed", "thu", "fri"]
    from_hour = 8
    to_hour = 20
    price_per_kwh = 0.31

Hours are those of the wall clock in the time zone. A band from 22 to 6 goes past midnight and
belongs to the day on which it begins.
"""

from __future__ import annotations

import csv
import difflib
import math
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outlast.energy.cost import JOULES_PER_KWH
from outlast.errors import EnergyError
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


SLICE_SECONDS = 900
"""Prices change on quarters of an hour of UTC at most: every time zone is offset by such."""


@dataclass(frozen=True, slots=True)
class Band:
    """Hours of the week with a price of their own.

    Attributes:
        price_per_kwh: In the tariff's currency.
        days: On which the band begins, of `DAYS`.
        from_hour: First hour, 0 to 23.
        to_hour: Hour at which it ends, 1 to 24; at or below `from_hour` on the next day.
    """

    price_per_kwh: float
    days: frozenset[str]
    from_hour: int
    to_hour: int

    def holds(self, local: datetime) -> bool:
        """True if a local time lies in the band."""
        today, yesterday = DAYS[local.weekday()], DAYS[local.weekday() - 1]
        if self.from_hour < self.to_hour:
            return today in self.days and self.from_hour <= local.hour < self.to_hour
        begun = today in self.days and local.hour >= self.from_hour
        return begun or (yesterday in self.days and local.hour < self.to_hour)


@dataclass(frozen=True, slots=True)
class Tariff:
    """Price of electricity over time.

    Attributes:
        currency: ISO 4217 code, such as EUR.
        price_per_kwh: Where no band applies.
        time_zone: IANA name.
        bands: The first that holds applies.
    """

    currency: str
    price_per_kwh: float
    time_zone: str = "UTC"
    bands: tuple[Band, ...] = ()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Tariff:
        """A tariff file.

        Raises:
            EnergyError: When it cannot be read, or any key or value is wrong.
        """
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise EnergyError(f"tariff file {path} cannot be read: {reason}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "tariff") -> Tariff:
        """A tariff from TOML text; `name` is for errors."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise EnergyError(f"{name} is not TOML: {error}") from error
        _known(name, table, {"currency", "time_zone", "price_per_kwh", "bands"})
        currency = table.get("currency")
        if not (isinstance(currency, str) and len(currency) == 3 and currency.isupper()):
            raise EnergyError(f'{name}: currency = {currency!r} must be a code like "EUR"')
        zone = table.get("time_zone", "UTC")
        if not isinstance(zone, str):
            raise EnergyError(f'{name}: time_zone = {zone!r} must be a name like "Europe/Berlin"')
        _zone(zone, name)
        bands = table.get("bands", [])
        if not (isinstance(bands, list) and all(isinstance(band, dict) for band in bands)):
            raise EnergyError(f"{name}: bands must be written as [[bands]] tables")
        return cls(
            currency,
            _price(name, table),
            zone,
            tuple(_band(f"{name}: band {i}", band) for i, band in enumerate(bands, 1)),
        )

    def price_at(self, moment: datetime) -> float:
        """Price per kWh at a moment.

        Raises:
            EnergyError: For a moment without a time zone.
        """
        if moment.tzinfo is None:
            raise EnergyError(f"moment = {moment} has no time zone: pass one that has")
        local = moment.astimezone(_zone(self.time_zone, "tariff"))
        for band in self.bands:
            if band.holds(local):
                return band.price_per_kwh
        return self.price_per_kwh

    def cost(self, joules: float, begin: datetime, seconds: float) -> float:
        """Cost of joules that were drawn evenly over a time, in `currency`."""
        return joules / JOULES_PER_KWH * time_average(self.price_at, begin, seconds)


def time_average(value_at: Callable[[datetime], float], begin: datetime, seconds: float) -> float:
    """Mean over a time of a value that changes on quarters of an hour of UTC at most.

    Raises:
        EnergyError: For a beginning without time zone, or a negative time.
    """
    if begin.tzinfo is None:
        raise EnergyError(f"begin = {begin} has no time zone: pass one that has")
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise EnergyError(f"seconds = {seconds} is not a time of at least 0")
    start = begin.astimezone(UTC)
    end = start + timedelta(seconds=seconds)
    if end <= start:
        return value_at(start)
    total = 0.0
    at = start
    while at < end:
        ordinal = math.floor(at.timestamp() / SLICE_SECONDS) + 1
        border = datetime.fromtimestamp(ordinal * SLICE_SECONDS, UTC)
        until = min(border, end)
        total += value_at(at) * (until - at).total_seconds()
        at = until
    return total / (end - start).total_seconds()


def _band(name: str, table: dict[str, Any]) -> Band:
    _known(name, table, {"days", "from_hour", "to_hour", "price_per_kwh"})
    days = table.get("days", list(DAYS))
    if not (isinstance(days, list) and days and all(day in DAYS for day in days)):
        raise EnergyError(f"{name}: days = {days!r} must be some of {', '.join(DAYS)}")
    hours = {}
    for key, lowest, highest in (("from_hour", 0, 23), ("to_hour", 1, 24)):
        hour = table.get(key)
        if not (type(hour) is int and lowest <= hour <= highest):
            raise EnergyError(f"{name}: {key} = {hour!r} must be {lowest} to {highest}")
        hours[key] = hour
    return Band(_price(name, table), frozenset(days), hours["from_hour"], hours["to_hour"])


def _price(name: str, table: dict[str, Any]) -> float:
    price = table.get("price_per_kwh")
    if isinstance(price, bool) or not isinstance(price, int | float) or not math.isfinite(price):
        raise EnergyError(f"{name}: price_per_kwh = {price!r} must be a number")
    return float(price)


def _known(name: str, table: dict[str, Any], keys: set[str]) -> None:
    unknown = sorted(set(table) - keys)
    if unknown:
        raise EnergyError(
            f"{name}: {unknown[0]} is not known; it may have {', '.join(sorted(keys))}"
        )


def _zone(zone: str, name: str) -> ZoneInfo:
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise EnergyError(
            f'{name}: time_zone = "{zone}" is not known here: use an IANA name such as '
            '"Europe/Berlin", and install tzdata where the system has none'
        ) from error


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


Provider: TypeAlias = "Callable[[datetime, str], float]"
"""Grams of CO2 equivalent per kWh at a moment that has a time zone, and in a region.

It may ask a service, which this package never does."""


@cache
def table() -> Mapping[str, Intensity]:
    """The shipped table, by region."""
    # Imported here: it is slow, and most runs name no region.
    from importlib import resources

    file = resources.files("outlast.energy").joinpath("intensity.csv")
    with file.open(encoding="utf-8") as lines:
        return {
            region: Intensity(region, name, float(grams), int(year), kind, source)
            for region, name, grams, year, kind, source in list(csv.reader(lines))[1:]
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
    joules: float, begin: datetime, seconds: float, region: str, provider: Provider = yearly_average
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
