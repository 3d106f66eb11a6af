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
from dataclasses import dataclass, field
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

    @classmethod
    def none(cls, shape: Shape) -> Delays:
        """Nobody is late."""
        return cls(np.zeros(shape), np.ones(shape), np.ones(shape))

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


class _Sampled:
    """Gives the models `sample` as a method."""

    def sample(
        self: DelayModel, draws: int, workers: int, *, steps: int = 1, seed: int = 0
    ) -> Delays:
        """See `outlast.coding.delays.sample`."""
        return sample(self, draws, workers, steps=steps, seed=seed)


@dataclass(frozen=True)
class ShiftedExponential(_Sampled):
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
class Pareto(_Sampled):
    """Slowdown of at least 1 with P(slowdown > x) = x^-shape, anew for every worker and step.

    Attributes:
        shape: Above 0; the mean is infinite up to 1, the variance up to 2.
    """

    shape: float

    def __post_init__(self) -> None:
        if not self.shape > 0.0:
            raise CodingError(f"shape = {self.shape} is not above 0")

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        return _slowed(1.0 + generator.pareto(self.shape, shape))


@dataclass(frozen=True)
class Slow(_Sampled):
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
class Markov(_Sampled):
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
            raise CodingError("slow_share = 1 leaves no fast state; take Fixed instead")
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


@dataclass(frozen=True)
class Additive(_Sampled):
    """An exponential wait before the first chunk, however many chunks follow.

    Attributes:
        scale: Mean wait in seconds.
    """

    scale: float

    def __post_init__(self) -> None:
        at_least("scale", self.scale, 0.0)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        return _started(generator.exponential(self.scale, shape))


@dataclass(frozen=True, eq=False)
class Trace(_Sampled):
    """Measured seconds, replayed from a random round on, each simulated worker as a measured one.

    Attributes:
        table: (rounds, workers) seconds. It begins again after its last round.
        proportional: Whether the seconds are of computing, and so grow with the load: slowdowns
            are the seconds in units of their median. Otherwise they are waits before the start.
    """

    table: Array
    proportional: bool = False

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or not self.table.size or not np.all(self.table >= 0.0):
            raise CodingError(
                f"a trace is a table (rounds, workers) of seconds, none below 0, "
                f"not an array of shape {self.table.shape}"
            )

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        draws, steps, workers = shape
        rounds, measured = self.table.shape
        if workers > measured:
            raise CodingError(f"workers = {workers} is more than the {measured} of the trace")
        first = generator.integers(rounds, size=draws)
        columns = np.argsort(generator.random((draws, measured)), axis=1)[:, :workers]
        rows = (first[:, None] + np.arange(steps)) % rounds
        seconds = self.table[rows[:, :, None], columns[:, None, :]]
        if self.proportional:
            return _slowed(seconds / float(np.median(self.table)))
        return _started(seconds)


@dataclass(frozen=True)
class Fixed(_Sampled):
    """Workers that are always as slow as they are.

    Attributes:
        slowdowns: One per worker.
    """

    slowdowns: tuple[float, ...]

    def __post_init__(self) -> None:
        for slowdown in self.slowdowns:
            if not slowdown > 0.0:
                raise CodingError(f"slowdown {slowdown} is not above 0")

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        if shape[2] != len(self.slowdowns):
            raise CodingError(
                f"workers = {shape[2]}, but there are {len(self.slowdowns)} slowdowns"
            )
        return _slowed(np.broadcast_to(np.asarray(self.slowdowns, dtype=np.float64), shape))


@dataclass(frozen=True)
class FailStop(_Sampled):
    """Each worker is dead for a step with one probability: it never begins.

    Attributes:
        probability: Per worker and step.
    """

    probability: float

    def __post_init__(self) -> None:
        probability("probability", self.probability)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        return _started(np.where(generator.random(shape) < self.probability, math.inf, 0.0))


@dataclass(frozen=True)
class ChunkCosts(_Sampled):
    """Chunks that are dear for whoever computes them, as those with long sequences are.

    All chunks of an owner cost alike in a step: exp(deviation x normal), divided by its mean.

    Attributes:
        deviation: Standard deviation of the logarithm.
    """

    deviation: float

    def __post_init__(self) -> None:
        at_least("deviation", self.deviation, 0.0)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        normal = generator.standard_normal(shape)
        cost = np.exp(self.deviation * normal - self.deviation**2 / 2.0)
        return Delays(np.zeros(shape), np.ones(shape), cost)


@dataclass(frozen=True)
class Combined(_Sampled):
    """Several causes at once: waits add up, slowdowns and costs multiply.

    Attributes:
        models: The causes, independent of each other.
    """

    models: tuple[DelayModel, ...] = field(default_factory=tuple)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        total = Delays.none(shape)
        for model in self.models:
            each = model.draw(shape, generator)
            total = Delays(
                total.start_seconds + each.start_seconds,
                total.slowdown * each.slowdown,
                total.chunk_cost * each.chunk_cost,
            )
        return total


@dataclass(frozen=True)
class LoadIndependent(_Sampled):
    """The delays of another model, as a wait that does not grow with the load.

    Attributes:
        model: Whose slowdowns are meant.
        unit_seconds: A slowdown of 1 + x becomes a wait of x times these seconds.
    """

    model: DelayModel
    unit_seconds: float = 1.0

    def __post_init__(self) -> None:
        at_least("unit_seconds", self.unit_seconds, 0.0)

    def draw(self, shape: Shape, generator: np.random.Generator) -> Delays:
        """See `DelayModel`."""
        drawn = self.model.draw(shape, generator)
        waits = np.maximum(drawn.slowdown - 1.0, 0.0) * self.unit_seconds
        return Delays(drawn.start_seconds + waits, np.ones(shape), drawn.chunk_cost)


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a setting below `least`, or one that is no number."""
    if not value >= least:
        raise CodingError(f"{name} = {value} is below {least:g}")


def probability(name: str, value: float) -> None:
    """Refuse a setting outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise CodingError(f"{name} = {value} is not in [0, 1]")


def _slowed(slowdown: Array) -> Delays:
    return Delays(np.zeros(slowdown.shape), slowdown, np.ones(slowdown.shape))


def _started(seconds: Array) -> Delays:
    return Delays(seconds, np.ones(seconds.shape), np.ones(seconds.shape))
