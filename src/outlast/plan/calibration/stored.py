"""A fitted time model as the content of a calibration file, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.calibrated import Calibration, Constant, Provenance, ResidualPoints
from outlast.plan.calibration.fit import Column, Fit
from outlast.plan.calibration.groups import OTHERS
from outlast.plan.calibration.residual import FEATURES, Residual
from outlast.plan.calibration.step_model import StepModel
from outlast.plan.cases import Array
from outlast.plan.constants import LEVELS, NAMES, PRIORS, bounded, unbounded

_FOR = " for "


def calibration_of(model: StepModel, provenance: Provenance) -> Calibration:
    """What is written down of a fitted model."""
    fitted = model.constants
    deviations = np.sqrt(np.diag(fitted.covariance))
    names = tuple(_name(column) for column in fitted.columns)
    constants = {}
    rows = zip(names, fitted.columns, fitted.values, deviations, strict=True)
    for name, column, value, deviation in rows:
        constants[name] = _constant(column, float(value), float(deviation))
    scale = np.outer(deviations, deviations)
    return Calibration(
        constants=constants,
        order=names,
        correlation=fitted.covariance / np.where(scale > 0.0, scale, 1.0),
        residual=_points(model.residual),
        quantiles=model.widths.quantiles,
        floor=model.widths.floor,
        coverage=model.widths.coverage,
        support=model.support.ranges,
        provenance=provenance,
        places=model.places,
    )


def step_model_of(calibration: Calibration) -> StepModel:
    """The model that a calibration describes.

    Raises:
        PlanError: It has constants that this version does not know, or lacks some.
    """
    columns = tuple(_column(name) for name in calibration.order)
    missing = sorted(set(NAMES) - {column.constant for column in columns if column.level is None})
    if missing:
        raise PlanError(
            f"the calibration lacks {', '.join(missing)}: calibrate again with this version"
        )
    values = np.array(
        [
            _value(column, calibration.constants[name])
            for name, column in zip(calibration.order, columns, strict=True)
        ]
    )
    return StepModel(
        Fit(columns, values, calibration.covariance),
        _residual(calibration.residual),
        calibration.conformal,
        calibration.ranges,
        len(calibration.provenance.rows),
        calibration.places,
    )


def shared(model: StepModel) -> StepModel:
    """What others can use of a model: constants of chips and frameworks, and interval widths.

    Clusters and the points of single runs are left out, and intervals are those of a cluster that
    nobody measured: no cluster of another owner is calibrated by them. Numbers are rounded,
    correlations to three digits after a hundredth of the identity is mixed in, so that they stay
    a correlation.
    """
    fitted = model.constants
    kept = [index for index, column in enumerate(fitted.columns) if column.level != "cluster"]
    covariance = fitted.covariance[np.ix_(kept, kept)]
    deviations = _rounded(np.sqrt(np.diag(covariance)))
    exact = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    correlation = np.round(0.99 * exact + 0.01 * np.eye(len(kept)), 3)
    constants = Fit(
        tuple(fitted.columns[index] for index in kept),
        _rounded(fitted.values[kept]),
        correlation * np.outer(deviations, deviations),
    )
    widths = replace(model.widths, quantiles={OTHERS: model.widths.quantiles[OTHERS]})
    return StepModel(constants, None, widths, model.support, model.rows, model.places)


def _rounded(values: Array) -> Array:
    return np.array([float(f"{value:.5g}") for value in values])


def _name(column: Column) -> str:
    if column.level is None:
        return column.constant
    return f"{column.constant}{_FOR}{column.level} {column.group}"


def _column(name: str) -> Column:
    constant, _, belonging = name.partition(_FOR)
    level, _, group = belonging.partition(" ")
    known = [item for item in LEVELS if item == level]
    if constant not in PRIORS or (belonging and not known):
        raise PlanError(
            f"constant {name!r} of the calibration is not one of this version's: calibrate again"
        )
    return Column(constant, known[0], group) if known else Column(constant)


def _constant(column: Column, value: float, deviation: float) -> Constant:
    """The common constant in its own unit; a group's as a factor (on the odds, below a bound)."""
    prior = PRIORS[column.constant]
    if column.level is not None:
        return Constant(
            float(np.exp(value)),
            deviation,
            "factor",
            "calibrated",
            f"{column.level} {column.group}",
        )
    median = unbounded(column.constant, np.array(prior.median))
    return Constant(
        float(bounded(column.constant, median + value)), deviation, prior.unit, "calibrated"
    )


def _value(column: Column, constant: Constant) -> float:
    if column.level is not None:
        return float(np.log(constant.value))
    median = unbounded(column.constant, np.array(PRIORS[column.constant].median))
    return float(unbounded(column.constant, np.array(constant.value)) - median)


def _points(residual: Residual | None) -> ResidualPoints | None:
    if residual is None:
        return None
    return ResidualPoints(
        names=FEATURES,
        features=residual.features,
        places=residual.places,
        residuals=residual.residuals,
        noises=residual.noises,
        amplitude=residual.amplitude,
        length_scales=np.full(len(FEATURES), residual.length),
    )


def _residual(points: ResidualPoints | None) -> Residual | None:
    if points is None:
        return None
    if points.names != FEATURES or np.ptp(points.length_scales) > 0.0:
        raise PlanError(
            "the calibration's residual has other features than this version's: calibrate again"
        )
    return Residual(
        points.features,
        points.places,
        points.residuals,
        points.noises,
        points.amplitude,
        float(points.length_scales[0]),
    )
