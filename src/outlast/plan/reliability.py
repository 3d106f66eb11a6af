"""Fault tolerance of a run: tiers, spares, replicas, guard, pace; and how available its nodes are.

Every number may be an array, one value per candidate: all arrays of one `Reliability` broadcast to
one shape (candidates,). Availability is that of nodes and of replica groups: failure rates, waits
for repair, absent groups.

Nodes in repair are busy servers. A run that needs all its nodes continues while at most `spares`
nodes are in repair and stands still, with no more failures, while there are more. For nodes that
fail alone this is Erlang's loss system with spares + 1 servers, whose blocking probability holds
for any distribution of repair times (Erlang 1917; insensitivity: Sevastyanov 1957). Where several
nodes fail at once, the numbers in repair while the run continues are those of the loss knapsack
(recursion: Kaufman 1981, Roberts 1981), and each wait is approximated by exponential repairs.
Replica groups continue without the missing nodes: then nodes in repair are Poisson.

A failure takes as many groups as its nodes hold: the eight workers of a gradient code on one node,
or the groups of a rack. So absences are independent not of group and group but of unit and unit, a
unit being the groups that one failure takes. Each width of failure has units of its own. A unit is
gone while it is recovering, and before that while it waits for a repair as no spare is left.
All widths take from one stock of spares: what one has in repair the others do without.

Two things are left out. Of widths the widest counts as served first, whoever failed first; and
repairs that continue while all stand still at a failure count by exposed time. Runs that wait most
of the time for enough groups are up to 1.5 points better or worse for it
(benchmarks/plan_coded.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import Array
from outlast.plan.cluster import FailureCause

Number: TypeAlias = float | Array
"""One number, or one for each candidate."""
DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0


def column(value: Number) -> Array:
    """`value` as an array of shape (candidates,) or (1,)."""
    return np.atleast_1d(np.asarray(value, dtype=np.float64))


def require(
    name: str, value: Number, low: float, high: float = np.inf, *, above: bool = False
) -> None:
    """Refuses values that are too small, too large or no finite numbers.

    Raises:
        PlanError: Names the setting, the first wrong value and what would be right.
    """
    values = column(value)
    wrong = ~np.isfinite(values) | (values < low) | (values > high)
    if above:
        wrong |= values == low
    if wrong.any():
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = f" and at most {high:g}" if np.isfinite(high) else ""
        raise PlanError(f"{name} = {values[wrong][0]:g}: give a finite number {least}{most}")


def _require_fields(part: Any, **ranges: tuple[float, float]) -> None:
    """Refuses fields of a dataclass out of their ranges, which begin at 0 where none is named."""
    for field in fields(part):
        if not isinstance(value := getattr(part, field.name), bool):
            require(field.name, value, *ranges.get(field.name, (0.0, np.inf)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One store of checkpoints.

    Attributes:
        name: memory, peer, local or shared, or one of one's own.
        survives_nodes: Most nodes lost at once that it survives: 0 for the memory or disk of the
            node itself, 1 for a peer's memory, infinite for shared storage.
        every: Base intervals from save to save, a multiple of that of the tiers before; 0 where
            the tier is not used.
        blocked_seconds: How long a save stops training.
        write_seconds: From then until the version can be restored; 0 for a synchronous save.
        slowdown: By how much steps are longer during the write; 0.02 is 2 %.
        restore_seconds: To load a version.
        kept: Whether it is the nodes' own memory after so many steps, and no checkpoint.
    """

    name: str
    survives_nodes: float = np.inf
    every: Number = 1
    blocked_seconds: Number = 0.0
    write_seconds: Number = 0.0
    slowdown: Number = 0.0
    restore_seconds: Number = 0.0
    kept: bool = False

    def __post_init__(self) -> None:
        if not self.survives_nodes >= 0.0:
            raise PlanError(
                f"survives_nodes = {self.survives_nodes} of tier {self.name!r}: give at least 0"
            )
        for field in ("every", "blocked_seconds", "write_seconds", "slowdown", "restore_seconds"):
            require(f"{field} of tier {self.name!r}", getattr(self, field), 0.0)
        every = column(self.every)
        if (every != np.floor(every)).any():
            wrong = every[every != np.floor(every)][0]
            raise PlanError(f"every = {wrong:g} of tier {self.name!r}: give a whole number")

    @property
    def latency_seconds(self) -> Array:
        """Running time, at full speed, from the start of the write until it can be restored."""
        return column(self.write_seconds) / (1.0 + column(self.slowdown))

    @property
    def overhead_seconds(self) -> Array:
        """By how much a save lengthens the run."""
        return column(self.blocked_seconds) + self.write_seconds - self.latency_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The recovery after a stop.

    Attributes:
        restart_seconds: To start all processes again, up to the restore.
        replace_seconds: To put a spare in the place of a lost node; a node that comes back from
            repair takes as long.
        spares: Nodes that stand by; without a free one the run waits for a repair.
    """

    restart_seconds: Number = 120.0
    replace_seconds: Number = 0.0
    spares: Number = 0

    def __post_init__(self) -> None:
        _require_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Groups that hold the whole state each, and continue when some of them are gone.

    The same numbers describe a gradient code: its groups are the workers, of which it may lose all
    but `minimum` without a restart.

    Attributes:
        groups: How many there are when all is well; 1 for none.
        minimum: Fewest that may continue.
        step_seconds: A failure costs the step under way, half of one on average.
        regroup_seconds: For which all stand still when a group goes.
        rejoin_seconds: For which all stand still when a group comes back.
        recovery_seconds: To load the state from another group.
        detection_seconds: Until the others act, where that is sooner than a failure's cause says;
            0 for the cause's own.
    """

    groups: Number = 1
    minimum: Number = 1
    step_seconds: Number = 0.0
    regroup_seconds: Number = 0.0
    rejoin_seconds: Number = 0.0
    recovery_seconds: Number = 0.0
    detection_seconds: Number = 0.0

    def __post_init__(self) -> None:
        _require_fields(self, groups=(1.0, np.inf), minimum=(1.0, np.inf))
        if (column(self.minimum) > column(self.groups)).any():
            raise PlanError(
                f"minimum = {self.minimum} replica groups of {self.groups}: give at most as many "
                "as there are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Detection and correction of silent data corruption.

    Attributes:
        coverage: Share of silent errors that the guard finds.
        overhead: Share of a step's time that it adds.
        latency_seconds: Work thrown away from the error to the alarm.
        correction_seconds: To put it right in place.
        rolls_back: Found errors are answered by a restart from a checkpoint and not in place.
        false_alarms_per_day: Of the whole run.
        alarm_seconds: That one costs.
        noticed: Share of the errors the guard does not find that people notice later.
        noticed_hours: How much later, in wall time.
    """

    coverage: Number = 0.0
    overhead: Number = 0.0
    latency_seconds: Number = 0.0
    correction_seconds: Number = 0.0
    rolls_back: bool = False
    false_alarms_per_day: Number = 0.0
    alarm_seconds: Number = 0.0
    noticed: Number = 0.0
    noticed_hours: Number = 48.0

    def __post_init__(self) -> None:
        _require_fields(self, coverage=(0.0, 1.0), noticed=(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """By how much steps are longer than those of equal, punctual workers.

    Attributes:
        straggler_factor: Mean step that waits for the slowest worker, to one without stragglers.
        coding_ratio: Mean step of the gradient code to the one that waits, its own overhead left
            out; 1 without a code.
        coding_overhead: Share of a step that the code adds when nobody straggles.
    """

    straggler_factor: Number = 1.0
    coding_ratio: Number = 1.0
    coding_overhead: Number = 0.0

    def __post_init__(self) -> None:
        _require_fields(self, straggler_factor=(1.0, np.inf))

    @property
    def straggling(self) -> Array:
        """Factor on a step that stragglers leave, with the code."""
        return np.maximum(1.0, column(self.straggler_factor) * self.coding_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """A run, what may befall it, and what it does about that.

    Attributes:
        nodes: That the run uses, spares not counted.
        causes: Why nodes stop; none for a run that nothing befalls.
        interval_seconds: Running time between two saves of the tier that saves most often, the
            saves themselves not counted.
        tiers: From the cheapest to the safest. The last one is always used and survives all. A
            failure is answered with the newest version that is left; of equal ones with that of the
            tier listed first.
        restart: The recovery.
        replicas: Groups that continue without each other.
        guard: Against wrong values.
        pace: Stragglers and gradient codes.
        days_from_new: Days from the first use of all nodes over which failures with a Weibull
            shape are averaged; infinite for a cluster so old that their mean rate holds.
    """

    nodes: Number
    causes: tuple[FailureCause, ...]
    interval_seconds: Number
    tiers: tuple[Tier, ...]
    restart: Restart = Restart()
    replicas: Replicas = Replicas()
    guard: Guard = Guard()
    pace: Pace = Pace()
    days_from_new: float = np.inf

    def __post_init__(self) -> None:
        sizes: dict[int, str] = {}
        for name, size in self.sizes():
            sizes.setdefault(size, name)
        if len(sizes) > 1:
            (size, name), (other, second) = sorted(sizes.items())[:2]
            raise PlanError(
                f"{name} and {second} have {size} and {other} values: give one value for each "
                "candidate, or one for all"
            )
        require("nodes", self.nodes, 1.0)
        if not self.days_from_new > 0.0:
            raise PlanError(f"days_from_new = {self.days_from_new}: give more than 0")
        require("interval_seconds", self.interval_seconds, 0.0, above=True)
        if not self.tiers:
            raise PlanError("tiers = none: give at least one store of checkpoints")
        self._require_order()
        for tier in self.tiers:
            between = column(tier.every) * self.interval_seconds
            late = (tier.latency_seconds > between * (1.0 + 1e-9)) & (between > 0.0)
            if late.any():
                seconds = np.broadcast_to(between, late.shape)[late][0]
                raise PlanError(
                    f"write_seconds of tier {tier.name!r}: a version is not durable before the "
                    f"next save, {seconds:g} s later; save it less often"
                )
        last = self.tiers[-1]
        for cause in self.causes:
            if last.survives_nodes < lost_nodes(cause):
                raise PlanError(
                    f"survives_nodes = {last.survives_nodes:g} of the last tier {last.name!r}: "
                    f"nothing is left after {cause.name!r}, which takes {lost_nodes(cause)} "
                    "nodes; add a tier on shared storage"
                )

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and number of values of each setting that has other than one."""
        parts: tuple[Any, ...] = (self, self.restart, self.replicas, self.guard, self.pace)
        for part in (*parts, *self.tiers):
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, np.ndarray) and value.size != 1:
                    yield field.name, value.size

    def _require_order(self) -> None:
        """Tiers are nested: each later one survives more and is saved at some of the same times."""
        before = np.zeros(1)
        for index, tier in enumerate(self.tiers):
            every = column(tier.every)
            if index and tier.survives_nodes < self.tiers[index - 1].survives_nodes:
                raise PlanError(
                    f"tiers: {tier.name!r} survives less than {self.tiers[index - 1].name!r} "
                    "before it; list them from the cheapest to the safest"
                )
            rest = np.mod(every, np.maximum(before, 1.0))
            if (rest != 0.0).any():
                wrong = np.broadcast_to(every, rest.shape)[rest != 0.0][0]
                raise PlanError(
                    f"every = {wrong:g} of tier {tier.name!r} is no multiple of the tier before"
                )
            before = np.where(every > 0.0, every, before)
        if (column(self.tiers[-1].every) < 1.0).any():
            raise PlanError(f"every = 0 of the last tier {self.tiers[-1].name!r}: give at least 1")


