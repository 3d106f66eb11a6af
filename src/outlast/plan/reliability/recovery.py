"""Settings of fault tolerance: tiers, spares, replicas, guard, pace; waits for spares.

Every number may be an array, one value per candidate: all arrays of one `Reliability` broadcast to
one shape (candidates,). The simulator reads the same settings with one number each.

Nodes in repair are busy servers. A run that needs all its nodes goes on while at most `spares`
nodes are in repair and stands still, with no more failures, while there are more. For nodes that
fail alone this is Erlang's loss system with spares + 1 servers, whose blocking probability holds
for any distribution of repair times (Erlang 1917; insensitivity: Sevastyanov 1957). Where several
nodes fail at once, the numbers in repair while the run goes on are those of the loss knapsack
(recursion: Kaufman 1981, Roberts 1981), and each wait is approximated by exponential repairs.
Replica groups go on without the missing nodes: then nodes in repair are Poisson.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    """The way back after a stop.

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
        for field in fields(self):
            require(field.name, getattr(self, field.name), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Groups that hold the whole state each, and go on when some of them are gone.

    The same numbers describe a gradient code: its groups are the workers, of which it may lose all
    but `minimum` without a restart.

    Attributes:
        groups: How many there are when all is well; 1 for none.
        minimum: Fewest that may go on.
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
        for field in fields(self):
            least = 1.0 if field.name in ("groups", "minimum") else 0.0
            require(field.name, getattr(self, field.name), least)
        if (column(self.minimum) > column(self.groups)).any():
            raise PlanError(
                f"minimum = {self.minimum} replica groups of {self.groups}: give at most as many "
                "as there are"
            )

    def noticed_seconds(self, cause: FailureCause) -> Array:
        """From a failure of this cause until the other groups act."""
        own = column(self.detection_seconds)
        return np.where(
            own > 0.0, np.minimum(own, cause.detection_seconds), cause.detection_seconds
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
        for field in fields(self):
            if field.name != "rolls_back":
                high = 1.0 if field.name in ("coverage", "noticed") else np.inf
                require(field.name, getattr(self, field.name), 0.0, high)


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
        require("straggler_factor", self.straggler_factor, 1.0)
        require("coding_ratio", self.coding_ratio, 0.0)
        require("coding_overhead", self.coding_overhead, 0.0)

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
        restart: The way back.
        replicas: Groups that go on without each other.
        guard: Against wrong numbers.
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
        self._require_one_shape()
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

    def _require_one_shape(self) -> None:
        parts: tuple[Any, ...] = (self, self.restart, self.replicas, self.guard, self.pace)
        sizes: dict[int, str] = {}
        for part in (*parts, *self.tiers):
            for name in part.__slots__:
                value = getattr(part, name)
                if isinstance(value, np.ndarray) and value.size != 1:
                    sizes.setdefault(value.size, name)
        if len(sizes) > 1:
            (size, name), (other, second) = sorted(sizes.items())[:2]
            raise PlanError(
                f"{name} and {second} have {size} and {other} values: give one value for each "
                "candidate, or one for all"
            )

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
        load = sum((batch.load for batch in batches), np.zeros(1))
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
            weight = sum((b.load * b.nodes * q for b, q in pairs), np.zeros(1)) / busy
        inside = np.where(busy <= spares, weight, 0.0)
        running = running + inside
        if (busy + widest > spares).any():
            others = _Others.of(batches, before, weight)
            for batch in batches:
                over = busy + batch.nodes - spares
                if (over > 0.0).any():
                    wait = _wait(batch, float(busy), over, others)
                    waiting = waiting + np.where(over > 0.0, inside * batch.per_second * wait, 0.0)
        recent = [*recent, weight][-widest:]
        # Only ratios count: keeps large loads from overflowing.
        large = np.where(running > 1e100, 1e-100, 1.0)
        if (large < 1.0).any():
            running, waiting = running * large, waiting * large
            recent = [array * large for array in recent]
    return waiting / running


@dataclass(frozen=True, slots=True)
class _Others:
    """Batches in repair when so many nodes are: their mean number and their returns per second.

    Of cause j there are `a_j q(k - h_j) / q(k)` on average.
    """

    number: Array
    per_second: Array

    @classmethod
    def of(cls, batches: Sequence[Batch], before: Sequence[Array], weight: Array) -> _Others:
        safe = np.maximum(weight, 1e-300)
        number = per_second = np.zeros(1)
        for batch, item in zip(batches, before, strict=True):
            returns = batch.per_second * item / safe
            number = number + returns * batch.repair_seconds
            per_second = per_second + returns
        return cls(number, per_second)


def _wait(batch: Batch, busy: float, over: Array, others: _Others) -> Array:
    """Mean seconds until `over` nodes are back after a batch failed with `busy` in repair.

    The batch itself comes back, or enough of the others, whichever is first.
    """
    number = np.maximum(others.number, SMALLEST_LOAD)
    needed = np.ceil(over * number / max(busy, 1.0) - 1e-9)
    # The sum of 1 / n from all others down to those left, as logarithms of half-way points.
    last = np.maximum(number - needed, 0.0)
    one = 1.0 / np.maximum(others.per_second, 1e-300)
    more = number * one * np.log((number + 0.5) / (last + 0.5))
    seconds = np.where(needed <= 1.0, one, more)
    possible = (over <= busy) & (seconds > 0.0)
    sooner = np.where(possible, 1.0 / np.where(possible, seconds, 1.0), 0.0)
    return 1.0 / (1.0 / batch.repair_seconds + sooner)


def missing_nodes(spares: Array, load: Array, peakedness: Array) -> Array:
    """Mean nodes in repair beyond the spares, where the run goes on without them.

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
