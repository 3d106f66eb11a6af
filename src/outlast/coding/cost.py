"""What gradient coding costs and saves, as pure functions of its settings; needs no torch.

The planner composes these. Times are in seconds, and ratios are to training without a code, where
every step waits for the slowest worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.simulate.delays import DelayModel

CLAIM_SECONDS = 2e-4
"""One compare-and-set in the process group's store."""


@dataclass(frozen=True)
class CostModel:
    """What a training step consists of.

    Attributes:
        chunk_seconds: Forward and backward of one microbatch on a worker that is not slow.
        chunks_per_worker: Microbatches per worker and step, k.
        reduction_seconds: The all-reduce of the gradient, which every scheme pays.
        claim_seconds: What coverage pays per microbatch.
        gradient_bytes: Of one gradient, as it is stored and sent.
        iid: Whether any part of the data is like any other, so that dropping some only makes the
            batch smaller. Not so where workers keep shards of their own that differ.
    """

    chunk_seconds: float
    chunks_per_worker: int = 8
    reduction_seconds: float = 0.0
    claim_seconds: float = CLAIM_SECONDS
    gradient_bytes: float = 0.0
    iid: bool = True

    def __post_init__(self) -> None:
        if not self.chunk_seconds > 0.0:
            raise CodingError(f"chunk_seconds = {self.chunk_seconds} is not above 0")
        if self.chunks_per_worker < 1:
            raise CodingError(f"chunks_per_worker = {self.chunks_per_worker} is below 1")
        for name in ("reduction_seconds", "claim_seconds", "gradient_bytes"):
            if not getattr(self, name) >= 0.0:
                raise CodingError(f"{name} = {getattr(self, name)} is below 0")

    @property
    def share_seconds(self) -> float:
        """A worker's own microbatches of one step."""
        return self.chunk_seconds * self.chunks_per_worker

    @property
    def claims_seconds(self) -> float:
        """What coverage adds to a step when nobody straggles."""
        return self.claim_seconds * self.chunks_per_worker

    @property
    def claims_overhead(self) -> float:
        """The same as a share of a step in which nobody straggles."""
        return self.claims_seconds / (self.share_seconds + self.reduction_seconds)


def all_reduce_bytes(workers: int, gradient_bytes: float) -> float:
    """Bytes that a worker sends for a ring all-reduce: 2 (n - 1) / n of a gradient.

    Coverage, repetition and the real codes all sum one weighted gradient per worker this way.
    """
    _counted("workers", workers)
    return 2.0 * (workers - 1) / workers * gradient_bytes


def any_k_bytes(
    workers: int, gradient_bytes: float, *, shrink: int = 1, complex_messages: bool = False
) -> float:
    """Bytes that arrive at a parameter server in a step from all workers.

    Args:
        workers: Number of them.
        gradient_bytes: Of a gradient.
        shrink: Messages are one so-many-th of a gradient: m of Ye and Abbe (2018), l of
            Ramamoorthy, Meng and Girimaji (2024).
        complex_messages: Reed-Solomon codes on the unit roots send two numbers for one.
    """
    _counted("workers", workers)
    _counted("shrink", shrink)
    return workers * gradient_bytes / shrink * (2.0 if complex_messages else 1.0)


def lost_chunks(
    workers: int, chunks_per_worker: int, copies: int, failure_probability: float
) -> float:
    """Expected chunks that all their d holders fail to compute: n k p^d.

    This is also the expected `Certificate.error` of the sum of the others, and an upper bound of
    the probability that a step loses anything.

    Args:
        workers: n.
        chunks_per_worker: k.
        copies: Holders of a chunk, d.
        failure_probability: Of each worker in a step, independently.
    """
    _counted("workers", workers)
    _counted("chunks_per_worker", chunks_per_worker)
    if not 1 <= copies <= workers:
        raise CodingError(f"copies = {copies} is not in [1, {workers}]")
    if not 0.0 <= failure_probability <= 1.0:
        raise CodingError(f"failure_probability = {failure_probability} is not in [0, 1]")
    return workers * chunks_per_worker * failure_probability**copies


def dropped_error(kept: float) -> float:
    """Error per chunk of a rescaled gradient over a share of the chunks: (1 - kept) / kept.

    The mean of (alpha - 1)^2, with alpha = 1 / kept for those kept and 0 for the others.
    """
    return (1.0 - kept) / kept if kept > 0.0 else math.inf


def exponential_order(workers: int, rank: int) -> float:
    """Mean of the rank-th smallest of n unit exponentials: H_n - H_(n - rank) (Rényi)."""
    _ranked(workers, rank)
    return math.fsum(1.0 / (workers - i) for i in range(rank))


def pareto_order(workers: int, rank: int, shape: float) -> float:
    """Mean of the rank-th smallest of n Pareto variables of at least 1; may be infinite.

    n! / (n - rank)! x Gamma(n - rank + 1 - 1/a) / Gamma(n + 1 - 1/a).
    """
    _ranked(workers, rank)
    left = workers - rank + 1.0
    if left - 1.0 / shape <= 0.0:
        return math.inf
    logarithm = math.lgamma(workers + 1.0) - math.lgamma(workers + 1.0 - 1.0 / shape)
    return math.exp(logarithm + math.lgamma(left - 1.0 / shape) - math.lgamma(left))