def lost_nodes(cause: FailureCause) -> int:
    """Nodes whose memory and disk are gone: none where a restart is enough."""
    return cause.nodes_hit if cause.repair_hours > 0.0 and not cause.silent else 0


SMALLEST_RATE = 1e-30
RENEWAL_STEPS = 400


def summed(values: Iterable[Array]) -> Array:
    """Their sum, (candidates,) or (1,); 0 of none."""
    return sum(values, np.zeros(1))


def rate_of(settings: Reliability, cause: FailureCause, nodes: Array) -> Array:
    """Failures of the whole run per second."""
    if cause.per_node_day == 0.0:
        return np.zeros(1)
    early = early_factor(cause.shape, 1.0 / cause.per_node_day, settings.days_from_new)
    return cause.per_day(nodes) * (early / DAY_SECONDS)


@lru_cache(maxsize=256)
def early_factor(shape: float, mean_days: float, days: float) -> float:
    """Mean failures of a new node in its first days to those of an old one in as many.

    M(t) / (t / mean), where M solves the renewal equation of Weibull times,
    `M(t) = F(t) + integral of M(t - x) dF(x)` (Cox 1962, Renewal Theory, eq. 4.2.6), by steps.

    Args:
        shape: Of the Weibull distribution; 1 gives 1.
        mean_days: Between failures.
        days: How many; infinite gives 1.
    """
    if shape == 1.0 or not math.isfinite(days) or not math.isfinite(mean_days):
        return 1.0
    # Beyond many means the nodes are old for most of the time, and M(t) = t / m + constant.
    span = min(days / mean_days, 50.0)
    times = np.linspace(0.0, span, RENEWAL_STEPS + 1)
    spread = -np.expm1(-((times * math.gamma(1.0 + 1.0 / shape)) ** shape))
    part = np.diff(spread)
    renewals = np.zeros_like(times)
    for step in range(1, times.size):
        # Half-way values of M keep the error at the second order of the step.
        middle = (renewals[1:step] + renewals[: step - 1]) / 2.0
        known = spread[step] + float(part[1:step] @ middle[::-1])
        known += part[0] * renewals[step - 1] / 2.0
        renewals[step] = known / (1.0 - part[0] / 2.0)
    beyond = days / mean_days - span
    return float((renewals[-1] + beyond) / (days / mean_days))


