"""What happens without a plan: whatever is ready starts, and transfers share max-min fairly."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from outlast.cluster.tasks.fluid import Fluid
from outlast.cluster.tasks.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.graph import Graph


def run_greedily(graph: Graph, priorities: Sequence[float] | None = None) -> Schedule:
    """Let time pass: at each event, start what is ready and fits, and share the bandwidth anew.

    Args:
        graph: What is to be done.
        priorities: By activity; larger ones start first. None: the order of the graph.

    Returns:
        A schedule in which rates are those of a max-min fair file system.
    """
    return _Run(graph, priorities).run()


class _Run:
    def __init__(self, graph: Graph, priorities: Sequence[float] | None) -> None:
        count = len(graph.activities)
        self.graph = graph
        self.key = (
            [float(n) for n in range(count)] if priorities is None else [-p for p in priorities]
        )
        self.free = list(graph.machine.nodes.values())
        self.fluid = Fluid(list(graph.machine.bytes_per_s.values()))
        self.missing = [len(name) for name in graph.before]
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.work_ends, self.chosen = [0.0] * count, [0] * count
        # Activities of the same demand wait in one heap: if the first does not fit, none does.
        self.waiting: dict[tuple[tuple[int, int], ...], list[tuple[float, int]]] = {}
        # (seconds, activity, whether it waits for its earliest time).
        self.clock: list[tuple[float, int, bool]] = []
        self.now = 0.0

    def run(self) -> Schedule:
        for number, count in enumerate(self.missing):
            if not count:
                self._released(number)
        self._start_what_fits()
        while True:
            next_flow = self.fluid.next_end()
            next_clock = self.clock[0][0] if self.clock else math.inf
            now = min(next_flow, next_clock)
            if math.isinf(now):
                break
            self.now = now
            for flow in self.fluid.advance(now):
                self._ended(flow)
            while self.clock and self.clock[0][0] <= now:
                _, number, earliest = heapq.heappop(self.clock)
                if earliest:
                    self._queue(number)
                else:
                    self._worked(number)
            self._start_what_fits()
        return Schedule(
            self.graph,
            self.starts,
            self.work_ends,
            self.ends,
            self.chosen,
            "fair",
            self._rates,
            [0] * len(self.starts),
        )

    def _rates(self, number: int) -> tuple[tuple[float, float, float], ...]:
        return self.fluid.profile(number) if self.graph.activities[number].size_bytes else ()

    def _released(self, number: int) -> None:
        """All that was before an activity has ended."""
        earliest = self.graph.activities[number].earliest_seconds
        if earliest > self.now:
            heapq.heappush(self.clock, (earliest, number, True))
        else:
            self._queue(number)

    def _queue(self, number: int) -> None:
        options = self.graph.activities[number].options
        demand = tuple((option.group, option.nodes) for option in options)
        heapq.heappush(self.waiting.setdefault(demand, []), (self.key[number], number))

    def _start_what_fits(self) -> None:
        # An activity without work or bytes ends at once and may release others.
        while self._start_round():
            pass
        self.fluid.share()

    def _start_round(self) -> bool:
        heads = sorted((heap[0], demand) for demand, heap in self.waiting.items() if heap)
        ended = False
        while heads:
            demand = heads[0][1]
            fitting = [
                option
                for option, (group, nodes) in enumerate(demand)
                if not nodes or self.free[group] >= nodes
            ]
            heap = self.waiting[demand]
            if not fitting:
                heapq.heappop(heads)
                continue
            # The first may be another than when the round began: what ends at once releases more.
            ended |= self._start(heapq.heappop(heap)[1], fitting)
            if heap:
                heapq.heapreplace(heads, (heap[0], demand))
            else:
                heapq.heappop(heads)
        return ended

    def _start(self, number: int, fitting: list[int]) -> bool:
        """Start an activity; returns whether it has ended at once."""
        options = self.graph.activities[number].options
        chosen = min(fitting, key=lambda number: options[number].seconds)
        option = options[chosen]
        self.starts[number], self.chosen[number] = self.now, chosen
        self.work_ends[number] = self.now + option.seconds
        if option.nodes:
            self.free[option.group] -= option.nodes
        if option.seconds:
            heapq.heappush(self.clock, (self.work_ends[number], number, False))
            return False
        return self._worked(number)

    def _worked(self, number: int) -> bool:
        """The work of an activity is done; returns whether it has ended."""
        activity = self.graph.activities[number]
        if activity.size_bytes:
            self.fluid.add(number, activity.via, activity.cap_bytes_per_s, activity.size_bytes)
            return False
        self._ended(number)
        return True

    def _ended(self, number: int) -> None:
        self.ends[number] = self.now
        option = self.graph.activities[number].options[self.chosen[number]]
        if option.nodes:
            self.free[option.group] += option.nodes
        for target in self.graph.after[number]:
            self.missing[target] -= 1
            if not self.missing[target]:
                self._released(target)
