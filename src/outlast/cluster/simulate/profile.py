"""Free nodes over time as a step function, with spans taken out of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from outlast.cluster.simulate.book import NEVER


class Profile:
    """`free[k]` nodes from `times[k]` up to `times[k + 1]`, the last for ever.

    Attributes:
        times: Ascending seconds, the first is the present.
        free: Nodes.
    """

    __slots__ = ("_known", "free", "times")

    def __init__(self, now: float, free: int) -> None:
        self.times = [now]
        self.free = [free]
        self._known: dict[int, tuple[float, float]] = {}

    def free_from(self, time: float, nodes: int) -> None:
        """More nodes from a time on, not before the last step; not after `earliest`."""
        if time <= self.times[-1]:
            self.free[-1] += nodes
        else:
            self.times.append(time)
            self.free.append(self.free[-1] + nodes)

    def advance(self, now: float) -> None:
        """Forget what is past."""
        place = bisect_right(self.times, now) - 1
        del self.times[:place]
        del self.free[:place]
        self.times[0] = now

    def earliest(self, nodes: int, seconds: float) -> float:
        """First moment from which `nodes` are free for `seconds`; inf where there is none."""
        times, free, known = self.times, self.free, self._known
        count = len(times)
        place = 0
        # Spans are only taken out: no job starts before one of its size that was no longer.
        if nodes in known and known[nodes][0] <= seconds:
            place = bisect_left(times, known[nodes][1])
        while True:
            while place < count and free[place] < nodes:
                place += 1
            if place == count:
                return NEVER
            start = times[place]
            end = start + seconds
            place += 1
            while place < count and times[place] < end:
                if free[place] < nodes:
                    break
                place += 1
            else:
                known[nodes] = (seconds, start)
                return start
            place += 1

    def reserve(self, start: float, end: float, nodes: int) -> None:
        """Take nodes out of a span; what lies before the present is left out."""
        times, free = self.times, self.free
        if end <= times[0]:
            return
        first = self._step_at(max(start, times[0]))
        last = len(times) if end == NEVER else self._step_at(end)
        for place in range(first, last):
            free[place] -= nodes

    def hole_seconds(self, nodes: int) -> float:
        """How long from now at least `nodes` are free."""
        for time, free in zip(self.times, self.free, strict=True):
            if free < nodes:
                return time - self.times[0]
        return NEVER

    def _step_at(self, time: float) -> int:
        """Index of a step that begins at a time, made if need be."""
        times = self.times
        place = bisect_left(times, time)
        if place == len(times) or times[place] != time:
            times.insert(place, time)
            self.free.insert(place, self.free[place - 1])
        return place
