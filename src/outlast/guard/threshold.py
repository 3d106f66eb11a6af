"""Thresholds of checksums: rounding-error analysis in second moments.

A check compares ``sum_j v_j y_j`` of a computed row ``y`` with the same sum computed another way,
with signs ``v_j`` = +-1. Without a fault both differ by rounding alone. The model (Higham and Mary,
"A New Approach to Probabilistic Rounding Error Analysis", SISC 2019): roundings are independent
with mean zero. Then the variance of the difference is a sum of three terms.

*Storing.* A number y with 2^e <= |y| < 2^(e+1) stored with unit roundoff u is off by up to u 2^e,
uniformly: variance u^2 4^e / 3. ``powers`` = sum of 4^e is counted exactly, so this term has no
slack.

*Accumulating.* A sum of k products rounds every partial sum S_t, which adds u_acc^2 4^e(S_t) / 3;
over log-uniform significands 4^e is S^2 / 2.16. Where the order of the summands is exchangeable,
S_t = (t/k) y + bridge and ``E sum_t S_t^2 = k y^2 / 3 + k / 6 sum_t p_t^2``. The first part is the
bias of long sums and non-zero means (it grows with k even if the products do not vary); the second
is the random walk. ``squares`` = sum over outputs and terms of p_t^2.

*Reading.* Units that round operands (TF32, fp8) change every product by two roundings:
variance 2 u_in^2 / 3 sum_t p_t^2.

A difference beyond `DEVIATIONS` standard deviations is looked into: 9e-9 of clean checks would be,
were the differences normal (sums of uniform errors have lighter tails). Where terms are like each
other the model fails, as its authors say: their partial sums are larger than those of exchangeable
ones, and so are a check's own. `outlast.guard.product.second_look` judges such rows anew, by the
partial sums that they have. Only the worst case of rounding (`outlast.guard.linear`) decides that
numbers which come out the same again are wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outlast.errors import GuardError

DEVIATIONS = 5.75
_SPACING_SHARE = 2.16
"""x^2 / 4^floor(log2 |x|) in the mean over log-uniform significands: 3 / (2 ln 2)."""

Sums = Any
"""A float, or an array or tensor of floats."""

_SIGNIFICAND_BITS = {
    "float64": 53,
    "float32": 24,
    "tf32": 11,
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e5m2": 3,
}
_SMALLEST_NORMAL = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float8_e4m3fn": 2.0**-6,
    "float8_e5m2": 2.0**-14,
}
"""Below this the spacing of numbers no longer shrinks with them."""


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest: 2^-p for a significand of p bits.

    Args:
        dtype: A torch dtype's name without ``torch.``, or ``tf32``.

    Raises:
        GuardError: When the type is not a floating-point type that has a bound here.
    """
    try:
        return 2.0 ** -_SIGNIFICAND_BITS[dtype]
    except KeyError:
        known = ", ".join(_SIGNIFICAND_BITS)
        raise GuardError(f"there is no rounding bound for {dtype}; known are {known}") from None


@dataclass(frozen=True)
class Rounding:
    """The types that a matrix product goes through, by name.

    Attributes:
        stored: Of the output in memory.
        accumulated: Of the partial sums in the unit.
        read: Of the operands as the unit takes them, or empty where they are taken as they are.
        summed: Of the check's own sums.
    """

    stored: str
    accumulated: str = "float32"
    read: str = ""
    summed: str = "float64"


@dataclass(frozen=True)
class Bound:
    """Variance of a row's difference.

    ``by_power powers + by_square squares + by_value value^2 + floor``, where the value is the row's
    own checked sum.
    """

    by_power: float
    by_square: float
    floor: float
    by_value: float = 0.0

    def variance(self, powers: Sums, squares: Sums, value: Sums = 0.0) -> Sums:
        """Variance of rows with these sums: floats, arrays or tensors (rows,)."""
        own = self.by_power * powers + self.by_square * squares + self.floor
        return own + self.by_value * value**2

    @property
    def limit(self) -> float:
        """Largest difference^2 / variance that passes."""
        return DEVIATIONS**2

    def detection_point(
        self, power_share: float = 1.0 / _SPACING_SHARE, square_share: float = 0.0
    ) -> float:
        """Smallest error surely found, as a share of the row's 2-norm, from the storing term alone.

        Args:
            power_share: ``powers`` / norm^2; 1/2.16 for log-uniform significands, at most 1.
            square_share: ``squares`` / norm^2; 0 for the storing and drift terms alone.
        """
        return (
            2.0
            * DEVIATIONS
            * math.sqrt(self.by_power * power_share + self.by_square * square_share)
        )


def product_bound(rounding: Rounding, terms: int, outputs: int, *, alike: bool = False) -> Bound:
    """The bound of a row of `outputs` sums of `terms` products each.

    With `alike` the numbers of a row may be sums of nearly proportional terms, whose partial sums
    are rounded alike: dW, where the features of X share their mean. Then their drifts do not
    cancel under signs, but add up to a common relative error of the checked sum; `squares` must
    then hold the squares of the terms' signed sums as well.

    The check's own sums round, too, but never add more than 64 numbers, or 1/32 of a row, one after
    the other.
    """
    stored = unit_roundoff(rounding.stored)
    accumulated = unit_roundoff(rounding.accumulated)
    # A row's squares are this multiple of its powers, and so are those of its partial sums.
    drift, walk = terms / 3.0, terms / 6.0 / _SPACING_SHARE
    unit = accumulated**2 / 3.0
    own = unit_roundoff(rounding.summed) ** 2 / 3.0
    read = 2.0 * unit_roundoff(rounding.read) ** 2 / 3.0 if rounding.read else 0.0
    spacing = stored * _SMALLEST_NORMAL[rounding.stored]
    # Squares that are too small for the check's sums vanish; fp64 loses none that matter.
    lost = _SMALLEST_NORMAL["float32"] if rounding.summed == "float32" else 2.0**-1000
    return Bound(
        by_power=stored**2 / 3.0 + unit * drift + own * 4.0 * (32.0 + outputs / 64.0),
        by_square=unit * walk + own * (32.0 + terms / 64.0) + read,
        by_value=unit * drift if alike else 0.0,
        floor=outputs * max(spacing**2 / 3.0, lost),
    )
