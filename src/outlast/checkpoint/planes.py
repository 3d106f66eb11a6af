"""Byte planes of 16- and 32-bit numbers: the store's codec of floating-point tiles.

The mantissas of a trained model are noise, the exponents are not. A tile is split into the planes
of its bytes, the sign turned behind the upper mantissa so that the exponent is one plane; each
plane goes through zstd, set up so that it looks for hardly any matches and codes the entropy of
single bytes (the matches that it finds among exponents are mostly false and cost more than they
save), or stays raw. Layout of a coded tile: parts (uint8), flags (uint8), exceptions (uint32),
length of each part (uint32), parts. All little-endian.

Earlier releases have also coded differences to a version shortly before, whose sign is not turned;
as most of them are tiny, their upper halves may stand as nibbles, with a list of the exceptions.
These are decoded, and never written.

This is the coder in NumPy. Compiled code (see `compiled`) does most of the work where it can be
had; the bytes are the same.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from backports import zstd
from numpy.typing import NDArray

from outlast.checkpoint.compiled import ZSTD_PARAMETERS, CompiledTiles

if TYPE_CHECKING:
    from collections.abc import Sequence

Words: TypeAlias = NDArray[Any]
"""Unsigned integers of the width of one element."""

ITEM_BYTES = (2, 4)
_ROTATED, _NIBBLES = 1, 2
_HEAD = struct.Struct("<BBI")
_ESCAPE = 15
_PAYS = 0.985
ZEROS = 0.98
"""A half of whose low bytes fewer are not zero is coded, whatever the plan says."""


@dataclass
class PlanePlan:
    """Choices that pay for one tensor, found on a tile of it.

    Attributes:
        planes: Whether each byte plane is coded, from the lowest to the highest.
    """

    planes: list[bool]

    @property
    def coded(self) -> int:
        """The planes that are coded, as the bits of an integer."""
        return sum(pays << number for number, pays in enumerate(self.planes))


@dataclass(frozen=True)
class _Code:
    """The parts of a coded tile.

    Attributes:
        flags: `_ROTATED`, `_NIBBLES`.
        exceptions: Upper halves that stand in full beside the nibbles.
        parts: Two for each half: low and high plane, or words and nothing, or nibbles and others.
    """

    flags: int
    exceptions: int
    parts: list[memoryview]

    @classmethod
    def parse(cls, stored: bytes | memoryview, itemsize: int) -> _Code:
        """Take a coded tile apart; raises ValueError when its lengths do not add up."""
        view = memoryview(stored)
        count, flags, exceptions = _HEAD.unpack_from(view)
        lengths = struct.unpack_from(f"<{count}I", view, _HEAD.size)
        start = _HEAD.size + 4 * count
        if count != itemsize or start + sum(lengths) != len(view):
            raise ValueError("the lengths of its planes do not add up")
        parts = []
        for length in lengths:
            parts.append(view[start : start + length])
            start += length
        return cls(flags, exceptions, parts)

    @property
    def kind(self) -> tuple[int, ...]:
        """Tiles of one kind are decoded together."""
        return self.flags, *(len(part) == 0 for part in self.parts[1::2])


class PlaneCoder:
    """Codes tiles of one element size; keeps its scratch memory, so use one in each thread.

    Args:
        itemsize: Bytes of an element: 2 or 4.
    """

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._type = np.dtype(f"<u{itemsize}")
        self._compressor = zstd.ZstdCompressor(options=dict(ZSTD_PARAMETERS.values()))
        self._room = 0
        self._compiled = CompiledTiles.new()

    def plan(self, raw: NDArray[np.uint8]) -> PlanePlan:
        """Find out on one tile what pays for its tensor."""
        if raw.size == 0:
            return PlanePlan([False] * self._itemsize)
        everything = self.encode(raw, PlanePlan([True] * self._itemsize))
        parts = _Code.parse(everything, self._itemsize).parts
        return PlanePlan([len(part) < _PAYS * raw.size / self._itemsize for part in parts])

    def encode(self, raw: NDArray[np.uint8], plan: PlanePlan) -> bytes:
        """Code a tile.

        Args:
            raw: Bytes of the tile.
            plan: What to do with each plane.
        """
        if self._compiled is not None:
            return self._compiled.encode_planes(raw, self._itemsize, plan.coded, ZEROS)
        lower, upper = self._halves(raw)
        parts = [] if lower is None else self._split_half(lower, plan.planes[:2])
        parts += self._split_half(upper, plan.planes[-2:])
        lengths = struct.pack(f"<{len(parts)}I", *map(len, parts))
        return b"".join([_HEAD.pack(len(parts), _ROTATED, 0), lengths, *parts])

    def decode(self, stored: Sequence[bytes | memoryview], size: int) -> NDArray[np.uint8]:
        """Decode several tiles of one size: together they take less time.

        Args:
            stored: The codes.
            size: Bytes of each tile.

        Returns:
            (tiles, size) bytes.

        Raises:
            ValueError: When one cannot be the code of so many bytes.
        """
        if self._compiled is not None:
            tiles = np.empty((len(stored), size), np.uint8)
            done = self._compiled.decode_planes(stored, self._itemsize, tiles)
            if done < len(stored):
                tiles[done:] = self._decode(stored[done:], size)
            return tiles
        return self._decode(stored, size)

    def _decode(self, stored: Sequence[bytes | memoryview], size: int) -> NDArray[np.uint8]:
        count = size // self._itemsize
        codes = [_Code.parse(chunk, self._itemsize) for chunk in stored]
        if any(code.exceptions > count for code in codes):
            raise ValueError("it names more exceptions than elements")
        words = np.empty((len(codes), count), self._type)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, code in enumerate(codes):
            alike.setdefault(code.kind, []).append(number)
        for kind, members in alike.items():
            chosen = [codes[number] for number in members]
            found = self._decode_alike(chosen, count, kind[0])
            if len(alike) == 1:
                return found.view(np.uint8)
            words[members] = found
        return words.view(np.uint8)

    def _decode_alike(self, codes: list[_Code], count: int, flags: int) -> Words:
        """Tiles of which the same planes are coded in the same way: one operation for all."""
        self._make_room(len(codes) * count)
        shape = (len(codes), count)
        if flags & _NIBBLES:
            upper = self._from_nibbles(codes, shape)
        else:
            upper = self._join_half([code.parts[-2:] for code in codes], shape, self._upper)
        if flags & _ROTATED:
            turned = self._spare[: upper.size].reshape(shape)
            # A multiplication, which is quicker than a shift.
            np.multiply(upper, np.uint16(1 << 15), out=turned)
            np.right_shift(upper, 1, out=upper)
            np.bitwise_or(upper, turned, out=upper)
        if self._itemsize == 2:
            return upper.copy()
        lower = self._join_half([code.parts[:2] for code in codes], shape, self._lower)
        words = lower.astype(self._type)
        shifted = self._words[: words.size].reshape(shape)
        np.copyto(shifted, upper)
        np.left_shift(shifted, 16, out=shifted)
        np.bitwise_or(words, shifted, out=words)
        return words

    def _halves(self, raw: NDArray[np.uint8]) -> tuple[Words | None, Words]:
        """The lower (none of 16-bit numbers) and upper 16 bits, turned, of the words of a tile."""
        words = raw.view(self._type)
        count = words.size
        self._make_room(count)
        lower, upper = None, words
        if self._itemsize == 4:
            lower, upper, shifted = self._lower[:count], self._upper[:count], self._words[:count]
            np.copyto(lower, words, casting="unsafe")
            np.right_shift(words, 16, out=shifted)
            np.copyto(upper, shifted, casting="unsafe")
        turned, spare = self._upper[:count], self._spare[:count]
        np.right_shift(upper, 15, out=spare)
        np.add(upper, upper, out=turned)
        return lower, np.bitwise_or(turned, spare, out=turned)

    def _split_half(self, half: Words, coded: list[bool]) -> list[bytes]:
        """Two byte planes of 16-bit words; both raw: the words as they are, and nothing."""
        count = half.size
        low, high = (plane[:count] for plane in self._bytes)
        np.copyto(low, half, casting="unsafe")
        # Rows that were never touched are zeros in every plane.
        zeros = np.count_nonzero(low) < ZEROS * count
        if not (zeros or any(coded)):
            return [half.tobytes(), b""]
        np.right_shift(half, 8, out=self._shifted[:count])
        np.copyto(high, self._shifted[:count], casting="unsafe")
        return [
            self._compress(low) if coded[0] or zeros else low.tobytes(),
            self._compress(high) if coded[1] or zeros else high.tobytes(),
        ]

    def _join_half(
        self, halves: list[list[memoryview]], shape: tuple[int, int], room: Words
    ) -> Words:
        """16-bit words from their byte planes, or as they were stored."""
        words = room[: shape[0] * shape[1]].reshape(shape)
        if len(halves[0][1]) == 0:
            for row, (stored, _) in zip(words, halves, strict=True):
                row[:] = np.frombuffer(stored, "<u2")
            return words
        low, high = (plane[: words.size].reshape(shape) for plane in self._bytes)
        for row, (coded, _) in zip(low, halves, strict=True):
            row[:] = self._decompress(coded, shape[1])
        for row, (_, coded) in zip(high, halves, strict=True):
            row[:] = self._decompress(coded, shape[1])
        np.copyto(words, high)
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, low, out=words)
        return words

    def _from_nibbles(self, codes: list[_Code], shape: tuple[int, int]) -> Words:
        packed = np.empty((shape[0], shape[1] // 2), np.uint8)
        for row, code in zip(packed, codes, strict=True):
            row[:] = self._decompress(code.parts[-2], shape[1] // 2)
        pairs = packed.astype("<u4")
        pairs |= pairs << 12
        pairs &= 0x000F000F
        half = pairs.view("<u2")
        # Those of all tiles stand in the order of the tiles.
        others = [self._in_full(code) for code in codes if code.exceptions]
        if others:
            half.reshape(-1)[np.flatnonzero(half == _ESCAPE)] = np.concatenate(others)
        return half

    def _in_full(self, code: _Code) -> Words:
        plain = self._decompress(code.parts[-1], 2 * code.exceptions)
        return plain[code.exceptions :].astype("<u2") << 8 | plain[: code.exceptions]

    def _compress(self, plane: NDArray[np.uint8]) -> bytes:
        if plane.size:
            coded: bytes = self._compressor.compress(plane.data, zstd.ZstdCompressor.FLUSH_FRAME)
            if len(coded) < plane.size:
                return coded
        return plane.tobytes()

    def _decompress(self, coded: memoryview, size: int) -> NDArray[np.uint8]:
        """`size` bytes; as many stored bytes are not coded."""
        if len(coded) == size:
            return np.frombuffer(coded, np.uint8)
        decompressor = zstd.ZstdDecompressor()
        # One byte more than there are: the frame then ends, or is too long.
        plain = decompressor.decompress(coded, max_length=size + 1)
        if len(plain) != size or not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"a plane is not one frame of {size} bytes")
        return np.frombuffer(plain, np.uint8)

    def _make_room(self, count: int) -> None:
        if count <= self._room:
            return
        self._room = count
        self._words = np.empty(count, self._type)
        self._spare = np.empty(count, "<u2")
        self._lower, self._upper, self._shifted = (np.empty(count, "<u2") for _ in range(3))
        self._bytes = (np.empty(count, np.uint8), np.empty(count, np.uint8))
