"""Lengths of time as a person and as Slurm writes them.

They follow the manual pages of sbatch (``--time``), squeue (``%l``, ``%L``, ``%M``), sinfo (``%l``)
and sacct (``Timelimit``, ``Elapsed``).
"""

from __future__ import annotations

import math
import re

from outlast.errors import ClusterError

FORMS = "MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or a number with s, min, h or d"


"""What `limit_seconds` reads, in words."""


_UNLIMITED = frozenset({"unlimited", "infinite", "infinity", "-1"})


_UNKNOWN = frozenset(
    {"", "invalid", "not_set", "n/a", "none", "(null)", "unknown", "partition_limit"}
)


_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)", re.IGNORECASE)


_UNIT_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


_PARTS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(\.\d+)?")


def limit_seconds(text: str, name: str = "") -> float:
    """Seconds of a time limit as a person or ``--time`` says it; a bare number is minutes.

    Also reads a number with a unit (``90min``, ``8h``, ``1.5d``), which Slurm does not.

    Args:
        text: What was given.
        name: Of the option or setting, for the error.

    Returns:
        Seconds; infinity for UNLIMITED.

    Raises:
        ClusterError: The text is no length of time.
    """
    found = _read(text)
    if found is None:
        where = f"{name} = " if name else ""
        raise ClusterError(f'{where}"{text}" is no length of time: write it as {FORMS}')
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
