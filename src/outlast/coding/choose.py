"""Choice of a scheme: all are simulated under the same delays; codes must earn their complexity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from outlast.coding.assignment import spread
from outlast.coding.cost import CostModel, all_reduce_bytes, dropped_error
from outlast.coding.delays import Array, DelayModel, Delays, sample
from outlast.coding.simulate import (
    Steps,
    cover,
    deadline,
    drop_slowest,
    erasure_head,
    fixed_load,
    fluid,
    graph_code,
    rebalance,
    repetition,
    repetition_on_demand,
    wait_all,
)
from outlast.errors import CodingError

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

TIE = 0.02
"""A scheme that is slower by this share at most, but simpler, is preferred."""

MARGIN = 0.1
"""Dropping samples must beat the fastest scheme that drops none by this share. Its simulated
deadline stops a worker at once; a real one comes after the microbatch that the worker is at.
"""

_LOSSY = ("deadline", "drop-slowest")
_SIMPLEST = ("wait-all", "rebalance", "coverage", *_LOSSY)
_UNCODED = ("wait-all", "rebalance", *_LOSSY)
_WORKER_STEPS = 100_000
_MOST_STRETCHES = 200
_STRETCH = 10


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
        """True if every simulated gradient was the whole batch's."""
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
            recompute: Whether coverage computes lost chunks again, or continues without them; if so
                it is tried with an early deadline as well.
        """
        found = [self.uncoded(), self.rebalanced()]
        workers = self.delays.workers
        for copies in (2, 3):
            if copies <= workers:
                found += self.covered(copies, recompute=recompute)
            if workers % copies == 0:
                found += [self.repeated(copies), self.repeated_on_demand(copies)]
                found += self.erased(copies)
        for stragglers in (1, 2):
            # A real cyclic MDS code needs n and s of different parity.
            if stragglers < workers and (workers - stragglers) % 2:
                found.append(self.cyclic(stragglers))
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

    def graph(self, degree: int) -> list[Candidate]:
        """A graph code that stops at the deadline that serves best."""
        # Imported here, since the graphs' modules take longer to import than all others.
        from outlast.coding.graph import GraphCode

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


@dataclass(frozen=True)
class Choice:
    """Advice, its reason and all candidates. All figures are simulated.

    Attributes:
        best: The scheme to take, with its redundancy (`Candidate.copies`) and deadline.
        reason: Why, in words.
        candidates: All schemes, best first, those that the caller's conditions exclude last.
        bound_seconds: Mean step if all work could be divided at will, which no scheme beats without
            losing samples.
    """

    best: Candidate
    reason: str
    candidates: tuple[Candidate, ...]
    bound_seconds: float

    @property
    def code(self) -> bool:
        """True if the advice is to use a code."""
        return self.best.scheme not in _UNCODED

    def candidate(self, scheme: str) -> Candidate:
        """The best variant of a scheme.

        Raises:
            CodingError: For a scheme that was not among those tried.
        """
        for item in self.candidates:
            if item.scheme == scheme:
                return item
        known = ", ".join(sorted({candidate.scheme for candidate in self.candidates}))
        raise CodingError(f"scheme = {scheme!r} was not tried; those tried are {known}")

    def table(self) -> str:
        """All candidates as aligned text."""
        head = ["scheme", "settings", "median s", "mean s", "p90 s", "kept", "error/chunk"]
        rows = [[*head, "s/batch", "memory", "sent", ""]]
        for candidate in self.candidates:
            seconds = (candidate.median_seconds, candidate.mean_seconds, candidate.p90_seconds)
            mark = "<- chosen" if candidate == self.best else candidate.excluded
            rows.append(
                [candidate.scheme, candidate.settings, *(_seconds(value) for value in seconds)]
                + [
                    f"{candidate.kept:.1%}",
                    f"{candidate.error:.2g}",
                    _seconds(candidate.useful_seconds),
                ]
                + [_bytes(candidate.extra_bytes), _bytes(candidate.sent_bytes), mark]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        left = (0, 1, len(widths) - 1)
        lines = (
            "  ".join(
                text.ljust(width) if i in left else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )
        return "\n".join(lines)


def choose_code(
    workers: int,
    straggler_model: DelayModel,
    cost_model: CostModel,
    *,
    exact: bool = False,
    memory_bytes: float = math.inf,
    message_bytes: float = math.inf,
    margin: float = MARGIN,
    stretches: int | None = None,
    seed: int = 0,
) -> Choice:
    """The scheme with the least expected time per sample, among those that the caller allows.

    Every scheme is simulated under the same draws. Time is compared at equal samples: a step that
    drops a tenth of the batch counts for nine tenths of a step. An approximate gradient counts for
    as many samples as, equally weighted, would be as noisy: 1 / (1 + centred / chunks) of the batch
    with `Certificate.centred`, which is 1 - error / chunks for weights of least error. A scheme
    that is slower by `TIE` at most is preferred where it is simpler: waiting for all before
    rebalancing before coverage.

    Args:
        workers: Data-parallel replicas.
        straggler_model: Their delays.
        cost_model: What a step consists of. Schemes that drop chunks are excluded where what they
            lose is not like the rest: with `CostModel.iid` false, or chunks of different costs, of
            which the dear ones would be lost.
        exact: Take only schemes whose gradient is the whole batch's; approximate ones are excluded.
            If `exact`, or if chunks differ, coverage computes the chunks again whose holders are
            all dead; otherwise it continues without them, after a long wait or a short one.
        memory_bytes: A worker has this much memory to spare.
        message_bytes: A worker sends this much per step at most.
        margin: See `MARGIN`; 0 to count simulated time per sample alone.
        stretches: Independent stretches of 10 steps to simulate. By default 200 up to 50 workers,
            41 at 240, and 1 from 5000 on: 0.7 to 1.4 s of CPU time at 240, ten or so at 10,000.
        seed: Of all random numbers.

    Raises:
        CodingError: For settings out of range, or where no scheme meets the conditions.
    """
    if workers < 1:
        raise CodingError(f"workers = {workers} is below 1")
    if stretches is None:
        stretches = min(max(_WORKER_STEPS // (_STRETCH * workers), 1), _MOST_STRETCHES)
    delays = sample(straggler_model, stretches, workers, steps=_STRETCH + 1, seed=seed)
    uneven = bool((delays.chunk_cost != 1.0).any())
    alike = cost_model.iid and not uneven
    found = Bench(delays, cost_model, seed).candidates(recompute=exact or not alike)
    limits = (memory_bytes, message_bytes)
    reasons_against = [
        _exclusion(candidate, limits, exact=exact, alike=alike) for candidate in found
    ]
    judged = sorted(
        (
            replace(found_item, excluded=why)
            for found_item, why in zip(found, reasons_against, strict=True)
        ),
        key=lambda array: (array.excluded != "", array.useful_seconds),
    )
    allowed = [array for array in judged if not array.excluded]
    if not allowed:
        reasons = "; ".join(f"{array.scheme}: {array.excluded}" for array in judged)
        raise CodingError(f"no scheme meets the conditions ({reasons})")
    best = _best(allowed, margin)
    bound = float(fluid(delays, cost_model.share_seconds).seconds[:, 1:].mean())
    bound += cost_model.reduction_seconds
    reason = _reason(best, judged, cost_model, uneven=uneven)
    return Choice(best, reason, tuple(judged), bound)


def _exclusion(
    candidate: Candidate, limits: tuple[float, float], *, exact: bool, alike: bool
) -> str:
    """Why the caller's conditions exclude a candidate, or nothing."""
    memory_bytes, message_bytes = limits
    if not math.isfinite(candidate.mean_seconds):
        return "may never end"
    if not math.isfinite(candidate.error):
        return "may keep nothing"
    # No loss in the simulated steps is luck for a scheme that gives up samples.
    whole = candidate.exact and not candidate.lossy
    if exact and not whole:
        return "not exact"
    if not whole and not alike:
        return "biased: chunks differ"
    if candidate.extra_bytes > memory_bytes:
        return f"needs more than {_bytes(memory_bytes)} of memory"
    if candidate.sent_bytes > message_bytes:
        return f"sends more than {_bytes(message_bytes)}"
    return ""


