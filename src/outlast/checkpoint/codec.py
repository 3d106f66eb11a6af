"""Codecs of a tile: raw, constant fill, byte planes and blosc2, each with its inverse.

A codec's name says how bytes were coded, from the outside in: ``diff+planes``, which earlier
releases have written, is the difference to a base tile, coded by byte planes. Names are part of the
file format.

*Error-bounded rounding*: the trailing mantissa bits of a trained tensor are noise that no lossless
codec can shrink. Setting them to zero leaves the bytes a valid tensor of the same dtype and length,
and a byte-shuffling codec then stores about H(exponent) + 1 + k bits for k kept mantissa bits.
Nothing is rounded without a stated bound, and the error really made is measured and returned.

A float with m mantissa bits and the unbiased exponent e is +-S 2^(e - m), with the integer
significand S in [2^m, 2^(m + 1)) when it is normal. Sign aside, consecutive floats have consecutive
bit patterns, so rounding to a multiple of 2^t units in the last place (ulp) is integer arithmetic
on the bits, and a carry out of the mantissa is the right step into the next binade.

- Relative, k kept bits, t = m - k: round to nearest errs by at most 2^(t - 1) of S >= 2^m ulp, so
  by 2^-(k + 1) relatively; stochastic rounding by less than 2^-k.
- Absolute, quantum 2^q: t = q - (e - m) depends on the element; round to nearest errs by at most
  2^(q - 1), stochastic rounding by less than 2^q.

Sources: Higham, Accuracy and Stability of Numerical Algorithms (2nd ed.), theorem 2.2 (rounding
to nearest); Connolly, Higham and Mary, Stochastic rounding and its probabilistic backward error
analysis, SIAM J. Sci. Comput. 43 (2021), definition 1.1; Micikevicius et al., FP8 formats for
deep learning, arXiv:2209.05433, table 1.
"""

from __future__ import annotations

import functools
import math
import numbers
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from backports import zstd
from numpy.typing import NDArray

from outlast.checkpoint.compiled import CompiledTiles, digests_of
from outlast.checkpoint.manifest import item_bytes
from outlast.checkpoint.planes import ITEM_BYTES, ZEROS, PlaneCoder, PlanePlan, Words
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.checkpoint.compiled import Table

Bytes: TypeAlias = NDArray[np.uint8]
Errors: TypeAlias = NDArray[np.float64]

