"""The shortest makespan of a small graph, by mixed-integer programming: an oracle for tests.

Time is cut at events. Binary steps say by which event an activity has started, has done its work
and has ended; the bytes that it moves between two events are a continuous variable. With as many
events as activities could start at, the optimum over all orders and all rates is exact (an
event-based model as of Koné, Artigues, Lopez and Mongeau 2011, with fluid transfers). Rates need
not be max-min fair here, so that no way to share bandwidth can be better.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.tasks.planner import heads_and_tails, lower_bounds, node_shares
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.cluster.tasks.graph import Activity, Graph
    from outlast.cluster.tasks.schedule import Schedule, Segment

LARGEST = 40
"""Most activities that it takes; the time that it needs grows exponentially."""

_IMPOSSIBLE = 2


@dataclass(frozen=True)
class Optimum:
    """What the solver found.

    Attributes:
        seconds: The shortest makespan found; infinite when none was found in time.
        bound_seconds: No schedule is shorter; equal to `seconds` when that is proved optimal.
        proved: Whether the two are the same, within 0.01 %.
    """

    seconds: float
    bound_seconds: float

    @property
    def proved(self) -> bool:
        """Whether `seconds` is the optimum."""
        return self.bound_seconds >= self.seconds * (1 - 1e-4)


def shortest(
    graph: Graph, *, limit_seconds: float = 60.0, known_seconds: float = math.inf
) -> Optimum:
    """The optimum over all orders, places and rates.

    Args:
        graph: At most `LARGEST` activities.
        limit_seconds: Longest search; then the bound is less than the best schedule.
        known_seconds: A makespan that can be reached, which makes the search shorter.

    Raises:
        ClusterError: For a graph that is too large.
    """
    if len(graph.activities) > LARGEST:
        raise ClusterError(
            f"the exact solver takes at most {LARGEST} activities, and there are "
            f"{len(graph.activities)}: use plan()"
        )
    bound = lower_bounds(graph).seconds
    if not graph.activities or known_seconds <= bound * (1 + 1e-6):
        return Optimum(bound, bound)
    return _Model(graph, bound, known_seconds).solve(limit_seconds)


def is_within(
    graph: Graph, seconds: float, share: float = 0.05, *, limit_seconds: float = 60.0
) -> bool | None:
    """Whether a makespan is at most so much longer than the optimum; None: not known in time.

    It is often shown sooner that nothing is much shorter than what the optimum is.
    """
    target = seconds / (1.0 + share)
    if target <= lower_bounds(graph).seconds:
        return True
    found = shortest(graph, limit_seconds=limit_seconds, known_seconds=target)
    if found.seconds < target * (1.0 - 1e-4):
        return False
    return True if found.proved else None


class _Model:
    """Variables and rows of the programme; one unit of time is the lower bound."""

    def __init__(self, graph: Graph, bound: float, known: float) -> None:
        self.graph = graph
        self.unit = bound or 1.0
        self.known = known / self.unit
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.events = self._event_count()
        self.time = [self._variable(0.0, self.known * (1 + 1e-6)) for _ in range(self.events + 1)]
        self.upper[self.time[0]] = 0.0
        self.lower[self.time[-1]] = 1.0
        for k in range(self.events):
            self._row({self.time[k + 1]: 1.0, self.time[k]: -1.0}, low=0.0)
        self.started: dict[tuple[int, int], list[int]] = {}
        self.worked: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], list[int]] = {}
        self.moved: dict[tuple[int, int], list[int]] = {}
        for number in range(len(graph.activities)):
            self._activity(number)
        for number in range(len(graph.activities)):
            self._order(number)
        self._capacities()
        self._tighten()

    def _event_count(self) -> int:
        """Intervals: one for each start, of work or of bytes, that could have its own time."""
        free = [
            number
            for number, activity in enumerate(self.graph.activities)
            if not self.graph.before[number]
            and not activity.earliest_seconds
            and all(not option.nodes for option in activity.options)
        ]
        both = [
            activity
            for activity in self.graph.activities
            if activity.size_bytes and any(option.seconds for option in activity.options)
        ]
        # The first interval begins at 0, even where nothing may start then.
        idle = all(
            activity.earliest_seconds
            for number, activity in enumerate(self.graph.activities)
            if not self.graph.before[number]
        )
        count = len(self.graph.activities) + len(both) - max(len(free) - 1, 0)
        return max(count, 1) + int(idle)

    def _variable(self, lower: float, upper: float, *, whole: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.lower) - 1

    def _row(
        self, terms: dict[int, float], *, low: float = -math.inf, high: float = math.inf
    ) -> None:
        self.rows.append((terms, low, high))

    def _steps(self, first: int) -> list[int]:
        """Binaries for the events 0 to the last that never fall back, 0 before event `first`."""
        steps = [
            self._variable(0, 1 if k >= first else 0, whole=True) for k in range(self.events + 1)
        ]
        for k in range(self.events):
            self._row({steps[k + 1]: 1.0, steps[k]: -1.0}, low=0.0)
        return steps

    def _activity(self, number: int) -> None:
        activity = self.graph.activities[number]
        chosen = [self._variable(0, 1, whole=True) for _ in activity.options]
        self._row(dict.fromkeys(chosen, 1.0), low=1.0, high=1.0)
        for place, option in enumerate(activity.options):
            key = (number, place)
            started = self.started[key] = self._steps(0)
            self.upper[started[-1]] = 1.0
            # It ends whole, in the place that was chosen.
            worked = started if not option.seconds else self._steps(1)
            ended = worked if not activity.size_bytes else self._steps(1)
            self.worked[key], self.ended[key] = worked, ended
            for steps in {id(item): item for item in (started, worked, ended)}.values():
                self._row({steps[-1]: 1.0, chosen[place]: -1.0}, low=0.0, high=0.0)
            if option.seconds:
                self._work(started, worked, option.seconds / self.unit)
            self._flow(key, worked, ended)
            for k in range(self.events + 1):
                if activity.earliest_seconds:
                    terms = {self.time[k]: 1.0, started[k]: -activity.earliest_seconds / self.unit}
                    self._row(terms, low=0.0)

    def _order(self, number: int) -> None:
        """Started by an event only if all before it have ended by then."""
        places = range(len(self.graph.activities[number].options))
        for source in self.graph.before[number]:
            for k in range(self.events + 1):
                terms = {self.started[number, place][k]: 1.0 for place in places}
                for place in range(len(self.graph.activities[source].options)):
                    terms[self.ended[source, place][k]] = -1.0
                self._row(terms, high=0.0)

    def _work(self, started: list[int], worked: list[int], seconds: float) -> None:
        """Not started before event e and done by event f: there is its work between them."""
        for f in range(1, self.events + 1):
            self._row({started[f - 1]: 1.0, worked[f]: -1.0}, low=0.0)
            for e in range(f):
                terms = {self.time[f]: 1.0, self.time[e]: -1.0, worked[f]: -seconds}
                if e:
                    terms[started[e - 1]] = seconds
                self._row(terms, low=0.0)

    def _flow(self, key: tuple[int, int], worked: list[int], ended: list[int]) -> None:
        """Shares of the bytes by interval: none before the work is done, all when it has ended."""
        activity = self.graph.activities[key[0]]
        if not activity.size_bytes:
            return
        moved = self.moved[key] = [self._variable(0, 1) for _ in range(self.events)]
        cap = self.unit / activity.flow_seconds
        for k in range(self.events):
            self._row({moved[k]: 1.0, worked[k]: -1.0}, high=0.0)
            terms = {moved[k]: 1.0, self.time[k + 1]: -cap, self.time[k]: cap}
            self._row(terms, high=0.0)
            done = dict.fromkeys(moved[: k + 1], 1.0)
            done[ended[k + 1]] = -1.0
            self._row(done, low=0.0)

    def _capacities(self) -> None:
        machine = self.graph.machine
        for resource, rate in enumerate(machine.bytes_per_s.values()):
            users = [
                (key, each.size_bytes)
                for key in self.moved
                if resource in (each := self.graph.activities[key[0]]).via
            ]
            for k in range(self.events):
                terms = {self.moved[key][k]: size / (rate * self.unit) for key, size in users}
                terms |= {self.time[k + 1]: -1.0, self.time[k]: 1.0}
                self._row(terms, high=0.0)
        for group, count in enumerate(machine.nodes.values()):
            for k in range(self.events):
                terms = {}
                for (number, place), started in self.started.items():
                    option = self.graph.activities[number].options[place]
                    if option.group == group and self.ended[number, place] is not started:
                        terms[started[k]] = float(option.nodes)
                        terms[self.ended[number, place][k]] = -float(option.nodes)
                if terms:
                    self._row(terms, high=float(count))

    def _tighten(self) -> None:
        """Rows that follow from the others and make their linear relaxation less loose."""
        heads, tails = heads_and_tails(self.graph)
        last = self.time[-1]
        for number, activity in enumerate(self.graph.activities):
            for place, option in enumerate(activity.options):
                started = self.started[number, place]
                least = option.seconds + activity.flow_seconds
                after = (least + tails[number]) / self.unit
                for k in range(self.events + 1):
                    ended = {self.time[k]: 1.0, self.ended[number, place][k]: -least / self.unit}
                    self._row(ended, low=0.0)
                    self._row({self.time[k]: 1.0, started[k]: -heads[number] / self.unit}, low=0.0)
                    if len(activity.options) == 1 and k < self.events:
                        # Not started before event k: all of it is still to come.
                        left = {last: 1.0, self.time[k]: -1.0}
                        if k:
                            left[started[k - 1]] = left.get(started[k - 1], 0.0) + after
                        self._row(left, low=after)
        for group, count in enumerate(self.graph.machine.nodes.values()):
            self._tighten_group(group, count)

    def _tighten_group(self, group: int, count: int) -> None:
        """What has ended by an event fits before it; what has not started, after it."""
        users = {
            number: activity.options[0]
            for number, activity in enumerate(self.graph.activities)
            if len(activity.options) == 1 and activity.options[0].group == group
        }
        for shares in node_shares(count, {user.nodes for user in users.values()}):
            work = {
                n: shares[user.nodes]
                * (user.seconds + self.graph.activities[n].flow_seconds)
                / self.unit
                for n, user in users.items()
            }
            whole = math.fsum(work.values())
            for k in range(1, self.events + 1):
                done = {self.time[k]: 1.0}
                left = {self.time[-1]: 1.0, self.time[k]: -1.0}
                for number, seconds in work.items():
                    ended, started = self.ended[number, 0][k], self.started[number, 0][k - 1]
                    done[ended] = done.get(ended, 0.0) - seconds
                    left[started] = left.get(started, 0.0) + seconds
                self._row(done, low=0.0)
                if k < self.events:
                    self._row(left, low=whole)

    def solve(self, limit_seconds: float) -> Optimum:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        entries = [(r, c, v) for r, (terms, _, _) in enumerate(self.rows) for c, v in terms.items()]
        row, column, value = (np.array(item) for item in zip(*entries, strict=True))
        matrix = csr_array((value, (row, column)), shape=(len(self.rows), len(self.lower)))
        low, high = np.array([r[1] for r in self.rows]), np.array([r[2] for r in self.rows])
        cost = np.zeros(len(self.lower))
        cost[self.time[-1]] = 1.0
        found = milp(
            cost,
            integrality=np.array(self.whole),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": limit_seconds, "mip_rel_gap": 1e-5},
        )
        if found.status == _IMPOSSIBLE:
            # Nothing is as short as what is known, within rounding.
            return Optimum(self.known * self.unit, self.known * self.unit)
        bound = 1.0
        if found.mip_dual_bound is not None and math.isfinite(found.mip_dual_bound):
            bound = max(bound, float(found.mip_dual_bound))
        best = min(self.known, float(found.fun) if found.fun is not None else math.inf)
        return Optimum(best * self.unit, min(bound, best) * self.unit)


_SAME = 1e-9


def problems(schedule: Schedule) -> list[str]:
    """Violations in a schedule, one sentence each; none where it can be carried out.

    Checks the order of edges, the nodes of each group, the capacity of each resource, caps, and
    that every transfer moves all of its bytes.
    """
    graph = schedule.graph
    slack = _SAME * max(schedule.makespan_seconds, 1e-9)
    return [
        *_order_problems(schedule, slack),
        *_node_problems(schedule, slack),
        *_rate_problems(graph, schedule, slack),
    ]


def _order_problems(schedule: Schedule, slack: float) -> Iterable[str]:
    graph = schedule.graph
    for number, activity in enumerate(graph.activities):
        start, end = schedule.starts[number], schedule.ends[number]
        if start < activity.earliest_seconds - slack:
            yield f'"{activity.name}" starts at {start:g} s, before {activity.earliest_seconds:g} s'
        if abs(schedule.work_ends[number] - start - schedule.option(number).seconds) > slack:
            seconds = schedule.option(number).seconds
            yield f'the work of "{activity.name}" does not take its {seconds} s'
        if end < schedule.work_ends[number] - slack:
            yield f'"{activity.name}" ends before its work does'
        for source in graph.before[number]:
            if start < schedule.ends[source] - slack:
                yield f'"{activity.name}" starts before "{graph.activities[source].name}" has ended'


def _node_problems(schedule: Schedule, slack: float) -> Iterable[str]:
    for group, (name, count) in enumerate(schedule.graph.machine.nodes.items()):
        changes: list[tuple[float, int]] = []
        for number in range(len(schedule.starts)):
            option = schedule.option(number)
            if (
                option.group == group
                and schedule.ends[number] - schedule.starts[number] > 2 * slack
            ):
                changes.append((schedule.starts[number] + slack, option.nodes))
                changes.append((schedule.ends[number] - slack, -option.nodes))
        used = 0
        for time, change in sorted(changes):
            used += change
            if used > count:
                yield f'{used} nodes of "{name}" are used at {time:g} s, and it has {count}'
                return


def _rate_problems(graph: Graph, schedule: Schedule, slack: float) -> Iterable[str]:
    capacities = list(graph.machine.bytes_per_s.items())
    changes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number, activity in enumerate(graph.activities):
        if not activity.size_bytes:
            continue
        segments = schedule.rate_of(number)
        yield from _flow_problems(activity, segments, schedule, number, slack)
        for start, end, rate in segments:
            for resource in activity.via:
                changes[resource] += [(start, rate), (end, -rate)]
    for resource, found in changes.items():
        name, capacity = capacities[resource]
        rate = 0.0
        found.sort()
        for (time, change), (until, _) in itertools.pairwise(found):
            rate += change
            if rate > capacity * (1 + 1e-6) and until - time > slack:
                yield f'"{name}" carries {rate:g} bytes/s at {time:g} s, and it has {capacity:g}'
                break


def _flow_problems(
    activity: Activity, segments: Sequence[Segment], schedule: Schedule, number: int, slack: float
) -> Iterable[str]:
    moved = math.fsum((end - start) * rate for start, end, rate in segments)
    rounding = 1e-6 * activity.size_bytes + slack * activity.cap_bytes_per_s
    if abs(moved - activity.size_bytes) > rounding:
        yield f'"{activity.name}" moves {moved:g} of {activity.size_bytes:g} bytes'
    if any(rate > activity.cap_bytes_per_s * (1 + 1e-6) for _, _, rate in segments):
        yield f'"{activity.name}" is faster than its cap of {activity.cap_bytes_per_s:g} bytes/s'
    if segments and (
        segments[0][0] < schedule.work_ends[number] - slack
        or segments[-1][1] > schedule.ends[number] + slack
    ):
        yield f'"{activity.name}" moves bytes when it is not its time'
