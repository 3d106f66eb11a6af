"""Jobs that compute and save to one file system, as a fluid: what an order of saves is worth.

Each job computes for its period and asks to save. Then its nodes stand still until the save is
done, or it continues computing until it is its turn. The bandwidth is 1; a save of C seconds is C.
Without coordination all saves begin at once and share it fairly. Waste is the node-time for which
jobs stand still, and the node-time of work that is expected to be done again after failures: of a
job with mean time mu between failures, whatever it has computed since what the last save holds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.cluster.storage import Order, priority, set_of, waiting_cost
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.storage import SavingJob

Policy = Literal["uncoordinated"] | Order
Waiting = Literal["still", "computing"]
_DONE = 1e-9


@dataclass(frozen=True)
class Wasted:
    """Result of a simulation.

    Attributes:
        blocked: Share of all node-time for which jobs stood still.
        redone: Expected share of all node-time that failures make be done again.
        saves: How many were made.
        load: Share of the time for which the file system was busy.
    """

    blocked: float
    redone: float
    saves: int
    load: float

    @property
    def waste(self) -> float:
        """Both together."""
        return self.blocked + self.redone


def simulate_saves(
    jobs: Sequence[SavingJob],
    periods: Sequence[float],
    policy: Policy,
    *,
    horizon_seconds: float,
    waiting: Waiting = "still",
    interrupt: bool = False,
    most_share: Sequence[float] | None = None,
    jitter: float = 0.05,
    seed: int = 0,
) -> Wasted:
    """Simulate jobs that save to one file system.

    Args:
        jobs: Nodes, seconds of a save with the whole bandwidth, mean time between failures.
        periods: Seconds that each computes between two saves.
        policy: "uncoordinated", or the order in which saves are served.
        horizon_seconds: How long.
        waiting: Whether jobs stand still while they wait for their turn, or compute; without
            coordination nobody waits for a turn.
        interrupt: With least-waste, whether a save makes way when a more urgent one is asked for.
        most_share: Share of the bandwidth that a job can use by itself; None: all of it.
        jitter: How much computing times vary, as a share.
        seed: Of the first computing times and the jitter; the same for all policies compares them
            on the same jobs.

    Raises:
        ClusterError: Where there is not one period per job.
    """
    if len(periods) != len(jobs) or not jobs:
        raise ClusterError(f"{len(periods)} periods for {len(jobs)} jobs: give one for each")
    shares = [1.0] * len(jobs) if most_share is None else list(most_share)
    run = _Run(jobs, periods, policy, shares, (jitter, seed))
    run.interrupt = interrupt and policy == "least-waste"
    run.computes = waiting == "computing" and policy != "uncoordinated"
    return run.until(horizon_seconds)


class _Run:
    def __init__(
        self,
        jobs: Sequence[SavingJob],
        periods: Sequence[float],
        policy: Policy,
        shares: list[float],
        jitter: tuple[float, int],
    ) -> None:
        self.interrupt = self.computes = False
        self.jobs, self.periods, self.policy = jobs, periods, policy
        self.shares, (self.jitter, seed) = shares, jitter
        self.chances = [random.Random(f"{seed}/{number}") for number in range(len(jobs))]
        # Anywhere in its first period, or all jobs would save together at first.
        self.asks = [
            chance.random() * period for chance, period in zip(self.chances, periods, strict=True)
        ]
        self.left: dict[int, float] = {}
        self.asked: dict[int, float] = {}
        # When its nodes began to stand still.
        self.still: dict[int, float] = {}
        self.began = [0.0] * len(jobs)
        self.now = 0.0
        # Jobs that have begun to save and keep their place until they are done.
        self.served: list[int] = []
        self.blocked = self.redone = self.busy = 0.0
        self.saves = 0

    def until(self, horizon: float) -> Wasted:
        while self.now < horizon:
            rates = self._rates()
            end = min((self.left[n] / rate for n, rate in rates.items() if rate), default=math.inf)
            asking = min(range(len(self.jobs)), key=self.asks.__getitem__)
            until = min(self.now + end, self.asks[asking], horizon)
            elapsed = until - self.now
            self.busy += elapsed * sum(rates.values())
            for number, rate in rates.items():
                self.left[number] -= rate * elapsed
            self.now = until
            for number in [n for n in rates if self.left[n] <= _DONE * self.jobs[n].save_seconds]:
                self._saved(number)
            if self.asks[asking] <= self.now:
                self.left[asking] = self.jobs[asking].save_seconds
                self.asked[asking] = self.now
                self.asks[asking] = math.inf
                if not self.computes:
                    self.still[asking] = self.now
        for number, since in self.still.items():
            self.blocked += self.jobs[number].nodes * (self.now - since)
        nodes = math.fsum(job.nodes for job in self.jobs) * horizon
        return Wasted(self.blocked / nodes, self.redone / nodes, self.saves, self.busy / horizon)

    def _saved(self, number: int) -> None:
        job, since = self.jobs[number], self.still.pop(number)
        computed, stood = since - self.began[number], self.now - since
        del self.left[number], self.asked[number]
        if number in self.served:
            self.served.remove(number)
        self.saves += 1
        self.blocked += job.nodes * stood
        # While it computes, half of it is lost on average; while it stands still, all of it.
        self.redone += job.nodes * computed * (0.5 * computed + stood) / job.mtbf_seconds
        vary = 1.0 + self.jitter * (2.0 * self.chances[number].random() - 1.0)
        self.began[number] = self.now
        self.asks[number] = self.now + self.periods[number] * vary

    def _rates(self) -> dict[int, float]:
        """Bandwidth of each save that gets some."""
        if self.policy == "uncoordinated":
            return _weighted(dict.fromkeys(self.left, 1.0), self.shares)
        if self.interrupt:
            self.served = sorted(self.left, key=lambda n: self.left[n] / self.jobs[n].nodes)
            self.still.update((n, self.now) for n in self.served if n not in self.still)
            return _in_turn(self.served, self.shares)
        # Give the turn to those who may have it.
        waiting = sorted((n for n in self.left if n not in self.served), key=self._key)
        sets = {self._set(n) for n in self.served}
        free = 1.0 - sum(self.shares[n] for n in self.served)
        for number in waiting:
            if self.policy == "set-10":
                if self._set(number) in sets:
                    continue
                sets.add(self._set(number))
            elif free <= _DONE:
                break
            self.served.append(number)
            self.still.setdefault(number, self.now)
            free -= self.shares[number]
        if self.policy == "set-10":
            weights = {n: weight_of(set_of("set-10", self.periods[n])) for n in self.served}
            return _weighted(weights, self.shares)
        return _in_turn(self.served, self.shares)

    def _set(self, number: int) -> int:
        return set_of("set-10", self.periods[number]) if self.policy == "set-10" else 0

    def _key(self, number: int) -> tuple[float, float]:
        assert self.policy != "uncoordinated"
        job, asked = self.jobs[number], self.asked[number]
        unsaved, mtbf = self.now - self.began[number], job.mtbf_seconds if self.computes else 0.0
        key = priority(
            self.policy,
            asked_seconds=asked,
            size_bytes=job.save_seconds,
            cost_per_second=waiting_cost(job.nodes, unsaved, mtbf),
        )
        return key, asked


def _in_turn(served: Sequence[int], shares: Sequence[float]) -> dict[int, float]:
    """Those before take what they can; the last takes what is left."""
    free, rates = 1.0, {}
    for number in served:
        rates[number] = min(shares[number], free)
        free -= rates[number]
    return rates


def _weighted(weights: dict[int, float], shares: Sequence[float]) -> dict[int, float]:
    """Max-min fair with weights: who can use less than its part leaves the rest to the others."""
    free, rates = 1.0, {}
    open_weight = math.fsum(weights.values())
    # By how soon a share is full as all grow in proportion to their weights.
    for number in sorted(weights, key=lambda weight: shares[weight] / weights[weight]):
        rates[number] = min(shares[number], free * weights[number] / open_weight)
        free = max(free - rates[number], 0.0)
        open_weight -= weights[number]
        open_weight = max(open_weight, weights[number] * 1e-15)
    return rates


def weight_of(number: int) -> float:
    """The weight by which a set shares the bandwidth with the others."""
    return 10.0**-number
