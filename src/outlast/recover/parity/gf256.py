"""The field GF(2^8) of bytes modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D), with generator 2.

Addition is XOR. The same field as in H. P. Anvin, "The mathematics of RAID-6" (2004).
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x11D
ORDER = 255


@functools.cache
def _tables() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Powers of the generator, twice over as sums of two logarithms need it; logarithms."""
    powers, logarithms, value = [0] * (2 * ORDER), [0] * (ORDER + 1), 1
    for exponent in range(ORDER):
        powers[exponent] = powers[exponent + ORDER] = value
        logarithms[value] = exponent
        value <<= 1
        if value > ORDER:
            value ^= POLYNOMIAL
    return tuple(powers), tuple(logarithms)


def power(exponent: int) -> int:
    """2 to the `exponent`; distinct for exponents 0 to 254."""
    return _tables()[0][exponent % ORDER]


def multiply(a: int, b: int) -> int:
    """The product of two bytes."""
    powers, logarithms = _tables()
    return powers[logarithms[a] + logarithms[b]] if a and b else 0


def inverse(a: int) -> int:
    """The byte whose product with `a` is 1.

    Raises:
        ZeroDivisionError: For 0.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(256)")
    powers, logarithms = _tables()
    return powers[ORDER - logarithms[a]]


@functools.lru_cache(maxsize=ORDER + 1)
def products(constant: int) -> NDArray[np.uint8]:
    """(256,): the product of `constant` with every byte."""
    return np.array([multiply(constant, byte) for byte in range(256)], np.uint8)


def invert(matrix: list[list[int]]) -> list[list[int]]:
    """The inverse of a 1 x 1 or 2 x 2 matrix over the field.

    Raises:
        ZeroDivisionError: Where the matrix has none.
    """
    if len(matrix) == 1:
        return [[inverse(matrix[0][0])]]
    (a, b), (c, d) = matrix
    scale = inverse(multiply(a, d) ^ multiply(b, c))
    return [[multiply(scale, item) for item in row] for row in ((d, b), (c, a))]