def _best(allowed: list[Candidate], margin: float) -> Candidate:
    """The fastest, or a simpler one that is as fast; `allowed` is sorted by speed."""
    whole = [candidate for candidate in allowed if not candidate.lossy]
    fastest = allowed[0]
    if whole and whole[0].useful_seconds <= fastest.useful_seconds * (1.0 + margin):
        allowed, fastest = whole, whole[0]
    limit = fastest.useful_seconds * (1.0 + TIE)

    def simplicity(candidate: Candidate) -> tuple[int, float]:
        names = _SIMPLEST
        place = names.index(candidate.scheme) if candidate.scheme in names else len(names)
        return place, candidate.useful_seconds

    good = (candidate for candidate in allowed if candidate.useful_seconds <= limit)
    return min(good, key=simplicity)


def _reason(best: Candidate, candidates: list[Candidate], costs: CostModel, *, uneven: bool) -> str:
    """The advice in words; compares with what a reader would have expected instead."""
    by_scheme: dict[str, Candidate] = {}
    for candidate in candidates:
        by_scheme.setdefault(candidate.scheme, candidate)
    waiting = by_scheme["wait-all"]
    coverage = by_scheme.get("coverage")
    lossy = [by_scheme[name] for name in _LOSSY if name in by_scheme]
    dropping = min(lossy, key=lambda name: name.useful_seconds, default=None)
    said = [_advice(best, uneven=uneven)]
    if best is waiting:
        if coverage is not None:
            said.append(
                f"Coverage would cost {_seconds(costs.claims_seconds)} s of claims per step "
                f"({costs.claims_overhead:.2%}), and pay once somebody straggles or dies."
            )
        return " ".join(said)
    said.append(f"Waiting for all {_takes(waiting)}.")
    if coverage is not None and best.scheme != "coverage":
        said.append(f"Coverage {_takes(coverage)}.")
    if best.scheme in _LOSSY:
        said.append(
            f"The gradient is a smaller batch's, with an error of {best.error:.2g} per chunk; ask "
            "for exact = True where every sample must count."
        )
    elif dropping is not None and dropping.useful_seconds < best.useful_seconds:
        why = f"is excluded: {dropping.excluded}" if dropping.excluded else "is within the margin"
        said.append(
            f"Dropping ({dropping.scheme}, {dropping.settings}) {_takes(dropping)}, but {why}."
        )
    return " ".join(said)


def _advice(best: Candidate, *, uneven: bool) -> str:
    if best.scheme == "wait-all":
        return (
            f"Do not code: waiting for the slowest {_takes(best)}, and nothing that is allowed is "
            "faster by more than is worth its complexity."
        )
    if best.scheme == "rebalance":
        cause = (
            "cost stays with the chunk, whoever computes it, and is known before the step"
            if uneven
            else "who was slow in the last step is slow in the next"
        )
        return f"Do not code, rebalance: {cause}. It {_takes(best)}."
    if best.scheme in _LOSSY:
        return (
            f"Do not code, drop and rescale ({best.scheme}, {best.settings}): it loses "
            f"{1.0 - best.kept:.1%} of the samples and {_takes(best)} at equal samples."
        )
    kind = "exact" if best.exact else f"with an error of {best.error:.2g} per chunk"
    return f"Code with {best.scheme} ({best.settings}), {kind}: it {_takes(best)}."


def _takes(candidate: Candidate) -> str:
    if not math.isfinite(candidate.useful_seconds):
        return "may never end"
    return f"takes {_seconds(candidate.useful_seconds)} s per batch"


def _seconds(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "never"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.3g} {unit}"
        value /= 1000.0
    return f"{value:.3g} TB"
