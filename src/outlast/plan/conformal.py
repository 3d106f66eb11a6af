"""Intervals that cover: quantiles of the errors on rows that were not fitted, and their ranges.

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
from outlast.plan.facts import facts

_SLACK = 1.0 + 1e-9

KINDS: Mapping[str, Sequence[str]] = facts("kinds")
"""Features that tell kinds of runs, and in words a run of each kind."""


@dataclass(frozen=True, slots=True)
class Support:
    """Smallest and largest value of each feature among the calibrated rows.

    Attributes:
        ranges: By feature, e.g. "devices"; not negative, since distances are in log space.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            if not 0.0 <= low <= high < float("inf"):
                raise PlanError(f"support of {name} from {low:g} to {high:g} is no range from 0 on")

    def distances(self, features: Mapping[str, Array]) -> Array:
        """Distances of runs from the ranges: sums over features of the log of the excess.

        A run with twice the most devices and all else inside is log 2 = 0.69 away.

        Args:
            features: By name, (n,) or (1,) each; a feature without a range is left out.

        Returns:
            (n,).
        """
        total = np.zeros(1)
        for name, (low, high) in self.ranges.items():
            if name not in features:
                continue
            values = np.asarray(features[name], np.float64)
            # Where a range or a value of 0 has no factor, it counts as 1.
            with np.errstate(divide="ignore", invalid="ignore"):
                over = np.log(values / high) if high else np.ones_like(values)
                under = np.where(values > 0, np.log(low / values), 1.0) if low else 0.0
            below = values * _SLACK < low
            total = total + np.where(values > high * _SLACK, over, np.where(below, under, 0.0))
        return total

    def outside(self, features: Mapping[str, float]) -> tuple[str, ...]:
        """Name the features of one run that are outside, and by how much: a phrase each."""
        phrases = []
        for name, (low, high) in self.ranges.items():
            if name not in features:
                continue
            value = float(features[name])
            above = value > high * _SLACK
            if not above and value * _SLACK >= low:
                continue
            if name in KINDS:
                phrases.append(f"no run {KINDS[name][int(value)]} was measured")
                continue
            by = "outside"
            if above and high:
                by = f"{value / high:.3g} times above"
            elif not above and value:
                by = f"{low / value:.3g} times below"
            known = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
            phrases.append(f"{name} = {value:.6g} is {by} the calibrated {known}")
        return tuple(phrases)

    def joined(self, other: Support) -> Support:
        """The smallest ranges that hold both."""
        ranges = dict(self.ranges)
        for name, (low, high) in other.ranges.items():
            own = ranges.get(name, (low, high))
            ranges[name] = min(low, own[0]), max(high, own[1])
        return Support(ranges)


@dataclass(frozen=True, slots=True)
class Place:
    """Calibrated ranges of one interval group.

    Attributes:
        ranges: Of the features of its runs.
        utilisation: Largest share of the peak (MFU) among its runs, by precision.
    """

    ranges: Support
    utilisation: Mapping[str, float]

    def __post_init__(self) -> None:
        for precision, share in self.utilisation.items():
            if not 0.0 < share < float("inf"):
                raise PlanError(
                    f"utilisation = {share:g} in {precision} of a calibrated place: calibrate again"
                )


def support_of(features: Mapping[str, Array]) -> Support:
    """The ranges of calibrated rows.

    Args:
        features: By name, (n,) each, not negative and finite.

    Raises:
        PlanError: A feature without values, or with one that is negative or not finite.
    """
    ranges = {}
    for name, values in features.items():
        array = np.asarray(values, np.float64)
        if not array.size or not np.all(np.isfinite(array)) or array.min() < 0:
            raise PlanError(f"feature {name} has no values, or some below 0: give one per row")
        ranges[name] = (float(array.min()), float(array.max()))
    return Support(ranges)


OTHERS = "*"
"""Stands for every group that no row was measured of."""


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


COVERAGE = 0.9
"""Of the intervals, where a calibration file says no other."""
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
    coverage: float = COVERAGE

    def __post_init__(self) -> None:
        for name, value in self.quantiles.items():
            if not 0 <= value < math.inf:
                raise PlanError(
                    f"quantile of {name} = {value:g} is not 0 or above: calibrate again"
                )
        if not (0 <= self.floor < math.inf and 0 < self.coverage < 1):
            raise PlanError(
                f"floor = {self.floor:g} and coverage = {self.coverage:g}: the first should be "
                "0 or above, the second between 0 and 1"
            )

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


