"""All schemes under the same simulated delays: what each step takes, keeps and costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from outlast.coding.cost import CostModel, all_reduce_bytes, dropped_error
from outlast.coding.simulate.coverage import cover
from outlast.coding.simulate.delays import Array, Delays
from outlast.coding.simulate.fixed import (
    Steps,
    deadline,
    drop_slowest,
    fixed_load,
    rebalance,
    repetition,
    repetition_on_demand,
    wait_all,
)
from outlast.coding.spread import spread

DROPS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the workers that dropping may lose; the best is kept."""

DEADLINE_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Deadlines of DropCompute as quantiles of when workers finish their shares; the best is kept."""

GRACE = 1.5
"""Coverage gives a chunk up for lost after the longest simulated step without loss, times this."""


@dataclass(frozen=True)
class Candidate:
    """A scheme and its simulated steps.

    Attributes:
        scheme: Its name, one word.
        settings: The settings in words.
        median_seconds: Of a step, all-reduce and claims included.
        mean_seconds: Infinite where a step may never end.
        p90_seconds: The 90th percentile.
        kept: Mean share of the batch's samples that the gradient holds.
        error: Error per chunk of the rescaled gradient, see `dropped_error`; 0 is exact.
        extra_bytes: Memory per worker beyond that of training without a code.
        sent_bytes: Per worker and step.
        copies: Workers that hold each chunk.
        deadline_seconds: When the step ends at the latest; infinite without a deadline.
        excluded: Why it is not to be taken, or empty.
    """

    scheme: str
    settings: str
    median_seconds: float
    mean_seconds: float
    p90_seconds: float
    kept: float
    error: float
    extra_bytes: float
    sent_bytes: float
    copies: int = 1
    deadline_seconds: float = math.inf
    excluded: str = ""

    @property
    def exact(self) -> bool:
        """Whether every simulated gradient was the whole batch's."""
        return self.error == 0.0

    @property
    def useful_seconds(self) -> float:
        """Mean seconds for as many samples as a batch has: what is dropped must be made up for."""
        return self.mean_seconds / self.kept if self.kept > 0.0 else math.inf


