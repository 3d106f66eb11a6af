"""Beam search for a plan, guided by the prices of the linear programme.

Weak duality splits what a plan loses against the bound into parts that are never negative. With
f_ab the price of waiting on edge (a, b), and p_i the price of operation i's time (the sums of f
before it and after it are p_i, but for the first and last operations),

    joules - bound = sum_i [e_i(d_i) + p_i d_i - min_d (e_i(d) + p_i d)] + sum_ab f_ab wait_ab,

where the last operations' wait until the deadline counts too. So operations can be placed one by
one in order of time, and the plans so far be compared by what they have lost. All combinations of
neighbouring operations' clocks compete, across devices, which a search that changes one operation
at a time does not reach: where a device's micro-batch must fit between those of its neighbour,
no single change fits.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.frontier.table import Curves, Places
    from outlast.energy.schedule.dag import Schedule

    Array = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.intp]


# Ends that are kept at most, over all plans: where hundreds wait at once, fewer plans are kept.
_KEPT_ENDS = 40_000


@dataclass(frozen=True)
class Leaning:
    """What a beam search prefers. Results vary much with it, so several are tried.

    Attributes:
        pull: How strongly plans near the relaxed plan's times are preferred. Without it, plans
            collect debts of time that must be paid later; too much of it forbids variety.
        grain: Plans whose times differ less are one plan; as a share of a mean duration.
        early: Weight of ends that are earlier than the relaxed plan's; later ones have 1.
    """

    pull: float
    grain: float = 2e-3
    early: float = 1.0


@dataclass(frozen=True)
class Width:
    """How much a beam search looks at.

    Attributes:
        plans: Kept after each operation.
        options: Points of an operation that are tried: those that lose least. The fastest one is
            tried always, so that the deadline can be met. More options help no further: plans
            then win by gaining time early that they lose later.
    """

    plans: int = 32
    options: int = 8


@dataclass(frozen=True, eq=False)
class _States:
    """Plans of the operations so far: one row each, `plans` rows for each search.

    Attributes:
        lost: (rows,) joules against the bound; infinite for rows that stand for no plan.
        ends: (rows, slots) when operations end that others still wait for.
        pulls: (rows, slots) penalty of each of these ends.
        pulled: (rows,) their sum.
        marks: (rows,) a number that differs where the ends do.
    """

    lost: Array
    ends: Array
    pulls: Array
    pulled: Array
    marks: Array


@dataclass(frozen=True, eq=False)
class _Searches:
    """Searches that run side by side: one array operation serves them all.

    Attributes:
        plans: Rows of each search.
        pull: (rows, 1) of the row's search.
        early: (rows, 1) the same for ends that are early.
        grain: (searches, 1) seconds.
    """

    plans: int
    pull: Array
    early: Array
    grain: Array


class Beam:
    """Searches in one direction of time for one deadline.

    Args:
        schedule: The step.
        curves: What operations may run at.
        relaxed: The optimum of the linear programme; for a schedule with reversed edges, with
            starts counted from the end.
        deadline_seconds: Not shorter than the fastest plan takes.
    """

    def __init__(
        self, schedule: Schedule, curves: Curves, relaxed: Relaxed, deadline_seconds: float
    ) -> None:
        count = len(schedule.operations)
        self._curves = curves
        self._deadline = deadline_seconds
        self._edge_watts = relaxed.edge_watts.tolist()
        self._watts = relaxed.operation_watts.tolist()
        self._before: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._final_watts = list(self._watts)
        for edge, (before, after) in enumerate(schedule.edges):
            self._before[after].append((edge, before))
            self._final_watts[before] -= self._edge_watts[edge]
        self._after = schedule.successors
        self._references = (relaxed.starts + relaxed.seconds).tolist()
        fastest = [float(own[0]) for own in curves.seconds]
        latest = schedule.latest_ends(fastest, deadline_seconds * (1 + 1e-12))
        self._latest = latest
        self._mean_seconds = sum(fastest) / max(count, 1)
        self._order = _in_time(schedule, relaxed.starts.tolist())
        self._slots, self._freed, self._slot_count = _slots(schedule, self._order)
        self._hash = (np.random.default_rng(0).random(count) + 0.5).tolist()

    def search(self, leanings: Sequence[Leaning], width: Width) -> list[Places]:
        """For each leaning the plan found that loses least; all meet the deadline."""
        count = len(leanings)
        plans = max(min(width.plans, _KEPT_ENDS // (self._slot_count * count)), 1)
        searches = _Searches(
            plans,
            np.repeat([leaning.pull for leaning in leanings], plans)[:, None],
            np.repeat([leaning.pull * leaning.early for leaning in leanings], plans)[:, None],
            np.array([[max(leaning.grain * self._mean_seconds, 1e-300)] for leaning in leanings]),
        )
        lost = np.full((count, plans), np.inf)
        lost[:, 0] = 0.0
        rows = count * plans
        none = np.zeros((rows, self._slot_count))
        states = _States(lost.ravel(), none, none, np.zeros(rows), np.zeros(rows))
        known: dict[tuple[int, float], tuple[Indices, Array, Array]] = {}
        history = []
        for index in self._order:
            kind = (id(self._curves.seconds[index]), round(self._watts[index], 9))
            if kind not in known:
                known[kind] = self._options(index, width.options)
            places, seconds, losses = known[kind]
            states, before, columns = self._step(index, seconds, losses, (states, searches))
            history.append((before, places[columns]))
        row = np.argmin(states.lost.reshape(count, plans), axis=1) + plans * np.arange(count)
        found = np.zeros((count, len(self._order)), dtype=np.intp)
        for index, (before, chosen) in zip(reversed(self._order), reversed(history), strict=True):
            found[:, index], row = chosen[row], before[row]
        return [[int(place) for place in tensor] for tensor in found]

    def _options(self, index: int, count: int) -> tuple[Indices, Array, Array]:
        """Places that lose least at the operation's price, their seconds and losses."""
        seconds, joules = self._curves.seconds[index], self._curves.joules[index]
        losses = joules + self._watts[index] * seconds
        losses -= losses.min()
        places = np.argsort(losses, kind="stable")[:count]
        if 0 not in places:
            places = np.append(places, 0)
        return places, seconds[places], losses[places]

    def _step(
        self, index: int, seconds: Array, losses: Array, now: tuple[_States, _Searches]
    ) -> tuple[_States, Indices, Indices]:
        """Place an operation: the states that are kept, of which rows and options they are."""
        states, searches = now
        start, lost = self._start(index, states)
        ends = start[:, None] + seconds
        lost = lost[:, None] + losses
        pulled, marks = states.pulled, states.marks
        for other in self._freed[index]:
            pulled = pulled - states.pulls[:, self._slots[other]]
            marks = marks - self._hash[other] * states.ends[:, self._slots[other]]
        alive = bool(self._after[index])
        pulls = np.zeros_like(ends)
        if alive:
            pulls = ends - self._references[index]
            weight = self._watts[index] / max(self._mean_seconds, 1e-300)
            pulls = weight * np.where(pulls < 0, searches.early, searches.pull) * pulls**2
            new_marks = marks[:, None] + self._hash[index] * ends
        else:
            lost = lost + max(self._final_watts[index], 0.0) * (self._deadline - ends)
            new_marks = np.broadcast_to(marks[:, None], ends.shape)
        lost[ends > self._latest[index]] = np.inf
        scores = lost + pulled[:, None] + pulls
        picked = _picked(scores, new_marks, searches)
        rows, columns = np.divmod(picked, len(seconds))
        # Fewer different plans than rows: the others stand for none.
        missing = rows < 0
        rows[missing], columns[missing], picked[missing] = 0, 0, 0
        kept_lost = lost.ravel()[picked]
        kept_lost[missing] = np.inf
        kept = _States(
            kept_lost,
            states.ends[rows],
            states.pulls[rows],
            pulled[rows] + pulls.ravel()[picked],
            new_marks.ravel()[picked],
        )
        if alive:
            kept.ends[:, self._slots[index]] = ends.ravel()[picked]
            kept.pulls[:, self._slots[index]] = pulls.ravel()[picked]
        return kept, rows, columns

    def _start(self, index: int, states: _States) -> tuple[Array, Array]:
        """When the operation can begin, and what is lost when those before it have waited."""
        before = [
            (self._edge_watts[e], states.ends[:, self._slots[i]]) for e, i in self._before[index]
        ]
        start, lost = np.zeros(len(states.lost)), states.lost
        for _, ends in before:
            start = np.maximum(start, ends)
        for watts, ends in before:
            if watts > 0:
                lost = lost + watts * (start - ends)
        return start, lost


