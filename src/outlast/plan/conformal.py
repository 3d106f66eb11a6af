"""Intervals that cover: quantiles of the errors on rows that were not fitted.

The score of a row is `|log measured - log predicted| / scale`, with the difficulty

    scale = sqrt(floor^2 + deviation^2) * (1 + distance),

`deviation` from the fit's covariance (delta method), `distance` from the calibrated ranges. The
residuals come from cross-validation by configuration (CV+: Barber et al. 2021, 1905.02928), so
that no row judges its own fit.

A group is a framework on a chip. Small groups borrow twice: the group's mean score is shrunk to
that of all rows (`_MEAN_ROWS` rows' worth of it), leaving out the row that it normalises, and of
the normalised scores those of other groups count as `_QUANTILE_ROWS` rows together. The quantile is
the weighted one with its share of weight at infinity (Barber et al. 2023, 2202.13415, equation 11),
which with equal weights is the usual correction to the rank ceil((n + 1) coverage).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.batch import Array
from outlast.plan.estimate import Interval
from outlast.plan.rows import Row

OTHERS = "*"
"""Stands for every group that no row was measured of."""


def interval_group(framework: str, chip: str, cluster: str = "", *, mixture: bool = False) -> str:
    """The name under which errors of a framework on a chip of a cluster are collected.

    Another cluster with the same framework and chip has errors of its own: its network, hosts and
    versions differ. How far a prediction is off differs as much between dense models and mixtures
    of experts: kernels and exchanges of experts change from release to release.

    Args:
        framework: As calibrations count.
        chip: Kind of the devices.
        cluster: Its name; empty for the beginning that the names of all clusters share.
        mixture: A mixture of experts.
    """
    name = f"{framework} on {chip} at {cluster}"
    return f"mixtures, {name}" if mixture else name


def interval_groups(rows: Sequence[Row]) -> tuple[str, ...]:
    """`interval_group` of each row."""
    return tuple(
        interval_group(row.framework, row.chip, row.cluster.name, mixture=row.model.experts > 1)
        for row in rows
    )


def folds(keys: Sequence[str], count: int, seed: int = 0) -> NDArray[np.intp]:
    """Folds for cross-validation that never split a key.

    Keys are ordered by a hash of the seed and themselves, not by their place in the file: sorted
    files leak through ties. They are dealt out so that the folds have nearly equal numbers of rows.

    Args:
        keys: (n,) of the rows, `Row.key`.
        count: Folds, at least 2.
        seed: Of the order.

    Returns:
        (n,) number of each row's fold, from 0.

    Raises:
        PlanError: Fewer keys than folds.
    """
    members: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    if count < 2 or len(members) < count:
        raise PlanError(
            f"folds = {count}: give at least 2 and at most one per configuration "
            f"(there are {len(members)})"
        )
    found = np.zeros(len(keys), np.intp)
    filled = [0] * count
    for key in sorted(
        members,
        key=lambda member: (
            -len(members[member]),
            hashlib.sha256(f"{seed}:{member}".encode()).digest(),
        ),
    ):
        fold = min(range(count), key=lambda index: (filled[index], index))
        found[members[key]] = fold
        filled[fold] += len(members[key])
    return found


_MEAN_ROWS = 3.0
_QUANTILE_ROWS = 15.0
_LEAST_FLOOR = 0.005
FEW = 19
"""Rows below which the quantile of one group's scores would be the largest of them."""
_EXPECTED = 0.1
"""Log error that is expected of the formulas before any row is seen."""
EXPECTED_ROWS = 4.0
"""Rows that an expected error counts for beside those that were measured: of a few, that they
happen to lie close says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformal:
    """Widths of intervals.

    Attributes:
        quantiles: Of the score, by group; `OTHERS` is for groups that were not calibrated.
        floor: Log standard deviation of a row that the fit knows perfectly.
        coverage: Share of truths that the intervals hold.
    """

    quantiles: Mapping[str, float]
    floor: float
    coverage: float = 0.9

    def half_widths(self, deviations: Array, groups: Sequence[str], distances: Array) -> Array:
        """Half of the intervals' widths in log space.

        Args:
            deviations: (n,) log standard deviations from the fit's covariance.
            groups: (n,) names; unknown ones take the quantile of `OTHERS`.
            distances: (n,) from `support.Support.distances`, 0 inside the calibrated ranges.

        Returns:
            (n,), at least 0.
        """
        other = self.quantiles[OTHERS]
        quantiles = np.array([self.quantiles.get(group, other) for group in groups])
        return quantiles * _scales(self.floor, deviations, distances)

    def bounds(
        self, middles: Array, deviations: Array, groups: Sequence[str], distances: Array
    ) -> tuple[Array, Array]:
        """Lower and upper ends, (n,) each, of figures whose errors are proportional to them."""
        factors = np.exp(self.half_widths(deviations, groups, distances))
        return middles / factors, middles * factors

    def interval(
        self,
        middle: float,
        deviation: float,
        group: str,
        distance: float = 0.0,
        outside: tuple[str, ...] = (),
    ) -> Interval:
        """One figure with its interval.

        Args:
            middle: Predicted, positive.
            deviation: Its log standard deviation from the fit's covariance.
            group: Of the run.
            distance: From the calibrated ranges.
            outside: What is outside them, a phrase each.
        """
        low, high = self.bounds(
            np.array([middle]), np.array([deviation]), [group], np.array([distance])
        )
        phrases = outside
        if group not in self.quantiles:
            phrases = (*outside, f"no run of {group} was calibrated")
        return Interval(float(low[0]), middle, float(high[0]), self.coverage, phrases)


def conformal(
    residuals: Array,
    deviations: Array,
    groups: Sequence[str],
    distances: Array | None = None,
    coverage: float = 0.9,
) -> Conformal:
    """Quantiles from residuals of rows that were held out when they were predicted.

    Args:
        residuals: (n,) log of measured over predicted.
        deviations: (n,) log standard deviations from the fit's covariance, of the same folds.
        groups: (n,) names.
        distances: (n,) of the rows from the other folds' ranges; None for 0.
        coverage: Between 0 and 1.

    Raises:
        PlanError: No residual, shapes that differ, numbers that are not finite, or a coverage
            outside 0 to 1.
    """
    residuals, deviations = np.asarray(residuals, float), np.asarray(deviations, float)
    away = np.zeros_like(residuals) if distances is None else np.asarray(distances, float)
    if not residuals.size or not residuals.shape == deviations.shape == away.shape == (
        len(groups),
    ):
        raise PlanError(
            f"residuals = {residuals.shape}, deviations = {deviations.shape}, groups = "
            f"{len(groups)}: give at least one row and as many of each"
        )
    if not all(np.all(np.isfinite(item)) for item in (residuals, deviations, away)):
        raise PlanError(
            "residuals, deviations or distances are not all finite: leave such rows out"
        )
    if not 0.0 < coverage < 1.0:
        raise PlanError(f"coverage = {coverage:g} is not between 0 and 1")
    floor = max(1.4826 * float(np.median(np.abs(residuals))), _LEAST_FLOOR)
    if residuals.size < FEW and len(set(groups)) == 1:
        return _of_few(floor, residuals.size, groups[0], coverage)
    scores = np.abs(residuals) / _scales(floor, deviations, away)
    names = np.array(groups)
    factors = _factors(scores, names)
    normalised = scores / factors
    quantiles = {}
    for group in dict.fromkeys(groups):
        own = names == group
        others = int((~own).sum())
        weights = np.where(own, 1.0, min(1.0, _QUANTILE_ROWS / others) if others else 1.0)
        factor = _mean(scores[own], float(scores.mean())) / float(scores.mean() or 1.0)
        quantiles[str(group)] = factor * _quantile(normalised, weights, coverage)
    quantiles[OTHERS] = _elsewhere(scores, names, coverage)
    return Conformal(quantiles=quantiles, floor=floor, coverage=coverage)


def scale_of_few(expected: float, squares: float, rows: int) -> float:
    """Standard deviation of errors, where some were measured and some is expected.

    Conjugate prior of a variance: Gelman et al., Bayesian Data Analysis, section 2.6.

    Args:
        expected: Standard deviation that is believed before any row is seen.
        squares: Sum of the squared errors of the rows.
        rows: How many there are; may be 0.
    """
    return math.sqrt((EXPECTED_ROWS * expected**2 + squares) / (EXPECTED_ROWS + rows))


def _of_few(floor: float, rows: int, group: str, coverage: float) -> Conformal:
    """Student's quantile of a scale that few rows and what is expected give together.

    Probes lie at the ends of their ranges, where a fit without them is worst, and one of them may
    stray: their largest error is no quantile. Of three rows that happen to lie close, the error
    says too little. (Conjugate prior of a variance: Gelman et al., Bayesian Data Analysis,
    section 2.6.)
    """
    from scipy.special import stdtrit

    scale = scale_of_few(_EXPECTED, rows * floor**2, rows)
    quantile = float(stdtrit(EXPECTED_ROWS + rows, 0.5 + coverage / 2.0))
    # As in `_elsewhere`: another group differs as much again.
    others = quantile * math.sqrt(2.0)
    return Conformal(quantiles={group: quantile, OTHERS: others}, floor=scale, coverage=coverage)


def _scales(floor: float, deviations: Array, distances: Array) -> Array:
    scales: Array = np.hypot(floor, deviations) * (1.0 + distances)
    return scales


def _mean(scores: Array, pooled: float) -> float:
    return (float(scores.sum()) + _MEAN_ROWS * pooled) / (scores.size + _MEAN_ROWS)


def _factors(scores: Array, names: Array) -> Array:
    """(n,) shrunk mean score of each row's group without the row, over the mean of all."""
    factors = np.ones_like(scores)
    pooled = float(scores.mean())
    if pooled <= 0.0:
        return factors
    for group in np.unique(names):
        own = names == group
        rest = scores[own].sum() - scores[own]
        factors[own] = (rest + _MEAN_ROWS * pooled) / (own.sum() - 1 + _MEAN_ROWS) / pooled
    return factors


def _quantile(scores: Array, weights: Array, coverage: float) -> float:
    """Weighted quantile with weight 1 at infinity.

    Where so few rows cannot reach the coverage, the largest score is stretched as far as that of
    normal errors would be.
    """
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(weights[order]) / (weights.sum() + 1.0)
    enough = np.flatnonzero(reached >= coverage - 1e-12)
    if enough.size:
        return float(scores[order[enough[0]]])
    return float(scores.max()) * _normal(coverage) / _normal(float(reached[-1]))


def _normal(coverage: float) -> float:
    """Half-width that holds this share of normal errors, in standard deviations."""
    return NormalDist().inv_cdf(0.5 + coverage / 2.0)


def _elsewhere(scores: Array, names: Array, coverage: float) -> float:
    """For a new group: all groups count alike, and there are only so many of them."""
    worst = []
    for group in np.unique(names):
        own = scores[names == group]
        worst.append(_quantile(own, np.ones(own.size), coverage))
    typical = _quantile(scores, np.ones(scores.size), coverage)
    if len(worst) == 1:
        return typical * math.sqrt(2.0)
    return max(typical, float(np.quantile(worst, coverage)))
