"""Further laws of delays, with which simulations and advice are tested."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from outlast.coding.delays import DelayModel, Delays, Shape


@dataclass(frozen=True)
class Pareto:
    """Slowdown of at least 1 with P(slowdown > x) = x^-shape, anew for every worker and step.

    Attributes:
        shape: Above 0; the mean is infinite up to 1, the variance up to 2.
    """

    shape: float

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        return _slowed(1.0 + generator.pareto(self.shape, shape))


@dataclass(frozen=True)
class Additive:
    """An exponential wait before the first chunk, however many chunks follow.

    Attributes:
        scale: Mean wait in seconds.
    """

    scale: float

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        return _started(generator.exponential(self.scale, shape))


@dataclass(frozen=True)
class Fixed:
    """Workers that are always as slow as they are.

    Attributes:
        slowdowns: One per worker.
    """

    slowdowns: tuple[float, ...]

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        return _slowed(np.broadcast_to(np.asarray(self.slowdowns, dtype=np.float64), shape))


@dataclass(frozen=True)
class FailStop:
    """Each worker is dead for a step with one probability: it never begins.

    Attributes:
        probability: Per worker and step.
    """

    probability: float

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        return _started(np.where(generator.random(shape) < self.probability, math.inf, 0.0))


@dataclass(frozen=True)
class ChunkCosts:
    """Chunks that are dear for whoever computes them, as those with long sequences are.

    All chunks of an owner cost alike in a step: exp(deviation x normal), divided by its mean.

    Attributes:
        deviation: Standard deviation of the logarithm.
    """

    deviation: float

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        normal = generator.standard_normal(shape)
        cost = np.exp(self.deviation * normal - self.deviation**2 / 2.0)
        return Delays(np.zeros(shape), np.ones(shape), cost)


@dataclass(frozen=True)
class Combined:
    """Several causes at once: waits add up, slowdowns and costs multiply.

    Attributes:
        models: The causes, independent of drawn other.
    """

    models: tuple[DelayModel, ...] = field(default_factory=tuple)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        total = Delays(np.zeros(shape), np.ones(shape), np.ones(shape))
        for model in self.models:
            drawn = model.draw(shape, generator)
            total = Delays(
                total.start_seconds + drawn.start_seconds,
                total.slowdown * drawn.slowdown,
                total.chunk_cost * drawn.chunk_cost,
            )
        return total


@dataclass(frozen=True, eq=False)
class Trace:
    """Measured seconds, replayed from a random round on, each simulated worker as a measured one.

    Attributes:
        table: (rounds, workers) seconds. It begins again after its last round.
        proportional: Whether the seconds are of computing, and so grow with the load: slowdowns
            are the seconds in units of their median. Otherwise they are waits before the start.
    """

    table: np.ndarray
    proportional: bool = False

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        draws, steps, workers = shape
        rounds, measured = self.table.shape
        first = generator.integers(rounds, size=draws)
        columns = np.argsort(generator.random((draws, measured)), axis=1)[:, :workers]
        rows = (first[:, None] + np.arange(steps)) % rounds
        seconds = self.table[rows[:, :, None], columns[:, None, :]]
        if self.proportional:
            return _slowed(seconds / float(np.median(self.table)))
        return _started(seconds)


@dataclass(frozen=True)
class LoadIndependent:
    """The delays of another model, as a wait that does not grow with the load.

    Attributes:
        model: Whose slowdowns are meant.
        unit_seconds: A slowdown of 1 + x becomes a wait of x times these seconds.
    """

    model: DelayModel
    unit_seconds: float = 1.0

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """Delays of shape (draws, steps, workers)."""
        drawn = self.model.draw(shape, generator)
        waits = np.maximum(drawn.slowdown - 1.0, 0.0) * self.unit_seconds
        return Delays(drawn.start_seconds + waits, np.ones(shape), drawn.chunk_cost)


def _slowed(slowdown: np.ndarray) -> Delays:
    return Delays(np.zeros(slowdown.shape), slowdown, np.ones(slowdown.shape))


def _started(seconds: np.ndarray) -> Delays:
    return Delays(seconds, np.ones(seconds.shape), np.ones(seconds.shape))
