"""Elements of saved tensors as numbers, and how far two tensors lie apart. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INTEGERS = {"bool": "u1"} | {
    f"{sign}int{8 * size}": f"<{kind}{size}"
    for sign, kind in (("", "i"), ("u", "u"))
    for size in (1, 2, 4, 8)
}
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_COMPLEX = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
# Bits of the exponent and of the mantissa, bias of the exponent, codes of NaN; Micikevicius et al.,
# FP8 formats for deep learning, arXiv:2209.05433, table 1; Noune et al., 8-bit numerical formats
# for deep neural networks, arXiv:2206.02915 (fnuz: no infinity, no negative zero).
_FLOATS8 = {
    "float8_e4m3fn": (4, 3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (4, 3, 8, (0x80,)),
    "float8_e5m2fnuz": (5, 2, 16, (0x80,)),
}


def numbers_of(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any] | None:
    """The elements in `raw`, little-endian bytes of a torch type.

    Returns:
        (elements,) integers, float64 or complex128; None for a type of unknown layout.
    """
    if dtype in _INTEGERS:
        return raw.view(_INTEGERS[dtype])
    if dtype in _FLOATS:
        return _widened(raw.view(_FLOATS[dtype]))
    if dtype == "bfloat16":
        return _widened((raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4"))
    if dtype == "float8_e5m2":
        return _widened((raw.astype("<u2") << np.uint16(8)).view("<f2"))
    if dtype in _FLOATS8:
        return _float8_table(dtype)[raw]
    if dtype in _COMPLEX:
        return _widened(raw.view(_COMPLEX[dtype])).view(np.complex128)
    return None


def _widened(numbers: NDArray[Any]) -> NDArray[np.float64]:
    # Signalling NaNs become quiet ones, which some machines report.
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.float64)


@cache
def _float8_table(dtype: str) -> NDArray[np.float64]:
    """The value of each of the 256 codes."""
    exponent_bits, mantissa_bits, bias, not_a_number = _FLOATS8[dtype]
    codes = np.arange(256)
    fields = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    fractions = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitudes = np.where(
        fields > 0, np.ldexp(1 + fractions, fields - bias), np.ldexp(fractions, 1 - bias)
    )
    values: NDArray[np.float64] = np.where(codes < 128, magnitudes, -magnitudes)
    values[list(not_a_number)] = math.nan
    return values


@dataclass
class Distance:
    """How far two tensors of one type lie apart, added up over their parts.

    Attributes:
        dtype: Torch's name of the type.
        itemsize: Bytes of an element.
        changed: Elements whose bits differ.
        not_finite: Those of them that are infinite or NaN in one of the tensors.
        largest: Largest ``|a - b|`` of the others; an int for integers, exact.
        comparable: Whether the type's elements are numbers here, not just bytes.
    """

    dtype: str
    itemsize: int
    changed: int = 0
    not_finite: int = 0
    largest: float = 0
    comparable: bool = True
    _squares: float = 0.0
    _later_squares: float = 0.0

    @property
    def relative(self) -> float | None:
        """``||a - b|| / ||b||`` over finite elements; None when it is not defined."""
        if not self.comparable or not self._later_squares:
            return None
        found = math.sqrt(self._squares) / math.sqrt(self._later_squares)
        return found if math.isfinite(found) else None

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Compare two parts.

        Args:
            before: (bytes,) of the earlier tensor.
            after: (bytes,) of the later one.
        """
        word = math.gcd(self.itemsize, 8)
        words = before.view(f"<u{word}") != after.view(f"<u{word}")
        differ = words.reshape(-1, self.itemsize // word).any(axis=1)
        self.changed += int(np.count_nonzero(differ))
        a, b = numbers_of(before, self.dtype), numbers_of(after, self.dtype)
        if a is None or b is None:
            self.comparable = False
            return
        self._add_later(b)
        a, b = a[differ], b[differ]
        if a.dtype.kind in "iu":
            # The difference of two 64-bit integers needs 65 bits, its magnitude does not.
            x, y = a.astype(np.uint64), b.astype(np.uint64)
            gaps: NDArray[Any] = np.where(a >= b, x - y, y - x)
            self.largest = max(self.largest, int(gaps.max(initial=0)))
        else:
            finite = np.isfinite(a) & np.isfinite(b)
            self.not_finite += int(np.count_nonzero(~finite))
            with np.errstate(over="ignore"):
                gaps = np.abs(a[finite] - b[finite])
            self.largest = max(self.largest, float(gaps.max(initial=0.0)))
        self._squares += _squares(gaps)

    def add_equal(self, both: NDArray[np.uint8]) -> None:
        """Take in a part that is equal in both; (bytes,)."""
        numbers = numbers_of(both, self.dtype)
        if numbers is not None:
            self._add_later(numbers)

    def _add_later(self, numbers: NDArray[Any]) -> None:
        if numbers.dtype.kind in "fc":
            numbers = numbers[np.isfinite(numbers)]
        self._later_squares += _squares(numbers)


def _squares(numbers: NDArray[Any]) -> float:
    magnitudes = np.abs(numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64))
    with np.errstate(over="ignore"):
        return float(np.square(magnitudes, out=magnitudes).sum())
