"""Fits of measured steps: shared constants by least squares, and a smooth residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.batch import Array, Cases
from outlast.plan.constants import (
    KNOWN_OF_CHIPS,
    LEVELS,
    NAMES,
    PRIORS,
    Constants,
    Level,
    constants,
)
from outlast.plan.step_time import step_seconds

NOISE = 0.06
"""Log standard deviation of a measured step around a perfect model (rows that differ in nothing
that matters: a few per cent, with heavy tails)."""
GRADES = (5.0 * NOISE, 2.0 * NOISE, NOISE)
"""Noises of the passes of a fit."""
FREEDOM = 4.0
"""Degrees of Student's distribution around the model: broken runs count less and less."""
STEP = 1e-4
"""Of the finite differences, on the unbounded scale."""


@dataclass(frozen=True, slots=True)
class Belonging:
    """Whose run it is; runs share constants with those of the same chip, cluster or framework."""

    chip: str
    cluster: str
    framework: str

    def of(self, level: Level) -> str:
        """Name at a level."""
        return str(getattr(self, level))

    @property
    def place(self) -> str:
        """Runs correct each other only within a framework on a cluster."""
        return f"{self.framework} on {self.cluster}"

    def group(self, *, mixture: bool) -> str:
        """The name under which errors of a framework on a chip of a cluster are collected.

        Another cluster with the same framework and chip has errors of its own: its network, hosts
        and versions differ. How far a prediction is off differs as much between dense models and
        mixtures of experts: kernels and exchanges of experts change from release to release.
        """
        name = f"{self.framework} on {self.chip} at {self.cluster}"
        return f"mixtures, {name}" if mixture else name


@dataclass(frozen=True, slots=True)
class Column:
    """One fitted number: the common position of a constant, or a group's distance from it.

    Attributes:
        constant: Name.
        level: None for the common position.
        group: Name of the chip, cluster or framework.
    """

    constant: str
    level: Level | None = None
    group: str = ""

    @property
    def deviation(self) -> float:
        """Prior standard deviation, on the unbounded scale."""
        prior = PRIORS[self.constant]
        log_deviation = prior.log_deviation if self.level is None else prior.spreads[self.level]
        return prior.unbounded_deviation(log_deviation)

    @property
    def mean(self) -> float:
        """Prior mean, on the unbounded scale: 0, or what is known of a chip."""
        if self.level != "chip":
            return 0.0
        prior = PRIORS[self.constant]
        known = prior.median * KNOWN_OF_CHIPS.get((self.constant, self.group), 1.0)
        return float(prior.unbounded(np.array(known)) - prior.unbounded(np.array(prior.median)))

    def counts_for(self, whose: Belonging) -> bool:
        """True if a run's constant contains it."""
        return self.level is None or whose.of(self.level) == self.group


