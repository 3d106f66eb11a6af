"""The fit of the time model's constants to measured steps, shared over chip, cluster, framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.cases import Array, Cases
from outlast.plan.constants import (
    KNOWN_OF_CHIPS,
    LEVELS,
    NAMES,
    PRIORS,
    Constants,
    Level,
    bounded,
    constants,
    unbounded,
    unbounded_deviation,
)
from outlast.plan.terms.step import step_seconds

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
        return unbounded_deviation(self.constant, log_deviation)

    @property
    def mean(self) -> float:
        """Prior mean, on the unbounded scale: 0, or what is known of a chip."""
        if self.level != "chip":
            return 0.0
        median = PRIORS[self.constant].median
        known = median * KNOWN_OF_CHIPS.get((self.constant, self.group), 1.0)
        return float(
            unbounded(self.constant, np.array(known)) - unbounded(self.constant, np.array(median))
        )

    def counts_for(self, whose: Belonging) -> bool:
        """Whether a run's constant contains it."""
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
        counted: Array = np.array(
            [
                [float(column.counts_for(belonging)) for belonging in whose]
                for column in self.columns
            ]
        )
        return counted

    def positions(self, shares: Array, values: Array | None = None) -> Array:
        """(constants, runs) on the unbounded scale."""
        own = self.values if values is None else values
        positions = np.zeros((len(NAMES), shares.shape[1]))
        np.add.at(positions, self._rows, own[:, None] * shares)
        whole: Array = positions + _MEDIANS[:, None]
        return whole

    def constants(self, whose: Sequence[Belonging]) -> Constants:
        """Of some runs; a group that was not fitted has the common position."""
        return _constants(self.positions(self.shares(whose)))

    def log_gradient(self, cases: Cases, whose: Sequence[Belonging]) -> Array:
        """(runs, columns): derivative of the log of a step's time by the fitted numbers."""
        shares = self.shares(whose)
        slopes = _slopes(cases, self.positions(shares))
        gradient: Array = (slopes[self._rows] * shares).T
        return gradient

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
        deviation: Array = np.sqrt(variance)
        return deviation


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
    from scipy.optimize import least_squares

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
        return np.concatenate([(slopes * _soft_slope(error)).T, whitening])

    found, begin = None, means
    # Outliers make several minima. With much noise there are none, and the minimum is followed
    # down to the noise that there is (graduated non-convexity: Blake and Zisserman 1987).
    for noise in GRADES:
        found = least_squares(
            residuals,
            begin,
            jac=jacobian,
            args=(noise,),
            x_scale=deviations,
            max_nfev=80,
            ftol=1e-6,
        )
        begin = found.x
    assert found is not None
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Fit(columns, found.x, covariance)


def believed(whose: Sequence[Belonging] = (), prior: Fit | None = None) -> Fit:
    """What is believed of all numbers before the runs are looked at.

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


_MEDIANS = np.array([float(unbounded(name, np.array(PRIORS[name].median))) for name in NAMES])


def _constants(positions: Array) -> Constants:
    return constants({name: bounded(name, positions[index]) for index, name in enumerate(NAMES)})


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


def _soft_slope(error: Array) -> Array:
    root = np.abs(_soft(error))
    slope = np.abs(error) / (1.0 + error**2 / FREEDOM) / np.maximum(root, 1e-9)
    return np.where(root > 1e-9, slope, 1.0)
