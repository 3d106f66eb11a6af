"""Plans of clocks for a training step, and the whole time-energy frontier.

planner = EnergyPlanner(profile)
plan = planner.plan(schedule, deadline="+2%")
plan.saving, plan.gap                      # of top clocks' energy; above what any plan can reach
plan = planner.plan(schedule, "+5%", switches="per_stage")     # one clock per device
frontier = planner.frontier(schedule)      # 20 plans; frontier.at(seconds) is a look-up

From durations that may lie between measured ones to clocks that exist.

Rounding every operation down meets the deadline but wastes time; giving the rest to operations one
by one ends where no single change fits. So beam searches (see `Beam`) make many plans, forwards and
backwards in time, at the optimum's prices and at the mean prices of deadlines nearby. The best of
them fill their slack, and the best one is kept. Where it is near the bound, fewer are made.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.energy.linear_program import DeadlineError, LinearProgram, lower_hull
from outlast.energy.operations import Choices, SwitchDelays, baseline, curves_of, merged
from outlast.energy.plan import SWITCHES, ClockPlan, Frontier, fingerprint
from outlast.energy.profile import effective
from outlast.energy.switches import Grouped, GroupedProgram
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.linear_program import Relaxed
    from outlast.energy.operations import Places
    from outlast.energy.plan import Switches
    from outlast.energy.profile import Point, Profile
    from outlast.energy.schedule import Schedule

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
# Ends that are kept at most, over all plans: where hundreds wait at once, fewer plans are kept.
_KEPT_ENDS = 40_000
# Points of an operation that are tried: those that lose least. The fastest one is tried always, so
# that the deadline can be met. More options help no further: plans then win by gaining time early
# that they lose later.
_OPTIONS = 8


@dataclass(frozen=True)
class Leaning:
    """Preference of a beam search. Results vary much with it, so several are tried.

    Attributes:
        pull: How strongly plans near the relaxed plan's times are preferred. Without it, plans
            collect debts of time that must be paid later; too much of it forbids variety.
        grain: Plans whose times differ less are one plan; as a share of a mean duration.
        early: Weight of ends that are earlier than the relaxed plan's; later ones have 1.
    """

    pull: float
    grain: float = 2e-3
    early: float = 1.0


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
        choices: What operations may run at.
        relaxed: The optimum of the linear programme; for a schedule with reversed edges, with
            starts counted from the end.
        deadline_seconds: Not shorter than the fastest plan takes.
    """

    def __init__(
        self, schedule: Schedule, choices: Choices, relaxed: Relaxed, deadline_seconds: float
    ) -> None:
        count = len(schedule.operations)
        self._choices = choices
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
        fastest = [float(own[0]) for own in choices.seconds]
        self._latest = schedule.latest_ends(fastest, deadline_seconds * (1 + 1e-12))
        self._mean_seconds = sum(fastest) / max(count, 1)
        # By start, so that operations that compete for time are near.
        self._order = schedule.topological(relaxed.starts.tolist())
        self._slots, self._freed, self._slot_count = _slots(schedule, self._order)
        self._hash = (np.random.default_rng(0).random(count) + 0.5).tolist()

    def search(self, leanings: Sequence[Leaning], plans: int) -> list[Places]:
        """For each leaning the plan found that loses least; all meet the deadline.

        Args:
            leanings: Of searches side by side.
            plans: How many each keeps after an operation.
        """
        count = len(leanings)
        plans = max(min(plans, _KEPT_ENDS // (self._slot_count * count)), 1)
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
            all_seconds, joules = self._choices.seconds[index], self._choices.joules[index]
            kind = (id(all_seconds), round(self._watts[index], 9))
            if kind not in known:
                # Places that lose least at the operation's price, their seconds and losses.
                losses = joules + self._watts[index] * all_seconds
                losses -= losses.min()
                places = np.argsort(losses, kind="stable")[:_OPTIONS]
                if 0 not in places:
                    places = np.append(places, 0)
                known[kind] = places, all_seconds[places], losses[places]
            places, seconds, losses = known[kind]
            states, before, columns = self._step(index, seconds, losses, (states, searches))
            history.append((before, places[columns]))
        row = np.argmin(states.lost.reshape(count, plans), axis=1) + plans * np.arange(count)
        found = np.zeros((count, len(self._order)), dtype=np.intp)
        for index, (before, chosen) in zip(reversed(self._order), reversed(history), strict=True):
            found[:, index], row = chosen[row], before[row]
        return [[int(place) for place in plan] for plan in found]

    def _step(
        self, index: int, seconds: Array, losses: Array, now: tuple[_States, _Searches]
    ) -> tuple[_States, Indices, Indices]:
        """Place an operation: the states that are kept, of which rows and options they are."""
        states, searches = now
        # Earliest start of the operation, and the loss once those before it have waited.
        before = [
            (self._edge_watts[e], states.ends[:, self._slots[i]]) for e, i in self._before[index]
        ]
        start, lost = np.zeros(len(states.lost)), states.lost
        for _, before_ends in before:
            start = np.maximum(start, before_ends)
        for watts, before_ends in before:
            if watts > 0:
                lost = lost + watts * (start - before_ends)
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


def _slots(schedule: Schedule, order: list[int]) -> tuple[list[int], list[list[int]], int]:
    """Slot of each operation's end, slots that each operation frees, and the number of slots.

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


class Slack:
    """A feasible plan that gets slower, one operation at a time.

    Args:
        schedule: The step.
        choices: What operations may run at.
        places: The plan to begin with; it meets the deadline.
        deadline_seconds: Of the step.
    """

    def __init__(
        self, schedule: Schedule, choices: Choices, places: Sequence[int], deadline_seconds: float
    ) -> None:
        self._before, self._after = schedule.predecessors, schedule.successors
        self._rank = [0] * len(places)
        for rank, index in enumerate(schedule.order):
            self._rank[index] = rank
        self._seconds = [own.tolist() for own in choices.seconds]
        self._joules = [own.tolist() for own in choices.joules]
        self._durations = choices.durations(places)
        self._starts = schedule.earliest_starts(self._durations)
        self._ends = schedule.latest_ends(self._durations, deadline_seconds)
        # Sums in another order may differ by a few units in the last place.
        self._tolerance = 1e-12 * deadline_seconds
        self.places: Places = list(places)

    def fill(self) -> Places:
        """Slow operations down until none fits a slower place, most watts saved first."""
        heap = []
        for index in range(len(self.places)):
            step = self._best(index)
            if step:
                heap.append((-step[0], index))
        heapq.heapify(heap)
        while heap:
            watts, index = heapq.heappop(heap)
            step = self._best(index)
            if not step:
                continue
            # Others have taken slack since: it waits for its turn again.
            if -step[0] <= watts + 1e-12:
                self._take(index, step[1])
                step = self._best(index)
            if step:
                heapq.heappush(heap, (-step[0], index))
        return self.places

    def _best(self, index: int) -> tuple[float, int] | None:
        """The slower place that saves most watts, and how many; None where none fits."""
        seconds, joules, here = self._seconds[index], self._joules[index], self.places[index]
        room = self._ends[index] - self._starts[index] + self._tolerance
        best = None
        for place in range(here + 1, len(seconds)):
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


# No setting is best everywhere: tight deadlines need less pull.
_LEANINGS = tuple(
    Leaning(pull, grain, early)
    for early in (1.0, 0.2)
    for grain in (2e-3, 1e-2)
    for pull in (0.3, 1.0, 2.0, 5.0, 10.0)
)
# Plans that a search keeps, more of them in short steps; wider searches help less than more.
_KEPT, _MOST_KEPT = 16, 48
# Their number times operations.
_PLACES = 6_000
# Longer steps are searched with every other leaning only, to save time.
_LONG = 1_000
# Plans of the searches whose slack is filled, the best ones: others hardly become the best.
_FILLED = 2
# Rounds of searches: whether backwards in time; weights of the mean of deadlines nearby in the
# prices, and in the times that plans are pulled to; not made where the plan is nearer to the bound
# than this share of the step's energy. The most useful ones come first. Later ones pay where plans
# are still far from the bound.
_ROUNDS = (
    (False, 0.0, 0.0, 0.0),
    (True, 1.0, 0.0, 4e-4),
    (False, 1.0, 0.0, 4e-4),
    (True, 0.0, 0.0, 4e-4),
    (False, 0.0, 1.0, 6e-4),
    (False, 0.5, 0.0, 6e-4),
    (True, 0.5, 0.0, 6e-4),
    (False, 0.5, 0.5, 6e-4),
    (True, 0.0, 1.0, 6e-4),
)
# Operations that rounds place for one deadline, and the fewest rounds.
_PLACED, _FEWEST_ROUNDS = 5_000, 3


def rounded(
    schedule: Schedule,
    choices: Choices,
    relaxed: Relaxed,
    deadline_seconds: float,
    nearby: Sequence[Relaxed] = (),
) -> list[Point]:
    """Measured points of all operations with which the step meets the deadline.

    Args:
        schedule: The step.
        choices: What its operations may run at.
        relaxed: The linear programme's optimum for the deadline.
        deadline_seconds: Met but for rounding errors of floating point (one part in a thousand
            million), and not below the time of the fastest plan.
        nearby: Optima of slightly shorter and longer deadlines. Prices jump from one deadline to
            the next; their mean weighs more operations.
    """
    fastest = [0] * len(choices.points)
    # A deadline that is the fastest plan's own time must not fail by rounding.
    deadline = max(deadline_seconds, schedule.makespan(choices.durations(fastest)))

    def better(best: Places, rivals: Sequence[Places]) -> Places:
        """The plan that needs least, of the best so far and of rivals that keep to the limit."""
        limit = deadline * (1 + 1e-9)
        fitting = [p for p in rivals if schedule.makespan(choices.durations(p)) <= limit]
        return min((best, *fitting), key=choices.energy)

    # Optima of deadlines nearby as if they were for this one; the mean's prices are a flow as well.
    every = [relaxed]
    for item in nearby:
        longer = deadline / float((item.starts + item.seconds).max())
        every.append(replace(item, starts=item.starts * longer, seconds=item.seconds * longer))
    mean = replace(
        relaxed,
        starts=np.mean([item.starts for item in every], axis=0),
        seconds=np.mean([item.seconds for item in every], axis=0),
        edge_watts=np.mean([item.edge_watts for item in every], axis=0),
        operation_watts=np.mean([item.operation_watts for item in every], axis=0),
    )
    full = relaxed.joules + schedule.devices * choices.blocking_watts * deadline
    kept = min(max(_PLACES // len(schedule.operations), _KEPT), _MOST_KEPT)
    leanings = _LEANINGS[::2] if len(schedule.operations) > _LONG else _LEANINGS
    best = better(fastest, [choices.below(relaxed.seconds.tolist())])
    rounds = max(_PLACED // max(len(fastest), 1), _FEWEST_ROUNDS)
    for backwards, price, time, above in _ROUNDS[:rounds]:
        if not choices.energy(best) - relaxed.joules > above * full:
            continue
        # An optimum's mixture with the mean.
        optimum = replace(
            relaxed,
            starts=(1 - time) * relaxed.starts + time * mean.starts,
            seconds=(1 - time) * relaxed.seconds + time * mean.seconds,
            edge_watts=(1 - price) * relaxed.edge_watts + price * mean.edge_watts,
            operation_watts=(1 - price) * relaxed.operation_watts + price * mean.operation_watts,
        )
        if backwards:
            optimum = mirrored_optimum(optimum, deadline)
        beam = Beam(mirrored(schedule) if backwards else schedule, choices, optimum, deadline)
        plans = sorted(beam.search(leanings, kept), key=choices.energy)[:_FILLED]
        best = better(best, [Slack(schedule, choices, plan, deadline).fill() for plan in plans])
    return [own[place] for own, place in zip(choices.points, best, strict=True)]


LONGEST = 1.1
"""A frontier ends at this multiple of the baseline's time, where not told otherwise."""
# By what share the deadlines differ whose prices help to round a plan.
_NEARBY = 0.005
# Halvings of the interval of deadlines in which a plan with delayed changes of clock is looked for.
_HALVINGS = 7


class EnergyPlanner:
    """Chooses clocks; never touches hardware.

    Args:
        profile: Time and energy of the operations.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def plan(
        self,
        schedule: Schedule,
        deadline: float | str = "+0%",
        *,
        switches: Switches = "free",
        switch_seconds: float = 0.0,
        margin: float = 0.0,
    ) -> ClockPlan:
        """Clocks with the least energy that meet a deadline.

        Args:
            schedule: The step.
            deadline: In seconds, or above the baseline's time, as in "+2%". The baseline is the
                step at top clocks; where lower ones are faster, see `baseline`.
            switches: "none" (one clock for all devices), "per_stage" (one for each device),
                "per_phase" (one for each device and phase) or "free" (one for each operation).
            switch_seconds: What a change of a device's clock takes; the device then waits at
                blocking power.
            margin: Share of the deadline to keep free, because the profile is not exact; see
                `margin_for`.

        Raises:
            EnergyError: For a setting that cannot be read or a deadline that cannot be met.
        """
        solver = _Solver(self.profile, schedule, switches, switch_seconds)
        return solver.plan(deadline, margin)

    def frontier(
        self,
        schedule: Schedule,
        points: int = 20,
        longest: float | str = f"+{LONGEST - 1:.0%}",
        *,
        switches: Switches = "free",
        switch_seconds: float = 0.0,
        margin: float = 0.0,
    ) -> Frontier:
        """Plans for evenly spaced deadlines, from the baseline's time to the longest.

        Args:
            schedule: The step.
            points: Number of plans.
            longest: The last deadline, as in `plan`; "least energy" ends where slowing down no
                longer pays.
            switches: As in `plan`.
            switch_seconds: As in `plan`.
            margin: As in `plan`; the deadlines then begin later by as much.

        Raises:
            EnergyError: As `plan` does, and for fewer than one point.
        """
        if points < 1:
            raise EnergyError(f"points = {points} is below 1: a frontier needs at least one plan")
        solver = _Solver(self.profile, schedule, switches, switch_seconds)
        first = solver.shortest_seconds / (1 - _checked(margin, "margin", 1.0))
        if longest == "least energy":
            longest = solver.longest_useful_seconds / (1 - margin)
        last = solver.seconds_of(longest)
        if last < first:
            raise EnergyError(
                f"longest = {longest} is {last:.6g} s, which is below the shortest deadline of "
                f"{first:.6g} s: make it longer"
            )
        step = (last - first) / max(points - 1, 1)
        return Frontier(
            tuple(solver.plan(first + step * i, margin) for i in range(points)),
            longest_useful_seconds=solver.longest_useful_seconds,
        )


class _Solver:
    """The programmes of one schedule, kept for all its deadlines."""

    def __init__(
        self, profile: Profile, schedule: Schedule, switches: Switches, switch_seconds: float
    ) -> None:
        if switches not in SWITCHES:
            near = get_close_matches(str(switches), SWITCHES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"say {', '.join(SWITCHES)}"
            raise EnergyError(f'switches = "{switches}" is unknown: {hint}')
        if not schedule.operations:
            raise EnergyError("the schedule has no operations: there is nothing to plan")
        schedule.check()
        self._profile, self._schedule = profile, schedule
        self._switches_allowed = switches
        self._delays = SwitchDelays(schedule, _checked(switch_seconds, "switch_seconds", math.inf))
        watts = profile.blocking_watts
        self._curves = curves_of(profile, schedule)
        pareto = {id(curve): curve.pareto(watts) for curve in self._curves}
        hulls = {curve: lower_hull(points, watts) for curve, points in pareto.items()}
        keys = [id(curve) for curve in self._curves]
        self._choices = Choices([pareto[key] for key in keys], [hulls[key] for key in keys], watts)
        self._baseline = baseline(schedule, self._curves)
        self._program = LinearProgram(schedule, self._choices.hulls, watts)
        budgets: list[Switches] = [switches]
        if switches == "free":
            budgets = ["per_stage", "free"] if switch_seconds else []
        self._grouped = [
            GroupedProgram(schedule, profile, budget, switch_seconds) for budget in budgets
        ]
        self._fingerprint = fingerprint(schedule)
        self.baseline_seconds = schedule.makespan([point.seconds for point in self._baseline])

    @property
    def shortest_seconds(self) -> float:
        """Of the baseline, changes between operations with different top clocks included."""
        return self._schedule.makespan(self._delays.seconds(self._baseline))

    @property
    def longest_useful_seconds(self) -> float:
        """The step's time with the least effective energy: a slower one only takes more."""
        return self._schedule.makespan([points[-1].seconds for points in self._choices.points])

    def seconds_of(self, deadline: float | str) -> float:
        """A deadline in seconds."""
        if not isinstance(deadline, str):
            if isinstance(deadline, bool) or not isinstance(deadline, int | float):
                raise EnergyError(f'deadline = {deadline} is not a time: say e.g. 3.2 or "+2%"')
            if not 0 < deadline < math.inf:
                raise EnergyError(f"deadline = {deadline:g} s is not a time: say e.g. 3.2")
            return deadline
        try:
            share = float(deadline.strip().removesuffix("%")) / 100
        except ValueError:
            share = float("nan")
        if not deadline.strip().endswith("%") or not -1 < share < math.inf:
            raise EnergyError(
                f'deadline = "{deadline}" is neither seconds nor a percentage: say e.g. 3.2 or '
                '"+2%" above the time of top clocks'
            )
        return self.baseline_seconds * (1 + share)

    def plan(self, deadline: float | str, margin: float = 0.0) -> ClockPlan:
        """The plan for one deadline."""
        seconds = self.seconds_of(deadline)
        usable = seconds * (1 - _checked(margin, "margin", 1.0))
        try:
            relaxed = self._program.solve(usable)
            found = self._within(relaxed, usable)
        except DeadlineError as error:
            if not margin:
                raise
            raise EnergyError(
                f"deadline = {seconds:g} s cannot be met with margin = {margin:g} and switches = "
                f'"{self._switches_allowed}": the shortest feasible deadline is '
                f"{error.shortest_seconds / (1 - margin):.6g} s; allow it, or a smaller margin"
            ) from error
        blocked = self._blocked(seconds)
        bound = self._program.solve(seconds).joules if margin else relaxed.joules
        own = found.bound_joules if not margin else bound
        return ClockPlan(
            clocks_mhz=tuple(point.clock_mhz for point in found.points),
            seconds=self._schedule.makespan(self._delays.seconds(found.points)),
            deadline_seconds=seconds,
            joules=self._joules(found.points, seconds),
            bound_joules=bound + blocked,
            fastest_joules=self._joules(self._baseline, seconds),
            switches=sum(self._delays.changes(found.points)),
            kind=self._profile.kind,
            budget=self._switches_allowed,
            budget_bound_joules=max(own, bound) + blocked,
            switch_seconds=self._delays.switch_seconds,
            margin=margin,
            blocking_watts=self._profile.blocking_watts,
            devices=self._schedule.devices,
            device=self._profile.device,
            schedule=self._fingerprint,
        )

    def _within(self, relaxed: Relaxed, seconds: float) -> Grouped:
        if self._switches_allowed != "free":
            return self._grouped[0].solve(seconds)
        if self._delays.switch_seconds:
            return self._free_with_delays(seconds, relaxed.joules)
        # Deadlines a little shorter and longer, whose prices help to round.
        shorter = max(seconds * (1 - _NEARBY), self._program.fastest_seconds)
        nearby = [self._program.solve(value) for value in (shorter, seconds * (1 + _NEARBY))]
        points = rounded(self._schedule, self._choices, relaxed, seconds, nearby)
        return Grouped(points, relaxed.joules)

    def _free_with_delays(self, seconds: float, bound: float) -> Grouped:
        """The best of plans per device, per part of the step, and with merged changes."""
        found: list[list[Point]] = []
        problem = None
        for grouped in self._grouped:
            try:
                found.append(grouped.solve(seconds).points)
            except EnergyError as error:
                problem = error
        low, high = self._program.fastest_seconds, seconds
        for halving in range(_HALVINGS):
            middle = high if not halving else (low + high) / 2
            relaxed = self._program.solve(middle)
            points = merged(
                self._schedule, self._curves, self._choices, relaxed, self._delays.switch_seconds
            )
            if self._schedule.makespan(self._delays.seconds(points)) > seconds * (1 + 1e-9):
                high = middle
            else:
                low = middle
                found.append(points)
        if not found:
            raise problem or EnergyError(f"deadline = {seconds:g} s cannot be met")
        return Grouped(min(found, key=lambda points: self._joules(points, seconds)), bound)

    def _blocked(self, seconds: float) -> float:
        return self._schedule.devices * self._profile.blocking_watts * seconds

    def _joules(self, points: list[Point], seconds: float) -> float:
        watts = self._profile.blocking_watts
        return sum(effective(point, watts) for point in points) + self._blocked(seconds)


def _checked(value: float, name: str, below: float) -> float:
    """A number in [0, below)."""
    if not 0 <= value < below:
        limit = "finite" if math.isinf(below) else f"below {below:g}"
        raise EnergyError(f"{name} = {value:g} must be {limit} and not below 0")
    return value
