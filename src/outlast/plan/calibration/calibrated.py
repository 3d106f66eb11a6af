"""What was calibrated: constants with their errors, interval widths, ranges and provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.plan.calibration.conformal import Conformal
from outlast.plan.calibration.support import Place, Support
from outlast.plan.cases import Array

ORIGINS = ("calibrated", "prior", "measured", "published", "datasheet")


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of the model.

    Attributes:
        value: In `unit`.
        log_deviation: Its standard deviation on the scale on which it is fitted (the logarithm, or
            log odds of its share of a bound: `constants.unbounded`); 0 where it is held fixed.
        unit: Of the value.
        origin: One of `ORIGINS`.
        group: Chip, cluster or framework that it belongs to; empty for all runs.
    """

    value: float
    log_deviation: float
    unit: str
    origin: str
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPoints:
    """Rows near which the formulas' error is known: the support of a Gaussian process.

    Attributes:
        names: (k,) of the features.
        features: (n, k) of the rows, as the process measures distances.
        places: (n,) of the rows: only runs of the same place are corrected.
        residuals: (n,) log of measured over predicted seconds.
        noises: (n,) log standard deviations of the measurements, larger for outliers.
        amplitude: Log standard deviation of the process.
        length_scales: (k,) in units of the features.
    """

    names: tuple[str, ...]
    features: Array
    places: tuple[str, ...]
    residuals: Array
    noises: Array
    amplitude: float
    length_scales: Array

    def __post_init__(self) -> None:
        rows, columns = len(self.places), len(self.names)
        for name, shape in (
            ("features", (rows, columns)),
            ("residuals", (rows,)),
            ("noises", (rows,)),
            ("length_scales", (columns,)),
        ):
            array = np.asarray(getattr(self, name), np.float64)
            if array.shape != shape or not np.all(np.isfinite(array)):
                raise PlanError(
                    f"residual.{name} has shape {array.shape} or is not finite: it should be "
                    f"{shape}"
                )
            object.__setattr__(self, name, array)
        if not (
            np.all(self.noises >= 0) and np.all(self.length_scales > 0) and self.amplitude >= 0
        ):
            raise PlanError("residual has a noise or amplitude below 0 or a length scale of 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a calibration comes from.

    Attributes:
        date: As the caller says it, e.g. "2026-11-22".
        version: Of Outlast.
        rows: Names of the rows used.
        sources: Tables, logs and run directories that they come from.
        flagged: Sentences about rows that were left out.
        text: For people.
    """

    date: str
    version: str
    rows: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """All that a prediction needs beside the run and the cluster.

    Attributes:
        constants: By name.
        order: (p,) names of those that the fit moved, in the order of `correlation`.
        correlation: (p, p) of their errors in log space.
        residual: Correction near measured rows; None for none.
        quantiles: Of the interval scores, by group, with `groups.OTHERS` for all others.
        floor: Log standard deviation of a row that the fit knows perfectly.
        coverage: Share of truths that the intervals should hold.
        support: Calibrated range of each feature.
        provenance: Where it comes from.
        places: What was measured, by interval group; empty in files of older versions, whose
            groups do not tell clusters apart, so that none counts as calibrated.
    """

    constants: Mapping[str, Constant]
    order: tuple[str, ...]
    correlation: Array
    residual: ResidualPoints | None = None
    quantiles: Mapping[str, float]
    floor: float
    coverage: float = 0.9
    support: Mapping[str, tuple[float, float]]
    provenance: Provenance
    places: Mapping[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, constant in self.constants.items():
            if not (math.isfinite(constant.value) and 0 <= constant.log_deviation < math.inf):
                raise PlanError(f"constant {name} = {constant.value:g} is not finite: fit it again")
            if constant.origin not in ORIGINS:
                raise PlanError(
                    f"constant {name} has origin {constant.origin!r}, which is none of "
                    f"{', '.join(ORIGINS)}"
                )
        for name in self.order:
            if name not in self.constants:
                raise PlanError(f"order names {name}, which is not among the constants")
        object.__setattr__(self, "correlation", _correlation(self.correlation, len(self.order)))
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
        Support(self.support)

    @property
    def covariance(self) -> Array:
        """(p, p) of the errors of the constants in `order`, in log space."""
        deviations = np.array([self.constants[name].log_deviation for name in self.order])
        scaled: Array = self.correlation * np.outer(deviations, deviations)
        return scaled

    @property
    def conformal(self) -> Conformal:
        """The widths of the intervals."""
        return Conformal(quantiles=self.quantiles, floor=self.floor, coverage=self.coverage)

    @property
    def ranges(self) -> Support:
        """The calibrated ranges."""
        return Support(self.support)


def _correlation(matrix: Array | NDArray[np.float64], count: int) -> Array:
    """Its lower triangle mirrored, so that what is written and read is the same to the last bit."""
    array = np.asarray(matrix, np.float64)
    if array.shape != (count, count) or not np.all(np.isfinite(array)):
        raise PlanError(
            f"correlation has shape {array.shape} or is not finite: it should be ({count}, {count})"
        )
    lower = np.tril(array, -1)
    whole: Array = lower + lower.T + np.eye(count)
    if not np.allclose(array, whole, atol=1e-6) or np.abs(whole).max(initial=0.0) > 1 + 1e-9:
        raise PlanError("correlation is not symmetric with ones on its diagonal: fit again")
    if count and float(np.linalg.eigvalsh(whole)[0]) < -1e-6:
        raise PlanError("correlation has a negative eigenvalue: fit again")
    return whole