def mirrored(schedule: Schedule) -> Schedule:
    """The same step with time running backwards."""
    return replace(schedule, edges=tuple((after, before) for before, after in schedule.edges))


def mirrored_optimum(relaxed: Relaxed, deadline_seconds: float) -> Relaxed:
    """The optimum with time running backwards from the deadline."""
    return replace(relaxed, starts=deadline_seconds - relaxed.starts - relaxed.seconds)


def _picked(scores: Array, marks: Array, searches: _Searches) -> Indices:
    """(rows,) indices of each search's best scores, one of each group of nearly equal plans.

    Where fewer are left, -1.
    """
    count = len(searches.grain)
    own = scores.reshape(count, -1)
    size = own.shape[1]
    some = min(size, 2 * searches.plans)
    if some < size:
        best = np.argpartition(own, some - 1, axis=1)[:, :some]
        best += size * np.arange(count)[:, None]
    else:
        best = np.arange(own.size).reshape(own.shape)
    # Indices into the whole array are several times faster than along an axis.
    lines = some * np.arange(count)[:, None]
    best = best.ravel()[np.argsort(scores.ravel()[best], axis=1, kind="stable") + lines]
    # Equal marks stand side by side after a stable sort, the best score first.
    near = np.round(marks.ravel()[best] / searches.grain)
    by_mark = np.argsort(near, axis=1, kind="stable") + lines
    near = near.ravel()[by_mark]
    dropped = ~np.isfinite(scores.ravel()[best])
    dropped.ravel()[by_mark[:, 1:][near[:, 1:] == near[:, :-1]]] = True
    front = np.argsort(dropped, axis=1, kind="stable")[:, : searches.plans] + lines
    picked = np.full((count, searches.plans), -1)
    picked[:, : front.shape[1]] = np.where(dropped.ravel()[front], -1, best.ravel()[front])
    return picked.ravel()


def _in_time(schedule: Schedule, starts: list[float]) -> list[int]:
    """A topological order by start, so that operations that compete for time are near."""
    waiting = [len(before) for before in schedule.predecessors]
    ready = [(starts[index], index) for index, number in enumerate(waiting) if not number]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for after in schedule.successors[index]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (starts[after], after))
    return order


def _slots(schedule: Schedule, order: list[int]) -> tuple[list[int], list[list[int]], int]:
    """Where each operation's end is kept, what each operation frees, and how many places it takes.

    An end is kept until the last operation that waits for it is placed.
    """
    waiting = [len(after) for after in schedule.successors]
    slots = [0] * len(order)
    freed: list[list[int]] = [[] for _ in order]
    free: list[int] = []
    used = 0
    for index in order:
        for before in schedule.predecessors[index]:
            waiting[before] -= 1
            if not waiting[before]:
                freed[index].append(before)
                free.append(slots[before])
        if schedule.successors[index]:
            if not free:
                free.append(used)
                used += 1
            slots[index] = free.pop()
    return slots, freed, max(used, 1)
