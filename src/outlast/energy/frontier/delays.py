"""What changes of clock cost: each delays the operation that comes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.frontier.hull import slopes
from outlast.energy.profile import effective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.frontier.rounding import Choices
    from outlast.energy.profile import Curve, Point
    from outlast.energy.schedule.dag import Schedule


class SwitchDelays:
    """What changes of clock add to operations.

    Args:
        schedule: The step.
        switch_seconds: Of one change.
    """

    def __init__(self, schedule: Schedule, switch_seconds: float) -> None:
        self._schedule, self.switch_seconds = schedule, switch_seconds

    def before(self, clocked: Sequence[bool]) -> list[int]:
        """(operations,) the operation that sets the clock which each finds; itself if none does.

        Args:
            clocked: (operations,) whether a clock changes its time.
        """
        on_device: dict[int, list[int]] = {}
        for index in self._schedule.order:
            if clocked[index]:
                on_device.setdefault(self._schedule.operations[index].device, []).append(index)
        found = list(range(len(self._schedule.operations)))
        for indices in on_device.values():
            # The first operation of a step finds the clock of the last one of the step before.
            for last, index in zip([indices[-1], *indices], indices, strict=False):
                found[index] = last
        return found

    def changes(self, points: Sequence[Point]) -> list[bool]:
        """(operations,) whether the clock changes before each."""
        before = self.before([bool(point.clock_mhz) for point in points])
        return [
            points[last].clock_mhz != point.clock_mhz
            for last, point in zip(before, points, strict=True)
        ]

    def seconds(self, points: Sequence[Point]) -> list[float]:
        """(operations,) durations with the changes before them."""
        return [
            point.seconds + self.switch_seconds * change
            for point, change in zip(points, self.changes(points), strict=True)
        ]


def merged(
    schedule: Schedule,
    curves: Sequence[Curve],
    choices: Choices,
    relaxed: Relaxed,
    switch_seconds: float,
) -> list[Point]:
    """(operations,) points where clocks change only when that pays at the programme's prices.

    The optimum of the linear programme prices each operation's time: where its duration lies on a
    segment of the hull, one more second is worth minus that segment's slope in watts. On each
    device the clocks with the least energy plus priced time, changes included, are a shortest
    path over (operation, clock), found by dynamic programming (Viterbi 1967). It heeds prices, not
    the deadline, which the caller must check.
    """
    points = [curve.points[-1] for curve in curves]
    prices = _prices(choices, relaxed)
    sequences: dict[int, list[int]] = {}
    for index in schedule.order:
        if any(point.clock_mhz for point in curves[index].points):
            sequences.setdefault(schedule.operations[index].device, []).append(index)
    for indices in sequences.values():
        clocks = sorted({point.clock_mhz for index in indices for point in curves[index].points})
        place = {clock: i for i, clock in enumerate(clocks)}
        total = np.zeros(len(clocks))
        came_from = []
        for index in indices:
            price = prices[index]
            own = np.full(len(clocks), np.inf)
            for point in curves[index].points:
                joules = effective(point, choices.blocking_watts)
                own[place[point.clock_mhz]] = joules + price * point.seconds
            best = int(np.argmin(total))
            changed = total[best] + price * switch_seconds
            came_from.append(np.where(total <= changed, np.arange(len(clocks)), best))
            total = np.minimum(total, changed) + own
        at = int(np.argmin(total))
        for index, before in zip(reversed(indices), reversed(came_from), strict=True):
            points[index] = curves[index].at(clocks[at])
            at = int(before[at])
    return points


def _prices(choices: Choices, relaxed: Relaxed) -> list[float]:
    """(operations,) watts that one more second of each is worth."""
    found = []
    for hull, seconds in zip(choices.hulls, relaxed.seconds.tolist(), strict=True):
        falls = [-slope for slope in slopes(hull, choices.blocking_watts)]
        if not falls:
            found.append(0.0)
            continue
        # Beyond the ends the price is only known to be higher or lower: twice and half are guesses.
        prices = [2 * falls[0], *falls, falls[-1] / 2]
        inner = [corner.seconds for corner in hull]
        slack = 1e-9 * inner[-1]
        left = int(np.searchsorted(inner, seconds - slack, side="right"))
        right = int(np.searchsorted(inner, seconds + slack, side="right"))
        found.append((prices[min(left, right)] + prices[max(left, right)]) / 2)
    return found
