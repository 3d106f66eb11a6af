"""Models of how late workers are: seconds before they begin, and how much slower they compute.

A worker that computes a load of x chunks is done after ``start + x * slowdown * chunk seconds``.
What happens before the first chunk does not grow with the load (a cold start, a network stall);
slowness does. Which of the two it is decides whether replication can pay: a code with d chunks per
worker pays the second d times and the first once.

All models draw (draws, steps, workers) at once; draws are independent, the steps of one draw follow
each other, so that slowness may persist from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from outlast.errors import CodingError

Array = npt.NDArray[np.float64]


Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Delays:
    """Drawn delays, all arrays (draws, steps, workers).

    Attributes:
        start_seconds: Until a worker begins its first chunk; infinite for one that never does.
        slowdown: Factor on the seconds of every chunk that the worker computes.
        chunk_cost: Factor on the seconds of every chunk that the worker *owns*, whoever computes
            it.
    """

    start_seconds: Array
    slowdown: Array
    chunk_cost: Array

    @property
    def workers(self) -> int:
        """Number of workers."""
        return int(self.slowdown.shape[-1])

    def flat(self) -> tuple[Array, Array, Array]:
        """The three arrays with draws and steps as one axis: (draws * steps, workers)."""
        shape = (-1, self.workers)
        return (
            self.start_seconds.reshape(shape),
            self.slowdown.reshape(shape),
            self.chunk_cost.reshape(shape),
        )


@runtime_checkable
class DelayModel(Protocol):
    """Anything that draws delays."""

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""


def sample(model: DelayModel, draws: int, workers: int, *, steps: int = 1, seed: int = 0) -> Delays:
    """Delays of `draws` independent stretches of `steps` steps.

    Raises:
        CodingError: For counts below 1, or where the model has another number of workers.
    """
    for name, value in (("draws", draws), ("workers", workers), ("steps", steps)):
        if value < 1:
            raise CodingError(f"{name} = {value} is below 1")
    return model.draw((draws, steps, workers), np.random.default_rng(seed))


@dataclass(frozen=True)
class ShiftedExponential:
    """Slowdown 1 + Exp(scale), anew for every worker and step.

    Attributes:
        scale: Mean of what is beyond 1.
    """

    scale: float

    def __post_init__(self) -> None:
        at_least("scale", self.scale, 0.0)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        return _slowed(1.0 + generator.exponential(self.scale, shape))


@dataclass(frozen=True)
class Slow:
    """Each worker is slow in a step with one probability, whatever it was before.

    Attributes:
        share: Probability of being slow.
        factor: Slowdown of a slow worker.
    """

    share: float
    factor: float

    def __post_init__(self) -> None:
        probability("share", self.share)
        at_least("factor", self.factor, 1.0)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        return _slowed(np.where(generator.random(shape) < self.share, self.factor, 1.0))


@dataclass(frozen=True)
class Markov:
    """Workers that are slow for a while: a two-state chain per worker, begun in its stationary law.

    Attributes:
        slow_share: Share of steps in which a worker is slow.
        persistence: P(slow in the next step | slow); `slow_share` makes the steps independent.
        factor: Slowdown of a slow worker.
    """

    slow_share: float
    persistence: float
    factor: float

    def __post_init__(self) -> None:
        probability("slow_share", self.slow_share)
        probability("persistence", self.persistence)
        at_least("factor", self.factor, 1.0)
        if self.slow_share == 1.0:
            raise CodingError("slow_share = 1 leaves no fast state; take Slow(1, factor) instead")
        if self.onset > 1.0:
            least = 2.0 - 1.0 / self.slow_share
            raise CodingError(
                f"persistence = {self.persistence} is too small for slow_share = "
                f"{self.slow_share}: at least {least:g}"
            )

    @property
    def onset(self) -> float:
        """P(slow in the next step | fast), which keeps `slow_share` stationary."""
        return self.slow_share * (1.0 - self.persistence) / (1.0 - self.slow_share)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        uniform = generator.random(shape)
        slow = np.empty(shape, dtype=bool)
        slow[:, 0] = uniform[:, 0] < self.slow_share
        for step in range(1, shape[1]):
            becomes = np.where(slow[:, step - 1], self.persistence, self.onset)
            slow[:, step] = uniform[:, step] < becomes
        return _slowed(np.where(slow, self.factor, 1.0))


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a setting below `least`, or one that is no number."""
    if not value >= least:
        raise CodingError(f"{name} = {value} is below {least:g}")
    if value == math.inf:
        raise CodingError(f"{name} = {value} is not finite; give a number")


def probability(name: str, value: float) -> None:
    """Refuse a setting outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise CodingError(f"{name} = {value} is not in [0, 1]")


def _slowed(slowdown: Array) -> Delays:
    return Delays(np.zeros(slowdown.shape), slowdown, np.ones(slowdown.shape))
