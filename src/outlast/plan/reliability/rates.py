"""How often what fails in a run."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.failures import FailureCause
from outlast.plan.reliability.recovery import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Reliability,
    column,
    lost_nodes,
)
from outlast.plan.reliability.waiting import Batch

RENEWAL_STEPS = 400


def rate_of(settings: Reliability, cause: FailureCause, nodes: Array) -> Array:
    """Failures of the whole run per second."""
    if cause.per_node_day == 0.0:
        return np.zeros(1)
    early = early_factor(cause.shape, 1.0 / cause.per_node_day, settings.days_from_new)
    return cause.per_day(nodes) * (early / DAY_SECONDS)


@lru_cache(maxsize=256)
def early_factor(shape: float, mean_days: float, days: float) -> float:
    """Mean failures of a new node in its first days to those of an old one in as many.

    M(t) / (t / mean), where M solves the renewal equation of Weibull times,
    `M(t) = F(t) + integral of M(t - x) dF(x)` (Cox 1962, Renewal Theory, eq. 4.2.6), by steps.

    Args:
        shape: Of the Weibull distribution; 1 gives 1.
        mean_days: Between failures.
        days: How many; infinite gives 1.
    """
    if shape == 1.0 or not math.isfinite(days) or not math.isfinite(mean_days):
        return 1.0
    # Beyond many means the nodes are old for most of the time, and M(t) = t / m + constant.
    span = min(days / mean_days, 50.0)
    times = np.linspace(0.0, span, RENEWAL_STEPS + 1)
    spread = -np.expm1(-((times * math.gamma(1.0 + 1.0 / shape)) ** shape))
    part = np.diff(spread)
    renewals = np.zeros_like(times)
    for step in range(1, times.size):
        # Half-way values of M keep the error at the second order of the step.
        middle = (renewals[1:step] + renewals[: step - 1]) / 2.0
        known = spread[step] + float(part[1:step] @ middle[::-1])
        known += part[0] * renewals[step - 1] / 2.0
        renewals[step] = known / (1.0 - part[0] / 2.0)
    beyond = days / mean_days - span
    return float((renewals[-1] + beyond) / (days / mean_days))


def groups_hit(settings: Reliability, nodes: Array, nodes_hit: int) -> Array:
    """Replica groups that one failure takes."""
    groups = column(settings.replicas.groups)
    return np.maximum(1.0, np.ceil(nodes_hit * groups / nodes - 1e-9))


def batches_of(settings: Reliability, nodes: Array, slow: Array) -> list[Batch]:
    """Nodes that go to repair, `slow` times as rarely per wall time as per exposed time."""
    return [
        Batch(
            lost_nodes(cause),
            rate_of(settings, cause, nodes) / slow,
            cause.repair_hours * HOUR_SECONDS,
        )
        for cause in settings.causes
        if lost_nodes(cause) and cause.per_node_day > 0.0
    ]
