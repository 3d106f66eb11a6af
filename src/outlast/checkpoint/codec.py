"""Codecs of a tile: raw, constant fill, byte planes and blosc2, each with its inverse.

A codec's name says how bytes were coded, from the outside in: ``diff+planes`` is the difference to
a base tile, coded by byte planes. Names are part of the file format.

*Byte planes* are for 16- and 32-bit floating-point numbers. The mantissas of a trained model are
noise, the exponents are not. A tile is split into the planes of its bytes, the sign turned behind
the upper mantissa so that the exponent is one plane; each plane goes through zstd, set up so that
it looks for hardly any matches and codes the entropy of single bytes (the matches that it finds
among exponents are mostly false and cost more than they save), or stays raw. Differences to a
version shortly before are mostly tiny: their upper halves are then coded as nibbles, with a list of
the exceptions. Layout of a coded tile: parts (uint8), flags (uint8), exceptions (uint32), length of
each part (uint32), parts. All little-endian.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from outlast.checkpoint.manifest import item_bytes
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Choices that pay for one tensor, found on a tile of it.

    Attributes:
        planes: Whether each byte plane is coded, from the lowest to the highest.
        nibbles: Whether the upper halves are coded as nibbles.
    """

    planes: list[bool]
    nibbles: bool = False


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
        lower, upper = self._halves(raw, rotate=rotate)
        if upper.size == 0:
            return PlanePlan([False] * self._itemsize)
        halves = [upper] if lower is None else [lower, upper]
        planes = [plane for half in halves for plane in (half.astype(np.uint8), half >> 8)]
        coded = [len(self._compressor.compress(plane.astype(np.uint8).data)) for plane in planes]
        plan = PlanePlan([size < _PAYS * upper.size for size in coded])
        small = np.mean(upper < _ESCAPE) > _SMALL_HALVES
        if not rotate and small and upper.size % 2 == 0:
            nibbles = PlanePlan(plan.planes, nibbles=True)
            by_plan, by_nibbles = (
                len(self.encode(raw, item, rotate=False)) for item in (plan, nibbles)
            )
            return nibbles if by_nibbles < by_plan else plan
        return plan

    def encode(self, raw: NDArray[np.uint8], plan: PlanePlan, *, rotate: bool) -> bytes:
        """Code a tile.

        Args:
            raw: Bytes of the tile.
            plan: What to do with each plane.
            rotate: Turn the sign bit to the end of the upper half: right for floating-point
                numbers, not for differences.
        """
        lower, upper = self._halves(raw, rotate=rotate)
        flags, exceptions = _ROTATED if rotate else 0, 0
        parts = [] if lower is None else self._split_half(lower, plan.planes[:2])
        if plan.nibbles and upper.size % 2 == 0:
            flags |= _NIBBLES
            # 16-bit words below 15 as nibbles, two to a byte, and the others in full beside them.
            count = upper.size
            others = upper[upper >= _ESCAPE]
            small = self._shifted[:count]
            np.minimum(upper, _ESCAPE, out=small)
            pairs = small.view("<u4")
            packed = pairs | (pairs >> 12)
            in_full = np.concatenate([others.astype(np.uint8), (others >> 8).astype(np.uint8)])
            exceptions, nibbles = (
                others.size,
                [self._compress(packed.astype(np.uint8)), self._compress(in_full)],
            )
            parts += nibbles
        else:
            parts += self._split_half(upper, plan.planes[-2:])
        lengths = struct.pack(f"<{len(parts)}I", *map(len, parts))
        return b"".join([_HEAD.pack(len(parts), flags, exceptions), lengths, *parts])

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
        count = size // self._itemsize
        codes = [_Code.parse(chunk, self._itemsize) for chunk in stored]
        if any(code.exceptions > count for code in codes):
            raise ValueError("it names more exceptions than elements")
        words = np.empty((len(codes), count), self._type)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, code in enumerate(codes):
            alike.setdefault(code.kind, []).append(number)
        for kind, numbers in alike.items():
            chosen = [codes[number] for number in numbers]
            found = self._decode_alike(chosen, count, kind[0])
            if len(alike) == 1:
                return found.view(np.uint8)
            words[numbers] = found
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

    def _halves(self, raw: NDArray[np.uint8], *, rotate: bool) -> tuple[Words | None, Words]:
        """The lower (none of 16-bit numbers) and upper 16 bits of the words of a tile."""
        words = raw.view(self._type)
        count = words.size
        self._make_room(count)
        lower, upper = None, words
        if self._itemsize == 4:
            lower, upper, shifted = self._lower[:count], self._upper[:count], self._words[:count]
            np.copyto(lower, words, casting="unsafe")
            np.right_shift(words, 16, out=shifted)
            np.copyto(upper, shifted, casting="unsafe")
        if rotate:
            turned, spare = self._upper[:count], self._spare[:count]
            np.right_shift(upper, 15, out=spare)
            np.add(upper, upper, out=turned)
            upper = np.bitwise_or(turned, spare, out=turned)
        return lower, upper

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
            coded: bytes = self._compressor.compress(plane.data)
            if len(coded) < plane.size:
                return coded
        return plane.tobytes()

    def _decompress(self, coded: memoryview, size: int) -> NDArray[np.uint8]:
        """`size` bytes; as many stored bytes are not coded."""
        if len(coded) == size:
            return np.frombuffer(coded, np.uint8)
        # The library believes the size that stands in the frame, whatever `max_output_size` says.
        if zstandard.frame_content_size(coded) != size:
            raise ValueError(f"the frame of a plane names another size than {size} bytes")
        plain = self._decompressor.decompress(coded, max_output_size=size)
        if len(plain) != size:
            raise ValueError(f"a plane has {len(plain)} bytes instead of {size}")
        return np.frombuffer(plain, np.uint8)

    def _make_room(self, count: int) -> None:
        if count <= self._room:
            return
        self._room = count
        self._words = np.empty(count, self._type)
        self._spare = np.empty(count, "<u2")
        self._lower = np.empty(count + count % 2, "<u2")
        self._upper = np.empty(count + count % 2, "<u2")
        self._shifted = np.empty(count + count % 2, "<u2")
        self._bytes = (np.empty(count, np.uint8), np.empty(count, np.uint8))


