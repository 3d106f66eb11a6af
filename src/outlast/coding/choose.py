"""Which code to take, or none: all schemes simulated under the same delays, and a reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.coding.simulate.candidates import Bench, Candidate
from outlast.coding.simulate.delays import DelayModel, sample
from outlast.coding.simulate.fixed import fluid
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.cost import CostModel

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
class Choice:
    """What to do, why, and all that was weighed. All figures are simulated.

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
        """Whether the advice is to use a code at all."""
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
        straggler_model: Their delays; see `outlast.coding.simulate.fit` for one from measurements.
        cost_model: What a step consists of. Schemes that drop chunks are excluded where what they
            lose is not like the rest: with `CostModel.iid` false, or chunks of different costs, of
            which the dear ones would be lost.
        exact: Take only schemes whose gradient is the whole batch's; approximate ones are excluded.
            If `exact`, or if chunks differ, coverage computes the chunks again whose holders are
            all dead; otherwise it goes on without them, after a long wait or a short one.
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
    return min(
        (candidate for candidate in allowed if candidate.useful_seconds <= limit), key=_simplicity
    )


def _simplicity(candidate: Candidate) -> tuple[int, float]:
    names = _SIMPLEST
    place = names.index(candidate.scheme) if candidate.scheme in names else len(names)
    return place, candidate.useful_seconds


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
