"""Costs and savings of gradient coding, as pure functions of its settings; needs no torch.

The planner composes these. Times are in seconds, and ratios are to training without a code, where
every step waits for the slowest worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.delays import DelayModel

CLAIM_SECONDS = 2e-4
"""One compare-and-set in the process group's store."""


@dataclass(frozen=True)
class CostModel:
    """Times and bytes of a training step.

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
        """Time that coverage adds to a step when nobody straggles."""
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
    from outlast.coding.assignment import spread
    from outlast.coding.delays import sample
    from outlast.coding.simulate import cover, wait_all

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
    from outlast.coding.delays import sample
    from outlast.coding.simulate import wait_all

    delays = sample(model, draws, workers, seed=seed)
    waited = float(wait_all(delays, costs.share_seconds).seconds.mean())
    step = waited + costs.reduction_seconds
    # Chunks may also be cheap, and a step of cheap ones is no gain to be had.
    return max(step / (costs.share_seconds + costs.reduction_seconds), 1.0)


def _counted(name: str, value: int) -> None:
    if value < 1:
        raise CodingError(f"{name} = {value} is below 1")
