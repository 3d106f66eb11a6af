"""What is left of nodes or bandwidth over time, as steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.fluid import Segment

_NOTHING = 1e-12


class Timeline:
    """How much of a resource is left from each moment on.

    Attributes:
        times: When a step begins; the first is 0.
        left: What is left from there to the next step; the last step has no end.
    """

    def __init__(self, capacity: float) -> None:
        self.times = [0.0]
        self.left = [float(capacity)]
        self._rounding = _NOTHING * capacity
        # For each amount that was asked for, the time before which less is left everywhere.
        self._full_until: dict[float, float] = {}

    def at(self, time: float) -> int:
        """The step that a time is in."""
        return bisect_right(self.times, time) - 1

    def take(self, start: float, end: float, amount: float) -> None:
        """Use `amount` from `start` to `end`."""
        if end <= start:
            return
        first = self._split(start)
        last = self._split(end)
        left = self.left
        for step in range(first, last):
            rest = left[step] - amount
            left[step] = rest if rest > self._rounding else 0.0
        self._join(last)
        self._join(first)

    def first_fit(self, amount: float, start: float, seconds: float) -> float:
        """The first time, from `start` on, with `amount` left for so many seconds."""
        times, left = self.times, self.left
        begun = start
        start = max(start, self._full_until.get(amount, 0.0))
        step = bisect_right(times, start) - 1
        count = len(times)
        untouched = begun <= self._full_until.get(amount, 0.0)
        while True:
            while left[step] < amount:
                step += 1
                start = times[step]
            if untouched:
                # Nothing is given back, so no later search need look at what was full.
                self._full_until[amount] = start
                untouched = False
            end = start + seconds
            step += 1
            while step < count and times[step] < end and left[step] >= amount:
                step += 1
            if step == count or times[step] >= end:
                return start

    def _split(self, time: float) -> int:
        """Make a step begin at `time`; returns its number."""
        step = bisect_right(self.times, time) - 1
        if self.times[step] == time:
            return step
        self.times.insert(step + 1, time)
        self.left.insert(step + 1, self.left[step])
        return step + 1

    def _join(self, step: int) -> None:
        """Make one step of this and the one before if they are alike."""
        if step and self.left[step] == self.left[step - 1]:
            del self.times[step]
            del self.left[step]


def pour(timelines: Sequence[Timeline], cap: float, size: float, start: float) -> list[Segment]:
    """How a flow uses what is left: from `start` on, as fast as its resources and its cap allow.

    Args:
        timelines: What is left of each resource that it goes through.
        cap: Most bytes per second; finite.
        size: Bytes; more than 0.
        start: Seconds.

    Returns:
        Its rates over time; the last segment ends when all bytes have moved.
    """
    steps = [bisect_right(timeline.times, start) - 1 for timeline in timelines]
    found: list[Segment] = []
    now, rest = start, size
    while True:
        rate, until, blocked = cap, math.inf, 0.0
        for number, timeline in enumerate(timelines):
            step = steps[number]
            left = timeline.left[step]
            end = timeline.times[step + 1] if step + 1 < len(timeline.times) else math.inf
            rate = min(rate, left)
            until = min(until, end)
            if not left:
                blocked = max(blocked, end)
        if rate > 0:
            end = now + rest / rate
            done = end <= until
            end = end if done else until
            if found and found[-1][1] == now and found[-1][2] == rate:
                found[-1] = (found[-1][0], end, rate)
            else:
                found.append((now, end, rate))
            if done:
                return found
            rest -= rate * (until - now)
            if rest <= _NOTHING * size:
                return found
            now = until
            for number, timeline in enumerate(timelines):
                step = steps[number]
                if step + 1 < len(timeline.times) and timeline.times[step + 1] <= now:
                    steps[number] += 1
        else:
            now = blocked
            steps = [bisect_right(timeline.times, now) - 1 for timeline in timelines]
