"""Durations as the policies' sentences show them."""

from __future__ import annotations

import math


def hours(seconds: float) -> str:
    """``20 min``, ``7.5 h``, ``3.2 d``; ``no limit`` for infinity."""
    if math.isinf(seconds):
        return "no limit"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    if seconds < 48.5 * 3600.0:
        return f"{seconds / 3600.0:.3g} h"
    return f"{seconds / 86400.0:.3g} d"
