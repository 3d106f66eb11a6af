"""What becomes of a step of micro-coverage, on the way and at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.certificate import certify

if TYPE_CHECKING:
    import torch

    from outlast.coding.certificate import Certificate
    from outlast.coding.spread import Spread


@dataclass(frozen=True)
class Disagreement:
    """Two processes have computed one chunk and got different gradients.

    Attributes:
        chunk: The chunk.
        ranks: The process whose gradient counts, and the one that found the difference.
        difference: Estimate of the difference's 2-norm as a share of the gradient's.
    """

    chunk: int
    ranks: tuple[int, int]
    difference: float


@dataclass(frozen=True)
class Covered:
    """What became of one step.

    Attributes:
        loss: Sum of the losses of the chunks whose gradients this process has given, a scalar.
        certificate: Exact, or the error that lost chunks leave.
        lost: Chunks whose gradients are not in the result.
        taken_over: Chunks of others whose gradients this process has given.
        yielded: Chunks of this process that others have done.
        duplicates: Chunks that this process computed although another was first.
        disagreements: Chunks that two processes have computed with different results.
        ranks: Processes that take part after this step.
        seconds: Time from the begin of the step to its end.
        own_seconds: Time that this process would have needed at least for all its own chunks, from
            the chunks that it has computed or begun.
        waited_seconds: Of `seconds`: waiting for others, and summing.
    """

    loss: torch.Tensor
    certificate: Certificate
    lost: tuple[int, ...]
    taken_over: int
    yielded: int
    duplicates: int
    disagreements: tuple[Disagreement, ...]
    ranks: tuple[int, ...]
    seconds: float
    own_seconds: float
    waited_seconds: float


@dataclass
class Progress:
    """What this process has done in the step so far."""

    loss: torch.Tensor
    begun: float
    won: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    duplicates: int = 0
    waited_seconds: float = 0.0
    chunk_seconds: list[float] = field(default_factory=list)
    slow_seconds: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)

    def outcome(
        self, held: Spread, worker: int, *, ranks: tuple[int, ...], dtype: str, scale: float
    ) -> Covered:
        """The outcome of the step for one process.

        Args:
            held: Who owns which chunks.
            worker: This process's place among the owners.
            ranks: Processes that take part after the step.
            dtype: Type of the gradients.
            scale: What the sum was multiplied by.
        """
        coefficients = np.full(held.chunks, scale)
        coefficients[sorted(self.lost)] = 0.0
        norms = np.full(held.workers, np.sqrt(held.chunks_per_worker))
        kept = sum(chunk in held.own(worker) for chunk in self.won)
        # Of this step alone: a process that was slow once has not stayed so. A chunk that was given
        # up would have taken longer than it had when it was.
        typical = min(self.chunk_seconds, default=self.slow_seconds)
        return Covered(
            loss=self.loss,
            certificate=certify(coefficients, np.ones(held.workers), norms, dtype),
            lost=tuple(sorted(self.lost)),
            taken_over=len(self.won) - kept,
            yielded=held.chunks_per_worker - kept,
            duplicates=self.duplicates,
            disagreements=tuple(self.disagreements),
            ranks=ranks,
            seconds=time.monotonic() - self.begun,
            own_seconds=typical * held.chunks_per_worker,
            waited_seconds=self.waited_seconds,
        )