@dataclass(frozen=True)
class Bench:
    """The delays and costs under which all candidates are tried.

    Attributes:
        delays: Of at least two steps; the first only tells the speeds.
        costs: What a step consists of.
        seed: Of coverage's assignment.
    """

    delays: Delays
    costs: CostModel
    seed: int = 0

    def candidates(self, *, recompute: bool) -> list[Candidate]:
        """All schemes that are possible for so many workers.

        Args:
            recompute: Whether coverage computes lost chunks again, or goes on without them.
        """
        found = [self.uncoded(), self.rebalanced()]
        workers = self.delays.workers
        for copies in (2, 3):
            if copies <= workers:
                found.append(self.covered(copies, recompute=recompute))
            if workers % copies == 0:
                found += [self.repeated(copies), self.repeated_on_demand(copies)]
        for stragglers in (1, 2):
            # A real cyclic MDS code needs n and s of different parity.
            if stragglers < workers and (workers - stragglers) % 2:
                found.append(self.cyclic(stragglers))
        if workers >= 3:
            found.append(self.shortened())
        return [*found, *self.dropped(), *self.cut()]

    def uncoded(self) -> Candidate:
        """Wait for everybody."""
        steps = wait_all(self.delays, self.costs.share_seconds)
        return self.judge("wait-all", "no code", steps)

    def rebalanced(self) -> Candidate:
        """Loads after speeds."""
        costs = self.costs
        steps = rebalance(self.delays, costs.share_seconds, costs.chunks_per_worker)
        return self.judge("rebalance", "loads by last speed", steps)

    def covered(self, copies: int, *, recompute: bool) -> Candidate:
        """Micro-coverage; lost chunks are computed again by all who live, or given up."""
        costs, shape = self.costs, self.delays.slowdown.shape
        held = spread(shape[2], costs.chunks_per_worker, copies, seed=self.seed)
        chunk = costs.chunk_seconds + costs.claim_seconds
        course = cover(held, self.delays, chunk)
        lost = course.uncovered > 0
        seconds, kept, limit = course.seconds, np.ones(len(lost)), math.inf
        if lost.any():
            limit = GRACE * float(course.last_seconds.max())
            alive = np.isfinite(self.delays.flat()[0]).sum(axis=1)
            if recompute:
                with np.errstate(divide="ignore"):
                    again = np.ceil(course.uncovered / alive) * chunk
                seconds = np.where(lost, limit + again, seconds)
            else:
                seconds = np.where(lost, limit, seconds)
                kept = 1.0 - course.uncovered / held.chunks
        settings = f"k = {costs.chunks_per_worker}, d = {copies}"
        steps = Steps(seconds.reshape(shape[:2]), kept.reshape(shape[:2]))
        judged = self.judge("coverage", settings, steps, buffers=1)
        return replace(judged, copies=copies, deadline_seconds=limit)

    def repeated(self, copies: int) -> Candidate:
        """Fractional repetition."""
        steps = repetition(self.delays, self.costs.share_seconds, copies)
        judged = self.judge("repetition", f"d = {copies}, first of group", steps, buffers=1)
        return replace(judged, copies=copies)

    def repeated_on_demand(self, copies: int) -> Candidate:
        """Fractional repetition, own share first."""
        steps = repetition_on_demand(self.delays, self.costs.share_seconds, copies)
        judged = self.judge("repetition", f"d = {copies}, on demand", steps, buffers=1)
        return replace(judged, copies=copies)

    def cyclic(self, stragglers: int) -> Candidate:
        """Cyclic MDS with the least load."""
        copies = stragglers + 1
        steps = fixed_load(self.delays, self.costs.share_seconds, copies)
        judged = self.judge("cyclic-mds", f"s = {stragglers}, d = {copies}", steps, buffers=1)
        return replace(judged, copies=copies)

    def shortened(self) -> Candidate:
        """Ye and Abbe's code with d = 3, s = 1 and messages of one half, to a parameter server."""
        steps = fixed_load(self.delays, self.costs.share_seconds, 3, 1)
        judged = self.judge("ye-abbe", "s = 1, d = 3, m = 2", steps, buffers=1)
        return replace(judged, copies=3, sent_bytes=self.costs.gradient_bytes / 2)

    def dropped(self) -> list[Candidate]:
        """Backup workers, at the share that serves best."""
        share = self.costs.share_seconds
        tried = []
        for drop in DROPS:
            if math.floor(drop * self.delays.workers + 1e-9) >= 1:
                steps = drop_slowest(self.delays, share, drop)
                tried.append(self.judge("drop-slowest", f"{drop:.0%} of workers", steps))
        return [min(tried, key=lambda each: each.useful_seconds)] if tried else []

    def cut(self) -> list[Candidate]:
        """DropCompute, at the deadline that serves best."""
        share, count = self.costs.share_seconds, self.costs.chunks_per_worker
        delays = self.delays
        ends = delays.start_seconds + delays.slowdown * delays.chunk_cost * share
        finite = ends[np.isfinite(ends)]
        if not finite.size:
            return []
        tried = []
        for limit in np.unique(np.quantile(finite, DEADLINE_LEVELS, method="higher")):
            steps = deadline(delays, share, count, float(limit))
            judged = self.judge("deadline", f"{limit:.4g} s", steps)
            tried.append(replace(judged, deadline_seconds=float(limit)))
        return [min(tried, key=lambda each: each.useful_seconds)]

    def judge(self, scheme: str, settings: str, steps: Steps, *, buffers: int = 0) -> Candidate:
        """The candidate with these steps; the first step of each stretch does not count."""
        seconds = steps.seconds[:, 1:] + self.costs.reduction_seconds
        kept = steps.kept[:, 1:]
        error = np.vectorize(dropped_error, otypes=[float])(kept)
        return Candidate(
            scheme,
            settings,
            _quantile(seconds, 0.5),
            float(seconds.mean()),
            _quantile(seconds, 0.9),
            float(kept.mean()),
            float(error.mean()),
            buffers * self.costs.gradient_bytes,
            all_reduce_bytes(self.delays.workers, self.costs.gradient_bytes),
        )


def _quantile(seconds: Array, level: float) -> float:
    """Also of infinite ones, between which numpy would interpolate to no number."""
    return float(np.quantile(seconds, level, method="higher"))