if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


RAW, FILL, PLANES, BLOSC2 = "raw", "fill", "planes", "blosc2"
XOR, DIFFERENCE = "xor", "diff"
DELTAS = (XOR, DIFFERENCE)
_WORTH_CODING_BYTES = 64
_BLOSC2_CODECS = ("zstd", "lz4", "lz4hc", "zlib")


@dataclass(frozen=True)
class Compression:
    """Codec and level of tiles.

    Attributes:
        codec: ``auto`` takes what was measured best: byte planes for 16- and 32-bit floating-point
            numbers, blosc2 with zstd for the rest. A codec of blosc2 (``zstd``, ``lz4``, ``lz4hc``,
            ``zlib``) takes that for everything; ``lz4`` is fast and saves little. ``none`` stores
            everything as it is.
        level: Of blosc2's codec, 1 (fast) to 9.
    """

    codec: str = "auto"
    level: int = 1

    def __post_init__(self) -> None:
        """Refuse what blosc2 would not take."""
        known = ("auto", "none", *_BLOSC2_CODECS)
        if self.codec not in known:
            raise CheckpointError(
                f'compression = "{self.codec}" is unknown; take {", ".join(known[:-1])} or '
                f"{known[-1]}"
            )
        if not 1 <= self.level <= 9:
            raise CheckpointError(f"level = {self.level} must be between 1 (fast) and 9 (small)")


