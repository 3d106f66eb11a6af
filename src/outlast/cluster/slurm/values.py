"""Values as Slurm writes them in JSON, which differs between its versions.

Up to 22.05 a number is a number, with 0 or 2**32 - 2 for "not set"; from 23.02 it is a table
``{"set": true, "infinite": false, "number": 60}``. A state is a text, or from 23.11 a list of one
state and its flags.
"""

from __future__ import annotations

import json
import math
from typing import Any

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