def fixed_code_ratio(workers: int, copies: int, scale: float, *, additive: bool = False) -> float:
    """Step time of an exact code with d = s + 1 chunks per worker, to that without a code.

    A worker's own share takes 1 + Exp(scale). Where the delay grows with the load, the ratio is
    d (1 + scale (H_n - H_s)) / (1 + scale H_n); where it comes once per step,
    (d + scale (H_n - H_s)) / (1 + scale H_n).

    Args:
        workers: n.
        copies: d.
        scale: See above.
        additive: The delay does not grow with the load.
    """
    last = exponential_order(workers, workers) * scale
    kept = exponential_order(workers, workers - copies + 1) * scale
    if additive:
        return (copies + kept) / (1.0 + last)
    return copies * (1.0 + kept) / (1.0 + last)


def fixed_code_break_even(copies: int) -> float:
    """Mean additive delay, in units of a worker's share, above which that code pays.

    From d + x (H_n - H_s) < 1 + x H_n: x > s / H_s with s = d - 1, for every n. Infinite for a code
    that tolerates nobody.
    """
    _counted("copies", copies)
    if copies == 1:
        return math.inf
    return (copies - 1) / math.fsum(1.0 / i for i in range(1, copies))


def repetition_ratio(workers: int, copies: int, scale: float, *, additive: bool = False) -> float:
    """The same for fractional repetition that waits for one worker of each group.

    The fastest of d exponentials is exponential with a d-th of the mean, and n / d of them count.
    """
    if copies < 1 or workers % copies:
        raise CodingError(f"copies = {copies} does not divide the {workers} workers")
    last = exponential_order(workers, workers) * scale
    slowest = exponential_order(workers // copies, workers // copies) * scale / copies
    if additive:
        return (copies + slowest) / (1.0 + last)
    return copies * (1.0 + slowest) / (1.0 + last)


@dataclass(frozen=True)
class CodingCost:
    """Price and benefit of coverage for one run.

    Attributes:
        step_ratio: Mean simulated step to mean simulated step without a code, all-reduce and
            claims included; 0 where the latter never ends.
        overhead: Share of a step that the claims take when nobody straggles.
        extra_bytes: Memory per rank: the gradient of the chunk that is being computed.
        sent_bytes: Per rank and step, as without coverage.
        lost_chunks: Expected chunks per step that no holder computes.
    """

    step_ratio: float
    overhead: float
    extra_bytes: float
    sent_bytes: float
    lost_chunks: float


def coding_cost(
    workers: int,
    model: DelayModel,
    costs: CostModel,
    *,
    copies: int = 3,
    failure_probability: float = 0.0,
    draws: int = 50,
    seed: int = 0,
) -> CodingCost:
    """Price and benefit of coverage under a model of delays.

    Args:
        workers: Ranks.
        model: Their delays.
        costs: What a step consists of.
        copies: Holders of each chunk.
        failure_probability: Of a rank in a step, for `lost_chunks`.
        draws: Steps to simulate.
        seed: Of the simulation.

    Raises:
        CodingError: For settings out of range.
    """
    # Imported here, since the formulas above need no numpy.
    from outlast.coding.simulate.coverage import cover
    from outlast.coding.simulate.delays import sample
    from outlast.coding.simulate.fixed import wait_all
    from outlast.coding.spread import spread

    delays = sample(model, draws, workers, seed=seed)
    held = spread(workers, costs.chunks_per_worker, copies, seed=seed)
    covered = cover(held, delays, costs.chunk_seconds + costs.claim_seconds)
    waited = wait_all(delays, costs.share_seconds)
    step = float(covered.seconds.mean()) + costs.reduction_seconds
    plain = float(waited.seconds.mean()) + costs.reduction_seconds
    return CodingCost(
        step / plain if math.isfinite(plain) else (0.0 if math.isfinite(step) else 1.0),
        costs.claims_overhead,
        costs.gradient_bytes,
        all_reduce_bytes(workers, costs.gradient_bytes),
        lost_chunks(workers, costs.chunks_per_worker, copies, failure_probability),
    )


def straggler_factor(
    workers: int, model: DelayModel, costs: CostModel, *, draws: int = 50, seed: int = 0
) -> float:
    """Mean simulated step without a code, to one in which nobody is late; at least 1.

    Infinite where a worker may never end its share.

    Args:
        workers: Ranks.
        model: Their delays.
        costs: What a step consists of.
        draws: Steps to simulate.
        seed: Of the simulation.

    Raises:
        CodingError: For settings out of range.
    """
    from outlast.coding.simulate.delays import sample
    from outlast.coding.simulate.fixed import wait_all

    delays = sample(model, draws, workers, seed=seed)
    waited = float(wait_all(delays, costs.share_seconds).seconds.mean())
    step = waited + costs.reduction_seconds
    # Chunks may also be cheap, and a step of cheap ones is no gain to be had.
    return max(step / (costs.share_seconds + costs.reduction_seconds), 1.0)


def _counted(name: str, value: int) -> None:
    if value < 1:
        raise CodingError(f"{name} = {value} is below 1")


def _ranked(workers: int, rank: int) -> None:
    if not 1 <= rank <= workers:
        raise CodingError(f"rank = {rank} is not in [1, {workers}]")
