"""Values as Slurm writes them: JSON, which differs between its versions, and lengths of time.

Up to 22.05 a number is a number, with 0 or 2**32 - 2 for "not set"; from 23.02 it is a table
``{"set": true, "infinite": false, "number": 60}``. A state is a text, or from 23.11 a list of one
state and its flags.

Lengths of time follow the manual pages of sbatch (``--time``), squeue (``%l``, ``%L``, ``%M``),
sinfo (``%l``) and sacct (``Timelimit``, ``Elapsed``).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from outlast.errors import ClusterError

_NO_VALUE = 2**32 - 2
_INFINITE = 2**32 - 1
_NO_VALUE_64 = 2**64 - 2


def number(value: Any) -> float | None:
    """The number, infinity, or None where it is not set."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return number(value.get("number")) if value.get("set", True) else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            return number(float(value))
        except ValueError:
            return None
    if value in (_NO_VALUE, _NO_VALUE_64):
        return None
    return math.inf if value == _INFINITE else float(value)


def whole(value: Any, default: int = 0) -> int:
    """The number as an integer; `default` where it is not set or has no end."""
    found = number(value)
    return default if found is None or math.isinf(found) else int(found)


def moment(value: Any) -> float | None:
    """Seconds since the epoch; None for 0, which Slurm writes for "not known"."""
    found = number(value)
    return None if not found or math.isinf(found) else found


def words(value: Any) -> list[str]:
    """A text or a list of texts as a list of upper-case words."""
    items = value if isinstance(value, list) else [value]
    return [str(item).upper() for item in items if item not in (None, "")]


def document(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`, or None where there is none.

    Some versions print a warning line before it.
    """
    begin = text.find("{")
    if begin < 0:
        return None
    try:
        found = json.loads(text[begin:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


FORMS = "MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or a number with s, min, h or d"
"""What `limit_seconds` reads, in words."""
_UNLIMITED = frozenset({"unlimited", "infinite", "infinity", "-1"})
_UNKNOWN = frozenset(
    {"", "invalid", "not_set", "n/a", "none", "(null)", "unknown", "partition_limit"}
)
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)", re.IGNORECASE)
_UNIT_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PARTS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(\.\d+)?")


def limit_seconds(text: str) -> float:
    """Seconds of a time limit as a person or ``--time`` says it; a bare number is minutes.

    Also reads a number with a unit (``90min``, ``8h``, ``1.5d``), which Slurm does not.

    Returns:
        Seconds; infinity for UNLIMITED.

    Raises:
        ClusterError: The text is no length of time.
    """
    found = _read(text)
    if found is None:
        raise ClusterError(f'"{text}" is no length of time: write it as {FORMS}')
    return found


def shown_seconds(text: str) -> float | None:
    """Seconds of a length of time as squeue, sinfo, scontrol and sacct print it.

    Returns:
        Seconds, infinity for UNLIMITED; None where Slurm says that there is none (``INVALID``,
        ``NOT_SET``, ``n/a``, ``Partition_Limit``, nothing) and where it is no length of time.
    """
    return _read(text)


def limit_text(seconds: float) -> str:
    """`seconds` for ``--time``, rounded up to the whole minutes that Slurm counts.

    Raises:
        ClusterError: Not above zero.
    """
    if not seconds > 0.0:
        raise ClusterError(f"a time limit of {seconds:g} s is not possible: give more than 0 s")
    if math.isinf(seconds):
        return "UNLIMITED"
    return duration_text(math.ceil(seconds / 60.0) * 60.0)


def duration_text(seconds: float) -> str:
    """`seconds` as ``D-HH:MM:SS`` or ``HH:MM:SS``, rounded to whole seconds."""
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock


def _read(text: str) -> float | None:
    plain = text.strip().lower()
    if plain in _UNLIMITED:
        return math.inf
    if plain in _UNKNOWN:
        return None
    if (unit := _WITH_UNIT.fullmatch(plain)) is not None:
        return float(unit[1]) * _UNIT_SECONDS[unit[2]]
    if (parts := _PARTS.fullmatch(plain)) is None:
        return None
    days, first, second, third, fraction = parts.groups()
    numbers = [int(item) for item in (first, second, third) if item is not None]
    if days is not None:
        # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        # MM and MM:SS
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    return total + float(fraction or 0.0)