def conformal(
    residuals: Array, deviations: Array, groups: Sequence[str], distances: Array
) -> Conformal:
    """Quantiles from residuals of rows that were held out when they were predicted.

    Args:
        residuals: (n,) log of measured over predicted, at least one.
        deviations: (n,) log standard deviations from the fit's covariance, of the same folds.
        groups: (n,) names.
        distances: (n,) of the rows from the other folds' ranges.
    """
    floor = max(1.4826 * float(np.median(np.abs(residuals))), _LEAST_FLOOR)
    names, count = np.array(groups), residuals.size
    if count < FEW and len(set(groups)) == 1:
        return _of_few(floor, count, groups[0])
    scores = np.abs(residuals) / _scales(floor, deviations, distances)
    mean = float(scores.mean())
    # Of each row, the mean score of its group without the row, shrunk, over the mean of all.
    factors = np.ones_like(scores)
    for group in np.unique(names) if mean > 0.0 else ():
        own = names == group
        rest = scores[own].sum() - scores[own]
        factors[own] = (rest + _MEAN_ROWS * mean) / (own.sum() - 1 + _MEAN_ROWS) / mean
    quantiles = {}
    for group in dict.fromkeys(groups):
        own = names == group
        others = int((~own).sum())
        weights = np.where(own, 1.0, min(1.0, _QUANTILE_ROWS / others) if others else 1.0)
        alike = scores[own]
        shrunk = (float(alike.sum()) + _MEAN_ROWS * mean) / (alike.size + _MEAN_ROWS)
        quantiles[str(group)] = shrunk / (mean or 1.0) * _quantile(scores / factors, weights)
    # For a new group all groups count alike, and there are only so many of them.
    alike_ones = [scores[names == group] for group in np.unique(names)]
    worst = [_quantile(alike, np.ones(alike.size)) for alike in alike_ones]
    typical = _quantile(scores, np.ones(count))
    if len(worst) == 1:
        quantiles[OTHERS] = typical * math.sqrt(2.0)
    else:
        quantiles[OTHERS] = max(typical, float(np.quantile(worst, COVERAGE)))
    return Conformal(quantiles=quantiles, floor=floor)


def scale_of_few(expected: float, squares: float, rows: int) -> float:
    """Standard deviation of errors, where some were measured and some is expected.

    Conjugate prior of a variance: Gelman et al., Bayesian Data Analysis, section 2.6.

    Args:
        expected: Standard deviation that is believed before any row is seen.
        squares: Sum of the squared errors of the rows.
        rows: How many there are; may be 0.
    """
    return math.sqrt((EXPECTED_ROWS * expected**2 + squares) / (EXPECTED_ROWS + rows))


def _of_few(floor: float, rows: int, group: str) -> Conformal:
    """Student's quantile of a scale that few rows and what is expected give together.

    Probes lie at the ends of their ranges, where a fit without them is worst, and one of them may
    stray: their largest error is no quantile. Of three rows that happen to lie close, the error
    says too little. (Conjugate prior of a variance: Gelman et al., Bayesian Data Analysis,
    section 2.6.)
    """
    from scipy.special import stdtrit

    scale = scale_of_few(_EXPECTED, rows * floor**2, rows)
    quantile = float(stdtrit(EXPECTED_ROWS + rows, 0.5 + COVERAGE / 2.0))
    # As of one group in `conformal`: another one differs as much again.
    return Conformal(quantiles={group: quantile, OTHERS: quantile * math.sqrt(2.0)}, floor=scale)


def _scales(floor: float, deviations: Array, distances: Array) -> Array:
    return np.asarray(np.hypot(floor, deviations) * (1.0 + distances))


def _quantile(scores: Array, weights: Array) -> float:
    """Weighted quantile with weight 1 at infinity.

    Where so few rows cannot reach the coverage, the largest score is stretched as far as that of
    normal errors would be.
    """
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(weights[order]) / (weights.sum() + 1.0)
    enough = np.flatnonzero(reached >= COVERAGE - 1e-12)
    if enough.size:
        return float(scores[order[enough[0]]])
    # Half-widths that hold so large a share of normal errors, in standard deviations.
    shares = COVERAGE, float(reached[-1])
    wanted, had = (NormalDist().inv_cdf(0.5 + share / 2.0) for share in shares)
    return float(scores.max()) * wanted / had
