"""How many replica groups are absent at once, where one failure takes several of them.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.renewal import SMALLEST_RATE

NEGLIGIBLE = 1e-13


@dataclass(frozen=True, slots=True)
class Taken:
    """What failures of one cause take, all arrays (candidates,) or (1,).

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
class Units:
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
        """What may be in repair, beside a unit that is up.

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


def units_of(taken: Sequence[Taken], groups: Array) -> list[Units]:
    """The kinds of units, from the widest to the narrowest.

    Args:
        taken: What each cause takes.
        groups: All.
    """
    found: list[Units] = []
    for number in sorted({cause.nodes_hit for cause in taken}, reverse=True):
        same = [cause for cause in taken if cause.nodes_hit == number]
        hit = np.minimum(same[0].hit, groups)
        kind = Units(
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


def _merged(wide: Units, narrow: Units, equal: np.ndarray) -> tuple[Units, Units]:
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


def last_ones(units: Sequence[Units], absent: Array, groups: Array) -> list[Array]:
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


def outlasted(units: Sequence[Units], absent: Array, spares: Array) -> Array:
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
    first: Units, rest: Sequence[Units], absent: Array, waiting: Array, left: Array
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
