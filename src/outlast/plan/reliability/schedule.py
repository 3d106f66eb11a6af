"""The clock of a simulated run that nothing befalls: how far it is, and which saves it has made."""

from __future__ import annotations

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.recovery import Reliability


class Schedule:
    """Saves at every multiple of the interval, of those tiers whose turn it is.

    The clock counts running time and what saves add to it. A version is named by its round: the
    number of base intervals before it.
    """

    def __init__(self, run: Reliability) -> None:
        tiers = [tier for tier in run.tiers if float(np.max(tier.every)) > 0.0]
        self.tiers = tiers
        self.interval = float(np.max(run.interval_seconds))
        self.every = np.array([float(np.max(tier.every)) for tier in tiers])
        self.latency = np.array([float(tier.latency_seconds[0]) for tier in tiers])
        self.survives = np.array([tier.survives_nodes for tier in tiers])
        self.restore = np.array([float(np.max(tier.restore_seconds)) for tier in tiers])
        self._overhead = np.array([float(tier.overhead_seconds[0]) for tier in tiers])
        self._kept = np.array([float(tier.kept) for tier in tiers])
        self._rounds = int(self.every[-1])
        rounds = np.arange(self._rounds + 1.0)
        self._table = rounds * self.interval + self.saved(rounds)

    def saved(self, rounds: Array) -> Array:
        """Clock time that all saves up to a round have taken."""
        whole = np.floor(np.asarray(rounds, dtype=np.float64)[..., None] / self.every)
        found: Array = whole @ self._overhead
        return found

    def kept(self, clock: Array) -> Array:
        """Of a clock's time, what keeping states in the nodes' memory has taken."""
        rounds, _ = self.position(clock)
        whole = np.floor(rounds[..., None] / self.every)
        found: Array = whole @ (self._overhead * self._kept)
        return found

    def clock(self, rounds: Array) -> Array:
        """When the saves of a round are over."""
        cycles, rest = np.divmod(rounds, self._rounds)
        found: Array = cycles * self._table[-1] + self._table[rest.astype(np.int64)]
        return found

    def clock_of_work(self, running_seconds: float) -> float:
        """When so much running is done."""
        rounds = np.array([np.floor(running_seconds / self.interval)])
        return float(running_seconds + self.saved(rounds)[0])

    def position(self, clock: Array) -> tuple[Array, Array]:
        """The last round whose saves are over, and the running time done."""
        cycles, rest = np.divmod(clock, self._table[-1])
        inside = np.searchsorted(self._table, rest, side="right") - 1
        inside = np.minimum(inside, self._rounds - 1)
        rounds: Array = cycles * self._rounds + inside
        begun: Array = np.minimum(rest - self._table[inside], self.interval)
        return rounds, rounds * self.interval + begun

    def durable(self, rounds: Array, work: Array) -> Array:
        """Of each tier, the newest version that can be restored: (rows, tiers)."""
        newest = np.floor(rounds[:, None] / self.every) * self.every
        late = work[:, None] < newest * self.interval + self.latency
        found: Array = np.maximum(newest - np.where(late, self.every, 0.0), 0.0)
        return found
