"""Lower convex hulls of time-energy points."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from outlast.energy.profile import effective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.profile import Point


def lower_hull(points: Sequence[Point], blocking_watts: float) -> tuple[Point, ...]:
    """The corners of the largest convex function of time that is nowhere above the points.

    Args:
        points: As `Curve.pareto` gives them: fastest first, effective energy falling.
        blocking_watts: What a waiting device draws.

    Returns:
        Corners from the fastest to the point of least effective energy.
    """
    corners: list[Point] = []
    for point in points:
        while len(corners) >= 2 and not _turns_up((*corners[-2:], point), blocking_watts):
            corners.pop()
        corners.append(point)
    return tuple(corners)


def slopes(corners: Sequence[Point], blocking_watts: float) -> list[float]:
    """(corners - 1,) effective watts of each segment: negative and rising."""
    return [
        (effective(b, blocking_watts) - effective(a, blocking_watts)) / (b.seconds - a.seconds)
        for a, b in itertools.pairwise(corners)
    ]


def _turns_up(three: Sequence[Point], blocking_watts: float) -> bool:
    before, after = slopes(three, blocking_watts)
    return after > before
