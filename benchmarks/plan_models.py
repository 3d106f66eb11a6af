"""What benchmarks read of the planner's models: what others can use, priors, rank 0's memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outlast.plan.batch import Cases, stage
from outlast.plan.conformal import OTHERS, Conformal, Support
from outlast.plan.constants import MemoryConstants
from outlast.plan.memory import demand
from outlast.plan.step_fit import Fit, believed
from outlast.plan.step_model import StepModel


def shared(model: StepModel) -> StepModel:
    """Keep what others can use: constants of chips, frameworks, interval widths.

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


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.array([float(f"{value:.5g}") for value in values])


def uncalibrated() -> StepModel:
    """The priors: what is believed before any run was measured."""
    # 90 % of a normal error, on top of which the formulas themselves are off by about 10 %.
    return StepModel(believed(), None, Conformal(quantiles={OTHERS: 1.645}, floor=0.1), Support({}))


def first_stage_allocated(many: Cases, constants: MemoryConstants) -> np.ndarray:
    """(cases,) bytes of tensors of rank 0 after a step, which most logs are of."""
    return np.broadcast_to(demand(many, constants, stage(many, "first")).allocated, (len(many),))


def first_stage_reserved(many: Cases, constants: MemoryConstants) -> np.ndarray:
    """(cases,) the most that the allocator of rank 0 holds during a step."""
    return np.broadcast_to(demand(many, constants, stage(many, "first")).reserved, (len(many),))
