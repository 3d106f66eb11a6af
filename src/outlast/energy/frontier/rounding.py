"""From durations that may lie between measured ones to clocks that exist."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.profile import Point
    from outlast.energy.schedule.dag import Schedule


@dataclass(frozen=True, eq=False)
class Choices:
    """What every operation may run at.

    Attributes:
        points: (operations,) Pareto points, fastest first.
        hulls: (operations,) those of them that are corners of the lower hull.
        blocking_watts: Power of a waiting device.
    """

    points: Sequence[Sequence[Point]]
    hulls: Sequence[Sequence[Point]]
    blocking_watts: float


def rounded(
    schedule: Schedule, choices: Choices, relaxed: Relaxed, deadline_seconds: float
) -> list[Point]:
    """Measured points of all operations with which the step meets the deadline.

    Each operation gets the slowest point that is not slower than the relaxed duration.
    """
    found = []
    for points, seconds in zip(choices.points, relaxed.seconds.tolist(), strict=True):
        place = bisect_right([point.seconds for point in points], seconds * (1 + 1e-9))
        found.append(points[max(place - 1, 0)])
    return found
