"""Codecs of a tile: raw, constant fill, byte planes and blosc2, each with its inverse.

A codec's name says how bytes were coded, from the outside in: ``diff+planes`` is the difference to
a base tile, coded by byte planes. Names are part of the file format.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from outlast.checkpoint.format.manifest import item_bytes
from outlast.checkpoint.format.planes import ITEM_BYTES as PLANE_ITEM_BYTES
from outlast.checkpoint.format.planes import PlaneCoder, PlanePlan
from outlast.errors import CheckpointError

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
    """How tiles are coded.

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
        """What pays for a tensor, from a tile of it; None where there is no choice.

        Args:
            raw: Bytes of the tile, or of its difference to a base.
            dtype: Type of its elements.
            delta: Whether it is a difference.
        """
        itemsize = item_bytes(dtype)
        fits = itemsize in PLANE_ITEM_BYTES and (delta or "float" in dtype)
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
            if plan is not None:
                name = PLANES
                coded = self._plane_coder(itemsize).encode(raw, plan, rotate=not delta)
            else:
                name = BLOSC2
                coded = self._by_blosc2(raw, itemsize)
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
                if itemsize not in PLANE_ITEM_BYTES:
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

    def _by_blosc2(self, raw: Bytes, itemsize: int) -> bytes:
        blosc2 = _blosc2()
        coded: bytes = blosc2.compress2(
            raw,
            codec=blosc2.Codec[
                "ZSTD" if self._compression.codec == "auto" else self._compression.codec.upper()
            ],
            clevel=self._compression.level,
            typesize=itemsize,
            nthreads=1,
            filters=[blosc2.Filter.SHUFFLE],
            filters_meta=[0],
            splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
        )
        return coded

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
    """Whether all elements are alike; a look at the ends answers for most tiles."""
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
