"""Tiles read and written by compiled code (``native/tiles.c``), many in a call.

A call hashes, codes and copies without the interpreter's lock, so that threads share the work. It
needs a C compiler, the zstd in blosc2's wheel and the XXH3 in xxhash's; elsewhere
`CompiledTiles.new` gives None, and NumPy does the same with the same bytes. Set
``OUTLAST_NATIVE=0`` to compare.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from importlib import resources
from importlib.util import find_spec
from operator import mul, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.hardware.native import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.state.box import Box

_ZSTD = (
    "ZSTD_createCCtx",
    "ZSTD_freeCCtx",
    "ZSTD_CCtx_setParameter",
    "ZSTD_compress2",
    "ZSTD_createDCtx",
    "ZSTD_freeDCtx",
    "ZSTD_decompressDCtx",
    "ZSTD_isError",
)
"""In the order of ``struct libraries`` in tiles.c."""

ZSTD_PARAMETERS = {
    "window_log": (101, 17),
    "hash_log": (102, 6),
    "chain_log": (103, 6),
    "search_log": (104, 1),
    "min_match": (105, 7),
    "target_length": (106, 0),
    "strategy": (107, 1),
    "write_content_size": (200, 1),
    "write_checksum": (201, 0),
}
"""Name to zstd's number and the value that planes are coded with; strategy 1: fast."""

_POINTER, _INTEGER, _SMALL, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_FLAGS = ("-O3", "-march=native")

_LAYOUT = [("start", "i8"), ("strides", "i8", 3)]
_HASH = ("u8", 2)

COPY = np.dtype([("run", "i8"), ("counts", "i8", 3), ("to", _LAYOUT), ("from", _LAYOUT)])
"""``struct copy``: how a box is copied from one array to another."""

TILE = np.dtype(
    [
        *((name, "i8") for name in ("stored", "length", "codec", "itemsize", "bytes")),
        *(("content_hash", *_HASH), ("target", "i8"), ("copy", COPY)),
    ]
)
"""``struct tile``: a stored tile, and the memory that it goes to."""

SOURCE = np.dtype(
    [
        *((name, "i8") for name in ("memory", "itemsize", "bytes")),
        ("copy", COPY),
        ("content_hash", *_HASH),
        ("stored_hash", *_HASH),
        *(("codec", "i8"), ("length", "i8")),
    ]
)
"""``struct source``: a tile in memory, and what became of it."""

CODECS = ("raw", "fill", "planes")
"""Those of a tile, by their numbers in tiles.c."""

Table = NDArray[np.void]
"""(tiles,) of `TILE` or `SOURCE`."""


class Place(NamedTuple):
    """An array that holds a box.

    Attributes:
        box: What it holds.
        strides: In bytes.
    """

    box: Box
    strides: tuple[int, ...]

    @classmethod
    def row_major(cls, box: Box, itemsize: int) -> Place:
        """A contiguous one."""
        strides = [itemsize]
        for extent in reversed(box.shape[1:]):
            strides.append(strides[-1] * extent)
        return cls(box, tuple(reversed(strides[: len(box.shape)])))


def copy_of(inside: Box, itemsize: int, to: Place, source: Place) -> bytes | None:
    """Return the copy of a box as bytes of a `COPY`; None where it takes more than three loops."""
    found = runs(inside.shape, itemsize, to.strides, source.strides)
    if found is None:
        return None
    run, counts, *strides = found
    numbers = [run, *counts]
    for place, steps in zip((to, source), strides, strict=True):
        offsets = map(sub, inside.offset, place.box.offset)
        numbers += [sum(map(mul, offsets, place.strides)), *steps]
    return struct.pack(f"={len(numbers)}q", *numbers)