def columns_of(whose: Sequence[Belonging]) -> tuple[Column, ...]:
    """All numbers that the constants of some runs are made of, and of chips that are known."""
    found = [Column(name) for name in NAMES]
    found += [Column(name, "chip", chip) for name, chip in KNOWN_OF_CHIPS]
    for level in LEVELS:
        for group in sorted({belonging.of(level) for belonging in whose}):
            found += [Column(name, level, group) for name in NAMES if level in PRIORS[name].spreads]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
        columns: What was fitted.
        values: (columns,) on the unbounded scale, distances from the priors' medians.
        covariance: (columns, columns), of the Gauss-Newton approximation.
    """

    columns: tuple[Column, ...]
    values: Array
    covariance: Array

    @cached_property
    def _rows(self) -> NDArray[np.intp]:
        return np.array([NAMES.index(column.constant) for column in self.columns])

    def shares(self, whose: Sequence[Belonging]) -> Array:
        """(columns, runs): 1 where a number is part of a run's constant.

        One `Belonging` may stand for all runs: then `runs` is 1, which broadcasts.
        """
        return np.asarray(
            np.array(
                [
                    [float(column.counts_for(belonging)) for belonging in whose]
                    for column in self.columns
                ]
            )
        )

    def positions(self, shares: Array, values: Array | None = None) -> Array:
        """(constants, runs) on the unbounded scale."""
        own = self.values if values is None else values
        positions = np.zeros((len(NAMES), shares.shape[1]))
        np.add.at(positions, self._rows, own[:, None] * shares)
        return np.asarray(positions + _MEDIANS[:, None])

    def constants(self, whose: Sequence[Belonging]) -> Constants:
        """Of some runs; a group that was not fitted has the common position."""
        return _constants(self.positions(self.shares(whose)))

    def log_gradient(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(runs, columns): derivative of the log of a step's time by the fitted numbers."""
        shares = self.shares(whose)
        slopes = _slopes(cases, self.positions(shares))
        return np.asarray((slopes[self._rows] * shares).T)

    def log_deviation(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(runs,): standard deviation of the log of a step's time that the constants cause.

        Groups that were not fitted add the spread of their level (delta method).

        Args:
            cases: (runs,).
            whose: Of each run, or one for all.
        """
        known = set(self.columns)
        shares = self.shares(whose)
        slopes = _slopes(cases, self.positions(shares))
        if len(whose) == 1:
            # Columns of one constant have one gradient: their covariances add up.
            counted = np.zeros((len(NAMES), len(self.columns)))
            counted[self._rows, np.arange(len(self.columns))] = shares[:, 0]
            joint = counted @ self.covariance @ counted.T
            variance = np.einsum("ji,jk,ki->i", slopes, joint, slopes, optimize=True)
        else:
            gradient = (slopes[self._rows] * shares).T
            variance = np.einsum("ij,ij->i", gradient @ self.covariance, gradient)
        for index, name in enumerate(NAMES):
            for level in PRIORS[name].spreads:
                unknown = np.array(
                    [Column(name, level, belonging.of(level)) not in known for belonging in whose]
                )
                spread = Column(name, level, "").deviation
                variance = variance + unknown * (slopes[index] * spread) ** 2
        return np.asarray(np.sqrt(variance))


def most_probable(
    residuals: Callable[[Array], Array],
    begin: Array,
    deviations: Array,
    *,
    evaluations: int,
    jacobian: Callable[[Array], Array] | Literal["2-point"] = "2-point",
) -> tuple[Array, Array]:
    """Least squares of residuals, priors among them, and the covariance at the minimum.

    Args:
        residuals: Of the numbers, whitened.
        begin: Where to start.
        deviations: Scale of each number.
        evaluations: Of the residuals, at most.
        jacobian: Of the residuals; finite differences by default.
    """
    from scipy.optimize import least_squares

    found = least_squares(
        residuals, begin, jac=jacobian, x_scale=deviations, max_nfev=evaluations, ftol=1e-6
    )
    return found.x, np.linalg.inv(found.jac.T @ found.jac)


def fit(
    cases: Cases, seconds: Array, whose: Sequence[Belonging], *, prior: Fit | None = None
) -> Fit:
    """Most probable constants (maximum a posteriori).

    Student's noise on log seconds (robust regression: Lange et al. 1989), normal priors on the
    unbounded scale, so that no efficiency exceeds its bound; one common position for each
    constant, and distances of chips, clusters and frameworks from it.

    Args:
        cases: (runs,).
        seconds: (runs,) measured, of one step.
        whose: Of each run.
        prior: What other runs have taught: its values and their covariance take the place of the
            priors of `PRIORS`, and its groups stay in the result.

    Raises:
        PlanError: No run, or a time that is not above zero.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    if not measured.size or not (np.isfinite(measured) & (measured > 0.0)).all():
        raise PlanError("step_seconds of every run must be a number above 0: leave others out")
    blank = believed(whose, prior)
    columns, means = blank.columns, blank.values
    deviations = np.sqrt(np.diag(blank.covariance))
    whitening = np.linalg.cholesky(np.linalg.inv(blank.covariance)).T
    shares = blank.shares(whose)
    rows = blank._rows
    logarithms = np.log(measured)

    def errors(values: Array, noise: float) -> tuple[Array, Array]:
        positions = blank.positions(shares, values)
        return positions, (_log_seconds(cases, positions) - logarithms) / noise

    def residuals(values: Array, noise: float) -> Array:
        _, error = errors(values, noise)
        return np.concatenate([_soft(error), whitening @ (values - means)])

    def jacobian(values: Array, noise: float) -> Array:
        positions, error = errors(values, noise)
        slopes = _slopes(cases, positions)[rows] * shares / noise
        root = np.abs(_soft(error))
        slope = np.abs(error) / (1.0 + error**2 / FREEDOM) / np.maximum(root, 1e-9)
        return np.concatenate([(slopes * np.where(root > 1e-9, slope, 1.0)).T, whitening])

    # Outliers make several minima. With much noise there are none, and the minimum is followed
    # down to the noise that there is (graduated non-convexity: Blake and Zisserman 1987).
    values, covariance = means, blank.covariance
    for noise in GRADES:
        values, covariance = most_probable(
            partial(residuals, noise=noise),
            values,
            deviations,
            evaluations=80,
            jacobian=partial(jacobian, noise=noise),
        )
    return Fit(columns, values, covariance)


def believed(whose: Sequence[Belonging] = (), prior: Fit | None = None) -> Fit:
    """Prior means and deviations of all numbers, before the runs are looked at.

    Args:
        whose: Of each run.
        prior: What other runs have taught; None for the priors.
    """
    columns = columns_of(whose)
    if prior is not None:
        columns = (
            *prior.columns,
            *(column for column in columns if column not in set(prior.columns)),
        )
    deviations = np.array([column.deviation for column in columns])
    values = np.array([column.mean for column in columns])
    covariance = np.diag(deviations**2)
    if prior is not None:
        known = len(prior.columns)
        values[:known] = prior.values
        covariance[:known, :known] = prior.covariance
    return Fit(columns, values, covariance)


_MEDIANS = np.array([PRIORS[name].unbounded(np.array(PRIORS[name].median)) for name in NAMES])


def _constants(positions: Array) -> Constants:
    return constants(
        {name: PRIORS[name].bounded(positions[index]) for index, name in enumerate(NAMES)}
    )


def _log_seconds(cases: Cases, positions: Array) -> Array:
    return np.log(step_seconds(cases, _constants(positions)))


def _slopes(cases: Cases, positions: Array) -> Array:
    """(constants, runs): derivative of log seconds by each constant's position."""
    middle = _log_seconds(cases, positions)
    slopes = np.empty((len(NAMES), len(middle)))
    for index in range(len(NAMES)):
        moved = positions.copy()
        moved[index] += STEP
        slopes[index] = (_log_seconds(cases, moved) - middle) / STEP
    # Every term is proportional to a constant or its inverse, so that no slope exceeds 1; a
    # difference does where it crosses the point at which a block moves to another stage.
    return np.clip(slopes, -1.0, 1.0)


def _soft(error: Array) -> Array:
    """Signed root of the loss `n log(1 + e^2 / n)` of Student's density."""
    return np.sign(error) * np.sqrt(FREEDOM * np.log1p(error**2 / FREEDOM))


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
RESIDUAL_NOISE = 0.05
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
        return np.asarray(self._inverse @ self.residuals)

    def correction(self, cases: Cases, place: Sequence[str]) -> tuple[Array, Array]:
        """Correction of log seconds, and the variance that is left of it.

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
    return np.asarray(np.log2(np.maximum(np.stack(columns, axis=1), 1.0)))


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
    return np.asarray((names[:, None] == names[None]).astype(np.float64))


def _robust(kernel: Array, residuals: Array) -> tuple[Array, Array]:
    """Noises that grow for outliers (iterated), and the inverse of the kernel with them."""
    noises = np.full(len(residuals), RESIDUAL_NOISE)
    for _ in range(4):
        weights = np.linalg.solve(kernel + np.diag(noises**2), residuals)
        error = (residuals - kernel @ weights) / RESIDUAL_NOISE
        noises = RESIDUAL_NOISE * np.minimum(np.sqrt(1.0 + (error / OUTLIER) ** 2), 30.0)
    return noises, np.asarray(np.linalg.inv(kernel + np.diag(noises**2)), np.float64)


def _kernel(first: Array, second: Array, amplitude: float, length: float) -> Array:
    square = (
        np.sum(first**2, axis=1)[:, None] + np.sum(second**2, axis=1)[None] - 2.0 * first @ second.T
    )
    distance = np.sqrt(3.0 * np.maximum(square, 0.0)) / length
    return np.asarray(amplitude**2 * (1.0 + distance) * np.exp(-distance))
