"""How transfers share bandwidth: max-min fair, as a fluid, exactly.

A flow goes through several resources at one rate, and may have a cap. Rates are max-min fair: none
can grow without taking from a flow that has no more (Bertsekas and Gallager, Data Networks,
section 6.5.2; *progressive filling*). Flows of a better level are served before all others, as a
copier with bandwidth caps can do it and a file system by itself cannot.

`fair_rates` gives the rates of one moment. `Fluid` lets time pass and knows when a flow ends.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Segment = tuple[float, float, float]
"""Seconds from, seconds to, bytes per second."""

_NOTHING = 1e-12
"""Share of a capacity below which what is left is rounding."""

_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Flow:
    """A transfer at one moment.

    Attributes:
        via: Names of the resources that it goes through.
        cap_bytes_per_s: Most that it takes.
        level: Flows of a smaller level are served first; equal ones share.
    """

    via: tuple[str, ...]
    cap_bytes_per_s: float = math.inf
    level: float = 0.0


def fair_rates(flows: Sequence[Flow], bytes_per_s: Mapping[str, float]) -> list[float]:
    """The max-min fair rates of flows, level by level.

    Args:
        flows: Each goes through a resource or has a cap.
        bytes_per_s: Capacity by resource.

    Returns:
        Bytes per second of each flow.

    Raises:
        ClusterError: For a flow that nothing limits, or a resource that is not known.
    """
    names = {name: number for number, name in enumerate(bytes_per_s)}
    for flow in flows:
        for name in flow.via:
            if name not in names:
                raise ClusterError(f'a flow goes through "{name}", which has no bandwidth given')
        if not flow.via and math.isinf(flow.cap_bytes_per_s):
            raise ClusterError("a flow has neither a resource nor a cap: nothing limits its rate")
    left = list(bytes_per_s.values())
    rates = [0.0] * len(flows)
    for level in sorted({flow.level for flow in flows}):
        chosen = [number for number, flow in enumerate(flows) if flow.level == level]
        vias = [tuple({names[name] for name in flows[number].via}) for number in chosen]
        caps = [flows[number].cap_bytes_per_s for number in chosen]
        found = filled(vias, caps, [1] * len(chosen), left)
        for number, via, rate in zip(chosen, vias, found, strict=True):
            rates[number] = rate
            for item in via:
                left[item] = max(left[item] - rate, 0.0)
    return rates


def filled(
    vias: Sequence[tuple[int, ...]],
    caps: Sequence[float],
    counts: Sequence[int],
    capacities: Sequence[float],
) -> list[float]:
    """Progressive filling: all rates grow alike until a cap or a full resource stops some.

    Args:
        vias: Resources of each class of flows.
        caps: Most that one flow of each class takes.
        counts: Flows in each class; a class without flows gets rate 0.
        capacities: Of the resources.

    Returns:
        The rate of one flow of each class.
    """
    rates = [0.0] * len(vias)
    left = list(capacities)
    users = [0] * len(left)
    through: list[list[int]] = [[] for _ in left]
    by_cap = sorted((number for number, count in enumerate(counts) if count), key=caps.__getitem__)
    for number in by_cap:
        for item in vias[number]:
            users[item] += counts[number]
            through[item].append(number)
    growing = set(by_cap)
    next_cap = 0
    while growing:
        share, full = math.inf, -1
        for item, count in enumerate(users):
            if count and left[item] < share * count:
                share, full = left[item] / count, item
        while by_cap[next_cap] not in growing:
            next_cap += 1
        if caps[by_cap[next_cap]] <= share:
            share, stopped = caps[by_cap[next_cap]], [by_cap[next_cap]]
        else:
            stopped = [number for number in through[full] if number in growing]
        for number in stopped:
            growing.discard(number)
            rates[number] = share
            for item in vias[number]:
                users[item] -= counts[number]
                rest = left[item] - share * counts[number]
                left[item] = rest if rest > _NOTHING * capacities[item] else 0.0
    return rates


class Fluid:
    """Flows that share resources max-min fairly while time passes.

    Flows with the same resources and cap always have the same rate; such a class counts how much
    each of its flows could have moved since the beginning, so that an event costs as much as there
    are classes, however many flows there are.

    Args:
        capacities: Bytes per second by resource number.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now_seconds = 0.0
        self._capacities = list(capacities)
        self._classes: dict[tuple[tuple[int, ...], float], int] = {}
        self._vias: list[tuple[int, ...]] = []
        self._caps: list[float] = []
        self._counts: list[int] = []
        self._served: list[float] = []
        # Per class, a heap of (served when the flow will be done, flow).
        self._ends: list[list[tuple[float, int]]] = []
        self._rates: list[float] = []
        self._histories: list[tuple[list[float], list[float]]] = []
        self._active: set[int] = set()
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        self._lives: dict[int, tuple[int, float, float]] = {}

    def add(self, flow: int, via: tuple[int, ...], cap_bytes_per_s: float, size: float) -> None:
        """A flow of `size` bytes begins now; `flow` is its number, which comes back from `advance`.

        Call `share` after the last one that begins now.
        """
        key = (via, cap_bytes_per_s)
        number = self._classes.get(key)
        if number is None:
            number = self._classes[key] = len(self._vias)
            self._vias.append(via)
            self._caps.append(cap_bytes_per_s)
            self._counts.append(0)
            self._served.append(0.0)
            self._ends.append([])
            self._rates.append(0.0)
            self._histories.append(([], []))
        if not self._counts[number]:
            self._served[number] = 0.0
            self._active.add(number)
        heapq.heappush(self._ends[number], (self._served[number] + size, flow))
        self._counts[number] += 1
        self._lives[flow] = (number, self.now_seconds, math.inf)

    def share(self) -> None:
        """Share the bandwidth anew among the flows that are there now."""
        active = sorted(self._active)
        counts = tuple(self._counts[number] for number in active)
        key = (tuple(active), counts)
        rates = self._known.get(key)
        if rates is None:
            vias = [self._vias[number] for number in active]
            caps = [self._caps[number] for number in active]
            rates = filled(vias, caps, counts, self._capacities)
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            self._known[key] = rates
        for number, rate in zip(active, rates, strict=True):
            if rate != self._rates[number]:
                self._rates[number] = rate
                times, values = self._histories[number]
                if times and times[-1] == self.now_seconds:
                    values[-1] = rate
                else:
                    times.append(self.now_seconds)
                    values.append(rate)

    def next_end(self) -> float:
        """When the next flow ends if none begins before; infinite without flows."""
        soonest = math.inf
        for number in self._active:
            rate = self._rates[number]
            if rate:
                left = (self._ends[number][0][0] - self._served[number]) / rate
                soonest = min(soonest, left)
        return self.now_seconds + max(soonest, 0.0)

    def advance(self, now_seconds: float) -> list[int]:
        """Let time pass, at most until `next_end`; returns the flows that have ended.

        Call `share` when flows have ended or begun.
        """
        elapsed = now_seconds - self.now_seconds
        self.now_seconds = now_seconds
        done: list[int] = []
        for number in sorted(self._active):
            ends, rate = self._ends[number], self._rates[number]
            self._served[number] += rate * elapsed
            # What rounding leaves of a flow is done too, or time would stand still.
            reached = self._served[number] * (1 + _NOTHING) + rate * now_seconds * 1e-15
            while ends and ends[0][0] <= reached:
                flow = heapq.heappop(ends)[1]
                self._counts[number] -= 1
                self._lives[flow] = (number, self._lives[flow][1], now_seconds)
                done.append(flow)
            if not ends:
                self._active.discard(number)
                # Whoever begins next finds no rate left over from these.
                self._end_history(number)
        return done

    def _end_history(self, number: int) -> None:
        self._rates[number] = 0.0
        times, values = self._histories[number]
        if times and times[-1] < self.now_seconds:
            times.append(self.now_seconds)
            values.append(0.0)

    def profile(self, flow: int) -> tuple[Segment, ...]:
        """How fast a flow was when, from its beginning to its end."""
        number, start, end = self._lives[flow]
        times, values = self._histories[number]
        found: list[Segment] = []
        at = bisect_right(times, start) - 1
        while at < len(times) and times[at] < end:
            until = times[at + 1] if at + 1 < len(times) else math.inf
            if values[at] and min(until, end) > max(times[at], start):
                found.append((max(times[at], start), min(until, end), values[at]))
            at += 1
        return tuple(found)
