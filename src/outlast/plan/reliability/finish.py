"""When a run will be finished: the distribution of its wall time.

The wall time is that without failures plus a random sum of losses. Its mean is exact for the model
of `goodput`; its variance is that of the sum, `sum n (variance + (1 + clustering) mean^2)`, n being
the expected number of losses of a kind (compound Poisson: Feller 1968, volume 1, XII.2; clustering:
failures that strike again before an interval is over). For many failures the distribution is close
to normal (renewal central limit); for few it is not: with probability `exp(-n)` nothing happens at
all, and else the delay is at least the shortest way back. So the delay is taken for an atom at 0
and a gamma distribution, shifted by the shortest loss, that has the remaining mean and variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.goodput import Goodput
from outlast.plan.reliability.recovery import Number, column, require

SMALLEST = 1e-30
LARGEST_SECONDS = 1e290
LARGEST_LOSS = 1e100
"""Seconds of one loss, whose square is a float as well."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Wall time of a run, arrays (candidates,), predicted.

    Attributes:
        expected_seconds: Mean.
        undisturbed_seconds: When nothing fails.
        lost_work_seconds: Expected work that is done again.
        failures: Expected number of losses of all kinds.
        undisturbed_probability: That nothing fails.
        least_seconds: Shortest delay when something does.
        shape: Of the gamma distribution of what is beyond.
        scale_seconds: Of the same.
    """

    expected_seconds: Array
    undisturbed_seconds: Array
    lost_work_seconds: Array
    failures: Array
    undisturbed_probability: Array
    least_seconds: Array
    shape: Array
    scale_seconds: Array

    def quantile_seconds(self, share: float) -> Array:
        """Wall time within which the run is finished with this probability, in (0, 1).

        Raises:
            PlanError: For a share outside.
        """
        from scipy.special import gammaincinv

        require("share", share, 0.0, 1.0, above=True)
        require("1 - share", 1.0 - share, 0.0, above=True)
        free = self.undisturbed_probability
        inner = np.clip((share - free) / np.maximum(1.0 - free, 1e-12), 0.0, 1.0 - 1e-12)
        delay = self.least_seconds + self.scale_seconds * gammaincinv(self.shape, inner)
        return self.undisturbed_seconds + np.where(share <= free, 0.0, delay)

    def probability(self, deadline_seconds: Number) -> Array:
        """That the run is finished `deadline_seconds` after its start."""
        from scipy.special import gammainc

        require("deadline_seconds", deadline_seconds, 0.0)
        delay = column(deadline_seconds) - self.undisturbed_seconds
        free = self.undisturbed_probability
        beyond = np.maximum(delay - self.least_seconds, 0.0) / self.scale_seconds
        in_time = free + (1.0 - free) * gammainc(self.shape, beyond)
        # The sums above round; a deadline at the very end of an undisturbed run is met by it.
        return np.where(delay >= -1e-9 * self.undisturbed_seconds, in_time, 0.0)

    def likely(self, deadline_seconds: Number, log_deviation: Number) -> Array:
        """As `probability`, where the time itself is predicted with an error.

        All of the run's time is off by one log-normal factor. The delay by failures counts as
        log-normal here, too, with its mean and variance.

        Args:
            deadline_seconds: After the start.
            log_deviation: Of the logarithm of that factor, (cases,) or one.
        """
        from scipy.special import ndtr

        require("deadline_seconds", deadline_seconds, 0.0, above=True)
        deadline = np.log(column(deadline_seconds))
        spread = np.maximum(column(log_deviation), 1e-9)
        free = self.undisturbed_probability
        mean = self.undisturbed_seconds + self.least_seconds + self.shape * self.scale_seconds
        variance = np.log1p(self.shape * (self.scale_seconds / mean) ** 2)
        at_ease = ndtr((deadline - np.log(self.undisturbed_seconds)) / spread)
        delayed = ndtr((deadline - np.log(mean) + variance / 2.0) / np.sqrt(variance + spread**2))
        in_time: Array = free * at_ease + (1.0 - free) * delayed
        return in_time


def finish(run: Goodput, productive_seconds: Number) -> Finish:
    """Distribution of the wall time of `productive_seconds` of progress.

    Args:
        run: Of each candidate.
        productive_seconds: Time of the run without saves, failures, guard, code and stragglers.

    Raises:
        PlanError: For a time that is not positive.
    """
    require("productive_seconds", productive_seconds, 0.0, above=True)
    work = column(productive_seconds)
    expected = np.minimum(work / np.maximum(run.ettr, SMALLEST), LARGEST_SECONDS)
    count = mean = variance = weight = np.zeros(1)
    least = np.full(1, np.inf)
    for loss in run.losses:
        number = np.minimum(loss.count * work, 1e200)
        count = count + number
        weight = weight + number / (1.0 + loss.clustering)
        mean = mean + number * loss.mean_seconds
        each = np.minimum(loss.mean_seconds, LARGEST_LOSS)
        square = loss.variance + (1.0 + loss.clustering) * each**2
        variance = variance + number * np.minimum(square, 1e250)
        least = np.where(number > 0.0, np.minimum(least, loss.least_seconds), least)
    mean = np.minimum(mean, expected - work)
    free = np.exp(-np.minimum(weight, 700.0))
    happens = np.maximum(1.0 - free, SMALLEST)
    middle = mean / happens
    least = np.minimum(np.where(np.isfinite(least), least, 0.0), 0.9 * middle)
    # Of the delay given that there is one: second moment over its probability, less the mean's.
    spread = np.maximum((variance + mean**2) / happens - middle**2, 1e-12 * middle**2)
    beyond = np.maximum(middle - least, SMALLEST)
    shape = np.clip(beyond**2 / np.maximum(spread, SMALLEST), 1e-3, 1e9)
    shares = run.terms["lost work"]
    every = np.broadcast_arrays(
        expected,
        # Of a hopeless run the difference is all rounding.
        np.maximum(expected - mean, work),
        np.minimum(shares * expected, LARGEST_SECONDS),
        count,
        free,
        least,
        shape,
        np.maximum(beyond / shape, SMALLEST),
    )
    return Finish(*every)