def runs(
    shape: Sequence[int], itemsize: int, one: Sequence[int], other: Sequence[int]
) -> tuple[int, Sequence[int], Sequence[int], Sequence[int]] | None:
    """A box in two arrays at once, as runs of bytes that are contiguous in both.

    Args:
        shape: Of the box.
        itemsize: Bytes of an element.
        one: Strides of the first array, in bytes.
        other: Strides of the second.

    Returns:
        Bytes of a run, how many there are along three dimensions, and how many bytes apart, in each
        array; None where they lie along more dimensions.
    """
    run = itemsize
    levels: list[tuple[int, int, int]] = []
    for extent, first, second in zip(reversed(shape), reversed(one), reversed(other), strict=True):
        if extent == 1:
            continue
        if not levels and first == second == run:
            run *= extent
            continue
        if levels:
            count, *steps = levels[-1]
            if [first, second] == [count * step for step in steps]:
                levels[-1] = (count * extent, steps[0], steps[1])
                continue
        levels.append((extent, first, second))
    if len(levels) > 3:
        return None
    levels += [(1, 0, 0)] * (3 - len(levels))
    counts, first_strides, second_strides = zip(*reversed(levels), strict=True)
    return run, counts, first_strides, second_strides


def hashes_of(digests: Sequence[str]) -> NDArray[np.uint64]:
    """XXH3-128 digests in hexadecimal as (n, 2) low and high halves.

    What is no such digest becomes another one, which no content has.
    """
    try:
        content = bytes.fromhex("".join(digests))
        halves = np.frombuffer(content, ">u8").reshape(len(digests), 2)
    except ValueError:
        return np.zeros((len(digests), 2), np.uint64)
    return halves[:, ::-1].astype(np.uint64)


def digests_of(hashes: NDArray[np.uint64]) -> list[str]:
    """The inverse of `hashes_of`."""
    content = np.ascontiguousarray(hashes[:, ::-1]).astype(">u8").tobytes().hex()
    return [content[start : start + 32] for start in range(0, len(content), 32)]


class CompiledTiles:
    """The compiled functions; keeps their scratch memory, so use one in each thread."""

    def __init__(self, library: ctypes.CDLL, coder: int) -> None:
        self._library = library
        self._coder = coder
        self._out = np.empty(0, np.uint8)
        weakref.finalize(self, library.outlast_tiles_free, coder)

    @classmethod
    def new(cls) -> CompiledTiles | None:
        """None where there is no C compiler, or no zstd or XXH3 to call."""
        found = _library()
        if isinstance(found, str):
            return None
        library, functions = found
        numbers = np.array([*ZSTD_PARAMETERS.values()], np.int32)
        coder = library.outlast_tiles_new(functions, numbers.ctypes.data, len(numbers))
        return None if coder is None else cls(library, coder)

    def read(self, tiles: Table) -> NDArray[np.bool_]:
        """Check, decode and place tiles.

        Args:
            tiles: (n,) of `TILE`, whose memory stays until this returns.

        Returns:
            (n,) whether each was found right and placed; the others are malformed, or need NumPy.
        """
        done = np.empty(len(tiles), np.bool_)
        self._library.outlast_tiles_read(
            self._coder, tiles.ctypes.data, len(tiles), done.ctypes.data
        )
        return done

    def hash(self, sources: Table) -> None:
        """Fill `content_hash` of (n,) `SOURCE`; raises MemoryError."""
        if not self._library.outlast_tiles_hash(self._coder, sources.ctypes.data, len(sources)):
            raise MemoryError("no memory to copy a tile")

    def write(self, sources: Table, coded: int, zeros: float, least: int) -> NDArray[np.uint8]:
        """Code tiles; fills `codec`, `length` and `stored_hash`.

        Args:
            sources: (n,) of `SOURCE`, with their `content_hash`.
            coded: `PlanePlan.coded`, or -1 to store them as they are.
            zeros: As of `PlaneCoder`.
            least: A tile of fewer bytes is stored as it is.

        Returns:
            Their codes, one after the other; valid until the next call.

        Raises:
            MemoryError: When there is no room.
        """
        out = self._room(int(sources["bytes"].sum()), int(sources["bytes"].max()))
        if not self._library.outlast_tiles_write(
            *(self._coder, sources.ctypes.data, len(sources), coded, least, zeros),
            out.ctypes.data,
        ):
            raise MemoryError(f"no memory to code {len(sources)} tiles")
        return out[: int(sources["length"].sum())]

    def encode_planes(
        self, raw: NDArray[np.uint8], itemsize: int, coded: int, zeros: float
    ) -> bytes:
        """As `PlaneCoder.encode`.

        Raises:
            MemoryError: When there is no room for a tile.
        """
        raw = np.ascontiguousarray(raw)
        out = self._room(raw.size, raw.size)
        length = self._library.outlast_tiles_encode(
            *(self._coder, raw.ctypes.data, raw.size, itemsize, coded, zeros),
            out.ctypes.data,
        )
        if not length:
            raise MemoryError(f"no memory to code a tile of {raw.size} bytes")
        return out[:length].tobytes()

    def decode_planes(
        self, stored: Sequence[bytes | memoryview], itemsize: int, tiles: NDArray[np.uint8]
    ) -> int:
        """Decode as many tiles as can be; returns how many: the next one is for `PlaneCoder`."""
        codes = [np.frombuffer(code, np.uint8) for code in stored]
        places = np.array([address_of(code) for code in codes], np.int64)
        lengths = np.array([code.size for code in codes], np.int64)
        done: int = self._library.outlast_tiles_decode(
            *(self._coder, places.ctypes.data, lengths.ctypes.data, len(codes)),
            *(tiles.shape[1], itemsize, tiles.ctypes.data),
        )
        return done

    def _room(self, size: int, largest: int) -> NDArray[np.uint8]:
        """Bytes that tiles of `size` bytes may need, and the largest of them beside."""
        size += largest // 16 + 8192
        if self._out.size < size:
            self._out = np.empty(size, np.uint8)
        return self._out


