"""Giving the slack that a plan leaves to the operations that save most with it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.frontier.table import Curves, Places
    from outlast.energy.schedule.dag import Schedule


class Slack:
    """A feasible plan that gets slower, one operation at a time.

    Args:
        schedule: The step.
        curves: What operations may run at.
        places: The plan to begin with; it meets the deadline.
        deadline_seconds: Of the step.
    """

    def __init__(
        self, schedule: Schedule, curves: Curves, places: Sequence[int], deadline_seconds: float
    ) -> None:
        self._before, self._after = schedule.predecessors, schedule.successors
        self._rank = [0] * len(places)
        for rank, index in enumerate(schedule.order):
            self._rank[index] = rank
        self._seconds = [own.tolist() for own in curves.seconds]
        self._joules = [own.tolist() for own in curves.joules]
        self._durations = curves.durations(places)
        self._starts = schedule.earliest_starts(self._durations)
        self._ends = schedule.latest_ends(self._durations, deadline_seconds)
        # Sums in another order may differ by a few units in the last place.
        self._tolerance = 1e-12 * deadline_seconds
        self.places: Places = list(places)

    def fill(self, allowed: Sequence[Sequence[int]]) -> None:
        """Slow operations down until none fits a slower place, most watts saved first.

        Args:
            allowed: (operations,) rising places that may be chosen.
        """
        heap = []
        for index, own in enumerate(allowed):
            step = self._best(index, own)
            if step:
                heap.append((-step[0], index))
        heapq.heapify(heap)
        while heap:
            watts, index = heapq.heappop(heap)
            step = self._best(index, allowed[index])
            if not step:
                continue
            # Others have taken slack since: it waits for its turn again.
            if -step[0] <= watts + 1e-12:
                self._take(index, step[1])
                step = self._best(index, allowed[index])
            if step:
                heapq.heappush(heap, (-step[0], index))

    def _best(self, index: int, allowed: Sequence[int]) -> tuple[float, int] | None:
        seconds, joules, here = self._seconds[index], self._joules[index], self.places[index]
        room = self._ends[index] - self._starts[index] + self._tolerance
        best = None
        for place in allowed:
            if place <= here:
                continue
            if seconds[place] > room:
                break
            watts = (joules[here] - joules[place]) / (seconds[place] - seconds[here])
            if best is None or watts > best[0]:
                best = (watts, place)
        return best

    def _take(self, index: int, place: int) -> None:
        self.places[index] = place
        self._durations[index] = self._seconds[index][place]
        durations, starts, ends = self._durations, self._starts, self._ends
        later = [(self._rank[other], other) for other in self._after[index]]
        heapq.heapify(later)
        while later:
            _, other = heapq.heappop(later)
            start = max(starts[item] + durations[item] for item in self._before[other])
            if start > starts[other]:
                starts[other] = start
                for item in self._after[other]:
                    heapq.heappush(later, (self._rank[item], item))
        earlier = [(-self._rank[other], other) for other in self._before[index]]
        heapq.heapify(earlier)
        while earlier:
            _, other = heapq.heappop(earlier)
            end = min(ends[item] - durations[item] for item in self._after[other])
            if end < ends[other]:
                ends[other] = end
                for item in self._before[other]:
                    heapq.heappush(earlier, (-self._rank[item], item))
