"""A codec for 16- and 32-bit floating-point numbers: byte planes, entropy-coded where it pays.

The mantissas of a trained model are noise, the exponents are not. A tile is split into the planes
of its bytes, the sign turned to the end so that the exponent is one plane; each plane goes through
zstd, set up so that it looks for hardly any matches and codes the entropy of single bytes (the
matches that it finds among exponents are mostly false and cost more than they save), or stays raw.
Differences to a version shortly before are mostly tiny: their upper halves are then coded as
nibbles, with a list of the exceptions.

Layout of a coded tile: parts (uint8), flags (uint8), exceptions (uint32), length of each part
(uint32), parts. All little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[Any]

ITEM_BYTES = (2, 4)

_ROTATED, _NIBBLES = 1, 2
_HEAD = struct.Struct("<BBI")
_ESCAPE = 15
_PAYS = 0.985
_SMALL_HALVES = 0.9
_ZEROS = 0.98


@dataclass
class PlanePlan:
    """What pays for one tensor, found on a tile of it.

    Attributes:
        planes: Whether each byte plane is coded, from the lowest to the highest.
        nibbles: Whether the upper halves are coded as nibbles.
    """

    planes: list[bool]
    nibbles: bool = False


class PlaneCoder:
    """Codes tiles of one element size; keeps its scratch memory, so use one in each thread.

    Args:
        itemsize: Bytes of an element: 2 or 4.
    """

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._bits = 8 * itemsize
        self._type = np.dtype(f"<u{itemsize}")
        parameters = zstandard.ZstdCompressionParameters(
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
            write_content_size=True,
            write_checksum=False,
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor()
        self._room = 0

    def plan(self, raw: NDArray[np.uint8], *, rotate: bool) -> PlanePlan:
        """Find out on one tile what pays for its tensor."""
        words = self._forward(raw, rotate=rotate)
        if words.size == 0:
            return PlanePlan([False] * self._itemsize)
        coded = [
            len(self._compressor.compress((words >> (8 * plane)).astype(np.uint8).data))
            for plane in range(self._itemsize)
        ]
        plan = PlanePlan([size < _PAYS * words.size for size in coded])
        upper = (words >> (self._bits - 16)).astype(np.uint16)
        if not rotate and words.size % 2 == 0 and np.mean(upper < _ESCAPE) > _SMALL_HALVES:
            nibbles = PlanePlan(plan.planes, nibbles=True)
            if len(self._encode(words, nibbles, 0)) < len(self._encode(words, plan, 0)):
                return nibbles
        return plan

    def encode(self, raw: NDArray[np.uint8], plan: PlanePlan, *, rotate: bool) -> bytes:
        """Code a tile.

        Args:
            raw: Bytes of the tile.
            plan: What to do with each plane.
            rotate: Turn the sign bit to the end: right for floating-point numbers, not for
                differences.
        """
        words = self._forward(raw, rotate=rotate)
        return self._encode(words, plan, _ROTATED if rotate else 0)

    def decode(self, stored: bytes | memoryview, size: int) -> NDArray[np.uint8]:
        """The `size` bytes that `encode` was given.

        Raises:
            ValueError: When `stored` cannot be the code of so many bytes.
        """
        count = size // self._itemsize
        self._make_room(count)
        view = memoryview(stored)
        parts, flags, exceptions = _HEAD.unpack_from(view)
        lengths = struct.unpack_from(f"<{parts}I", view, _HEAD.size)
        start = _HEAD.size + 4 * parts
        pieces = []
        for length in lengths:
            pieces.append(view[start : start + length])
            start += length
        if start != len(view) or parts != self._itemsize:
            raise ValueError("the lengths of its planes do not add up")
        words = np.empty(count, self._type)
        if flags & _NIBBLES:
            upper = self._from_nibbles(pieces[-2], pieces[-1], exceptions, count)
        else:
            upper = self._join_half(pieces[-2], pieces[-1], count, self._upper)
        if self._itemsize == 2:
            np.copyto(words, upper)
        else:
            np.copyto(words, self._join_half(pieces[0], pieces[1], count, self._lower))
            shifted = self._spare[:count]
            np.copyto(shifted, upper)
            np.left_shift(shifted, 16, out=shifted)
            np.bitwise_or(words, shifted, out=words)
        if flags & _ROTATED:
            turned = self._spare[:count]
            np.left_shift(words, self._bits - 1, out=turned)
            np.right_shift(words, 1, out=words)
            np.bitwise_or(words, turned, out=words)
        return words.view(np.uint8)

    def _forward(self, raw: NDArray[np.uint8], *, rotate: bool) -> Words:
        words = raw.view(self._type)
        self._make_room(words.size)
        if not rotate:
            return words
        turned, spare = self._words[: words.size], self._spare[: words.size]
        np.left_shift(words, 1, out=turned)
        np.right_shift(words, self._bits - 1, out=spare)
        np.bitwise_or(turned, spare, out=turned)
        return turned

    def _encode(self, words: Words, plan: PlanePlan, flags: int) -> bytes:
        count, exceptions = words.size, 0
        parts: list[bytes] = []
        upper = words
        if self._itemsize == 4:
            lower = self._lower[:count]
            np.copyto(lower, words, casting="unsafe")
            parts += self._split_half(lower, plan.planes[:2])
            spare, upper = self._spare[:count], self._upper[:count]
            np.right_shift(words, 16, out=spare)
            np.copyto(upper, spare, casting="unsafe")
        if plan.nibbles and count % 2 == 0:
            flags |= _NIBBLES
            exceptions, nibbles = self._to_nibbles(upper)
            parts += nibbles
        else:
            parts += self._split_half(upper, plan.planes[-2:])
        lengths = struct.pack(f"<{len(parts)}I", *map(len, parts))
        return b"".join([_HEAD.pack(len(parts), flags, exceptions), lengths, *parts])

    def _split_half(self, half: Words, coded: list[bool]) -> list[bytes]:
        """Two byte planes of 16-bit words; both raw: the words as they are, and nothing."""
        count = half.size
        low, high = (plane[:count] for plane in self._bytes)
        np.copyto(low, half, casting="unsafe")
        # Rows that were never touched are zeros in every plane.
        zeros = np.count_nonzero(low) < _ZEROS * count
        if not (zeros or any(coded)):
            return [half.tobytes(), b""]
        np.right_shift(half, 8, out=self._shifted[:count])
        np.copyto(high, self._shifted[:count], casting="unsafe")
        return [
            self._compress(low) if coded[0] or zeros else low.tobytes(),
            self._compress(high) if coded[1] or zeros else high.tobytes(),
        ]

    def _join_half(self, low: memoryview, high: memoryview, count: int, room: Words) -> Words:
        if len(high) == 0:
            return np.frombuffer(low, "<u2")
        words = room[:count]
        np.copyto(words, self._decompress(high, count))
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, self._decompress(low, count), out=words)
        return words

    def _to_nibbles(self, half: Words) -> tuple[int, list[bytes]]:
        """16-bit words below 15 as nibbles, two to a byte, and the others in full beside them."""
        count = half.size
        others = half[half >= _ESCAPE]
        small = self._shifted[:count]
        np.minimum(half, _ESCAPE, out=small)
        pairs = small.view("<u4")
        packed = pairs | (pairs >> 12)
        in_full = np.concatenate([others.astype(np.uint8), (others >> 8).astype(np.uint8)])
        return others.size, [
            self._compress(packed.astype(np.uint8)),
            self._compress(in_full),
        ]

    def _from_nibbles(
        self, packed: memoryview, in_full: memoryview, exceptions: int, count: int
    ) -> Words:
        pairs = self._decompress(packed, count // 2).astype("<u4")
        pairs |= pairs << 12
        pairs &= 0x000F000F
        half = pairs.view("<u2")
        if exceptions:
            others = self._decompress(in_full, 2 * exceptions)
            values = others[exceptions:].astype("<u2") << 8 | others[:exceptions]
            half[np.flatnonzero(half == _ESCAPE)] = values
        return half

    def _compress(self, plane: NDArray[np.uint8]) -> bytes:
        if plane.size:
            coded: bytes = self._compressor.compress(plane.data)
            if len(coded) < plane.size:
                return coded
        return plane.tobytes()

    def _decompress(self, coded: memoryview, size: int) -> NDArray[np.uint8]:
        """`size` bytes; as many stored bytes are not coded."""
        if len(coded) == size:
            return np.frombuffer(coded, np.uint8)
        plain = self._decompressor.decompress(coded, max_output_size=size)
        if len(plain) != size:
            raise ValueError(f"a plane has {len(plain)} bytes instead of {size}")
        return np.frombuffer(plain, np.uint8)

    def _make_room(self, count: int) -> None:
        if count <= self._room:
            return
        self._room = count
        self._words = np.empty(count, self._type)
        self._spare = np.empty(count, self._type)
        self._lower = np.empty(count + count % 2, "<u2")
        self._upper = np.empty(count + count % 2, "<u2")
        self._shifted = np.empty(count + count % 2, "<u2")
        self._bytes = (np.empty(count, np.uint8), np.empty(count, np.uint8))
