"""Numbers, times and foreign text as words that a person reads."""

from __future__ import annotations

import html
import math
import textwrap
from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def escape(text: object) -> str:
    """`text` for HTML content or a quoted attribute; control characters become visible."""
    plain = str(text).replace("\r\n", "\n")
    return html.escape(
        "".join(
            character
            if character in "\n\t" or ord(character) >= 32
            else chr(0x2400 + ord(character))
            for character in plain
        )
    )


def count(value: int) -> str:
    """An integer with thousands separators, or rounded with its power from ten million on."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e7, "million")):
        if abs(value) >= size:
            scale = min(size, 1e6) if name == "million" else size
            return f"{number(value / scale)} {name}"
    return f"{value:,}"


def number(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits, without an exponent where that reads well."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def duration(seconds: float) -> str:
    """A span of time in its two largest units, e.g. ``2 h 05 min``; below a minute in seconds."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms"
    if abs(seconds) < _MINUTE - 0.05:
        return f"{seconds:.1f} s"
    if abs(seconds) < _HOUR - 0.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if abs(seconds) < _DAY - 30:
        hours, minutes = divmod(round(seconds / _MINUTE), 60)
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / _HOUR), 24)
    return f"{days} d {hours:02d} h"


def data_size(size_bytes: float) -> str:
    """A size in bytes with a decimal prefix."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def utc(time_seconds: float) -> str:
    """Seconds since the epoch as date and time of day (UTC)."""
    return datetime.fromtimestamp(time_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def plotly_time(time_seconds: float) -> str:
    """Seconds since the epoch as plotly's date text (UTC, milliseconds)."""
    return datetime.fromtimestamp(time_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def clock_unit(longest_seconds: float) -> tuple[str, float]:
    """The unit in which an axis up to `longest_seconds` reads well, and its length in seconds."""
    if longest_seconds < 10 * _MINUTE:
        return "seconds", 1.0
    if longest_seconds < 3 * _HOUR:
        return "minutes", _MINUTE
    return ("hours", _HOUR) if longest_seconds < 4 * _DAY else ("days", _DAY)


def plural(number_of: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``2 processes``."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number_of:,} {noun}{'' if number_of == 1 else ending}"


def hover(text: str, width: int = 80) -> str:
    """`text` escaped and wrapped for a plotly hover label, which breaks no lines by itself."""
    lines = textwrap.wrap(text, width, max_lines=6, placeholder=" …")
    return "<br>".join(escape(line) for line in lines)
