"""Expected time to get past an interval when failures of several classes throw the run back.

A run passes base intervals of T seconds of work and saves. A failure of class c throws it back to
the newest version of tier c, `every_c` base intervals apart. All failures are exponential with the
rate l. The ways back, in which failures strike too, are those of `ways_back`: each is over before
the next second of work, so they multiply the time that is found here.

One attempt takes (1 - exp(-l T)) / l and succeeds with exp(-l T). What fails does so in class c
with probability l_c / l, whatever came before, so each tier is solved on top of the one below:
after a failure of its class the attempt is repeated until it succeeds or a failure of a higher
class ends it, a geometric series; `every_c / every_(c-1)` such attempts in a row are the attempt of
the next tier. With one tier and ways back of Q seconds this is Daly's complete model (Daly 2006,
FGCS 22, eq. 20), `exp(l Q) (exp(l T) - 1) / l`; two levels are those of Di et al. 2016 (INRIA
RR-8851) without their first-order expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array

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
            attempt = _repeated(attempt, share)
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


def _repeated(attempt: _Attempt, share: Array) -> _Attempt:
    """An attempt that is made again after failures of its tier's class, a share of all."""
    failure = attempt.failure
    leave = np.maximum(attempt.success + failure * (1.0 - share), SMALLEST_SUCCESS)
    tries = 1.0 + failure * share / leave
    return _Attempt(
        attempt.seconds * tries,
        np.maximum(attempt.success * tries, SMALLEST_SUCCESS),
        failure * (1.0 - share) * tries,
    )
