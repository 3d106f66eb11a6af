"""Closed forms of step times, which simulations are compared with."""

from __future__ import annotations

import math

from outlast.errors import CodingError


def exponential_order(workers: int, rank: int) -> float:
    """Mean of the rank-th smallest of n unit exponentials: H_n - H_(n - rank) (Rényi)."""
    _ranked(workers, rank)
    return math.fsum(1.0 / (workers - i) for i in range(rank))


def pareto_order(workers: int, rank: int, shape: float) -> float:
    """Mean of the rank-th smallest of n Pareto variables of at least 1; may be infinite.

    n! / (n - rank)! x Gamma(n - rank + 1 - 1/a) / Gamma(n + 1 - 1/a).
    """
    _ranked(workers, rank)
    left = workers - rank + 1.0
    if left - 1.0 / shape <= 0.0:
        return math.inf
    logarithm = math.lgamma(workers + 1.0) - math.lgamma(workers + 1.0 - 1.0 / shape)
    return math.exp(logarithm + math.lgamma(left - 1.0 / shape) - math.lgamma(left))


def fixed_code_ratio(workers: int, copies: int, scale: float, *, additive: bool = False) -> float:
    """Step time of an exact code with d = s + 1 chunks per worker, to that without a code.

    A worker's own share takes 1 + Exp(scale). Where the delay grows with the load, the ratio is
    d (1 + scale (H_n - H_s)) / (1 + scale H_n); where it comes once per step,
    (d + scale (H_n - H_s)) / (1 + scale H_n).

    Args:
        workers: n.
        copies: d.
        scale: See above.
        additive: The delay does not grow with the load.
    """
    last = exponential_order(workers, workers) * scale
    kept = exponential_order(workers, workers - copies + 1) * scale
    if additive:
        return (copies + kept) / (1.0 + last)
    return copies * (1.0 + kept) / (1.0 + last)


def fixed_code_break_even(copies: int) -> float:
    """Mean additive delay, in units of a worker's share, above which that code pays.

    From d + x (H_n - H_s) < 1 + x H_n: x > s / H_s with s = d - 1, for every n. Infinite for a code
    that tolerates nobody.
    """
    if copies < 1:
        raise CodingError(f"copies = {copies} is below 1")
    if copies == 1:
        return math.inf
    return (copies - 1) / math.fsum(1.0 / i for i in range(1, copies))


def repetition_ratio(workers: int, copies: int, scale: float, *, additive: bool = False) -> float:
    """The same for fractional repetition that waits for one worker of each group.

    The fastest of d exponentials is exponential with a d-th of the mean, and n / d of them count.
    """
    if copies < 1 or workers % copies:
        raise CodingError(f"copies = {copies} does not divide the {workers} workers")
    last = exponential_order(workers, workers) * scale
    slowest = exponential_order(workers // copies, workers // copies) * scale / copies
    if additive:
        return (copies + slowest) / (1.0 + last)
    return copies * (1.0 + slowest) / (1.0 + last)


def _ranked(workers: int, rank: int) -> None:
    if not 1 <= rank <= workers:
        raise CodingError(f"rank = {rank} is not in [1, {workers}]")