RAW, FILL, PLANES, BLOSC2 = "raw", "fill", "planes", "blosc2"
_WORTH_CODING_BYTES = 64
# Of a tile, to find out what pays for its tensor.
_SAMPLE_BYTES = 32 << 10
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
        self._compiled = CompiledTiles.new()

    def plan(self, raw: Bytes, dtype: str) -> PlanePlan | None:
        """Choose what pays for a tensor, from a tile of it; None where there is no choice.

        Args:
            raw: Bytes of the tile.
            dtype: Type of its elements.
        """
        if self._compression.codec != "auto" or not _in_planes(dtype):
            return None
        return self._plane_coder(item_bytes(dtype)).plan(raw[:_SAMPLE_BYTES])

    def takes_all(self, dtype: str) -> bool:
        """Return whether `encode_all` codes tiles of a type."""
        codec = self._compression.codec
        return self._compiled is not None and (
            codec == "none" or (codec == "auto" and _in_planes(dtype))
        )

    def hash_all(self, sources: Table) -> list[str]:
        """XXH3-128 of the content of (n,) `SOURCE`, hexadecimal."""
        assert self._compiled is not None
        self._compiled.hash(sources)
        return digests_of(sources["content_hash"])

    def encode_all(self, sources: Table, plan: PlanePlan | None) -> memoryview:
        """As `encode`, of many tiles in one call.

        Args:
            sources: (n,) of `SOURCE`; their codecs, lengths and hashes are filled in.
            plan: As `plan` gave it for this tensor.

        Returns:
            What is stored, one after the other; valid until the next call.
        """
        assert self._compiled is not None
        coded = -1 if plan is None else plan.coded
        return self._compiled.write(sources, coded, ZEROS, _WORTH_CODING_BYTES).data

    def encode(self, raw: Bytes, itemsize: int, plan: PlanePlan | None) -> tuple[str, bytes]:
        """Code a tile as whatever is smallest.

        Args:
            raw: (n,) bytes of the tile.
            itemsize: Bytes of an element.
            plan: As `plan` gave it for this tensor.

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
                coded = self._plane_coder(itemsize).encode(raw, plan)
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
        except zstd.ZstdError as error:
            raise CheckpointError(f"a tile cannot be decoded by {codec}: {error}") from None
        return raw

    def _plane_coder(self, itemsize: int) -> PlaneCoder:
        if itemsize not in self._planes:
            self._planes[itemsize] = PlaneCoder(itemsize)
        return self._planes[itemsize]


def _in_planes(dtype: str) -> bool:
    """Return whether byte planes are what pays for a type."""
    return item_bytes(dtype) in ITEM_BYTES and "float" in dtype


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


def add(delta: str, difference: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """The tile of which earlier releases have stored the `difference` to `base`.

    Args:
        delta: ``xor``, or ``diff``: subtracted as unsigned integers, of which 0, -1, 1, -2 are
            stored as 0, 1, 2, 3.
        difference: (n,) bytes.
        base: (n,) bytes.
        itemsize: Bytes of an element.
    """
    # Complex numbers are pairs of reals.
    integers: np.dtype[np.unsignedinteger] = np.dtype(
        f"<u{itemsize if itemsize in (1, 2, 4) else 8}"
    )
    changed, before = (item.view(integers) for item in (difference, base))
    if delta == "xor":
        return np.bitwise_xor(changed, before).view(np.uint8)
    sign = np.bitwise_and(changed, 1)
    np.negative(sign, out=sign)
    magnitude = np.right_shift(changed, 1)
    np.bitwise_xor(magnitude, sign, out=magnitude)
    return np.add(magnitude, before, out=magnitude).view(np.uint8)


Rounding = Literal["nearest", "stochastic"]
_BLOCK = 1 << 14
"""Elements per pass, so that the scratch arrays stay in the cache; a multiple of 8, so that each
block takes whole 64-bit random words."""


@dataclass(frozen=True)
class Bound:
    """Largest error of a stored element; exactly one of the two limits is given.

    Attributes:
        relative: Largest ``|y - x| / |x|``, above 0 and below 1.
        absolute: Largest ``|y - x|`` in the unit of the tensor, above 0.
        rounding: ``nearest`` (ties to the even bit pattern), or ``stochastic``: unbiased in
            expectation, at twice the error for the same number of kept bits.

    Raises:
        CheckpointError: No limit or both are given, a limit is not a finite number in its range,
            or the rounding is unknown.
    """

    relative: float | None = None
    absolute: float | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if (self.relative is None) == (self.absolute is None):
            raise CheckpointError(
                f"bound.relative = {self.relative!r} and bound.absolute = {self.absolute!r}: give "
                "exactly one; a checkpoint is never made lossy without one bound on the error"
            )
        if self.rounding not in get_args(Rounding):
            raise CheckpointError(
                f"bound.rounding = {self.rounding!r} is unknown; give 'nearest' or 'stochastic'"
            )
        name = "relative" if self.relative is not None else "absolute"
        object.__setattr__(self, name, _limit(name, getattr(self, name)))

    @property
    def limit(self) -> float:
        """The one limit that is given."""
        limit = self.relative if self.relative is not None else self.absolute
        assert limit is not None
        return limit

    def to_dict(self) -> dict[str, Any]:
        """The bound as plain values for JSON."""
        return asdict(self)


def _limit(name: str, value: Any) -> float:
    upper = 1.0 if name == "relative" else math.inf
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    try:
        limit = float(value) if is_number else math.nan
    except OverflowError:
        limit = math.inf
    if not 0 < limit < upper:
        below = " and below 1" if name == "relative" else ""
        raise CheckpointError(
            f"bound.{name} = {value!r} bounds no error; give a finite number above 0{below}, "
            "or no bound at all to save losslessly"
        )
    return limit


@dataclass(frozen=True)
class _Format:
    """The bit layout of a float type.

    Attributes:
        word: The unsigned integer type of its width.
        mantissa_bits: m, without the hidden bit.
        bias: Exponent field minus exponent.
        largest: The bit pattern of the largest finite value; above it are infinity and NaN.
        wider: A numpy float type that holds every finite value after a shift of the pattern.
        shift: Bits to shift left by.
        scale: What the shifted pattern then lacks as a factor, a power of two.
    """

    word: str
    mantissa_bits: int
    bias: int
    largest: int
    wider: str
    shift: int = 0
    scale: float = 1.0

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The word as a numpy type."""
        return np.dtype(self.word)

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign bit."""
        return (1 << (8 * self.unsigned.itemsize - 1)) - 1

    @property
    def smallest_normal(self) -> int:
        """The bit pattern of the smallest normal value, which is the hidden bit."""
        return 1 << self.mantissa_bits

    def constant(self, value: int) -> Any:
        """A scalar of the word's type, so that no numpy version widens an array."""
        return self.unsigned.type(value)

    def magnitude(self, words: Words) -> Errors:
        """``|x|`` in float64, exact for every finite value."""
        wider = np.dtype(f"<u{np.dtype(self.wider).itemsize}")
        bits = (words & self.constant(self.magnitude_mask)).astype(wider)
        bits <<= wider.type(self.shift)
        magnitudes: Errors = bits.view(self.wider).astype(np.float64)
        magnitudes *= self.scale
        return magnitudes


