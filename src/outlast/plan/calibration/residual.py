"""What the formulas miss in a neighbourhood: a smooth correction of log seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outlast.plan.cases import Array, Cases

FEATURES = (
    "tensor",
    "pipeline",
    "data",
    "micro_batch",
    "micro_batches",
    "hidden",
    "layers",
    "sequence",
)
"""Of `Cases`; their binary logarithms span the space in which runs are near each other."""
AMPLITUDES = (0.03, 0.06, 0.12)
LENGTHS = (2.0, 4.0)
"""In doublings of all features together."""
NOISE = 0.05
OUTLIER = 2.0
"""Residuals beyond so many deviations of the noise count less and less (Student's weights)."""


@dataclass(frozen=True)
class Residual:
    """A Gaussian process with a Matern 3/2 kernel, one for each place (framework and cluster).

    Attributes:
        features: (rows, features) of the support.
        places: Of each row.
        residuals: (rows,) log of measured over predicted seconds.
        noises: (rows,) log standard deviations, larger for outliers.
        amplitude: Standard deviation of the correction, in log seconds.
        length: Of the kernel.
    """

    features: Array
    places: tuple[str, ...]
    residuals: Array
    noises: Array
    amplitude: float
    length: float

    @cached_property
    def _inverse(self) -> Array:
        same = _same(self.places)
        kernel = _kernel(self.features, self.features, self.amplitude, self.length) * same
        return np.asarray(np.linalg.inv(kernel + np.diag(self.noises**2)), np.float64)

    @cached_property
    def _weights(self) -> Array:
        weights: Array = self._inverse @ self.residuals
        return weights

    def correction(self, cases: Cases, place: Sequence[str]) -> tuple[Array, Array]:
        """What to add to log seconds, and the variance that is left of the correction.

        Args:
            cases: (cases,).
            place: (cases,) or one for all. Runs of other places correct nothing.

        Returns:
            (cases,) mean and (cases,) variance.
        """
        asked = features_of(cases)
        places = list(place) * len(asked) if len(place) == 1 else list(place)
        mean = np.zeros(len(asked))
        variance = np.full(len(asked), self.amplitude**2)
        for here in sorted(set(places) & set(self.places)):
            rows = np.array([place == here for place in places])
            columns = np.array([place == here for place in self.places])
            near = _kernel(asked[rows], self.features[columns], self.amplitude, self.length)
            mean[rows] = near @ self._weights[columns]
            inverse = self._inverse[np.ix_(columns, columns)]
            variance[rows] -= np.einsum("ij,jk,ik->i", near, inverse, near)
        return mean, np.maximum(variance, 0.0)


def features_of(cases: Cases) -> Array:
    """(cases, features): binary logarithms."""
    columns = [np.broadcast_to(getattr(cases, name), (len(cases),)) for name in FEATURES]
    logarithms: Array = np.log2(np.maximum(np.stack(columns, axis=1), 1.0))
    return logarithms


def fit_residual(cases: Cases, residuals: Array, place: Sequence[str]) -> Residual:
    """The correction that fits best when each row is predicted from the others.

    Amplitude and length are chosen from small grids by the leave-one-out density (Rasmussen and
    Williams 2006, equations 5.10 to 5.12).

    Args:
        cases: (rows,) of the calibration.
        residuals: (rows,) log of measured over predicted seconds.
        place: Framework and cluster of each row.
    """
    features = features_of(cases)
    same = _same(place)
    best: tuple[float, Residual] | None = None
    for amplitude in AMPLITUDES:
        for length in LENGTHS:
            kernel = _kernel(features, features, amplitude, length) * same
            noises, inverse = _robust(kernel, residuals)
            spread = 1.0 / np.diag(inverse)
            error = (inverse @ residuals) * spread
            # Student's density with 4 degrees of freedom: outliers must not choose the grid point.
            score = -np.sum(2.5 * np.log1p(error**2 / (4.0 * spread)) + 0.5 * np.log(spread))
            found = Residual(features, tuple(place), residuals, noises, amplitude, length)
            if best is None or score > best[0]:
                best = float(score), found
    assert best is not None
    return best[1]


def _same(places: Sequence[str]) -> Array:
    names = np.array(places)
    same: Array = (names[:, None] == names[None]).astype(np.float64)
    return same


def _robust(kernel: Array, residuals: Array) -> tuple[Array, Array]:
    """Noises that grow for outliers (iterated), and the inverse of the kernel with them."""
    noises = np.full(len(residuals), NOISE)
    for _ in range(4):
        weights = np.linalg.solve(kernel + np.diag(noises**2), residuals)
        error = (residuals - kernel @ weights) / NOISE
        noises = NOISE * np.minimum(np.sqrt(1.0 + (error / OUTLIER) ** 2), 30.0)
    return noises, np.asarray(np.linalg.inv(kernel + np.diag(noises**2)), np.float64)


def _kernel(first: Array, second: Array, amplitude: float, length: float) -> Array:
    square = (
        np.sum(first**2, axis=1)[:, None] + np.sum(second**2, axis=1)[None] - 2.0 * first @ second.T
    )
    distance = np.sqrt(3.0 * np.maximum(square, 0.0)) / length
    kernel: Array = amplitude**2 * (1.0 + distance) * np.exp(-distance)
    return kernel
