"""A delay model from the chunk seconds that a run has measured, and how well it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.coding.simulate.delays import (
    Array,
    DelayModel,
    Fixed,
    Markov,
    ShiftedExponential,
    sample,
)
from outlast.errors import CodingError

_OWN_SHARE = 0.8
_DRAWS = 200


@dataclass(frozen=True)
class Fitted:
    """A model fitted by moments.

    Attributes:
        model: Whose slowdowns are in units of `unit_seconds`.
        unit_seconds: Seconds of a chunk at slowdown 1.
        distance: Mean distance between the measured and the model's slowdowns, both sorted
            (Wasserstein-1), in units of the measured mean; 0 is a perfect fit.
        worker_share: Share of the variance that goes with the worker: 1 where each is always
            equally slow, 0 where it changes from step to step.
        slow_share: Share of measurements that are nearer to the slow than to the fast ones.
        persistence: P(such a worker in the next step | such a worker); None where it was never
            seen. About `slow_share` means that the steps are independent.
        measured_worst: Mean over the steps of the slowest worker's slowdown.
        predicted_worst: The same under the model.
    """

    model: DelayModel
    unit_seconds: float
    distance: float
    worker_share: float
    slow_share: float
    persistence: float | None
    measured_worst: float
    predicted_worst: float

    @property
    def trustworthy(self) -> bool:
        """Whether the model's slowest worker, which decides the step, is within 15 %."""
        return abs(self.predicted_worst / self.measured_worst - 1.0) <= 0.15


def fit(chunk_seconds: Array) -> Fitted:
    """The model among `Fixed`, `Markov` and `ShiftedExponential` that is nearest.

    `Fixed` where most of the variance goes with the worker; of the others, that with the smaller
    distance. Measured seconds alone do not tell whether slowness follows the worker or the chunk:
    where it is the chunk's, expect a persistence of about `slow_share`.

    Args:
        chunk_seconds: (steps, workers) seconds per chunk of each worker in each step.

    Raises:
        CodingError: For fewer than two steps or workers, or seconds that are not above 0.
    """
    shape = chunk_seconds.shape
    if len(shape) != 2 or min(shape) < 2:
        raise CodingError(f"chunk seconds of shape {shape} are not at least 2 steps x 2 workers")
    if not np.all(np.isfinite(chunk_seconds)) or not np.all(chunk_seconds > 0.0):
        raise CodingError("chunk seconds are not all finite and above 0")
    slow = slow_ones(chunk_seconds)
    slow_share = float(slow.mean())
    persistence = _persistence(slow)
    worker_share = _worker_share(chunk_seconds)
    candidates: list[tuple[DelayModel, float]] = []
    if worker_share > _OWN_SHARE:
        means = chunk_seconds.mean(axis=0)
        unit = float(np.median(means))
        candidates.append((Fixed(tuple(float(mean) for mean in means / unit)), unit))
    else:
        candidates.append(_exponential(chunk_seconds))
        if persistence is not None and 0.0 < slow_share < 0.5:
            candidates.append(_two_states(chunk_seconds, slow, persistence))
    fits = [
        _judged(chunk_seconds, model, unit, (worker_share, slow_share, persistence))
        for model, unit in candidates
    ]
    return min(fits, key=lambda fitted: fitted.distance)


def slow_ones(chunk_seconds: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which measurements belong to the slower of two classes.

    The threshold is Otsu's (1979), on logarithms: the one that leaves least variance within the
    classes.
    """
    logarithms = np.sort(np.log(chunk_seconds).ravel())
    count = np.arange(1, len(logarithms))
    below = np.cumsum(logarithms)[:-1]
    above = logarithms.sum() - below
    between = (below / count - above / count[::-1]) ** 2 * count * count[::-1]
    # Between-class variance is largest at an end of a run of equal values, so none is divided.
    return np.asarray(np.log(chunk_seconds) > logarithms[int(np.argmax(between))])


def _persistence(slow: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float | None:
    before, after = slow[:-1], slow[1:]
    return float((before & after).sum() / before.sum()) if before.any() else None


def _worker_share(chunk_seconds: Array) -> float:
    """The variance component of the workers in a one-way analysis of variance, as a share."""
    steps = len(chunk_seconds)
    within = float(chunk_seconds.var(axis=0, ddof=1).mean())
    between = float(chunk_seconds.mean(axis=0).var(ddof=1)) - within / steps
    total = max(between, 0.0) + within
    return max(between, 0.0) / total if total > 0.0 else 0.0


def _exponential(chunk_seconds: Array) -> tuple[DelayModel, float]:
    """A shifted exponential's deviation is its mean beyond the shift."""
    mean = float(chunk_seconds.mean())
    # Longer tails than exponential would put the shift below what is ever measured.
    deviation = min(float(chunk_seconds.std()), mean - float(chunk_seconds.min()))
    return ShiftedExponential(deviation / (mean - deviation)), mean - deviation


def _two_states(
    chunk_seconds: Array,
    slow: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    persistence: float,
) -> tuple[DelayModel, float]:
    unit = float(chunk_seconds[~slow].mean())
    share = float(slow.mean())
    return Markov(share, persistence, float(chunk_seconds[slow].mean()) / unit), unit


def _judged(
    chunk_seconds: Array,
    model: DelayModel,
    unit: float,
    moments: tuple[float, float, float | None],
) -> Fitted:
    steps, workers = chunk_seconds.shape
    drawn = sample(model, max(_DRAWS // steps, 1) * 4, workers, steps=steps).slowdown
    measured = chunk_seconds / unit
    level = (np.arange(1000) + 0.5) / 1000
    apart = np.abs(np.quantile(measured, level) - np.quantile(drawn, level))
    worker_share, slow_share, persistence = moments
    return Fitted(
        model,
        unit,
        float(apart.mean() / measured.mean()),
        worker_share,
        slow_share,
        persistence,
        float(measured.max(axis=-1).mean()),
        float(drawn.max(axis=-1).mean()),
    )