def address_of(array: NDArray[Any]) -> int:
    """Address of the first byte of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


def why_not() -> str:
    """Say why NumPy does the work here; empty where compiled code does."""
    found = _library()
    return found if isinstance(found, str) else ""


@functools.cache
def _library() -> tuple[ctypes.CDLL, Any] | str:
    """The compiled functions, and those of other libraries as they take them; or why not."""
    zstd = _files_of("blosc2", "lib/libblosc2.so*")
    xxhash = _files_of("xxhash", "_xxhash.*")
    if not (zstd and xxhash):
        return "the installed blosc2 or xxhash comes without a library that can be called"
    library, problem = load(
        resources.files("outlast.checkpoint") / "native", ["tiles.c"], _FLAGS, ("-O3",)
    )
    if library is None:
        return problem
    try:
        found = [getattr(ctypes.CDLL(str(zstd[0])), name) for name in _ZSTD]
        found.append(ctypes.CDLL(str(xxhash[0])).XXH128)
    except (OSError, AttributeError) as error:
        # They were built with other libraries, or show none of this.
        return f"blosc2 or xxhash cannot be called: {error}"
    functions = [ctypes.cast(function, _POINTER).value for function in found]
    p, i = _POINTER, _INTEGER
    for name, result, *takes in (
        ("new", p, p, p, i),
        ("free", None, p),
        ("encode", i, p, p, i, _SMALL, ctypes.c_uint32, _REAL, p),
        ("decode", i, p, p, p, i, i, _SMALL, p),
        ("read", None, p, p, i, p),
        ("hash", i, p, p, i),
        ("write", i, p, p, i, i, i, _REAL, p),
    ):
        function = getattr(library, f"outlast_tiles_{name}")
        function.restype, function.argtypes = result, takes
    return library, (_POINTER * len(functions))(*functions)


def _files_of(package: str, pattern: str) -> list[Path]:
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [file for folder in folders for file in sorted(Path(folder).glob(pattern))]