_FORMATS = {
    "float64": _Format("<u8", 52, 1023, 0x7FEF_FFFF_FFFF_FFFF, "<f8"),
    "float32": _Format("<u4", 23, 127, 0x7F7F_FFFF, "<f4"),
    "float16": _Format("<u2", 10, 15, 0x7BFF, "<f2"),
    "bfloat16": _Format("<u2", 7, 127, 0x7F7F, "<f4", shift=16),
    "float8_e4m3fn": _Format("u1", 3, 7, 0x7E, "<f2", shift=7, scale=2.0**8),
    "float8_e5m2": _Format("u1", 2, 15, 0x7B, "<f2", shift=8),
}

LOSSY_DTYPES = frozenset(_FORMATS)
"""Names of the types that `round_to_bound` rounds."""


def round_to_bound(raw: Bytes, dtype: str, bound: Bound, *, seed: int) -> tuple[Bytes, float]:
    """Round the elements of a tensor as coarsely as the bound allows.

    Zeros, infinities and NaNs come back bit for bit, and so do subnormals under a relative bound.
    A finite value never becomes infinite: where the nearest coarse value would, the element is
    rounded towards zero, and under stochastic rounding left as it is, which keeps it unbiased.
    Under an absolute bound a value may become a zero of its sign. Every element is checked against
    the bound afterwards, and one that exceeds it is put back exact.

    Stochastic rounding goes up with the probability of the part cut off, so E[y] = x (to within
    2^-64 of a quantum under an absolute bound).

    Args:
        raw: (bytes,) uint8, contiguous: the little-endian elements.
        dtype: One of `LOSSY_DTYPES`.
        bound: The largest error allowed.
        seed: Key of the counter-based generator, 0 <= seed < 2^128; used by stochastic rounding
            only. The same seed and data give the same bytes; give each tensor its own.

    Returns:
        The rounded bytes, (bytes,) uint8, a new array; and the largest error really made, relative
        or absolute as in the bound, rounded upward: no element errs by more, it is at most the
        bound, and 0.0 says that every byte is as before.

    Raises:
        CheckpointError: The type cannot be rounded, the bytes are no whole contiguous elements, or
            the seed is out of range.
    """
    layout = _FORMATS.get(dtype)
    if layout is None:
        raise CheckpointError(
            f"dtype = {dtype} cannot be rounded to a bound; save it losslessly, or give one of "
            f"{', '.join(_FORMATS)}"
        )
    if raw.dtype != np.uint8 or raw.ndim != 1 or not raw.flags.c_contiguous:
        raise CheckpointError(
            f"raw is {raw.dtype} of shape {raw.shape}; give contiguous uint8 of one dimension"
        )
    if raw.size % layout.unsigned.itemsize:
        raise CheckpointError(
            f"raw has {raw.size} bytes, not a whole number of {dtype} elements of "
            f"{layout.unsigned.itemsize} bytes"
        )
    if not 0 <= seed < 1 << 128:
        raise CheckpointError(f"seed = {seed} is out of range; give one from 0 to 2^128 - 1")
    exact = raw.view(layout.word)
    rounded = np.empty_like(exact)
    draws = np.random.Philox(key=seed) if bound.rounding == "stochastic" else None
    # Largest q with 2^q <= 2 limit; stochastic: 2^q <= limit. Relative: q = -k, at most 0.
    exponent = math.frexp(bound.limit)[1] - (bound.rounding == "stochastic")
    kept_bits = -exponent
    if bound.relative is not None and kept_bits >= layout.mantissa_bits:
        return raw.copy(), 0.0
    scratch = _Scratch(layout)
    worst = 0.0
    for start in range(0, exact.size, _BLOCK):
        x, y = exact[start : start + _BLOCK], rounded[start : start + _BLOCK]
        if bound.relative is not None:
            _round_relative(x, y, layout, kept_bits, draws=draws, scratch=scratch)
            # ``|y - x| / |x|``: both in units of x's last place are integers below 2^53.
            words = scratch.words[: x.size]
            # The same memory as signed integers: differences have a sign, and are converted faster.
            integers = words.view(f"<i{words.itemsize}")
            errors, significands = scratch.errors[: x.size], scratch.significands[: x.size]
            np.subtract(y, x, out=words)
            np.absolute(integers, out=integers)
            np.copyto(errors, integers)
            np.bitwise_and(x, layout.constant(layout.smallest_normal - 1), out=words)
            words |= layout.constant(layout.smallest_normal)
            np.copyto(significands, integers)
            errors /= significands
            # The quotients are rounded to nearest, so one below the bound is certified by one step.
            largest = _put_back(x, y, errors, math.nextafter(bound.limit, 0))
            largest = math.nextafter(largest, math.inf) if largest else 0.0
        else:
            _round_absolute(x, y, layout, exponent, draws)
            largest = _put_back(x, y, _absolute_errors(x, y, layout), bound.limit)
        worst = max(worst, largest)
    return rounded.view(np.uint8), worst