class Coder:
    """Codes and decodes tiles; holds scratch memory, so every thread needs one of its own."""

    def __init__(self, compression: Compression | None = None) -> None:
        self._compression = compression or Compression()
        self._planes: dict[int, PlaneCoder] = {}

    def plan(self, raw: Bytes, dtype: str, *, delta: bool) -> PlanePlan | None:
        """Choose what pays for a tensor, from a tile of it; None where there is no choice.

        Args:
            raw: Bytes of the tile, or of its difference to a base.
            dtype: Type of its elements.
            delta: Whether it is a difference.
        """
        itemsize = item_bytes(dtype)
        fits = itemsize in ITEM_BYTES and (delta or "float" in dtype)
        if self._compression.codec != "auto" or not fits:
            return None
        return self._plane_coder(itemsize).plan(raw, rotate=not delta)

    def encode(
        self, raw: Bytes, itemsize: int, plan: PlanePlan | None, *, delta: bool
    ) -> tuple[str, bytes]:
        """Code a tile as whatever is smallest.

        Args:
            raw: (n,) bytes of the tile, or of its difference to a base.
            itemsize: Bytes of an element.
            plan: As `plan` gave it for this tensor.
            delta: Whether it is a difference.

        Returns:
            Name of the codec and the stored bytes.
        """
        size = raw.size
        if _constant(raw, itemsize):
            return FILL, raw[:itemsize].tobytes()
        if self._compression.codec != "none" and size >= _WORTH_CODING_BYTES:
            coded: bytes
            if plan is not None:
                name = PLANES
                coded = self._plane_coder(itemsize).encode(raw, plan, rotate=not delta)
            else:
                name = BLOSC2
                blosc2 = _blosc2()
                codec = self._compression.codec
                coded = blosc2.compress2(
                    raw,
                    codec=blosc2.Codec["ZSTD" if codec == "auto" else codec.upper()],
                    clevel=self._compression.level,
                    typesize=itemsize,
                    nthreads=1,
                    filters=[blosc2.Filter.SHUFFLE],
                    filters_meta=[0],
                    splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
                )
            if len(coded) < size:
                return name, coded
        return RAW, raw.tobytes()

    def decode(
        self, codec: str, stored: Sequence[bytes | memoryview], itemsize: int, size: int
    ) -> Bytes:
        """The inverse of `encode`, for several tiles of one size.

        Args:
            codec: Name of their codec, without a delta.
            stored: The stored bytes of each, whose checksums were found right.
            itemsize: Bytes of an element.
            size: Bytes of each tile.

        Returns:
            (tiles, size) bytes.

        Raises:
            CheckpointError: When the codec is unknown or a length is not `size`.
        """
        if codec not in (RAW, FILL, PLANES, BLOSC2):
            raise CheckpointError(
                f"the codec {codec!r} is unknown; a newer Outlast wrote it: update"
            )
        try:
            if codec == PLANES:
                if itemsize not in ITEM_BYTES:
                    raise ValueError(f"elements of {itemsize} bytes have no planes")
                return self._plane_coder(itemsize).decode(stored, size)
            raw = np.empty((len(stored), size), np.uint8)
            for row, item in zip(raw, stored, strict=True):
                if codec == BLOSC2:
                    # blosc2 believes the size that stands in the code, whatever room there is.
                    if len(item) < 8 or int.from_bytes(item[4:8], "little") != size:
                        raise ValueError("its head names another size")
                    # One thread: a process that was forked waits for threads that it does not have.
                    _blosc2().decompress2(item, dst=row, nthreads=1)
                elif codec == FILL and len(item) == itemsize:
                    row.reshape(-1, len(item))[:] = np.frombuffer(item, np.uint8)
                elif len(item) == size:
                    row[:] = np.frombuffer(item, np.uint8)
                else:
                    raise ValueError("it has another size")
        except (RuntimeError, ValueError, LookupError, ArithmeticError, struct.error) as error:
            raise CheckpointError(f"a tile cannot be decoded by {codec}: {error}") from None
        except zstandard.ZstdError as error:
            raise CheckpointError(f"a tile cannot be decoded by {codec}: {error}") from None
        return raw

    def _plane_coder(self, itemsize: int) -> PlaneCoder:
        if itemsize not in self._planes:
            self._planes[itemsize] = PlaneCoder(itemsize)
        return self._planes[itemsize]


@functools.cache
def _blosc2() -> Any:
    """The library, loaded when a tile needs it: most states are floats, and it takes memory."""
    import blosc2

    # The interpreter runs on while blosc2 works.
    blosc2.set_releasegil(True)
    return blosc2


def _constant(raw: Bytes, itemsize: int) -> bool:
    """Return whether all elements are alike; a look at the ends answers for most tiles."""
    if raw.size <= itemsize or raw[:itemsize].tobytes() != raw[-itemsize:].tobytes():
        return False
    return not (raw[itemsize:] != raw[:-itemsize]).any()


def subtract(delta: str, raw: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """`raw` relative to `base`: their exclusive or, or their difference as unsigned integers.

    Small negative differences become small integers: 0, -1, 1, -2 become 0, 1, 2, 3.
    """
    now, before = (item.view(_integers(itemsize)) for item in (raw, base))
    if delta == XOR:
        return np.bitwise_xor(now, before).view(np.uint8)
    difference = now - before
    sign = difference.view(f"i{difference.itemsize}") >> (8 * difference.itemsize - 1)
    np.left_shift(difference, 1, out=difference)
    np.bitwise_xor(difference, sign.view(difference.dtype), out=difference)
    return difference.view(np.uint8)


def add(delta: str, difference: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """The inverse of `subtract`."""
    changed, before = (item.view(_integers(itemsize)) for item in (difference, base))
    if delta == XOR:
        return np.bitwise_xor(changed, before).view(np.uint8)
    sign = np.bitwise_and(changed, 1)
    np.negative(sign, out=sign)
    magnitude = np.right_shift(changed, 1)
    np.bitwise_xor(magnitude, sign, out=magnitude)
    return np.add(magnitude, before, out=magnitude).view(np.uint8)


def _integers(itemsize: int) -> np.dtype[np.unsignedinteger]:
    # Complex numbers are pairs of reals.
    return np.dtype(f"<u{itemsize if itemsize in (1, 2, 4) else 8}")