def groups_hit(settings: Reliability, nodes: Array, nodes_hit: int) -> Array:
    """Replica groups that one failure takes."""
    groups = column(settings.replicas.groups)
    return np.maximum(1.0, np.ceil(nodes_hit * groups / nodes - 1e-9))


def batches_of(settings: Reliability, nodes: Array, slow: Array) -> list[Batch]:
    """Nodes that go to repair, `slow` times as rarely per wall time as per exposed time."""
    return [
        Batch(
            lost_nodes(cause),
            rate_of(settings, cause, nodes) / slow,
            cause.repair_hours * HOUR_SECONDS,
        )
        for cause in settings.causes
        if lost_nodes(cause) and cause.per_node_day > 0.0
    ]


SMALLEST_LOAD = 1e-12
MOST_SPARES = 4096
"""With correlated failures, whose recursion takes a pass for each spare."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Nodes that fail and are repaired together.

    Attributes:
        nodes: How many.
        per_second: Failures per second, (candidates,) or (1,).
        repair_seconds: Mean.
    """

    nodes: int
    per_second: Array
    repair_seconds: float

    @property
    def load(self) -> Array:
        """Mean batches in repair, were there enough spares."""
        return self.per_second * self.repair_seconds


def waited(batches: Sequence[Batch], spares: Array) -> Array:
    """Seconds without enough nodes per second with enough.

    Args:
        batches: All that can fail, per second in which the run has its nodes.
        spares: (candidates,) or (1,).

    Raises:
        PlanError: Correlated failures with more spares than can be counted one by one.
    """
    if not batches:
        return np.zeros(1)
    if all(batch.nodes == 1 for batch in batches):
        load = summed(batch.load for batch in batches)
        blocked = _blocked_share(spares + 1.0, load)
        return blocked / np.maximum(1.0 - blocked, 1e-12)
    if float(spares.max()) > MOST_SPARES:
        raise PlanError(
            f"spares = {spares.max():g} with failures of several nodes at once: give at most "
            f"{MOST_SPARES}"
        )
    return _knapsack(batches, np.floor(spares))


