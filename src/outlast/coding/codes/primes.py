"""Primes, which several designs and graphs are built on."""

from __future__ import annotations

import math


def is_prime(number: int) -> bool:
    """Whether a number is a prime, by trial division."""
    return number > 1 and all(number % x for x in range(2, math.isqrt(number) + 1))
