"""Objectives of candidates: an array per figure; limits as people write them ("40 h", "3 MWh").

A space has millions of candidates and a front some hundreds, and a phrase is made row by row. So a
block of candidates carries a question, and the rows that stay carry it on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.batch import Array, Mask
from outlast.plan.estimate import Interval

Flags: TypeAlias = Callable[[int], tuple[str, ...] | None]
"""From a row to why its figures are beyond what was calibrated, a phrase each; empty within.

None where nobody knows.
"""
Column: TypeAlias = Array | Unavailable


Scale: TypeAlias = Literal["log", "linear"]
"""How differences along an axis count: by ratio, or by difference."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a candidate, less of which is better unless `more`.

    Attributes:
        name: Field or property of `Objectives`.
        words: For people.
        unit: Its unit.
        scale: Whether its half-width and its distances are ratios or differences.
        more: More of it is better.
    """

    name: str
    words: str
    unit: str
    scale: Scale = "log"
    more: bool = False


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("hours", "time to finish", "h"),
        Figure("kwh", "energy", "kWh"),
        Figure("lost_hours", "expected lost time", "h"),
        Figure("miss_probability", "probability to miss the deadline", "", "linear"),
        Figure("loss_difference", "loss against the reference", "nats", "linear"),
        Figure("device_hours", "device hours", "GPU h"),
        Figure("money", "money", ""),
        Figure("grams_co2", "carbon dioxide", "g"),
        Figure("headroom_bytes", "free memory", "B", "linear", more=True),
    )
}
"""All figures that can be an axis or a limit, by name."""

AXES = ("hours", "kwh", "lost_hours", "miss_probability", "loss_difference")
"""Axes of a front where nobody says others; those that are unavailable are left out."""
COVERAGE = 0.9
"""Of the intervals."""
_NOT_GIVEN = Unavailable("the evaluation gave none")
_NO_DEADLINE = Unavailable("no deadline was given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Figures of candidates, each (candidates,) or (1,) where all agree.

    Rows that do not fit, and rows in the memory cliff, may hold anything: they never enter a front.

    Attributes:
        hours: Expected wall time until the run is finished, failures included.
        kwh: Energy of devices, nodes and building together.
        lost_hours: Expected time lost to failures: work done twice, waits, restarts, checkpoints.
        miss_probability: Of finishing after the deadline; unavailable without one.
        loss_difference: Loss in nats per token over that of the reference at equal data, >= 0 or
            below it.
        memory_bytes: Reserved on the fullest device.
        capacity_bytes: Of a device.
        fits: It does not run out of memory.
        cliff: It runs, but so close to the limit that the allocator slows it down.
        device_hours: Devices times hours.
        money: In the cluster's currency.
        grams_co2: CO2 equivalent.
        half_widths: By the name of a figure: half the interval, in natural logarithms for figures
            on a log scale (`FIGURES`), else in the figure's unit.
        flags: From a candidate's row to why its figures are extrapolated, a phrase each; asked only
            of candidates that are read. None where nobody knows.
    """

    hours: Array
    memory_bytes: Array
    capacity_bytes: Array
    fits: Mask
    cliff: Mask
    kwh: Column = _NOT_GIVEN
    lost_hours: Column = _NOT_GIVEN
    miss_probability: Column = _NO_DEADLINE
    loss_difference: Column = _NOT_GIVEN
    device_hours: Column = _NOT_GIVEN
    money: Column = _NOT_GIVEN
    grams_co2: Column = _NOT_GIVEN
    half_widths: Mapping[str, Array] = field(default_factory=dict)
    flags: Flags | None = None

    def __len__(self) -> int:
        named = [*(getattr(self, item.name) for item in fields(self)), *self.half_widths.values()]
        sizes = {value.size for value in named if isinstance(value, np.ndarray)}
        return next(iter(sizes - {1}), 1)

    @property
    def headroom_bytes(self) -> Array:
        """Memory of the fullest device that stays free."""
        return np.asarray(self.capacity_bytes - self.memory_bytes)

    @property
    def allowed(self) -> Mask:
        """(candidates,), true where a candidate may be recommended."""
        return np.broadcast_to(self.fits & ~self.cliff, (len(self),))

    def column(self, name: str) -> Column:
        """(candidates,) of a figure, or why it is not there."""
        found: Column = getattr(self, name)
        return found if isinstance(found, Unavailable) else np.broadcast_to(found, (len(self),))

    def known(self, name: str) -> Array:
        """(candidates,) of a figure.

        Raises:
            PlanError: It is unavailable.
        """
        column = self.column(name)
        if isinstance(column, Unavailable):
            raise PlanError(f"{FIGURES[name].words} is not known: {column.reason}")
        return column

    def available(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that every candidate has."""
        return tuple(n for n in names if not isinstance(self.column(n), Unavailable))

    def half_width(self, name: str) -> Array:
        """(candidates,) half the interval of a figure; 0 where the model gives none."""
        return np.broadcast_to(self.half_widths.get(name, np.zeros(1)), (len(self),))

    def interval(self, name: str, row: int) -> Interval | Unavailable:
        """A figure of one candidate; without a half-width its ends are its middle."""
        column = self.column(name)
        if isinstance(column, Unavailable):
            return column
        low, middle, high = (float(end[row]) for end in ends(self, name))
        return Interval(low, middle, high, COVERAGE)

    def extrapolated(self, row: int) -> tuple[str, ...] | None:
        """Why the figures of one candidate are beyond what was calibrated; None: nobody knows."""
        return None if self.flags is None else self.flags(row)

    def taken(self, rows: NDArray[np.intp] | Mask) -> Objectives:
        """The candidates of some rows."""
        count, flags = len(self), self.flags
        places = np.arange(count)[rows]

        def some(value: object) -> object:
            if not isinstance(value, np.ndarray):
                return value
            return np.broadcast_to(value, (count,))[rows]

        named = {item.name: some(getattr(self, item.name)) for item in fields(self)}
        named["half_widths"] = {name: some(value) for name, value in self.half_widths.items()}
        if flags is not None:
            named["flags"] = lambda row: flags(int(places[row]))
        return Objectives(**named)  # type: ignore[arg-type]


def ends(objectives: Objectives, name: str) -> tuple[Array, Array, Array]:
    """Low end, middle and high end of a figure, each (candidates,).

    Raises:
        PlanError: The figure is unavailable.
    """
    middle, half = objectives.known(name), objectives.half_width(name)
    if FIGURES[name].scale == "log":
        return middle * np.exp(-half), middle, middle * np.exp(half)
    low, high = middle - half, middle + half
    if name == "miss_probability":
        low, high = np.clip(low, 0.0, middle), np.clip(high, middle, 1.0)
    return low, middle, high


def minimised(objectives: Objectives, axes: Sequence[str]) -> Array:
    """(candidates, axes) of what is to be as small as possible.

    Raises:
        PlanError: An axis is unavailable.
    """
    return np.column_stack(
        [(-1.0 if FIGURES[name].more else 1.0) * objectives.known(name) for name in axes]
    )


def joined(parts: Sequence[Objectives]) -> Objectives:
    """The candidates of several parts, one after the other.

    A figure that one part lacks is lacking in the whole, with that part's reason; half-widths that
    one part lacks are 0 there.
    """
    named: dict[str, object] = {}
    for item in fields(Objectives):
        if item.name in ("half_widths", "flags"):
            continue
        columns = [part.column(item.name) for part in parts]
        lacking = [column for column in columns if isinstance(column, Unavailable)]
        known = [column for column in columns if not isinstance(column, Unavailable)]
        named[item.name] = lacking[0] if lacking else np.concatenate(known)
    names = dict.fromkeys(name for part in parts for name in part.half_widths)
    named["half_widths"] = {
        name: np.concatenate([part.half_width(name) for part in parts]) for name in names
    }
    stops = np.cumsum([len(part) for part in parts])

    def flags(row: int) -> tuple[str, ...] | None:
        at = int(np.searchsorted(stops, row, side="right"))
        return parts[at].extrapolated(row - (int(stops[at - 1]) if at else 0))

    return Objectives(**named, flags=flags)  # type: ignore[arg-type]


_HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0}
_HOUR_WORDS = {"hour": 1.0, "hours": 1.0, "day": 24.0, "days": 24.0, "week": 168.0, "weeks": 168.0}
_KWH = {"Wh": 1e-3, "kWh": 1.0, "MWh": 1e3, "GWh": 1e6, "MJ": 1 / 3.6, "GJ": 1e3 / 3.6}
_GRAMS = {"g": 1.0, "kg": 1e3, "t": 1e6, "kt": 1e9}
_BYTES = {"MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
_THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6}
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}

UNITS: dict[str, tuple[str, float]] = {
    **{unit: ("hours", factor) for unit, factor in (_HOURS | _HOUR_WORDS).items()},
    **{unit: ("kwh", factor) for unit, factor in _KWH.items()},
    **{f"{unit}CO2": ("grams_co2", factor) for unit, factor in _GRAMS.items()},
    **{f"{unit}CO2e": ("grams_co2", factor) for unit, factor in _GRAMS.items()},
    **{unit: ("headroom_bytes", factor) for unit, factor in _BYTES.items()},
    **{
        f"{prefix}{unit}": ("device_hours", factor)
        for prefix, factor in _THOUSANDS.items()
        for unit in ("GPUh", "GPU-hours", "device-hours")
    },
    "nats": ("loss_difference", 1.0),
    "%": ("miss_probability", 0.01),
}
"""Unit to figure and factor."""

KNOWN = (
    "h, d, min, s; kWh, MWh, GJ; GPUh; kgCO2, tCO2; an amount in a currency (EUR, kUSD); GB or GiB "
    "of free memory; nats of loss; % of missing the deadline; a date (2027-01-31) with a start"
)
"""The units, for people."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit of one figure.

    Attributes:
        figure: Name in `FIGURES`.
        value: Most of it (free memory: least of it), in the figure's unit.
        text: As it was written.
        currency: Of an amount of money; empty for all others.
    """

    figure: str
    value: float
    text: str
    currency: str = ""


def parse(text: str, start: datetime | None = None, name: str = "budget") -> Budget:
    """A limit from its text.

    Args:
        text: A number and a unit, or a date or time (ISO 8601) by which to finish; a date means the
            end of that day. Times without a zone are the start's.
        start: When the run starts, which a deadline needs.
        name: Of the option, for the error.

    Raises:
        PlanError: The text has no number or no known unit, is not above 0, or is a deadline without
            a start or before it.
    """
    plain = text.strip().replace("₂", "2")
    if re.match(r"\d{4}-\d{1,2}-\d{1,2}", plain):
        return Budget("hours", _hours_until(text, plain, start), text)
    found = re.fullmatch(r"([$€£¥]?)\s*(\d[\d_ ,']*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([^\d\s].*)?", plain)
    if found is None:
        raise PlanError(f"{name} {text!r} is no number with a unit: known are {KNOWN}")
    sign, digits, unit = found.group(1), found.group(2), (found.group(3) or "").strip()
    if re.search(r",\d{1,2}(?!\d)", digits):
        raise PlanError(
            f"budget {text!r} has a comma that divides no thousands: write a decimal point"
        )
    value = float(re.sub(r"[_ ,']", "", digits))
    figure, factor, currency = _unit(sign, unit, text)
    if not (math.isfinite(value) and (value > 0.0 or figure == "loss_difference")):
        raise PlanError(f"budget {text!r} is not above 0: give more")
    return Budget(figure, value * factor, text, currency)


def _unit(sign: str, unit: str, text: str) -> tuple[str, float, str]:
    """Figure, factor and currency."""
    squeezed = re.sub(r"\s+(?=CO2)|(?<=GPU)\s+(?=h)", "", unit)
    if sign:
        if unit not in _THOUSANDS:
            raise PlanError(f"budget {text!r} has {unit!r} after an amount: give k, M or nothing")
        return "money", _THOUSANDS[unit], _SIGNS[sign]
    if squeezed in UNITS:
        return *UNITS[squeezed], ""
    money = re.fullmatch(r"([kM]?)([A-Z]{3}|[$€£¥])", unit)
    if money:
        return "money", _THOUSANDS[money.group(1)], _SIGNS.get(money.group(2), money.group(2))
    near = [known for known in UNITS if known.lower() == squeezed.lower()]
    guess = f"; did you mean {near[0]}?" if near and squeezed else ""
    said = f"has the unknown unit {unit!r}" if unit else "has no unit"
    raise PlanError(f"budget {text!r} {said}: known are {KNOWN}{guess}")


def _hours_until(text: str, plain: str, start: datetime | None) -> float:
    """Hours from the start to a deadline; a date ends with its day."""
    try:
        deadline = datetime.fromisoformat(plain)
        if len(plain) == 10:
            deadline = datetime.combine(date.fromisoformat(plain) + timedelta(days=1), time())
    except ValueError as error:
        raise PlanError(
            f"budget {plain!r} is no date: write 2027-01-31 or 2027-01-31T18:00"
        ) from error
    if start is None:
        raise PlanError(f"budget {text!r} is a deadline: say when the run starts")
    zone = start.tzinfo or UTC
    deadline = deadline if deadline.tzinfo else deadline.replace(tzinfo=zone)
    hours = (deadline - start.replace(tzinfo=zone)).total_seconds() / 3600.0
    if hours <= 0.0:
        raise PlanError(
            f"budget {text!r} lies before the start {start.isoformat(sep=' ')}: give a later one"
        )
    return hours


def limits(
    wanted: Iterable[str] | str, *, start: datetime | None = None, currency: str = ""
) -> dict[str, float]:
    """Limits by figure, in the figures' units; of two of one figure the tighter.

    Args:
        wanted: A text for `parse`, or several.
        start: When the run starts.
        currency: Of the prices; a budget in another one is refused.

    Raises:
        PlanError: A budget is in another currency, or what `parse` raises.
    """
    found: dict[str, float] = {}
    for text in [wanted] if isinstance(wanted, str) else wanted:
        budget = parse(text, start)
        if budget.currency and currency and budget.currency != currency:
            raise PlanError(
                f"budget {budget.text!r} is in {budget.currency}, but prices are in {currency}: "
                f"give the budget in {currency}"
            )
        tighter = max if FIGURES[budget.figure].more else min
        found[budget.figure] = tighter(found.get(budget.figure, budget.value), budget.value)
    return found
