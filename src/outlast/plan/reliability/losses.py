"""What one failure of each kind costs in wall time: number, mean, spread and least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array

SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind of failure, all arrays (candidates,) or (1,).

    Attributes:
        name: Its cause.
        count: Expected number per second of progress.
        mean_seconds: Of the wall time that one costs.
        variance: Of the same, in square seconds.
        least_seconds: Below which no single one costs.
        clustering: Failures that one interval brings, on average: their number is that of
            geometric series, whose variance is `1 + clustering` times that of a Poisson number.
    """

    name: str
    count: Array
    mean_seconds: Array
    variance: Array
    least_seconds: Array
    clustering: Array


Stop = tuple[str, Array, Array, Array, Array]
"""Name, number per second of progress, detection, way back (seconds), index of the tier."""


def of_stops(
    stops: Sequence[Stop], rates: Sequence[Array], apart: Sequence[Array], *, excess: Array
) -> tuple[Loss, ...]:
    """Losses of failures that throw the run back to a checkpoint.

    Args:
        stops: The kinds.
        rates: Their failures per exposed second.
        apart: Of each tier, exposed seconds from save to save.
        excess: What all of them cost together per second of progress; means are scaled to it.
    """
    found = []
    for (name, count, detection, offset, tier), rate in zip(stops, rates, strict=True):
        between = sum(
            (np.where(tier == index, item, 0.0) for index, item in enumerate(apart)), np.zeros(1)
        )
        strikes = sum(
            (
                np.where(other[4] >= tier, often, 0.0)
                for other, often in zip(stops, rates, strict=True)
            ),
            np.zeros(1),
        )
        mean, square = age_moments(between, strikes)
        least = detection + np.minimum(offset, 1.0 / np.maximum(strikes, SMALLEST))
        found.append(Loss(name, count, least + mean, square - mean**2, least, rate * between))
    raw = sum((loss.count * loss.mean_seconds for loss in found), np.zeros(1))
    scale = np.where(raw > 0.0, excess / np.maximum(raw, SMALLEST), 0.0)
    return tuple(
        Loss(
            loss.name,
            loss.count,
            loss.mean_seconds * scale,
            loss.variance * scale**2,
            loss.least_seconds * np.minimum(scale, 1.0),
            loss.clustering,
        )
        for loss in found
    )


def age_moments(interval_seconds: Array, rate: Array) -> tuple[Array, Array]:
    """Mean and mean square of the time from a save to a failure in an interval.

    Exponential times cut off at the interval; nearly uniform where failures are rare.
    """
    exponent = np.minimum(rate * interval_seconds, 500.0)
    rare = exponent < 1e-3
    safe, odds = np.where(rare, 1.0, rate), np.where(rare, 1.0, np.expm1(exponent))
    mean = np.where(
        rare,
        interval_seconds * (0.5 - exponent / 12.0),
        1.0 / safe - interval_seconds / odds,
    )
    square = np.where(
        rare,
        interval_seconds**2 * (1.0 / 3.0 - exponent / 12.0),
        2.0 / safe**2 - (interval_seconds**2 + 2.0 * interval_seconds / safe) / odds,
    )
    return mean, np.maximum(square, mean**2)


def others(
    *, waiting: tuple[Array, Array], going: tuple[Array, Array], silent: tuple[Array, Array]
) -> tuple[Loss, ...]:
    """Losses beside the checkpoints.

    Args:
        waiting: Seconds without nodes per second of progress, and mean seconds of one wait; waits
            are taken for exponential.
        going: Failures that replica groups outlast per second of progress, and what one costs.
        silent: Errors noticed late per second of progress, and what one costs.
    """
    share, seconds = waiting
    zero = np.zeros(1)
    waits = share / np.maximum(seconds, 1e-9)
    return (
        Loss("waiting for nodes", waits, seconds, seconds**2, zero, zero),
        Loss("replica groups", going[0], going[1], going[1] ** 2, zero, zero),
        Loss("silent errors", silent[0], silent[1], zero, zero, zero),
    )
