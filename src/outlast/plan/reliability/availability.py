"""Replica availability: how many groups are absent at once, and what that costs a run.

A failure takes as many groups as its nodes hold: the eight workers of a gradient code on one node,
or the groups of a rack. So absences are independent not of group and group but of unit and unit, a
unit being the groups that one failure takes. Each width of failure has units of its own. A unit is
gone while it is on its way back, and before that while it waits for a repair as no spare is left.
All widths take from one stock of spares: what one has in repair the others do without.

Two things are left out. Of widths the widest counts as served first, whoever failed first; and
repairs that go on while all stand still at a failure count by exposed time. Runs that wait most of
the time for enough groups are up to 1.5 points better or worse for it (benchmarks/plan_coded.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.plan.batch import Array
from outlast.plan.reliability.failure_rates import SMALLEST_RATE, batches_of, groups_hit, rate_of
from outlast.plan.reliability.recovery import (
    HOUR_SECONDS,
    Reliability,
    column,
    lost_nodes,
    missing_nodes,
)

NEGLIGIBLE = 1e-13


@dataclass(frozen=True, slots=True)
class GroupLosses:
    """Units that failures of one cause take, all arrays (candidates,) or (1,).

    Attributes:
        nodes_hit: Nodes of one failure.
        hit: Groups of one failure.
        rate: Failures per exposed second.
        down: Mean groups that are on their way back, over those that are up.
        short: Mean groups that wait for a repair, over those that are up.
        repairs: Mean failures whose nodes are in repair, were all up.
    """

    nodes_hit: int
    hit: Array
    rate: Array
    down: Array
    short: Array
    repairs: Array


@dataclass(frozen=True, slots=True)
class ConcurrentFailures:
    """Groups that fail together, all arrays (candidates,) or (1,).

    Attributes:
        nodes: Nodes of each.
        number: How many units there are.
        hit: Groups of each.
        rate: Failures of all of them.
        down: Time in which one is on its way back, over time in which it is up.
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
        """Probability that no more than `absent` are on their way back, beside one that is up.

        Binomial, for whole and other numbers of units (Abramowitz and Stegun 26.5.24).
        """
        from scipy.special import betainc

        left = np.maximum(self.number - 1.0, 0.0) - absent
        there = 1.0 / (1.0 + self.down)
        inside = betainc(np.maximum(left, 1e-9), absent + 1.0, there)
        found: Array = np.where(left <= 0.0, 1.0, inside)
        return found


def concurrent_failures(taken: Sequence[GroupLosses], groups: Array) -> list[ConcurrentFailures]:
    """The kinds of units, from the widest to the narrowest.

    Args:
        taken: What each cause takes.
        groups: All.
    """
    found: list[ConcurrentFailures] = []
    for number in sorted({cause.nodes_hit for cause in taken}, reverse=True):
        same = [cause for cause in taken if cause.nodes_hit == number]
        hit = np.minimum(same[0].hit, groups)
        kind = ConcurrentFailures(
            number,
            groups / hit,
            hit,
            sum((cause.rate for cause in same), np.zeros(1)),
            sum((cause.down for cause in same), np.zeros(1)),
            sum((cause.short for cause in same), np.zeros(1)),
            sum((cause.repairs for cause in same), np.zeros(1)),
        )
        if found:
            # Racks may take no more groups than nodes do; then their units are the same.
            found[-1], kind = _merged(found[-1], kind, found[-1].hit == hit)
        found.append(kind)
    return found