def _blocked_share(servers: Array, load: Array) -> Array:
    """Erlang's loss formula: share of time in which all servers are busy."""
    from scipy.special import gammaincc, gammaln

    offered = np.maximum(load, SMALLEST_LOAD)
    logarithm = servers * np.log(offered) - offered - gammaln(servers + 1.0)
    # B = (x^N e^-x / N!) / Q(N + 1, x), which equals the usual sum.
    upper = gammaincc(servers + 1.0, offered)
    blocked = np.exp(np.minimum(logarithm - np.log(np.maximum(upper, 1e-300)), 0.0))
    # Far beyond capacity the integral underflows; there B is 1 - N / x.
    heavy = upper < 1e-250
    blocked = np.where(heavy, 1.0 - servers / np.maximum(offered, servers), blocked)
    return np.where(load > 0.0, blocked, 0.0)


def _knapsack(batches: Sequence[Batch], spares: Array) -> Array:
    """As `waited`, for batches of several sizes."""
    most, widest = int(spares.max()), max(batch.nodes for batch in batches)
    # k q(k) = sum of a_i h_i q(k - h_i); the oldest entries are no longer needed.
    recent: list[Array] = []
    running, waiting = np.zeros(1), np.zeros(1)
    for busy in range(most + 1):
        before = [
            recent[-batch.nodes] if batch.nodes <= len(recent) else np.zeros(1) for batch in batches
        ]
        weight = np.ones(1)
        if busy:
            pairs = zip(batches, before, strict=True)
            weight = summed(b.load * b.nodes * q for b, q in pairs) / busy
        inside = np.where(busy <= spares, weight, 0.0)
        running = running + inside
        if (busy + widest > spares).any():
            # When so many nodes are in repair, a_j q(k - h_j) / q(k) batches of cause j are.
            safe = np.maximum(weight, 1e-300)
            returns = [b.per_second * q / safe for b, q in zip(batches, before, strict=True)]
            number = summed(
                rate * batch.repair_seconds for rate, batch in zip(returns, batches, strict=True)
            )
            for batch in batches:
                over = busy + batch.nodes - spares
                if (over > 0.0).any():
                    wait = _wait(batch, float(busy), over, number, summed(returns))
                    waiting = waiting + np.where(over > 0.0, inside * batch.per_second * wait, 0.0)
        recent = [*recent, weight][-widest:]
        # Only ratios count: keeps large loads from overflowing.
        large = np.where(running > 1e100, 1e-100, 1.0)
        if (large < 1.0).any():
            running, waiting = running * large, waiting * large
            recent = [array * large for array in recent]
    return waiting / running


