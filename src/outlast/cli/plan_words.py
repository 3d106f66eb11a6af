"""Predicted figures as people read them: durations, joules, bytes, intervals, bars."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.plan.estimate import Interval

GIB = 2.0**30
_TIMES = ((1.5 * 86_400.0 * 4, "d", 86_400.0), (5400.0, "h", 3600.0), (90.0, "min", 60.0))
_SMALL_TIMES = ((1.0, "s", 1.0), (1e-3, "ms", 1e-3), (0.0, "us", 1e-6))
_ENERGIES = ((2e12 * 3.6, "GWh", 3.6e12), (2e6 * 3.6e3, "MWh", 3.6e9), (3.6e5, "kWh", 3.6e6))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))
_BAR = 8


def rounded(value: float, digits: int = 3) -> str:
    """A number with so many digits, and no exponent where a person would write none."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def count_words(count: float) -> str:
    """A large number: ``8.03 B``."""
    unit, factor = next(item for item in _COUNTS if count >= item[1] or item[1] == 1.0)
    if not unit and count == int(count):
        return f"{int(count)}"
    return f"{rounded(count / factor, 4)} {unit}".strip()


def unit_of_seconds(seconds: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its seconds."""
    ladder = (*_TIMES, *_SMALL_TIMES)
    return next((unit, factor) for least, unit, factor in ladder if abs(seconds) >= least)


def seconds_words(seconds: float) -> str:
    """A time: ``48.4 h``."""
    if seconds == 0.0:
        return "0 s"
    unit, factor = unit_of_seconds(seconds)
    return f"{rounded(seconds / factor)} {unit}"


def seconds_range(found: Interval) -> str:
    """A time with its interval: ``48.4 h (34.0 to 68.9)``."""
    unit, factor = unit_of_seconds(found.middle)
    return _range(found, factor, unit)


def joules_words(joules: float) -> str:
    """Energy: ``2,785 kWh``."""
    unit, factor = unit_of_joules(joules)
    return f"{rounded(joules / factor, 4)} {unit}"


def joules_range(found: Interval | Unavailable) -> str:
    """Energy with its interval, or why it is not known."""
    if isinstance(found, Unavailable):
        return str(found)
    unit, factor = unit_of_joules(found.middle)
    return _range(found, factor, unit)


def range_words(found: Interval | Unavailable, unit: str, factor: float = 1.0) -> str:
    """A figure in a unit of so many of its own, with its interval, or why it is not known."""
    return str(found) if isinstance(found, Unavailable) else _range(found, factor, unit)


def bytes_words(size: float) -> str:
    """Memory of a device, as its users count: ``42.1 GiB``."""
    return (
        f"{rounded(size / GIB)} GiB" if abs(size) >= 0.1 * GIB else f"{rounded(size / 2**20)} MiB"
    )


def share_words(share: float) -> str:
    """``97.7 %``."""
    digits = ".3g" if abs(share) < 0.995 or share >= 1.0 else ".2f"
    return f"{100.0 * share:{digits}} %"


def bar(share: float, blocks: bool = True) -> str:
    """How full a device is: full is the whole bar, an overflow ends it with ``>``."""
    if not blocks:
        return ""
    count = min(round(_BAR * share), _BAR)
    tail = ">" if share > 1.0 else ""
    return (
        "\N{BLACK VERTICAL RECTANGLE}" * count
        + "\N{WHITE VERTICAL RECTANGLE}" * (_BAR - count)
        + tail
    )


def plain(value: Any) -> Any:
    """`value` as JSON holds it: what is not known says why, and no number is infinite."""
    from collections.abc import Mapping
    from dataclasses import fields, is_dataclass

    if isinstance(value, Unavailable):
        return {"unavailable": value.reason, "remedy": value.remedy}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def unit_of_joules(joules: float) -> tuple[str, float]:
    """The unit in which an energy reads well, and its joules."""
    found = ((unit, factor) for least, unit, factor in _ENERGIES if joules >= least)
    return next(found, ("J", 1.0))


def _range(found: Interval, factor: float, unit: str) -> str:
    low, middle, high = (rounded(item / factor) for item in (found.low, found.middle, found.high))
    between = "" if low == high else f" ({low} to {high})"
    return " ".join(filter(None, (middle, unit))) + between