def _merged(
    wide: ConcurrentFailures, narrow: ConcurrentFailures, equal: np.ndarray
) -> tuple[ConcurrentFailures, ConcurrentFailures]:
    """All that befalls wide units befalls the narrow ones where they are as wide."""

    def moved(before: Array, after: Array) -> tuple[Array, Array]:
        return np.where(equal, 0.0, before), after + np.where(equal, before, 0.0)

    rates = moved(wide.rate, narrow.rate)
    downs = moved(wide.down, narrow.down)
    shorts = moved(wide.short, narrow.short)
    return (
        replace(wide, rate=rates[0], down=downs[0], short=shorts[0]),
        replace(narrow, rate=rates[1], down=downs[1], short=shorts[1]),
    )


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
    total = np.zeros(1)
    if not rest:
        allowed = int(most.max())
        table = [first.back(np.maximum(most - waiting, 0.0)) for waiting in range(allowed + 1)]
        for chance, waiting, _ in first.states(np.floor(spares)):
            inside = np.zeros(1)
            for number in np.unique(waiting[waiting <= allowed]):
                inside = np.where(waiting == number, table[int(number)], inside)
            total = total + np.where(waiting <= most, chance * inside, 0.0)
        return total
    for chance, waiting, left in first.states(np.floor(spares)):
        here = (waiting <= most) & (chance > NEGLIGIBLE)
        if here.any():
            inside = _with_the_rest(first, rest, absent, waiting, left)
            total = total + np.where(here, chance * inside, 0.0)
    return total


def _with_the_rest(
    first: ConcurrentFailures,
    rest: Sequence[ConcurrentFailures],
    absent: Array,
    waiting: Array,
    left: Array,
) -> Array:
    """As `outlasted`, where so many units of the widest kind wait and so many spares are left."""
    most = np.maximum(np.floor(absent / first.hit + 1e-9) - waiting, 0.0)
    total, before = np.zeros(1), np.zeros(1)
    for count in range(int(most.max()) + 1):
        reached = first.back(np.minimum(float(count), most))
        others = np.maximum(absent - (waiting + count) * first.hit, 0.0)
        total = total + (reached - before) * outlasted(rest, others, left)
        before = reached
        if (reached > 1.0 - NEGLIGIBLE).all():
            break
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
    groups = column(replicas.groups)
    pauses = rate = watched = down = repairs = np.zeros(1)
    taken: list[tuple[int, Array, Array, Array, Array]] = []
    for cause in settings.causes:
        if cause.silent:
            continue
        hit = groups_hit(settings, nodes, cause.nodes_hit)
        soft = (groups > 1.0) & (hit < groups)
        each = np.where(soft, rate_of(settings, cause, nodes), 0.0)
        absent = (
            column(back.restart_seconds)
            + (column(back.replace_seconds) if lost_nodes(cause) else 0.0)
            + column(replicas.recovery_seconds)
        )
        noticed = replicas.noticed_seconds(cause)
        pause = (
            noticed
            + column(replicas.regroup_seconds)
            + column(replicas.rejoin_seconds)
            + column(replicas.step_seconds) / 2.0
        )
        rate, pauses = rate + each, pauses + each * pause
        watched = watched + each * noticed
        repair = each * (cause.repair_hours if lost_nodes(cause) else 0.0) * HOUR_SECONDS
        down, repairs = down + each * hit * absent, repairs + repair * hit
        taken.append((cause.nodes_hit, hit, each, each * hit * absent, repair))
    if not (rate > 0.0).any():
        zero = np.zeros(1)
        return ReplicaAvailability(np.ones(1), np.ones(1), zero, {}, zero, zero)
    short = _short_groups(settings, nodes)
    absent = (down + short) / groups
    # Who waits for a repair is one of those in repair.
    part = short / np.maximum(repairs, SMALLEST_RATE) / groups
    units = concurrent_failures(
        [
            GroupLosses(number, hit, each, gone / groups, repair * hit * part, repair)
            for number, hit, each, gone, repair in taken
        ],
        groups,
    )
    seldom = 1.0 / (1.0 + absent)
    chances = last_ones(units, 1.0 - seldom, groups)
    last = {unit.nodes: chance for unit, chance in zip(units, chances, strict=True)}
    stops = sum((each * last[number] for number, _, each, _, _ in taken), np.zeros(1))
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
    load = sum((batch.load * batch.nodes for batch in batches), np.zeros(1))
    square = sum((batch.load * batch.nodes**2 for batch in batches), np.zeros(1))
    hit = sum(
        (batch.load * groups_hit(settings, nodes, batch.nodes) for batch in batches), groups * 0
    )
    peaked = np.maximum(1.0, square / np.maximum(load, SMALLEST_RATE))
    missing = missing_nodes(column(settings.restart.spares), np.where(groups > 1, load, 0), peaked)
    return missing * hit / np.maximum(load, SMALLEST_RATE)
