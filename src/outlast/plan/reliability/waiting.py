"""How long a run waits for nodes: spares and repairs as servers of a queueing system.

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
from dataclasses import dataclass

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cases import Array

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