class _Scratch:
    """Arrays of one block, allocated once per call."""

    def __init__(self, layout: _Format) -> None:
        self.words = np.empty(_BLOCK, layout.word)
        self.flags = np.empty(_BLOCK, np.bool_)
        self.errors = np.empty(_BLOCK, np.float64)
        self.significands = np.empty(_BLOCK, np.float64)


def _round_relative(
    x: Words,
    y: Words,
    layout: _Format,
    kept_bits: int,
    *,
    draws: np.random.Philox | None,
    scratch: _Scratch,
) -> None:
    """Write to y the elements of x with `kept_bits` < m mantissa bits."""
    dropped = layout.mantissa_bits - kept_bits
    low = (1 << dropped) - 1
    half = 1 << (dropped - 1)
    keep_mask = layout.constant((layout.magnitude_mask * 2 + 1) ^ low)
    if draws is None:
        np.right_shift(x, layout.constant(dropped), out=y)
        y &= layout.constant(1)
        y += layout.constant(half - 1)
    else:
        np.bitwise_and(_random(draws, x.size, layout.unsigned), layout.constant(low), out=y)
    y += x
    y &= keep_mask

    # One unsigned comparison finds what the carry must not touch: zeros and subnormals wrap around
    # to the top, where infinity, NaN and what would overflow are too.
    coarse_largest = layout.largest & ~low
    ceiling = coarse_largest + (half if draws is None else 1)
    distance = scratch.words[: x.size]
    np.bitwise_and(x, layout.constant(layout.magnitude_mask), out=distance)
    distance -= layout.constant(layout.smallest_normal)
    special = scratch.flags[: x.size]
    np.greater_equal(distance, layout.constant(ceiling - layout.smallest_normal), out=special)
    if not special.any():
        return
    found = x[special]
    if draws is None:
        largest = layout.constant(layout.largest - layout.smallest_normal)
        found[distance[special] <= largest] &= keep_mask
    y[special] = found


