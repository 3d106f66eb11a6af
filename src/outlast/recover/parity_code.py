"""Erasure code of parity groups: GF(2^8), placement of stripes, rebuilding, and the files.

P is the sum of a row's data stripes, Q the sum of 2^i times the stripe of member i, over GF(2^8)
(Anvin, "The mathematics of RAID-6", 2004, equations 1 to 10). Any two lost stripes of a row,
data or parity, are linear combinations of the others.

The field is that of bytes modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D), with generator 2; addition is
XOR. Sums run in compiled code, or in NumPy where there is no compiler, and release the
interpreter's lock, so that training continues meanwhile.

The placement is RAID-6's. Every member's bytes are cut into stripes. A row takes at most one stripe
of each member: of ``losses`` members, which rotate from row to row, a stripe of parity, and of all
others their next stripe of data. So no member keeps parity of its own data, whoever is lost takes
at most one stripe of every row with it, and the parity of B bytes of data takes
B losses / (members - losses) bytes at each member. A stripe's place depends neither on the length
of the data nor on that of other members' data: data that grow add rows. Behind a member's end its
data count as zeros.

Digests tell apart steps, histories and members, and find a state that was overwritten in part. One
page of every four is looked at: reading all of them once more would add a seventh to the time of
an update. What is rebuilt is exact by the code, not by the digest.

The parity that one member keeps for others lies in files that outlive its process. Every stripe has
two places. An update fills those that are not in use; then a small file, the head, is replaced by a
rename and says which place of each stripe holds the parity of which epoch: ``prepared`` once all of
this member's stripes are written, ``committed`` once all members' are. So a death at any byte
leaves the parity of the last epoch as it was, and nothing needs undoing. Until the next update
begins, the epoch before is there as well, for jobs of several groups of which some were behind. (A
journal of old stripes would take as much memory wherever most of the state changes in a step, and
would copy each stripe once more.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import mmap
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from outlast.errors import RecoverError
from outlast.hardware.native import load

POLYNOMIAL = 0x11D
ORDER = 255
MOST_MEMBERS = 255
STRIPE_BYTES = 1 << 21
FORMAT = 1
Bytes = NDArray[np.uint8]
Buffer = torch.Tensor | NDArray[Any] | mmap.mmap | memoryview | bytearray
_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=256")
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_PAGE = 4096
_EVERY = 4 * _PAGE
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


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


@dataclass(frozen=True)
class Layout:
    """The placement of one group.

    Args:
        members: Who share parity, numbered from 0.
        losses: How many of them may be lost together: 1 (P) or 2 (P and Q).
        stripe_bytes: Bytes of a stripe, a multiple of 64.

    Raises:
        RecoverError: Where no such group can be.
    """

    members: int
    losses: int = 1
    stripe_bytes: int = STRIPE_BYTES

    def __post_init__(self) -> None:
        if self.losses not in (1, 2):
            raise RecoverError(f"losses = {self.losses} is not 1 or 2: parity survives no others")
        if not self.losses < self.members <= MOST_MEMBERS:
            raise RecoverError(
                f"{self.members} members cannot share parity for {self.losses} losses: it takes "
                f"{self.losses + 1} to {MOST_MEMBERS}"
            )
        if self.stripe_bytes <= 0 or self.stripe_bytes % 64:
            raise RecoverError(
                f"stripe_bytes = {self.stripe_bytes} is not a positive multiple of 64"
            )

    def holders(self, row: int) -> tuple[int, ...]:
        """Members that keep P (and Q) of a row."""
        first = self.members - 1 - row % self.members
        return tuple((first - which) % self.members for which in range(self.losses))

    def contributors(self, row: int) -> tuple[int, ...]:
        """Whose data are in a row, whether or not they reach that far; ascending."""
        holders = self.holders(row)
        return tuple(member for member in range(self.members) if member not in holders)

    def row_of_data(self, member: int, stripe: int) -> int:
        """The row of a member's data stripe."""
        cycle, place = divmod(stripe, (self.members - self.losses))
        for held in self._places(member):
            place += place >= held
        return cycle * self.members + place

    def data_stripe(self, member: int, row: int) -> int:
        """The number among a contributor's stripes of the one in a row."""
        cycle, place = divmod(row, self.members)
        return cycle * (self.members - self.losses) + place - self._held_before(member, place)

    def parity_stripe(self, member: int, row: int) -> int:
        """The number among a holder's parity stripes of the one in a row; of those before it."""
        cycle, place = divmod(row, self.members)
        return cycle * self.losses + self._held_before(member, place)

    def stripes(self, nbytes: int) -> int:
        """Into how many stripes data are cut, the last one perhaps short."""
        return -(-nbytes // self.stripe_bytes)

    def rows(self, lengths: Collection[int]) -> int:
        """Number of rows that the members' data of `lengths` bytes reach, in order of members."""
        return max(
            (
                self.row_of_data(member, self.stripes(nbytes) - 1) + 1
                for member, nbytes in enumerate(lengths)
                if nbytes
            ),
            default=0,
        )

    def span(self, nbytes: int, stripe: int) -> tuple[int, int]:
        """Begin and end of a stripe of data of `nbytes` bytes; empty behind their end."""
        begin = min(stripe * self.stripe_bytes, nbytes)
        return begin, min(begin + self.stripe_bytes, nbytes)

    def survives(self, lost_data: Collection[int], lost_parity: Collection[int]) -> bool:
        """Return whether every row can be made whole without that data and that parity."""
        return all(
            sum(member in lost_data for member in self.contributors(row))
            + sum(member in lost_parity for member in self.holders(row))
            <= self.losses
            for row in range(self.members)
        )

    def _places(self, member: int) -> list[int]:
        """The rows of a cycle whose parity a member keeps, ascending."""
        last = self.members - 1 - member
        return sorted((last - which) % self.members for which in range(self.losses))

    def _held_before(self, member: int, place: int) -> int:
        return sum(held < place for held in self._places(member))


class Stripe(NamedTuple):
    """One stripe of a row: a member's data, or the parity that a member keeps.

    Attributes:
        member: Whose memory holds it.
        parity: None for data, 0 for P, 1 for Q.
    """

    member: int
    parity: int | None = None


Combination = Mapping[Stripe, int]
"""A sum of stripes, each times a byte of GF(2^8) that is not 0."""


def weight(parity: int | None, member: int) -> int:
    """Factor of a member's data in P (0) or Q (1)."""
    return power(member) if parity else 1


def stripes_of(layout: Layout, row: int) -> tuple[Stripe, ...]:
    """All stripes of a row, the data first."""
    data = tuple(Stripe(member) for member in layout.contributors(row))
    return data + tuple(Stripe(member, which) for which, member in enumerate(layout.holders(row)))


def rebuilding(stripes: Collection[Stripe], lost: Collection[Stripe]) -> dict[Stripe, Combination]:
    """Each lost stripe of a row as a combination of the others.

    Args:
        stripes: All of the row.
        lost: Those of them that are gone, not more than there are stripes of parity.
    """
    data = [stripe for stripe in stripes if stripe.parity is None]
    missing = [datum for datum in data if datum in lost]
    parities = [stripe for stripe in stripes if stripe.parity is not None and stripe not in lost]
    used = parities[: len(missing)]
    found: dict[Stripe, Combination] = {datum: {datum: 1} for datum in data if datum not in lost}
    if missing:
        known = [_sum([(1, {parity: 1}), *_parts(parity, found)]) for parity in used]
        mixed = invert(
            [[weight(parity.parity, stripe.member) for stripe in missing] for parity in used]
        )
        found.update(
            (item, _sum(zip(row, known, strict=True)))
            for item, row in zip(missing, mixed, strict=True)
        )
    for stripe in lost:
        if stripe.parity is not None:
            found[stripe] = _sum(_parts(stripe, found))
    return {stripe: found[stripe] for stripe in lost}


def _parts(parity: Stripe, data: Mapping[Stripe, Combination]) -> list[tuple[int, Combination]]:
    """Terms that stripes of data add to one of parity."""
    return [
        (weight(parity.parity, key.member), made)
        for key, made in data.items()
        if key.parity is None
    ]


def _sum(parts: Iterable[tuple[int, Combination]]) -> Combination:
    total: dict[Stripe, int] = {}
    for factor, combination in parts:
        for stripe, constant in combination.items():
            total[stripe] = total.get(stripe, 0) ^ multiply(factor, constant)
    return {stripe: constant for stripe, constant in total.items() if constant}


def combine(out: Bytes, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Fill `out` with a sum of stripes, each times a constant.

    Args:
        out: (bytes,), contiguous; none of the sources.
        terms: A constant from 1 to 255 and a contiguous stripe of at most as many bytes as `out`,
            which counts as zero behind its end.
    """
    library = _library()
    if library is None:
        combine_in_numpy(out, terms)
        return
    count = len(terms)
    sources = (_POINTER * count)(*(source.ctypes.data for _, source in terms))
    lengths = (_INTEGER * count)(*(source.nbytes for _, source in terms))
    tables = np.concatenate([products(constant) for constant, _ in terms]) if terms else out[:0]
    library.outlast_combine(
        out.ctypes.data, out.nbytes, count, sources, lengths, tables.ctypes.data
    )


def combine_in_numpy(out: Bytes, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Do the same as `combine` without compiled code."""
    out.fill(0)
    for constant, source in terms:
        reached = out[: source.nbytes]
        np.bitwise_xor(
            reached, source if constant == 1 else products(constant)[source], out=reached
        )


def same(a: Bytes, b: Bytes) -> bool:
    """Compare two contiguous stripes; stops at the first byte that differs."""
    if a.nbytes != b.nbytes:
        return False
    library = _library()
    if library is None:
        return bool(np.array_equal(a, b))
    return bool(library.outlast_same(a.ctypes.data, b.ctypes.data, a.nbytes))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library, _ = load(resources.files("outlast.recover"), ["combine.c"], _FLAGS, ("-O3",))
    if library is not None:
        library.outlast_combine.argtypes = (
            *(_POINTER, _INTEGER, _INTEGER),
            *(ctypes.POINTER(_POINTER), ctypes.POINTER(_INTEGER), _POINTER),
        )
        library.outlast_combine.restype = None
        library.outlast_same.argtypes = (_POINTER, _POINTER, _INTEGER)
        library.outlast_same.restype = _INTEGER
    return library


def hash_stripe(data: Bytes) -> int:
    """XXH3 (64 bits) of the first 4 KiB of every 16 KiB of a stripe."""
    whole = data.nbytes // _EVERY * _EVERY
    pages = data[:whole].reshape(-1, _EVERY)[:, :_PAGE]
    rest = data[whole:][:_PAGE]
    return xxhash.xxh3_64_intdigest(pages.tobytes() + rest.tobytes())


def hash_stripes(layout: Layout, data: Bytes) -> list[int]:
    """`hash_stripe` of every stripe."""
    spans = (layout.span(data.nbytes, stripe) for stripe in range(layout.stripes(data.nbytes)))
    return [hash_stripe(data[begin:end]) for begin, end in spans]


def digest(hashes: Sequence[int], nbytes: int) -> int:
    """One number for data of `nbytes` bytes with these hashes of stripes."""
    return xxhash.xxh3_64_intdigest(np.array([nbytes, *hashes], np.uint64).tobytes())


class _Shared:
    """Memory that torch takes without a warning also where it is read-only: it is only sent."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        data = (memory.ctypes.data, False)
        self.__array_interface__ = {**memory.__array_interface__, "data": data}


def as_bytes(buffer: Buffer) -> Bytes:
    """(bytes,) uint8: the memory of a buffer of any type.

    Raises:
        RecoverError: Where it is not contiguous memory of the CPU.
    """
    if not isinstance(buffer, torch.Tensor):
        return np.asarray(_Shared(np.frombuffer(buffer, np.uint8)))
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise RecoverError(
            f"parity is kept of contiguous tensors in CPU memory, not of one on {buffer.device} "
            f"with shape {tuple(buffer.shape)} and strides {buffer.stride()}: copy it first"
        )
    return buffer.detach().reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class ParityMark:
    """Of which data some parity is.

    Attributes:
        epoch: The step whose state it was.
        lengths: Bytes of each member's data.
        digests: Of each member's data, see `digest`.
    """

    epoch: int
    lengths: tuple[int, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True)
class _Version:
    """A mark, and for each stripe of parity the place (0 or 1) of its bytes."""

    mark: ParityMark
    places: bytes


class ParityFile:
    """One member's stripes of parity.

    Args:
        directory: Where the files lie, in memory (tmpfs); made where it is missing.
        name: Of the group, the same for all members.
        layout: The group's placement.
        member: This member's number.

    Raises:
        RecoverError: Where the directory cannot be used, or its files are of another group.
    """

    def __init__(self, directory: str | Path, name: str, layout: Layout, member: int) -> None:
        self._layout, self._member = layout, member
        self._head = Path(directory) / f"{name}.{member}.head"
        self._stripes = Path(directory) / f"{name}.{member}.stripes"
        self._committed: _Version | None = None
        self._prepared: _Version | None = None
        self._previous: _Version | None = None
        self._written: set[int] = set()
        self._memory = np.empty(0, np.uint8)
        self._lock = -1
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._take()
            self._map(self._stripes.stat().st_size if self._stripes.exists() else 0)
            self._read_head()
        except OSError as error:
            raise RecoverError(f"parity cannot be kept in {directory}: {error}") from error

    @property
    def committed(self) -> ParityMark | None:
        """The parity that all members had when they last agreed."""
        return self._committed.mark if self._committed else None

    @property
    def marks(self) -> tuple[ParityMark, ...]:
        """Of all parity that is whole here: committed, before that, and prepared."""
        return tuple(version.mark for version in self._versions)

    def begin(self, rows: int) -> None:
        """Get ready to write an epoch whose data reach `rows` rows; forgets all but the committed.

        Raises:
            RecoverError: Where the memory does not suffice; what is committed stays.
        """
        self._written.clear()
        if self._prepared is not None or self._previous is not None:
            self._prepared = self._previous = None
            self._publish()
        stripes = self._layout.parity_stripe(self._member, rows)
        size = 2 * stripes * self._layout.stripe_bytes
        if size > self._memory.nbytes:
            self._grow(size)

    def place(self, stripe: int) -> Bytes:
        """(stripe_bytes,): where the next epoch's stripe is to be written."""
        self._written.add(stripe)
        return self._at(stripe, 1 - _place(self._committed, stripe))

    def current(self, stripe: int) -> Bytes:
        """(stripe_bytes,): the committed bytes of a stripe; zeros where there are none yet."""
        return self._at(stripe, _place(self._committed, stripe))

    def stripe(self, mark: ParityMark, stripe: int) -> Bytes:
        """(stripe_bytes,): the bytes of a stripe as committed or prepared with this mark."""
        version = self._version(mark)
        assert version is not None
        return self._at(stripe, _place(version, stripe))

    def prepare(self, mark: ParityMark) -> None:
        """Say that every stripe of an epoch is written."""
        places = bytearray(self._committed.places if self._committed else b"")
        stripes = self._layout.parity_stripe(self._member, self._layout.rows(mark.lengths))
        places.extend(bytes(max(stripes - len(places), 0)))
        for stripe in self._written:
            places[stripe] = 1 - _place(self._committed, stripe)
        self._prepared = _Version(mark, bytes(places))
        self._publish()

    def commit(self, mark: ParityMark) -> None:
        """Take what has this mark for the committed parity."""
        version = self._version(mark)
        self._previous = self._committed if version is self._prepared else None
        self._committed, self._prepared = version, None
        self._written.clear()
        self._publish()

    def close(self, *, remove: bool = False) -> None:
        """Let go of the memory; with `remove` also of the files."""
        self._memory = np.empty(0, np.uint8)
        if remove:
            for file in (self._head, self._stripes, self._head.with_suffix(".lock")):
                file.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self) -> None:
        """Keep the files from other processes: a stopped one may wake up behind its successor.

        A record lock goes with its process however that ends, and forked children do not hold it.
        """
        file = self._head.with_suffix(".lock")
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecoverError(
                f"member {self._member} of the parity group in {file.parent} is still alive as "
                "another process: end that one first"
            ) from error

    def _version(self, mark: ParityMark) -> _Version | None:
        # What is prepared may do over again what has the same mark.
        found = (version for version in reversed(self._versions) if version.mark == mark)
        return next(found, None)

    @property
    def _versions(self) -> list[_Version]:
        versions = (self._committed, self._previous, self._prepared)
        return [version for version in versions if version is not None]

    def _at(self, stripe: int, place: int) -> Bytes:
        size = self._layout.stripe_bytes
        begin = (2 * stripe + place) * size
        return self._memory[begin : begin + size]

    def _grow(self, size: int) -> None:
        before = self._memory.nbytes
        try:
            with self._stripes.open("ab") as file:
                try:
                    # A page that cannot be had must be missed here, not where it is written.
                    os.posix_fallocate(file.fileno(), 0, size)
                except OSError:
                    file.truncate(before)
                    raise
            self._map(size)
        except OSError as error:
            raise RecoverError(
                f"{size / 1e6:.1f} MB of parity do not fit into {self._stripes.parent}: "
                f"{_why(error)}; make room there, or choose another directory or fewer losses"
            ) from error

    def _map(self, size: int) -> None:
        if size:
            with self._stripes.open("r+b") as file:
                flags = mmap.MAP_SHARED | _POPULATE
                self._memory = np.frombuffer(mmap.mmap(file.fileno(), size, flags), np.uint8)

    def _identity(self) -> dict[str, Any]:
        return {"format": FORMAT, "member": self._member, **asdict(self._layout)}

    def _publish(self) -> None:
        content = {
            "group": self._identity(),
            "committed": _to_json(self._committed),
            "prepared": _to_json(self._prepared),
            "previous": _to_json(self._previous),
        }
        text = json.dumps(content)
        temporary = self._head.with_suffix(".new")
        try:
            temporary.write_text(f"{zlib.crc32(text.encode()):08x} {text}", encoding="utf-8")
            temporary.replace(self._head)
        except OSError as error:
            raise RecoverError(f"{self._head} cannot be written: {_why(error)}") from error

    def _read_head(self) -> None:
        """Take up the files of an earlier process; a damaged head counts as none."""
        with contextlib.suppress(FileNotFoundError):
            check, _, text = self._head.read_bytes().partition(b" ")
            if check != b"%08x" % zlib.crc32(text):
                return
            content = json.loads(text)
            if content["group"] != self._identity():
                raise RecoverError(
                    f"{self._head} is of another parity group ({content['group']}, here "
                    f"{self._identity()}); remove it or choose another name"
                )
            kinds = ("committed", "prepared", "previous")
            versions = [
                _Version(
                    ParityMark(found["epoch"], tuple(found["lengths"]), tuple(found["digests"])),
                    bytes.fromhex(found["places"]),
                )
                if (found := content[kind])
                else None
                for kind in kinds
            ]
            needed = max(len(version.places) if version else 0 for version in versions)
            if 2 * needed * self._layout.stripe_bytes <= self._memory.nbytes:
                self._committed, self._prepared, self._previous = versions


def _place(version: _Version | None, stripe: int) -> int:
    return version.places[stripe] if version and stripe < len(version.places) else 0


def _to_json(version: _Version | None) -> dict[str, Any] | None:
    return {**asdict(version.mark), "places": version.places.hex()} if version else None


def _why(error: OSError) -> str:
    return "no space is left" if error.errno == errno.ENOSPC else str(error)
