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
    erasure_head,
    fixed_load,
    graph_code,
    partial,
    rebalance,
    repetition,
    repetition_on_demand,
    wait_all,
)
from outlast.coding.spread import spread

DROPS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the workers (or groups) that dropping may lose; the best is kept."""

DEADLINE_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Deadlines of DropCompute as quantiles of when workers finish their shares; the best is kept."""

GRAPH_LEVELS = (0.8, 0.9, 0.95)
"""The same for graph codes."""

GRAPH_DEGREES = (2, 4)
"""Copies of each chunk: even, so that chunks are whole shares."""

COVERAGE_LEVEL = 0.9
"""Coverage's early deadline: the quantile of when the last chunk that can be finished is."""

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
        kept: Mean share of the batch's samples that the gradient holds. Of an approximate
            gradient, 1 / (1 + centred / chunks) with the certificate's centred error: the share
            that, equally weighted, would be as noisy (Kish's effective sample size).
        error: Error per chunk of the rescaled gradient, see `dropped_error`; 0 is exact.
        extra_bytes: Memory per worker beyond that of training without a code.
        sent_bytes: Per worker and step.
        copies: Workers that hold each chunk.
        deadline_seconds: When the step ends at the latest; infinite without a deadline.
        lossy: Whether it gives up samples in order to be fast.
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
    lossy: bool = False
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
            recompute: Whether coverage computes lost chunks again, or goes on without them; if so
                it is tried with an early deadline as well.
        """
        found = [self.uncoded(), self.rebalanced()]
        workers = self.delays.workers
        for copies in (2, 3):
            if copies <= workers:
                found += self.covered(copies, recompute=recompute)
                found.append(self.partial(copies, 1))
            if workers % copies == 0:
                found += [self.repeated(copies), self.repeated_on_demand(copies)]
                found += self.erased(copies)
        for stragglers in (1, 2):
            # A real cyclic MDS code needs n and s of different parity.
            if stragglers < workers and (workers - stragglers) % 2:
                found.append(self.cyclic(stragglers))
        if workers >= 3:
            found += [self.shortened(), self.partial(3, 2)]
        for degree in GRAPH_DEGREES:
            # A regular graph with 2 n / d vertices, more than d of them.
            if 2 * workers % degree == 0 and 2 * workers // degree > degree:
                found += self.graph(degree)
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

    def covered(self, copies: int, *, recompute: bool) -> list[Candidate]:
        """Micro-coverage; lost chunks are computed again by all who live, or given up.

        Where they are given up, waiting for them may be cut short as well.
        """
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

        def judged(seconds: Array, kept: Array, settings: str) -> Candidate:
            steps = Steps(seconds.reshape(shape[:2]), kept.reshape(shape[:2]))
            return self.judge("coverage", settings, steps, buffers=1)

        found = replace(judged(seconds, kept, settings), copies=copies, deadline_seconds=limit)
        if recompute or not lost.any():
            return [found]
        early = float(np.quantile(course.last_seconds, COVERAGE_LEVEL, method="higher"))
        course = cover(held, self.delays, chunk, deadline_seconds=early)
        kept = 1.0 - course.uncovered / held.chunks
        cut = judged(np.minimum(course.seconds, early), kept, f"{settings}, {early:.4g} s")
        return [found, replace(cut, copies=copies, deadline_seconds=early, lossy=True)]

    def partial(self, copies: int, parts: int) -> Candidate:
        """Partial-straggler coding in the order of matchings; it keeps its chunks' gradients."""
        steps = partial(self.delays, self.costs.share_seconds, copies, math.inf, parts=parts)
        settings = f"d = {copies}, l = {parts}, matchings"
        judged = replace(self.judge("partial", settings, steps, buffers=copies), copies=copies)
        # Shorter messages go to a parameter server.
        shorter = self.costs.gradient_bytes / parts
        return judged if parts == 1 else replace(judged, sent_bytes=shorter)

    def graph(self, degree: int) -> list[Candidate]:
        """A graph code that stops at the deadline that serves best."""
        # Imported here, since the graphs' modules take longer to import than all others.
        from outlast.coding.codes.graph.code import GraphCode

        share, delays = self.costs.share_seconds, self.delays
        code = GraphCode.random_regular(workers=delays.workers, degree=degree, seed=self.seed)
        ends = delays.start_seconds + delays.slowdown * degree * share
        tried = []
        for limit in _limits(ends, GRAPH_LEVELS):
            steps = graph_code(delays, share, code, limit)
            judged = self.judge("graph", f"d = {degree}, {limit:.4g} s", steps, buffers=1)
            tried.append(replace(judged, copies=degree, deadline_seconds=limit, lossy=True))
        return _fastest(tried)

    def erased(self, copies: int) -> list[Candidate]:
        """ErasureHead, at the share of groups that serves best."""
        tried = []
        for drop in DROPS:
            if math.floor(drop * (self.delays.workers // copies) + 1e-9) >= 1:
                steps = erasure_head(self.delays, self.costs.share_seconds, copies, drop)
                settings = f"d = {copies}, without {drop:.0%} of groups"
                judged = self.judge("erasure-head", settings, steps, buffers=1)
                tried.append(replace(judged, copies=copies, lossy=True))
        return _fastest(tried)

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
                judged = self.judge("drop-slowest", f"{drop:.0%} of workers", steps)
                tried.append(replace(judged, lossy=True))
        return _fastest(tried)

    def cut(self) -> list[Candidate]:
        """DropCompute, at the deadline that serves best."""
        share, count = self.costs.share_seconds, self.costs.chunks_per_worker
        delays = self.delays
        ends = delays.start_seconds + delays.slowdown * delays.chunk_cost * share
        tried = []
        for limit in _limits(ends, DEADLINE_LEVELS):
            steps = deadline(delays, share, count, limit)
            judged = self.judge("deadline", f"{limit:.4g} s", steps)
            tried.append(replace(judged, deadline_seconds=limit, lossy=True))
        return _fastest(tried)

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


def _limits(ends: Array, levels: tuple[float, ...]) -> list[float]:
    """Deadlines as quantiles of when workers finish that do; none where nobody does."""
    finite = ends[np.isfinite(ends)]
    if not finite.size:
        return []
    return [float(item) for item in np.unique(np.quantile(finite, levels, method="higher"))]


def _fastest(tried: list[Candidate]) -> list[Candidate]:
    """The best of several settings, if there is one."""
    return [min(tried, key=lambda candidate: candidate.useful_seconds)] if tried else []


def _quantile(seconds: Array, level: float) -> float:
    """Also of infinite ones, between which numpy would interpolate to no number."""
    return float(np.quantile(seconds, level, method="higher"))
