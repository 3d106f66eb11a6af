"""What a fault does to stored numbers: changes of their bits, in place, on any tensor.

Numbers are changed through integer views of the same size, as the hardware would: neither autograd
nor the version counter of a parameter notices. Bits are counted from 0, the lowest of the
significand; the highest is the sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from outlast.errors import GuardError
from outlast.guard.elements import bits as bits_of

if TYPE_CHECKING:
    import random

    from torch import Tensor

Change = Literal["flip", "carry", "stuck"]
"""flip: bits are inverted; carry: 2^k is added to or taken from the magnitude's integer, as a wrong
or missing carry does; stuck: a fixed value, also NaN or infinity."""

Extent = Literal["element", "segment", "stride"]
"""element: one number; segment: neighbours in a row, such as the lanes of a warp; stride: every
n-th number of a row."""

_WIDE_BITS = 32
# How many of float32's lowest significand bits rounding to the type removes.
_REMOVED_BITS = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class Pattern:
    """Which numbers around a position change, and how.

    Attributes:
        change: See `Change`.
        bits: To flip, or the one k of a carry; empty: one is drawn for every injection.
        sign: Of a carry: +1 wrongly added, -1 missing.
        value: Of stuck numbers.
        extent: See `Extent`.
        length: Numbers of a segment, or the period of a stride.
        before_cast: The change hits the float32 value that is then rounded to its 16-bit type.
    """

    change: Change = "flip"
    bits: tuple[int, ...] = ()
    sign: int = 1
    value: float = 0.0
    extent: Extent = "element"
    length: int = 1
    before_cast: bool = False

    def __eq__(self, other: object) -> bool:
        """NaN is the same value as NaN here."""
        return isinstance(other, Pattern) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def width(dtype: torch.dtype) -> int:
    """Bits of one number."""
    return 8 * dtype.itemsize


def integers(numbers: Tensor) -> Tensor:
    """`numbers` as signed integers of the same size and shape, over the same memory.

    Raises:
        GuardError: When they are not real floating-point numbers.
    """
    if not numbers.is_floating_point():
        raise GuardError(f"faults go into floating-point numbers, not into {numbers.dtype}")
    # Unlike detach, data has a version counter of its own.
    return bits_of(numbers.data)


def flip(numbers: Tensor, bits: tuple[int, ...]) -> None:
    """Invert these bits of every number in place; done twice, it does nothing."""
    total = width(numbers.dtype)
    mask = sum(1 << bit for bit in set(bits))
    integers(numbers).bitwise_xor_(mask - (1 << total) if mask >> (total - 1) else mask)


def carry(numbers: Tensor, bit: int, sign: int) -> None:
    """Add `sign` 2^bit to the integer of every magnitude in place, at most to its ends."""
    whole = integers(numbers)
    largest = (1 << (width(numbers.dtype) - 1)) - 1
    magnitudes = whole & largest
    room = largest - magnitudes if sign > 0 else magnitudes
    # Magnitude and sign are apart in these formats: the sign bit stays what it was.
    whole.add_(torch.clamp(room, max=1 << bit), alpha=sign)


def stick(numbers: Tensor, value: float) -> None:
    """Set every number in place."""
    numbers.data.fill_(value)


def before_cast(numbers: Tensor, pattern: Pattern, draw: random.Random) -> None:
    """Change the float32 values that 16-bit `numbers` were rounded from, and round again, in place.

    What rounding removed is not stored any more; it is drawn uniformly from what would have been
    rounded to the same number.

    Raises:
        GuardError: For numbers that are not 16 bits wide.
    """
    removed = _REMOVED_BITS.get(numbers.dtype)
    if removed is None:
        raise GuardError(
            f"cast=before needs bfloat16 or float16 numbers; these are {numbers.dtype}"
        )
    wide = numbers.data.float()
    half = 1 << (removed - 1)
    drawn = [draw.randrange(1 - half, half) for _ in range(wide.numel())]
    rests = torch.tensor(drawn, dtype=torch.int32, device=wide.device).view(wide.shape)
    whole = integers(wide)
    # Around zero the sign bit would change, and infinities would be rounded from nothing finite.
    rests = torch.where(wide == 0, rests.abs(), rests)
    whole.add_(torch.where(torch.isfinite(wide), rests, 0))
    change(wide, pattern)
    numbers.data.copy_(wide)


def change(numbers: Tensor, pattern: Pattern) -> None:
    """Apply a pattern's change, whose bits are known, to every number in place."""
    if pattern.change == "flip":
        flip(numbers, pattern.bits)
    elif pattern.change == "carry":
        carry(numbers, pattern.bits[0], pattern.sign)
    else:
        stick(numbers, pattern.value)


def settled(pattern: Pattern, dtype: torch.dtype, draw: random.Random) -> Pattern:
    """`pattern` with its bits drawn where they are open.

    Raises:
        GuardError: For a bit that numbers of this type do not have.
    """
    if pattern.change == "stuck":
        return pattern
    total = _WIDE_BITS if pattern.before_cast else width(dtype)
    # The sign stands apart from what a carry changes.
    usable = total - 1 if pattern.change == "carry" else total
    bits = pattern.bits or (draw.randrange(usable),)
    if max(bits) >= usable:
        where = "float32, before the cast," if pattern.before_cast else str(dtype)
        raise GuardError(
            f"bit = {max(bits)} cannot {pattern.change} in {where.removeprefix('torch.')}: bits 0 "
            f"to {usable - 1} can"
        )
    return replace(pattern, bits=bits)


def columns(pattern: Pattern, column: int, row_length: int) -> slice:
    """The columns of one row that a pattern around `column` changes."""
    if pattern.extent == "segment":
        # Lanes are aligned: the segment that holds the column.
        first = column // pattern.length * pattern.length
        return slice(first, min(first + pattern.length, row_length))
    if pattern.extent == "stride":
        return slice(column % pattern.length, row_length, pattern.length)
    return slice(column, column + 1)


def memory_of(numbers: Tensor) -> Tensor:
    """`numbers` without repetition: an expanded dimension, one number in memory, has length 1."""
    for dimension, step in enumerate(numbers.stride()):
        if step == 0 and numbers.shape[dimension] > 1:
            numbers = numbers.narrow(dimension, 0, 1)
    return numbers


def strike(row: Tensor, column: int, pattern: Pattern, draw: random.Random) -> None:
    """Let a pattern whose bits are known hit a row (columns,) in place.

    Raises:
        GuardError: When the row's type does not fit the pattern.
    """
    struck = row[columns(pattern, column, len(row))]
    if pattern.before_cast:
        before_cast(struck, pattern, draw)
    else:
        change(struck, pattern)


def relative_change(before: Tensor, after: Tensor) -> float:
    """|after - before| / |before| of two rows in 2-norms; infinity where it is not finite."""
    old, new = before.double(), after.double()
    norm, distance = float(old.norm()), float((new - old).norm())
    if distance == 0:
        return 0.0
    ratio = distance / norm if norm else math.inf
    return ratio if math.isfinite(ratio) else math.inf