def _round_absolute(
    x: Words, y: Words, layout: _Format, exponent: int, draws: np.random.Philox | None
) -> None:
    """Write to y the elements of x as multiples of the quantum 2^exponent."""
    mantissa_bits, one = layout.mantissa_bits, layout.constant(1)
    magnitudes = x & layout.constant(layout.magnitude_mask)
    fields = (magnitudes >> layout.constant(mantissa_bits)).astype(np.int64)
    finite = magnitudes <= layout.constant(layout.largest)
    # Subnormals share the unit of the smallest normal binade. From m + 2 dropped bits on, the
    # value is below half a quantum, and only stochastic rounding needs the true number.
    cut = exponent + layout.bias + mantissa_bits - np.maximum(fields, 1)
    dropped = np.clip(cut, 0, mantissa_bits + 2).astype(layout.word)
    low = (one << dropped) - one
    significands = magnitudes & layout.constant(layout.smallest_normal - 1)
    significands |= (fields > 0).astype(layout.word) << layout.constant(mantissa_bits)
    remainders = significands & low

    below_quantum = dropped > layout.constant(mantissa_bits)
    quantum = min(max(exponent + layout.bias, 0) << mantissa_bits, layout.largest + 1)
    down = np.where(below_quantum, layout.constant(0), magnitudes & ~low)
    up = np.where(below_quantum, layout.constant(quantum), down + low + one)
    overflowing = up > layout.constant(layout.largest)
    if draws is None:
        doubled, step = remainders << one, one << dropped
        odd = ((significands >> dropped) & one).astype(np.bool_)
        rises = (doubled > step) | ((doubled == step) & odd)
        coarse = np.where(rises & ~overflowing, up, down)
    else:
        rises = _random(draws, x.size, np.dtype("<u8")) < _probabilities(remainders, cut)
        coarse = np.where(overflowing, magnitudes, np.where(rises, up, down))
    np.bitwise_or(x ^ magnitudes, np.where(finite, coarse, magnitudes), out=y)


def _probabilities(remainders: Words, cut: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Chances of going up, remainder / 2^cut, in units of 2^-64, rounded down."""
    wide = remainders.astype(np.uint64)
    left = np.clip(64 - cut, 0, 63).astype(np.uint64)
    right = np.clip(cut - 64, 0, 63).astype(np.uint64)
    return (wide << left) >> right


def _random(draws: np.random.Philox, elements: int, word: np.dtype[Any]) -> Words:
    """Uniform words from the raw stream, which numpy keeps the same from version to version."""
    raw = draws.random_raw(-(-elements * word.itemsize // 8))
    return np.asarray(raw).astype("<u8", copy=False).view(word)[:elements]


def _absolute_errors(x: Words, y: Words, layout: _Format) -> Errors:
    """``|y - x|``, each the smallest float64 that is not below it.

    The part that the subtraction rounds away is exact by Dekker's FastTwoSum (Numer. Math. 18,
    1971), and its sign tells whether to go up.
    """
    with np.errstate(invalid="ignore"):
        before, after = layout.magnitude(x), layout.magnitude(y)
        larger, smaller = np.maximum(before, after), np.minimum(before, after)
        errors = larger - smaller
        lost = (larger - errors) - smaller
    errors[x == y] = 0.0
    short = lost > 0
    errors[short] = np.nextafter(errors[short], np.inf)
    return errors


def _put_back(x: Words, y: Words, errors: Errors, limit: float) -> float:
    """Restore in y what errs by more than the limit; the largest error that remains."""
    largest = float(errors.max())
    if largest > limit:
        over = errors > limit
        y[over] = x[over]
        errors[over] = 0.0
        largest = float(errors.max())
    return largest
