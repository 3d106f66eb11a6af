"""Failure rates of a run, and the expected time to get past an interval (renewal).

A run passes base intervals of T seconds of work and saves. A failure of class c throws it back to
the newest version of tier c, `every_c` base intervals apart. All failures are exponential with the
rate l. The ways back, in which failures strike too, are those of `recovery_time`: each is over
before the next second of work, so they multiply the time that is found here.

One attempt takes (1 - exp(-l T)) / l and succeeds with exp(-l T). What fails does so in class c
with probability l_c / l, whatever came before, so each tier is solved on top of the one below:
after a failure of its class the attempt is repeated until it succeeds or a failure of a higher
class ends it, a geometric series; `every_c / every_(c-1)` such attempts in a row are the attempt of
the next tier. With one tier and ways back of Q seconds this is Daly's complete model (Daly 2006,
FGCS 22, eq. 20), `exp(l Q) (exp(l T) - 1) / l`; two levels are those of Di et al. 2016 (INRIA
RR-8851) without their first-order expansion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from outlast.plan.batch import Array
from outlast.plan.cluster import FailureCause
from outlast.plan.reliability.recovery import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Batch,
    Reliability,
    column,
    lost_nodes,
)

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


LARGEST_EXPONENT = 500.0
SMALLEST_SUCCESS = 1e-250
SMALLEST_RATE = 1e-30


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Expected seconds, and probabilities of success and of its opposite."""

    seconds: Array
    success: Array
    failure: Array


def working_seconds(
    interval_seconds: Array, every: Sequence[Array], rates: Sequence[Array]
) -> Array:
    """Expected seconds of `every[-1]` base intervals and of their repeats, without the ways back.

    Args:
        interval_seconds: T, saves included.
        every: Of each tier, base intervals from save to save; 0 for one that is not used.
        rates: Of each tier, failures per second that are thrown back to it; those of a tier that is
            not used must have been handed to another.

    Returns:
        (candidates,) or (1,), finite.
    """
    # Of each tier, the failures of this and of all higher classes.
    above = [sum(rates[tier:], np.zeros(1)) for tier in range(len(every))]
    before = np.ones(1)
    attempt = _first_attempt(np.maximum(above[0], SMALLEST_RATE), interval_seconds)
    for apart, rate, rest in zip(every, rates, above, strict=True):
        step = np.where(apart > 0.0, apart, before)
        if (step != before).any():
            attempt = _in_a_row(attempt, step / before)
        before = step
        share = np.clip(rate / np.maximum(rest, SMALLEST_RATE), 0.0, 1.0)
        if (share > 0.0).any():
            # An attempt that is made again after failures of its tier's class, a share of all.
            failure = attempt.failure
            leave = np.maximum(attempt.success + failure * (1.0 - share), SMALLEST_SUCCESS)
            tries = 1.0 + failure * share / leave
            attempt = _Attempt(
                attempt.seconds * tries,
                np.maximum(attempt.success * tries, SMALLEST_SUCCESS),
                failure * (1.0 - share) * tries,
            )
    return attempt.seconds


def failing(rate: Array, seconds: Array) -> tuple[Array, Array]:
    """Probabilities that something fails within so many seconds, and that nothing does."""
    exponent = np.minimum(rate * seconds, LARGEST_EXPONENT)
    return -np.expm1(-exponent), np.exp(-exponent)


def _first_attempt(rate: Array, seconds: Array) -> _Attempt:
    failure, success = failing(rate, seconds)
    return _Attempt(failure / rate, success, failure)


def _in_a_row(plain: _Attempt, count: Array) -> _Attempt:
    """`count` attempts one after the other."""
    logarithm = np.where(
        plain.failure < 0.5,
        np.log1p(-np.minimum(plain.failure, 0.5)),
        np.log(np.maximum(plain.success, SMALLEST_SUCCESS)),
    )
    rest = (count - 1.0) * logarithm
    # Where nothing at all can fail, the geometric sum is the number of its terms.
    certain = logarithm == 0.0
    ratio = np.expm1(rest) / np.where(certain, 1.0, np.expm1(logarithm))
    later = plain.seconds * np.where(certain, count - 1.0, ratio)
    kept, ended = np.exp(np.maximum(rest, -LARGEST_EXPONENT)), -np.expm1(rest)
    return _Attempt(
        plain.seconds + plain.success * later,
        np.maximum(plain.success * kept, SMALLEST_SUCCESS),
        plain.failure + plain.success * ended,
    )