def _wait(batch: Batch, busy: float, over: Array, number: Array, per_second: Array) -> Array:
    """Mean seconds until `over` nodes are back after a batch failed with `busy` in repair.

    The batch itself comes back, or enough of the others, whichever is first.

    Args:
        batch: That failed.
        busy: Nodes in repair before.
        over: (candidates,) or (1,) nodes without which the run waits.
        number: Mean batches in repair before, likewise.
        per_second: Their returns, likewise.
    """
    number = np.maximum(number, SMALLEST_LOAD)
    needed = np.ceil(over * number / max(busy, 1.0) - 1e-9)
    # The sum of 1 / n from all others down to those left, as logarithms of half-way points.
    last = np.maximum(number - needed, 0.0)
    one = 1.0 / np.maximum(per_second, 1e-300)
    more = number * one * np.log((number + 0.5) / (last + 0.5))
    seconds = np.where(needed <= 1.0, one, more)
    possible = (over <= busy) & (seconds > 0.0)
    sooner = np.where(possible, 1.0 / np.where(possible, seconds, 1.0), 0.0)
    return 1.0 / (1.0 / batch.repair_seconds + sooner)


def missing_nodes(spares: Array, load: Array, peakedness: Array) -> Array:
    """Mean nodes in repair beyond the spares, where the run continues without them.

    E max(0, X - S) for Poisson X: `load P(X >= S) - S P(X >= S + 1)`, in units of the peakedness
    where several nodes fail at once (Hayward; Fredericks 1980, Bell System Technical Journal
    59(6)).

    Args:
        spares: (candidates,) or (1,), as all.
        load: Mean nodes in repair.
        peakedness: Variance of that number over its mean; 1 for nodes that fail alone.
    """
    from scipy.special import gammainc

    offered = np.maximum(load / peakedness, SMALLEST_LOAD)
    stock = spares / peakedness
    at_least = np.where(stock > 0.0, gammainc(np.maximum(stock, 1e-9), offered), 1.0)
    beyond = offered * at_least - stock * gammainc(stock + 1.0, offered)
    return np.where(load > 0.0, np.maximum(beyond, 0.0) * peakedness, 0.0)


NEGLIGIBLE = 1e-13


