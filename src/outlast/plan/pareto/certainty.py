"""Which points are surely worse than others, given that all figures are uncertain.

The truth of a figure lies log-normally around its middle (on a linear axis: normally), and its
half-width is that of the interval with the coverage given. Two points are predicted by one model,
so their errors have a part in common: with the correlation `rho` the difference of two logarithms
has the variance `s_a^2 + s_b^2 - 2 rho s_a s_b`. Errors of different objectives count as
independent, which understates the probability of dominance where they rise together, as time and
energy do: a point is rather kept than dropped. Figures that are equal to the last bit, with equal
half-widths, are the same quantity (the loss of two layouts of one model, say) and tie surely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from outlast.errors import PlanError
from outlast.plan.pareto.front import Floats, Mask, Scale, checked, nondominated

_BESIDE = 16
"""Points of the front that are compared with all others in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertain:
    """Points with intervals.

    Attributes:
        values: (points, objectives), middles.
        half_widths: (points, objectives): natural logarithms on log axes (the interval runs from
            `value * exp(-h)` to `value * exp(h)`), differences on linear ones; 0 for a sure figure.
        scales: Of each objective; a log axis needs values above 0, or 0 with half-width 0.
        coverage: Share of cases in which the truth lies inside.
        correlation: `rho` of two points' errors in the same objective.
    """

    values: Floats
    half_widths: Floats
    scales: tuple[Scale, ...]
    coverage: float = 0.9
    correlation: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.coverage < 1.0:
            raise PlanError(f"coverage = {self.coverage}: give a share between 0 and 1")
        if not 0.0 <= self.correlation <= 1.0:
            raise PlanError(f"correlation = {self.correlation}: give 0 to 1")
        values = checked(self.values)
        if values.shape != np.shape(self.half_widths):
            raise PlanError(
                f"half_widths of shape {np.shape(self.half_widths)} do not fit values of shape "
                f"{values.shape}: give one of each"
            )
        if not (np.isfinite(self.half_widths).all() and (self.half_widths >= 0.0).all()):
            raise PlanError("a half-width is negative or not finite: give 0 for a sure figure")
        for index, scale in enumerate(self.scales):
            if scale == "log" and (values[:, index] < 0.0).any():
                raise PlanError(
                    f"objective {index} has values below 0 on a log axis: make it linear"
                )


def probability_of_dominance(points: Uncertain, better: Sequence[int]) -> Floats:
    """How probably some points are no worse than all, in every objective.

    Args:
        points: All points.
        better: (some,) indices of those that may dominate.

    Returns:
        (some, points), 0 to 1; without half-widths 1 where no worse, else 0.
    """
    from scipy.special import ndtr

    return np.asarray(
        np.prod([ndtr(deviation) for deviation in _deviations(points, np.asarray(better))], axis=0)
    )


def _deviations(points: Uncertain, better: np.ndarray, against: Mask | None = None) -> list[Floats]:
    """For each objective, (better, against): lead of one over the other, in standard deviations."""
    against = np.ones(len(points.values), dtype=bool) if against is None else against
    # The interval's half-width in standard deviations.
    z = NormalDist().inv_cdf(0.5 + points.coverage / 2.0)
    found = []
    for index, scale in enumerate(points.scales):
        raw = points.values[:, index]
        with np.errstate(divide="ignore"):
            place = np.log(raw) if scale == "log" else raw
        sigma = points.half_widths[:, index] / z
        a, b = place[better, None], place[None, against]
        s, t = sigma[better, None], sigma[None, against]
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = s**2 + t**2 - 2.0 * points.correlation * s * t
            lead = np.where(a == b, 0.0, b - a) / np.sqrt(np.maximum(variance, 0.0))
        same = (a == b) & (s == t)
        lead[same | (np.isnan(lead) & (a == b))] = np.inf
        found.append(lead)
    return found


def undecided(points: Uncertain, confidence: float = 0.9) -> Mask:
    """The front, and with it every point that no point of the front surely dominates.

    Args:
        points: All points.
        confidence: Least probability of dominance that drops a point, above 0.5; only points that
            the middles dominate as well are dropped.

    Returns:
        (points,), true for those that stay: those of `nondominated`, and more.

    Raises:
        PlanError: `confidence` is not in 0.5 to 1.
    """
    if not 0.5 < confidence <= 1.0:
        raise PlanError(f"confidence = {confidence}: give more than 0.5 and at most 1")
    front = nondominated(points.values)
    stays = np.ones(len(front), dtype=bool)
    members = np.flatnonzero(front)
    ranks = np.argsort(np.argsort(points.values[members], axis=0), axis=0).sum(axis=1)
    members = members[np.argsort(ranks, kind="stable")]
    open_points = ~front
    for at in range(0, len(members), _BESIDE):
        if not open_points.any():
            break
        rows = np.flatnonzero(open_points)
        sure = _surely(points, members[at : at + _BESIDE], open_points, confidence)
        stays[rows[sure]] = False
        open_points[rows[sure]] = False
    return stays


def _surely(points: Uncertain, better: np.ndarray, against: Mask, confidence: float) -> Mask:
    """(against,) whether one of `better` dominates with the probability asked for."""
    from scipy.special import ndtr

    leads = _deviations(points, better, against)
    least = NormalDist().inv_cdf(confidence) if confidence < 1.0 else np.inf
    near = np.logical_and.reduce([lead >= least for lead in leads])
    # The product is at most its least factor, so that few pairs need it.
    found = np.zeros(near.shape, dtype=bool)
    found[near] = np.prod([ndtr(lead[near]) for lead in leads], axis=0) >= confidence
    return np.asarray(found.any(axis=0))
