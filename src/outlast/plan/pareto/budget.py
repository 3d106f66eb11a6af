"""Limits as people write them: "40 h", "3 MWh", "20 kEUR", "1.5 tCO2", "2027-01-31"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from outlast.errors import PlanError
from outlast.plan.pareto.objectives import FIGURES

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
        figure: Name in `outlast.plan.pareto.objectives.FIGURES`.
        value: Most of it (free memory: least of it), in the figure's unit.
        text: As it was written.
        currency: Of an amount of money; empty for all others.
    """

    figure: str
    value: float
    text: str
    currency: str = ""


def parse(text: str, start: datetime | None = None) -> Budget:
    """A limit from its text.

    Args:
        text: A number and a unit, or a date or time (ISO 8601) by which to finish; a date means the
            end of that day. Times without a zone are the start's.
        start: When the run starts, which a deadline needs.

    Raises:
        PlanError: The text has no number or no known unit, is not above 0, or is a deadline without
            a start or before it.
    """
    plain = text.strip().replace("₂", "2")
    deadline = _deadline(plain)
    if deadline is not None:
        return _until(text, deadline, start)
    found = re.fullmatch(r"([$€£¥]?)\s*(\d[\d_ ,']*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([^\d\s].*)?", plain)
    if found is None:
        raise PlanError(f"budget {text!r} is no number with a unit: known are {KNOWN}")
    sign, digits, unit = found.group(1), found.group(2), (found.group(3) or "").strip()
    value = float(re.sub(r"[_ ,']", "", digits))
    if re.search(r",\d{1,2}(?!\d)", digits):
        raise PlanError(
            f"budget {text!r} has a comma that divides no thousands: write a decimal point"
        )
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


def _deadline(text: str) -> datetime | date | None:
    if not re.match(r"\d{4}-\d{1,2}-\d{1,2}", text):
        return None
    try:
        return date.fromisoformat(text) if len(text) == 10 else datetime.fromisoformat(text)
    except ValueError as error:
        raise PlanError(
            f"budget {text!r} is no date: write 2027-01-31 or 2027-01-31T18:00"
        ) from error


def _until(text: str, deadline: datetime | date, start: datetime | None) -> Budget:
    if start is None:
        raise PlanError(f"budget {text!r} is a deadline: say when the run starts")
    zone = start.tzinfo or UTC
    if not isinstance(deadline, datetime):
        deadline = datetime.combine(deadline + timedelta(days=1), time(), zone)
    if deadline.tzinfo is None:
        deadline = deadline.replace(tzinfo=zone)
    hours = (deadline - start.replace(tzinfo=zone)).total_seconds() / 3600.0
    if hours <= 0.0:
        raise PlanError(
            f"budget {text!r} lies before the start {start.isoformat(sep=' ')}: give a later one"
        )
    return Budget("hours", hours, text)


def limits(
    wanted: Mapping[str, float | str] | Iterable[str] | str,
    *,
    start: datetime | None = None,
    currency: str = "",
) -> dict[str, float]:
    """Limits by figure, in the figures' units; of two of one figure the tighter.

    Args:
        wanted: A text for `parse`, or several; or by figure a number in its unit, or a text.
        start: When the run starts.
        currency: Of the prices; a budget in another one is refused.

    Raises:
        PlanError: A figure is unknown, a text belongs to another figure, or what `parse` raises.
    """
    found: dict[str, float] = {}
    wanted = [wanted] if isinstance(wanted, str) else wanted
    named = wanted.items() if isinstance(wanted, Mapping) else ((None, name) for name in wanted)
    for figure, value in named:
        if figure is not None and figure not in FIGURES:
            raise PlanError(f"a limit of {figure!r}: known figures are {', '.join(FIGURES)}")
        if figure is not None and not isinstance(value, str):
            if not math.isfinite(value):
                raise PlanError(f"a limit of {figure} = {value}: give a finite number")
            budget = Budget(figure, float(value), str(value))
        else:
            budget = parse(str(value), start)
        if figure not in (None, budget.figure):
            raise PlanError(
                f"a limit of {figure} = {value!r} is one of {FIGURES[budget.figure].words}: give "
                f"it as {budget.figure}"
            )
        if budget.currency and currency and budget.currency != currency:
            raise PlanError(
                f"budget {budget.text!r} is in {budget.currency}, but prices are in {currency}: "
                f"give the budget in {currency}"
            )
        tighter = max if FIGURES[budget.figure].more else min
        found[budget.figure] = tighter(found.get(budget.figure, budget.value), budget.value)
    return found