@dataclass(frozen=True, slots=True)
class GroupLosses:
    """Groups that failures of one cause take, all arrays (candidates,) or (1,).

    Attributes:
        nodes_hit: Nodes of one failure.
        hit: Groups of one failure.
        rate: Failures per exposed second.
        absent: Mean groups that are recovering.
        repairs: Mean failures whose nodes are in repair, were all groups up.
    """

    nodes_hit: int
    hit: Array
    rate: Array
    absent: Array
    repairs: Array


@dataclass(frozen=True, slots=True)
class ConcurrentFailures:
    """Groups that fail together, all arrays (candidates,) or (1,).

    Attributes:
        nodes: Nodes of each.
        number: How many units there are.
        hit: Groups of each.
        rate: Failures of all of them.
        down: Time in which one is recovering, over time in which it is up.
        short: Time in which one waits for a repair, over time in which it is up.
        repairs: Mean units in repair, were all up.
    """

    nodes: int
    number: Array
    hit: Array
    rate: Array
    down: Array
    short: Array
    repairs: Array

    def states(self, spares: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Units that may be in repair, beside a unit that is up.

        Args:
            spares: (candidates,) or (1,) nodes that stand by.

        Yields:
            Of 0, 1, ... units in repair: the probability, units that wait, and spares that are
            left, each (candidates,) or (1,).
        """
        total = np.full(1, -np.inf)
        for weight, _, _ in self._weights(spares):
            total = np.logaddexp(total, weight)
        for weight, waiting, left in self._weights(spares):
            yield np.exp(weight - total), waiting, left

    def _weights(self, spares: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Of a birth and death process: machine repair with spares (Feller 1968, 1, XVII.7).

        Units in repair n have the weights `w(n + 1) = w(n) load up / (n + 1)`, up being the share
        of the units that do not wait. As logarithms, since loads may be large.
        """
        weight, total, count = np.zeros(1), np.full(1, -np.inf), 0
        while True:
            taken = float(count * self.nodes)
            waiting = np.ceil(np.maximum(taken - spares, 0.0) / self.nodes - 1e-9)
            up = np.maximum(1.0 - waiting / self.number, 0.0)
            with np.errstate(divide="ignore"):
                # A certain unit is up with the share `up` of such times.
                here = weight + np.log(up)
                growth = np.log(self.repairs * up / (count + 1))
            yield here, waiting, np.maximum(spares - taken, 0.0)
            total = np.logaddexp(total, here)
            weight, count = weight + growth, count + 1
            if not ((growth > 0.0) | (weight > total + np.log(NEGLIGIBLE))).any():
                return

    def back(self, absent: Array) -> Array:
        """Probability that no more than `absent` are recovering, beside one that is up.

        Binomial, for whole and other numbers of units (Abramowitz and Stegun 26.5.24).
        """
        from scipy.special import betainc

        left = np.maximum(self.number - 1.0, 0.0) - absent
        there = 1.0 / (1.0 + self.down)
        inside = betainc(np.maximum(left, 1e-9), absent + 1.0, there)
        return np.asarray(np.where(left <= 0.0, 1.0, inside))


def concurrent_failures(
    taken: Sequence[GroupLosses], groups: Array, waiting: Array
) -> list[ConcurrentFailures]:
    """The kinds of units, from the widest to the narrowest.

    Args:
        taken: What each cause takes.
        groups: All.
        waiting: Share of the groups for each one in repair that waits for a repair.
    """
    found: list[ConcurrentFailures] = []
    for number in sorted({cause.nodes_hit for cause in taken}, reverse=True):
        same = [cause for cause in taken if cause.nodes_hit == number]
        hit = np.minimum(same[0].hit, groups)
        kind = ConcurrentFailures(
            number,
            groups / hit,
            hit,
            summed(cause.rate for cause in same),
            summed(cause.absent / groups for cause in same),
            summed(cause.repairs * cause.hit * waiting for cause in same),
            summed(cause.repairs for cause in same),
        )
        if found:
            # Racks may take no more groups than nodes do; then their units are the same, and all
            # that befalls the wide ones befalls the narrow ones.
            equal, wide = found[-1].hit == hit, found[-1]
            found[-1] = replace(
                wide,
                rate=np.where(equal, 0.0, wide.rate),
                down=np.where(equal, 0.0, wide.down),
                short=np.where(equal, 0.0, wide.short),
            )
            kind = replace(
                kind,
                rate=kind.rate + np.where(equal, wide.rate, 0.0),
                down=kind.down + np.where(equal, wide.down, 0.0),
                short=kind.short + np.where(equal, wide.short, 0.0),
            )
        found.append(kind)
    return found


def last_ones(units: Sequence[ConcurrentFailures], absent: Array, groups: Array) -> list[Array]:
    """Probability that a failure of each kind of units takes all groups that are up.

    All other groups are gone one by one, or all other units of the same kind are, whichever is more
    likely. Some group is always up: when the last one goes, the run restarts with all of them. So
    of n that are gone with probability q each, the probability that a certain one is the last is
    `(1 - q) q^(n - 1) / (1 - q^n)`, which rises with q to 1 / n.

    Args:
        units: From the widest to the narrowest.
        absent: Share of the time in which a group is gone.
        groups: All.
    """
    alone = _last_of(groups, absent)
    found: list[Array] = []
    for index, unit in reversed(list(enumerate(units))):
        gone = (unit.down + unit.short) / (1.0 + unit.down + unit.short)
        chance = np.maximum(alone, _last_of(unit.number, gone))
        if found:
            # Racks may take no more groups than nodes do; then their units are the same.
            chance = np.where(unit.hit == units[index + 1].hit, found[-1], chance)
        found.append(chance)
    return found[::-1]


def _last_of(number: Array, gone: Array) -> Array:
    """Probability that a certain one is up and all others are gone, if any is up."""
    rest = np.maximum(number - 1.0, 0.0)
    others = np.exp(rest * np.log(np.maximum(gone, SMALLEST_RATE)))
    found: Array = (1.0 - gone) * others / np.maximum(1.0 - gone * others, SMALLEST_RATE)
    return np.minimum(found, 1.0)


def outlasted(units: Sequence[ConcurrentFailures], absent: Array, spares: Array) -> Array:
    """Probability that at most `absent` groups are gone, beside one that is up.

    Kinds of units fail independently of each other, and share the spares: the widest first, so that
    the sum goes over those which are fewest.

    Args:
        units: From the widest to the narrowest.
        absent: (candidates,) or (1,) groups.
        spares: (candidates,) or (1,) nodes that stand by.
    """
    first, *rest = units
    most = np.floor(absent / first.hit + 1e-9)
    allowed, total = int(most.max()), np.zeros(1)
    if not rest:
        table = [first.back(np.maximum(most - waiting, 0.0)) for waiting in range(allowed + 1)]
        for chance, waiting, _ in first.states(np.floor(spares)):
            inside = np.zeros(1)
            for number in np.unique(waiting[waiting <= allowed]):
                inside = np.where(waiting == number, table[int(number)], inside)
            total = total + np.where(waiting <= most, chance * inside, 0.0)
        return total
    for chance, waiting, left in first.states(np.floor(spares)):
        here = (waiting <= most) & (chance > NEGLIGIBLE)
        if not here.any():
            continue
        # So many units of the widest kind wait, so many spares are left, and 0, 1, ... more units
        # are recovering.
        more = np.maximum(most - waiting, 0.0)
        inside, before = np.zeros(1), np.zeros(1)
        for count in range(int(more.max()) + 1):
            reached = first.back(np.minimum(float(count), more))
            others = np.maximum(absent - (waiting + count) * first.hit, 0.0)
            inside = inside + (reached - before) * outlasted(rest, others, left)
            before = reached
            if (reached > 1.0 - NEGLIGIBLE).all():
                break
        total = total + np.where(here, chance * inside, 0.0)
    return total


@dataclass(frozen=True, slots=True)
class ReplicaAvailability:
    """Effect of replica groups on the run; all rates are per second of exposed time.

    Attributes:
        present: Share of the groups that are up.
        up: Share of the work that gets done: with fewer than the minimum there is none.
        pauses: Seconds for which all stand still.
        last: Of failures by their nodes, the share that takes the last group that is up.
        loss: Seconds that one failure costs.
        rate: Failures when all groups are up.
    """

    present: Array
    up: Array
    pauses: Array
    last: Mapping[int, Array]
    loss: Array
    rate: Array


def replica_availability(settings: Reliability, nodes: Array) -> ReplicaAvailability:
    """Units of replica groups are up and down independently of each other."""
    replicas, back = settings.replicas, settings.restart
    groups, own = column(replicas.groups), column(replicas.detection_seconds)
    pauses = watched = np.zeros(1)
    taken: list[GroupLosses] = []
    for cause in settings.causes:
        if cause.silent:
            continue
        hit = groups_hit(settings, nodes, cause.nodes_hit)
        soft = (groups > 1.0) & (hit < groups)
        rate = np.where(soft, rate_of(settings, cause, nodes), 0.0)
        lost = lost_nodes(cause) > 0
        replaced = column(back.replace_seconds) if lost else 0.0
        away = column(back.restart_seconds) + replaced + column(replicas.recovery_seconds)
        # Until the other groups act.
        seen = cause.detection_seconds
        noticed = np.where(own > 0.0, np.minimum(own, seen), seen)
        regrouped = noticed + column(replicas.regroup_seconds) + column(replicas.rejoin_seconds)
        pause = regrouped + column(replicas.step_seconds) / 2.0
        pauses, watched = pauses + rate * pause, watched + rate * noticed
        repair = rate * (cause.repair_hours if lost else 0.0) * HOUR_SECONDS
        taken.append(GroupLosses(cause.nodes_hit, hit, rate, rate * hit * away, repair))
    rate = summed(cause.rate for cause in taken)
    if not (rate > 0.0).any():
        zero = np.zeros(1)
        return ReplicaAvailability(np.ones(1), np.ones(1), zero, {}, zero, zero)
    down = summed(cause.absent for cause in taken)
    repairs = summed(cause.repairs * cause.hit for cause in taken)
    short = _short_groups(settings, nodes)
    absent = (down + short) / groups
    # Who waits for a repair is one of those in repair.
    part = short / np.maximum(repairs, SMALLEST_RATE) / groups
    units = concurrent_failures(taken, groups, part)
    seldom = 1.0 / (1.0 + absent)
    chances = last_ones(units, 1.0 - seldom, groups)
    last = {unit.nodes: chance for unit, chance in zip(units, chances, strict=True)}
    stops = summed(cause.rate * last[cause.nodes_hit] for cause in taken)
    # While all stand still, groups come back without loss of work: absence is shorter by `slow`,
    # wall time over exposed time, where slow = still + pauses up and up = slow / (slow + absent).
    still = 1.0 + stops * watched / np.maximum(rate, SMALLEST_RATE)
    half = (still + pauses - absent) / 2.0
    slow = half + np.sqrt(half**2 + still * absent)
    up = slow / (slow + absent)
    # E[K; K >= m] of K groups up is G a P(at most G - m absent), given that a certain one is up.
    fewest = column(replicas.minimum)
    enough = np.ones(1)
    if (fewest > 1.0).any():
        spare = np.where(fewest > 1.0, groups - fewest, 0.0)
        enough = np.where(fewest > 1.0, outlasted(units, spare, column(back.spares)), 1.0)
    # A failure costs the absence, the pause, and the time in which too few groups are left.
    loss = (absent + pauses + 1.0 - enough) / np.maximum(rate, SMALLEST_RATE)
    return ReplicaAvailability(up, up * enough, pauses * up, last, loss, rate)


def _short_groups(settings: Reliability, nodes: Array) -> Array:
    """Mean replica groups that wait for a repair because no spare is left."""
    batches = batches_of(settings, nodes, np.ones(1))
    groups = column(settings.replicas.groups)
    load = summed(batch.load * batch.nodes for batch in batches)
    square = summed(batch.load * batch.nodes**2 for batch in batches)
    hit = sum(
        (batch.load * groups_hit(settings, nodes, batch.nodes) for batch in batches), groups * 0
    )
    peaked = np.maximum(1.0, square / np.maximum(load, SMALLEST_RATE))
    missing = missing_nodes(column(settings.restart.spares), np.where(groups > 1, load, 0), peaked)
    return missing * hit / np.maximum(load, SMALLEST_RATE)
