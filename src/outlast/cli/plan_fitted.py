"""What a calibration has learned: constants, errors of rows it has not seen, interval widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.plan.calibration.conformal import interval_groups
from outlast.plan.calibration.step_model import utilisation
from outlast.plan.constants import NAMES, PRIORS

if TYPE_CHECKING:
    from outlast.plan.calibration.fit import Belonging
    from outlast.plan.calibration.rows import Row
    from outlast.plan.calibration.step_model import StepModel, Validation


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration and what it was fitted to.

    Attributes:
        rows: All, flagged ones included.
        model: The calibration.
        before: Constants that were fitted to published runs.
        held: The rows as fits predict them that have not seen their configuration.
        whose: The place that most rows come from.
    """

    rows: list[Row]
    model: StepModel
    before: StepModel
    held: Validation
    whose: Belonging

    @property
    def used(self) -> list[Row]:
        """Those whose time was fitted."""
        return [row for row in self.rows if row.fits_time]


def constants_of(found: Fitted) -> list[dict[str, Any]]:
    """Of the place that most rows come from: before is what published runs gave."""
    before, after = (m.constants.constants([found.whose]) for m in (found.before, found.model))
    deviations = np.sqrt(np.diag(found.model.constants.covariance))
    own = {
        column.constant: float(deviation)
        for column, deviation in zip(found.model.constants.columns, deviations, strict=True)
        if column.level is None
    }
    return [
        {
            "name": name,
            "unit": PRIORS[name].unit,
            "before": float(getattr(before, name)[0]),
            "after": float(getattr(after, name)[0]),
            "log_deviation": own[name],
        }
        for name in NAMES
    ]


def errors_of(found: Fitted) -> dict[str, dict[str, float]]:
    """Absolute relative errors of rows that a fit has not seen, and of one constant MFU."""
    errors = np.abs(np.expm1(-found.held.log_errors))
    return {"model": _summary(errors), "constant MFU": _summary(_baseline(found))}


def _summary(errors: np.ndarray) -> dict[str, float]:
    return {
        "median": float(np.median(errors)),
        "mean": float(errors.mean()),
        "p90": float(np.quantile(errors, 0.9)),
        "rows": len(errors),
    }


def _baseline(found: Fitted) -> np.ndarray:
    """Errors of the median MFU of the other configurations of a framework, chip and precision."""
    rows = found.used
    shares = utilisation(rows)
    kinds = [f"{row.framework}/{row.chip}/{row.run.precision}" for row in rows]
    keys = [row.key for row in rows]
    errors = []
    for index, (kind, key) in enumerate(zip(kinds, keys, strict=True)):
        unseen = np.array([item != key for item in keys])
        alike = unseen & np.array([pair == kind for pair in kinds])
        others = alike if alike.any() else unseen
        errors.append(abs(shares[index] / np.median(shares[others]) - 1.0))
    return np.array(errors)


def intervals_of(found: Fitted) -> dict[str, Any]:
    """How wide intervals are, and how many of the rows lie in theirs."""
    widths, held = found.model.widths, found.held
    groups = interval_groups(held.rows)
    half = widths.half_widths(held.deviations, groups, held.distances)
    return {
        "coverage_asked": widths.coverage,
        "coverage_found": float((np.abs(held.log_errors) <= half).mean()),
        "median_half_width": float(np.expm1(np.median(half))),
        "quantiles": dict(widths.quantiles),
    }
