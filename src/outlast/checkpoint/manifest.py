"""The JSON files of a store: what a rank saved, the list of all tensors, the seal of a version.

Format 2; the page ``docs/checkpoint.md`` specifies it. Every file ends with a BLAKE3 of all that
stands before it, and names the files and chunks that it relies on by their hashes, so one root
covers a whole version. No file contains a pickle.

A rank holds a box of a global tensor: an offset and a shape. Every box is cut at the lines of one
grid that belongs to the *global* tensor, so that a tile has the same content whatever mesh saved
it, and a reader with another mesh fetches the tiles that it touches and little else.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import blake3

from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


TILE_BYTES = 128 << 10
"""A tile is at most this large, so that a partial read wastes little."""


# Smaller tiles would cost more for their code tables and manifests than partial reads gain; the
# more so, the better their elements can be coded.
_SMALL_TILE_BYTES = {4: 20 << 10, 8: 20 << 10}
_SMALL_TILE_BYTES_ELSE = 40 << 10
_INNER_ELEMENTS = 64


@functools.lru_cache(4096)
def grid(shape: tuple[int, ...], itemsize: int, tile_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """Distance of the grid lines in every dimension, in elements.

    Each dimension is cut into a power of two of equal parts, in turn, until a tile has at most
    `tile_bytes`: readers that split any dimension into 2, 4, 8, ... then find their borders on the
    grid. The first two dimensions are cut into four also where tiles get smaller than that, down
    to 20 KiB (40 KiB for 16-bit numbers), for the sake of readers that split the other dimension
    than the writers did. Rows are not cut below 64 elements (32 for small tiles) while another
    dimension can still be cut, because short runs are slow to copy. At the end, a step may be made
    a little smaller, so that thirds, quarters and the like of the extent lie on the grid.

    Args:
        shape: Global shape.
        itemsize: Bytes of an element.
        tile_bytes: Largest tile, in bytes; one element may exceed it.
    """
    cuts = [1] * len(shape)

    def step(dimension: int) -> int:
        return max(-(-shape[dimension] // cuts[dimension]), 1)

    def size() -> int:
        return math.prod(map(step, range(len(shape)))) * itemsize

    def cuttable(inner: int) -> list[int]:
        last = len(shape) - 1 if len(shape) > 1 else -1
        return [
            index
            for index in range(len(shape))
            if step(index) >= (2 * inner if index == last else 2)
        ]

    while size() > tile_bytes and (found := cuttable(_INNER_ELEMENTS) or cuttable(1)):
        cuts[min(found, key=lambda dimension: cuts[dimension])] *= 2
    if len(shape) > 1:
        smallest = _SMALL_TILE_BYTES.get(itemsize, _SMALL_TILE_BYTES_ELSE)
        while size() >= 2 * smallest and (
            found := [
                number
                for number in cuttable(_INNER_ELEMENTS // 2)
                if number < 2 and cuts[number] < 4
            ]
        ):
            cuts[min(found, key=lambda dimension: cuts[dimension])] *= 2
    return tuple(_even(extent, step(item)) for item, extent in enumerate(shape))


def _even(extent: int, step: int) -> int:
    """A step of at most `step`, and more than half of it, on whose multiples readers' borders lie.

    These are at the halves, thirds, quarters, ... of the extent.
    """
    for parts in (24, 12, 8, 6, 4, 3, 2):
        if extent % parts == 0:
            unit = extent // parts
            for index in range(min(step, unit), step // 2, -1):
                if unit % index == 0:
                    return index
    return step


def tiles(box: Box, steps: tuple[int, ...]) -> Iterator[Box]:
    """The pieces of `box` between the grid lines, in row-major order; none for an empty box."""
    if box.elements == 0:
        return
    spans = [
        _spans(first, extent, step)
        for first, extent, step in zip(box.offset, box.shape, steps, strict=True)
    ]
    for spans_of_tile in itertools.product(*spans):
        # Without dimensions there is one tile, of no extents.
        yield Box(*zip(*spans_of_tile, strict=True)) if spans_of_tile else Box((), ())


def tile_count(box: Box, steps: tuple[int, ...]) -> int:
    """Count the pieces that `tiles` gives, without making them."""
    if box.elements == 0:
        return 0
    return math.prod(
        (end - 1) // step - first // step + 1
        for first, end, step in zip(box.offset, box.end, steps, strict=True)
    )


def _spans(first: int, extent: int, step: int) -> list[tuple[int, int]]:
    end = first + extent
    found = []
    while first < end:
        last = min((first // step + 1) * step, end)
        found.append((first, last - first))
        first = last
    return found


def tiles_within(box: Box, steps: tuple[int, ...], part: Box) -> Iterator[tuple[int, Box]]:
    """The tiles of `box` that `part`, which lies in it, touches, each with its number in `tiles`.

    It takes time for these tiles alone, so that a small part of a large box is found at once.
    """
    if part.elements == 0:
        return
    lines = [
        range(first // step, (end - 1) // step + 1)
        for first, end, step in zip(part.offset, part.end, steps, strict=True)
    ]
    for cells in itertools.product(*lines):
        number, offset, shape = 0, [], []
        for cell, step, first, end in zip(cells, steps, box.offset, box.end, strict=True):
            number = number * ((end - 1) // step + 1 - first // step) + cell - first // step
            offset.append(max(cell * step, first))
            shape.append(min((cell + 1) * step, end) - offset[-1])
        yield number, Box(tuple(offset), tuple(shape))


FORMAT = 2
STATE, REPLAY = "state", "replay"
IMPORTED = "imported_structure"
"""Name of the value that says how what was imported was nested."""

_BITS = re.compile(r"\d+")

_DTYPES = """
bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool complex128 complex32 complex64 float16 float32
float4_e2m1fn_x2 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
int1 int16 int2 int3 int32 int4 int5 int6 int64 int7 int8 uint1 uint16 uint2 uint3 uint32 uint4
uint5 uint6 uint64 uint7 uint8
"""

DTYPES = frozenset(_DTYPES.split())
"""Element types that a tensor may have: torch's, without ``torch.`` and quantised ones."""

CODECS = frozenset(
    delta + codec
    for delta in ("", "xor+", "diff+")
    for codec in ("raw", "fill", "planes", "blosc2")
)
"""How a chunk may be coded; see `codec`."""


# What a file may say, before anything that it says is used.
_LARGEST = 2**62
MAX_DIMENSIONS = 64
_TILE_BYTES = 4 << 20
MAX_CHAIN = 512
MAX_RANKS = 1 << 20
ROOT = re.compile(r"[0-9a-f]{64}", re.ASCII)
PART_NAME = re.compile(r"rank-(\d{5,7})-of-(\d{5,7})\.json", re.ASCII)
GROUP_NAME = re.compile(r"group-(\d{5,7})-of-(\d{5,7})\.json", re.ASCII)
INDEX_NAME = re.compile(r"index-of-(\d{5,7})\.json", re.ASCII)

_PACK_NAME = re.compile(
    r"step-\d{8,19}-a[1-9]\d{0,18}/rank-\d{5,7}-of-\d{5,7}(\.\d{1,9})?\.pack", re.ASCII
)


class ManifestError(CheckpointError):
    """A file of a store says what no save can have written, although its hash is right."""


@dataclass(frozen=True)
class Fields:
    """The content of a file, field by field, each checked before it is used.

    Attributes:
        file: Its name, for errors.
        content: What was read from it.
    """

    file: str
    content: dict[str, Any]

    def only(self, *names: str) -> None:
        """Refuse missing and unknown fields."""
        for name in names:
            if name not in self.content:
                raise self.error(name, "is missing")
        for name in self.content:
            if name not in names:
                raise self.error(name, "is unknown; a newer Outlast may have written it: update")

    def number(self, name: str, *, least: int = 0, most: int = _LARGEST) -> int:
        """A whole number in a field."""
        return self.checked_number(name, self.content[name], least=least, most=most)

    def checked_number(
        self, field: str, value: Any, *, least: int = 0, most: int = _LARGEST
    ) -> int:
        """`value`, if it is a whole number within the limits."""
        if type(value) is not int or not least <= value <= most:
            raise self.error(field, f"= {_shown(value)} is no whole number from {least} to {most}")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        """A text of a form."""
        return self.checked_text(name, self.content[name], pattern)

    def checked_text(self, field: str, value: Any, pattern: re.Pattern[str]) -> str:
        """`value`, if it is a text of the form."""
        if type(value) is not str or not pattern.fullmatch(value):
            raise self.error(field, f"= {_shown(value)} is not of the form {pattern.pattern}")
        return value

    def one_of(self, field: str, value: Any, known: Collection[str]) -> str:
        """`value`, if it is a known name."""
        if type(value) is not str or value not in known:
            raise self.error(
                field, f"= {_shown(value)} is unknown; a newer Outlast may have written it: update"
            )
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A field that is an object."""
        found = self.content[name]
        if type(found) is not dict:
            raise self.error(name, f"= {_shown(found)} is no object")
        return found

    def rows(self, name: str) -> list[Any]:
        """A field that is a list."""
        return self.checked_rows(name, self.content[name])

    def checked_rows(self, field: str, value: Any, length: int | None = None) -> list[Any]:
        """`value`, if it is a list, of that length where one is given."""
        if type(value) is not list or (length is not None and len(value) != length):
            which = "list" if length is None else f"list of {length}"
            raise self.error(field, f"= {_shown(value)} is no {which}")
        return value

    def names(self, name: str) -> list[str]:
        """A list of texts, each of them once."""
        found = self.rows(name)
        if not all(type(name) is str for name in found) or len(set(found)) != len(found):
            raise self.error(name, f"= {_shown(found)} is no list of different texts")
        return found

    def packs(self) -> list[str]:
        """Files that hold chunks: within the store, whatever they are called."""
        found = self.names("packs")
        for number, pack in enumerate(found):
            self.checked_text(f"packs[{number}]", pack, _PACK_NAME)
        return found

    def extents(self, field: str, value: Any, least: int = 0) -> tuple[int, ...]:
        """As many numbers as a tensor may have dimensions."""
        found = self.checked_rows(field, value)
        if len(found) > MAX_DIMENSIONS:
            raise self.error(
                field, f"has {len(found)} dimensions; there are {MAX_DIMENSIONS} at most"
            )
        return tuple(self.checked_number(field, name, least=least) for name in found)

    def metrics(self, found: Any) -> dict[str, float]:
        """Figures by name."""
        if type(found) is not dict or not all(map(_is_figure, found.values())):
            raise self.error("metrics", f"= {_shown(found)} are no figures by name")
        return found

    def tree(self, field: str, value: Any) -> Any:
        """`value`, if it is what `values.encode` gives."""
        if problem := values.problem_of(value):
            raise self.error(field, problem)
        return value

    def error(self, field: str, what: str) -> ManifestError:
        """Return the error to raise when `field` is wrong."""
        return ManifestError(f"{self.file} is malformed: {field} {what}")


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _shown(value: Any) -> str:
    """The beginning of a value, however large or deep it is."""
    if isinstance(value, (list, dict)):
        return f"{'[...]' if isinstance(value, list) else '{...}'} of {len(value)}"
    if type(value) is int and value.bit_length() > 200:
        return "a number of very many digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def item_bytes(dtype: str) -> int:
    """Bytes of an element of a torch type, given its name without ``torch.``.

    The first number in the name is that of the bits: float8_e4m3fn, complex64, bits16. Packed types
    such as float4_e2m1fn_x2 are bytes, and so is bool.
    """
    bits = _BITS.search(dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


@dataclass(frozen=True)
class TensorFacts:
    """A global tensor.

    Attributes:
        dtype: torch's name without ``torch.``, e.g. ``bfloat16``.
        shape: Global shape.
        steps: Distance of the lines of its tile grid; see `grid`.
    """

    dtype: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> TensorFacts:
        """The facts of a tensor with the usual grid."""
        return cls(dtype, shape, grid(shape, item_bytes(dtype)))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


class Chunk(NamedTuple):
    """One stored piece of content.

    Attributes:
        pack: Index of its file in `Part.packs`.
        offset: First byte in that file.
        length: Stored bytes.
        codec: Index in `Part.codecs`.
        size: Bytes of the content.
        stored_hash: XXH3-128 of the stored bytes, hexadecimal.
        content_hash: XXH3-128 of the content: its address, equal content is stored once.
        base: Index of the chunk that a delta is relative to; -1 for none.
        max_error: Largest error made by a lossy chunk, relative or absolute as its bound; 0: exact.
    """

    pack: int
    offset: int
    length: int
    codec: int
    size: int
    stored_hash: str
    content_hash: str
    base: int = -1
    max_error: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank saved: its chunks, one for each tile, in row-major order."""

    box: Box
    chunks: list[int]


@dataclass
class Part:
    """Manifest of one rank's share of a version; its file makes that share real.

    Attributes:
        step: Steps done.
        session: Number of the store's owner that wrote it; later owners have larger numbers.
        rank: Who wrote it.
        world_size: How many wrote.
        kind: ``state``, or ``replay`` for a log from which the state is computed.
        catalogue: BLAKE3 of the catalogue file.
        requires: Steps of the same session that a replay log starts from.
        packs: Files that hold the chunks, relative to the store.
        codecs: Names of the codecs that occur.
        chunks: The stored content.
        pieces: Tensor name to what this rank saved of it.
        values: Name to a JSON value; see `values`.
        bounds: Tensor name to the bound under which it was rounded, for lossy tensors.
        notes: Free JSON: layout of the mesh, metrics, versions of the software.
    """

    step: int
    session: int
    rank: int
    world_size: int
    kind: str = STATE
    catalogue: str = ""
    requires: list[int] = field(default_factory=list)
    packs: list[str] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def chain(self, number: int) -> tuple[int, ...]:
        """Chunk `number` and the chunks that it is relative to, the delta first."""
        found = [number]
        while (base := self.chunks[found[-1]].base) >= 0:
            found.append(base)
        return tuple(found)

    def tiles(self, name: str, facts: TensorFacts) -> Iterator[tuple[Box, int]]:
        """Every saved tile of tensor `name` with the number of its chunk."""
        for piece in self.pieces.get(name, ()):
            yield from zip(tiles(piece.box, facts.steps), piece.chunks, strict=True)

    def to_bytes(self) -> bytes:
        """The content of the part's file."""
        content = {
            "format": FORMAT,
            **{item.name: getattr(self, item.name) for item in fields(self)},
        }
        content["pieces"] = {
            name: [[piece.box.offset, piece.box.shape, piece.chunks] for piece in pieces]
            for name, pieces in self.pieces.items()
        }
        return sealed(content)

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Part:
        """Read a part's file.

        Raises:
            CheckpointError: When it is damaged.
            ManifestError: When it is malformed. What it says of tensors is compared with the
                catalogue by `check_pieces`.
        """
        with collection_paused():
            found = Fields(name, unsealed(content, name))
            found.only(*(item.name for item in fields(cls)))
            packs = found.packs()
            codecs = found.names("codecs")
            for codec in codecs:
                found.one_of("codecs", codec, CODECS)
            chunks = _chunks(found, len(packs), codecs)
            pieces: dict[str, list[Piece]] = {}
            for tensor, rows in found.table("pieces").items():
                name_of = f"pieces[{_shown(tensor)}]"
                read = (
                    _piece(found, name_of, row, len(chunks))
                    for row in found.checked_rows(name_of, rows)
                )
                pieces[tensor] = list(read)
                if len({piece.box for piece in pieces[tensor]}) < len(pieces[tensor]):
                    raise found.error(name_of, "has the same box twice")
        notes = found.table("notes")
        found.metrics(notes.get("metrics", {}))
        for key, note in notes.items():
            if key != "metrics":
                found.tree(f"notes[{_shown(key)}]", note)
        bounds = found.table("bounds")
        for bound in bounds.values():
            given = (
                [bound[kind] for kind in ("relative", "absolute") if bound.get(kind) is not None]
                if type(bound) is dict
                else []
            )
            if len(given) != 1 or not _is_figure(given[0]):
                raise found.error("bounds", f"has {_shown(bound)}, which bounds no error")
        for key, value in found.table("values").items():
            found.tree(f"values[{_shown(key)}]", value)
        return cls(
            step=found.number("step"),
            session=found.number("session", least=1),
            rank=found.number("rank", most=MAX_RANKS),
            world_size=found.number("world_size", least=1, most=MAX_RANKS),
            kind=found.one_of("kind", found.content["kind"], (STATE, REPLAY)),
            catalogue=found.text("catalogue", ROOT),
            requires=[found.checked_number("requires", step) for step in found.rows("requires")],
            packs=packs,
            codecs=codecs,
            chunks=chunks,
            pieces=pieces,
            values=found.content["values"],
            bounds=bounds,
            notes=notes,
        )

    def check_pieces(self, catalogue: Catalogue, name: str) -> None:
        """Compare what the part says with the catalogue of its version.

        Raises:
            ManifestError: When it names tensors or boxes that there cannot be.
        """
        found = Fields(name, {})
        for tensor, pieces in self.pieces.items():
            field = f"pieces[{_shown(tensor)}]"
            facts = catalogue.tensors.get(tensor)
            if facts is None:
                raise found.error(field, "is of a tensor that the catalogue has not")
            for piece in pieces:
                box = piece.box
                inside = len(box.offset) == len(facts.shape) and all(
                    end <= extent for end, extent in zip(box.end, facts.shape, strict=True)
                )
                if not inside:
                    raise found.error(field, f"has a box outside the shape {facts.shape}")
                if len(piece.chunks) != tile_count(box, facts.steps):
                    raise found.error(
                        field,
                        f"has {len(piece.chunks)} chunks for a box of "
                        f"{tile_count(box, facts.steps)} tiles",
                    )


def _chunks(found: Fields, packs: int, codecs: list[str]) -> list[Chunk]:
    """The rows of the chunks, of which each base comes before what is relative to it."""
    chunks: list[Chunk] = []
    depths: list[int] = []
    deltas = ["+" in codec for codec in codecs]
    for row in found.rows("chunks"):
        field = f"chunks[{len(chunks)}]"
        if type(row) is not list or len(row) != len(Chunk._fields):
            raise found.error(field, f"= {_shown(row)} is no list of {len(Chunk._fields)}")
        chunk = Chunk(*row)
        pack, offset, length, codec, size, stored_hash, content_hash, base, max_error = row
        # One expression for all: there are very many chunks.
        if not (
            type(pack) is type(offset) is type(length) is type(codec) is type(size) is int
            and type(base) is int
            and type(stored_hash) is type(content_hash) is str
            and type(max_error) in (float, int)
            and 0 <= pack < packs
            and 0 <= codec < len(codecs)
            and 0 <= offset <= _LARGEST
            and 0 <= length <= size <= _TILE_BYTES
            and len(stored_hash) == len(content_hash) == 32
            and 0.0 <= max_error < math.inf
        ):
            raise found.error(field, f"= {str(row)[:200]} is no chunk that can be")
        if not -1 <= base < len(chunks) or (base >= 0) != deltas[codec]:
            raise found.error(field, f"has the base {_shown(base)}, which it cannot have")
        if base >= 0 and chunks[base].size != size:
            raise found.error(field, "has another size than its base")
        depths.append(depths[base] + 1 if base >= 0 else 0)
        if depths[-1] > MAX_CHAIN:
            raise found.error(field, f"is the end of a chain of more than {MAX_CHAIN}")
        chunks.append(chunk)
    return chunks


def _piece(found: Fields, field: str, row: Any, chunks: int) -> Piece:
    offset, shape, numbers = found.checked_rows(field, row, 3)
    box = Box(found.extents(field, offset), found.extents(field, shape))
    if len(box.offset) != len(box.shape):
        raise found.error(field, f"has an offset of {len(offset)} and a shape of {len(shape)}")
    for number in found.checked_rows(field, numbers):
        if type(number) is not int or not 0 <= number < chunks:
            raise found.error(field, f"refers to the chunk {_shown(number)} of {chunks}")
    return Piece(box, numbers)


@dataclass(frozen=True)
class Catalogue:
    """Everything that a version consists of, over all ranks; shared by versions that agree."""

    tensors: dict[str, TensorFacts]
    values: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """The content of the catalogue's file."""
        tensors = {
            name: [facts.dtype, facts.shape, facts.steps]
            for name, facts in sorted(self.tensors.items())
        }
        return sealed({"format": FORMAT, "tensors": tensors, "values": sorted(self.values)})

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Catalogue:
        """Read a catalogue's file.

        Raises:
            CheckpointError: When it is damaged.
            ManifestError: When it is malformed.
        """
        found = Fields(name, unsealed(content, name))
        found.only("tensors", "values")
        tensors: dict[str, TensorFacts] = {}
        # Of very many tensors, most have the facts of another one.
        known: dict[object, TensorFacts] = {}
        for tensor, row in found.table("tensors").items():
            key = None
            if type(row) is list and [*map(type, row)] == [str, list, list]:
                dtype, shape, steps = row
                if {*map(type, shape), *map(type, steps)} <= {int}:
                    key = dtype, tuple(shape), tuple(steps)
                    if (facts := known.get(key)) is not None:
                        tensors[tensor] = facts
                        continue
            tensors[tensor] = known[key] = _facts(found, f"tensors[{_shown(tensor)}]", row)
        return cls(tensors, tuple(found.names("values")))

    def merged(self, other: Catalogue) -> Catalogue:
        """Everything that is in one or the other."""
        values = tuple(sorted({*self.values, *other.values}))
        return Catalogue({**self.tensors, **other.tensors}, values)


def _facts(found: Fields, field: str, row: Any) -> TensorFacts:
    dtype, shape, steps = found.checked_rows(field, row, 3)
    facts = TensorFacts(
        found.one_of(f"the type of {field}", dtype, DTYPES),
        found.extents(field, shape),
        found.extents(field, steps, least=1),
    )
    if len(facts.shape) != len(facts.steps):
        raise found.error(field, "has another number of steps than of dimensions")
    if math.prod(facts.shape) * facts.itemsize > _LARGEST:
        raise found.error(field, f"has the shape {facts.shape}, which no memory holds")
    tile = math.prod(map(min, facts.shape, facts.steps)) * facts.itemsize
    if tile > _TILE_BYTES:
        raise found.error(field, f"has tiles of {tile} bytes; {_TILE_BYTES} at most can be")
    return facts


@dataclass(frozen=True)
class GroupSeal:
    """Contents of the manifests of neighbouring ranks, for those who need not read them all.

    Attributes:
        step: Steps done.
        session: As in `Part`.
        world_size: How many ranks saved the version.
        first: The first rank of the group.
        roots: BLAKE3 of the part of each rank, from the first one on.
        catalogues: BLAKE3 of the catalogues that they name.
        kind: ``state`` or ``replay``.
        requires: Steps of the same session that a replay log starts from.
        metrics: Figures that the first rank saved.
        packs: Files that hold their chunks, relative to the store.
        pieces: Tensor name to rank and box of all that was saved of it.
        values: Name of a value to the first rank that saved it.
    """

    step: int
    session: int
    world_size: int
    first: int
    roots: list[str]
    catalogues: list[str]
    kind: str
    requires: list[int]
    metrics: dict[str, float]
    packs: list[str]
    pieces: dict[str, list[tuple[int, Box]]]
    values: dict[str, int]

    @classmethod
    def of(cls, parts: list[Part], roots: list[str]) -> GroupSeal:
        """The seal of the parts of neighbouring ranks."""
        pieces: dict[str, list[tuple[int, Box]]] = {}
        values: dict[str, int] = {}
        for part in parts:
            for name, held in part.pieces.items():
                pieces.setdefault(name, []).extend((part.rank, piece.box) for piece in held)
            for name in part.values:
                values.setdefault(name, part.rank)
        first = parts[0]
        return cls(
            first.step,
            first.session,
            first.world_size,
            first.rank,
            roots,
            sorted({part.catalogue for part in parts}),
            first.kind,
            sorted({step for part in parts for step in part.requires}),
            first.notes.get("metrics", {}),
            sorted({pack for part in parts for pack in part.packs}),
            pieces,
            values,
        )

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first, self.first + len(self.roots))

    def to_bytes(self) -> bytes:
        """The content of the group's file."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["pieces"] = {
            name: [[rank, box.offset, box.shape] for rank, box in held]
            for name, held in self.pieces.items()
        }
        return sealed({"format": FORMAT, **content})

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> GroupSeal:
        """Read a group's file.

        Raises:
            CheckpointError: When it is damaged.
            ManifestError: When it is malformed.
        """
        with collection_paused():
            found = Fields(name, unsealed(content, name))
            found.only(*(item.name for item in fields(cls)))
            world_size = found.number("world_size", least=1, most=MAX_RANKS)
            first = found.number("first", most=world_size - 1)
            roots = _roots(found, "roots")
            if not 0 < len(roots) <= world_size - first:
                raise found.error(
                    "roots", f"are {len(roots)} from rank {first} on, of {world_size} ranks"
                )
            ranks = range(first, first + len(roots))
            pieces = {
                tensor: _numbered_boxes(found, f"pieces[{_shown(tensor)}]", rows, ranks)
                for tensor, rows in found.table("pieces").items()
            }
        values = found.table("values")
        for value, rank in values.items():
            found.checked_number(f"values[{_shown(value)}]", rank, least=first, most=ranks.stop - 1)
        return cls(
            **_of_version(found),
            world_size=world_size,
            first=first,
            roots=roots,
            metrics=found.metrics(found.content["metrics"]),
            packs=found.packs(),
            pieces=pieces,
            values=values,
        )


@dataclass(frozen=True)
class Index:
    """Contents of the groups of ranks that saved a version; a reader begins here.

    Attributes:
        step: Steps done.
        session: As in `Part`.
        world_size: How many ranks saved the version.
        group_ranks: How many ranks a group has; the last one may have fewer.
        groups: BLAKE3 of each group's file.
        catalogues: BLAKE3 of the catalogues.
        kind: ``state`` or ``replay``.
        requires: Steps of the same session that a replay log starts from.
        tensors: Tensor name to the groups that hold some of it, each with the smallest box around
            that; None for the box of a tensor that only one group holds.
        values: Name of a value to the first group that holds it.
    """

    step: int
    session: int
    world_size: int
    group_ranks: int
    groups: list[str]
    catalogues: list[str]
    kind: str
    requires: list[int]
    tensors: dict[str, list[tuple[int, Box | None]]]
    values: dict[str, int]

    @classmethod
    def of(cls, groups: list[GroupSeal], roots: list[str]) -> Index:
        """The index of all groups of a version, in their order, and BLAKE3 of their files."""
        tensors: dict[str, list[tuple[int, Box | None]]] = {}
        values: dict[str, int] = {}
        for number, group in enumerate(groups):
            for name in group.pieces:
                tensors.setdefault(name, []).append((number, None))
            for name in group.values:
                values.setdefault(name, number)
        for name, held in tensors.items():
            if len(held) > 1:
                tensors[name] = [
                    (number, around([box for _, box in groups[number].pieces[name]]))
                    for number, _ in held
                ]
        first = groups[0]
        return cls(
            first.step,
            first.session,
            first.world_size,
            len(first.roots),
            roots,
            sorted({root for group in groups for root in group.catalogues}),
            first.kind,
            sorted({step for group in groups for step in group.requires}),
            tensors,
            values,
        )

    def ranks_of(self, group: int) -> range:
        """The ranks of a group."""
        first = group * self.group_ranks
        return range(first, min(first + self.group_ranks, self.world_size))

    def to_bytes(self) -> bytes:
        """The content of the index file."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["tensors"] = {
            name: held[0][0]
            if len(held) == 1
            else [[number, box.offset, box.shape] for number, box in held if box is not None]
            for name, held in self.tensors.items()
        }
        return sealed({"format": FORMAT, **content})

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Index:
        """Read an index file.

        Raises:
            CheckpointError: When it is damaged.
            ManifestError: When it is malformed.
        """
        with collection_paused():
            found = Fields(name, unsealed(content, name))
            found.only(*(item.name for item in fields(cls)))
            world_size = found.number("world_size", least=1, most=MAX_RANKS)
            group_ranks = found.number("group_ranks", least=1, most=world_size)
            groups = _roots(found, "groups")
            if len(groups) != -(-world_size // group_ranks):
                raise found.error(
                    "groups", f"are {len(groups)} of {group_ranks} of {world_size} ranks each"
                )
            numbers = range(len(groups))
            tensors: dict[str, list[tuple[int, Box | None]]] = {}
            for tensor, held in found.table("tensors").items():
                if type(held) is int and held in numbers:
                    tensors[tensor] = [(held, None)]
                    continue
                field = f"tensors[{_shown(tensor)}]"
                rows = _numbered_boxes(found, field, held, numbers)
                if len({number for number, _ in rows}) < max(len(rows), 2):
                    raise found.error(field, "has a group twice, or only one")
                tensors[tensor] = [*rows]
        values = found.table("values")
        for value, group in values.items():
            found.checked_number(f"values[{_shown(value)}]", group, most=len(groups) - 1)
        return cls(
            **_of_version(found),
            world_size=world_size,
            group_ranks=group_ranks,
            groups=groups,
            tensors=tensors,
            values=values,
        )


def around(boxes: list[Box]) -> Box:
    """The smallest box that holds all of `boxes`, which are of one tensor."""
    offset = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
    end = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
    return Box(offset, tuple(last - first for first, last in zip(offset, end, strict=True)))


def _of_version(found: Fields) -> dict[str, Any]:
    """The entries on their version that the files of groups and the index have in common."""
    return {
        "step": found.number("step"),
        "session": found.number("session", least=1),
        "catalogues": _roots(found, "catalogues"),
        "kind": found.one_of("kind", found.content["kind"], (STATE, REPLAY)),
        "requires": [found.checked_number("requires", step) for step in found.rows("requires")],
    }


def _roots(found: Fields, field: str) -> list[str]:
    return [found.checked_text(field, root, ROOT) for root in found.rows(field)]


def _numbered_boxes(found: Fields, field: str, rows: Any, numbers: range) -> list[tuple[int, Box]]:
    """Rows of a number, an offset and a shape; there are very many of them."""
    boxes = []
    for row in found.checked_rows(field, rows):
        if type(row) is not list or [*map(type, row)] != [int, list, list]:
            raise found.error(field, f"has {_shown(row)}, which is no number and box")
        number, offset, shape = row
        if number not in numbers:
            raise found.error(field, f"has {_shown(number)}, which is none of {numbers}")
        if len(offset) != len(shape) or len(shape) > MAX_DIMENSIONS:
            raise found.error(field, f"has an offset of {len(offset)} and a shape of {len(shape)}")
        extents = offset + shape
        if extents and not (
            {*map(type, extents)} == {int} and 0 <= min(extents) <= max(extents) <= _LARGEST
        ):
            raise found.error(field, "has a box of no whole numbers that can be")
        boxes.append((number, Box(tuple(offset), tuple(shape))))
    return boxes


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while many small objects are made, which all stay.

    Each of them may start one that goes through all objects of the process: 0.1 s beside torch.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


_SEAL = ',"blake3":"%s"}\n'
_SEAL_BYTES = len(_SEAL % ("0" * 64))


def sealed(content: dict[str, Any]) -> bytes:
    """`content` as JSON whose last entry is the BLAKE3 of all bytes before that entry."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + (_SEAL % blake3.blake3(body).hexdigest()).encode()


def unsealed(content: bytes, name: str) -> dict[str, Any]:
    """The inverse of `sealed`, without the format and the seal.

    Raises:
        CheckpointError: When `content` is not as written, or of another format.
    """
    body = memoryview(content)[:-_SEAL_BYTES]
    if content[-_SEAL_BYTES:] != (_SEAL % blake3.blake3(body).hexdigest()).encode():
        raise CheckpointError(f"{name} is damaged: its content does not have the hash it names")
    try:
        found = json.loads(b"".join([body, b"}"]), parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ManifestError(f"{name} is malformed: {type(error).__name__}: {error}") from None
    if type(found) is not dict:
        raise ManifestError(f"{name} is malformed: it is no object")
    version = found.pop("format", None)
    if version != FORMAT:
        raise CheckpointError(
            f"{name} has format {_shown(version)}, this Outlast reads format {FORMAT}; use the "
            "Outlast that wrote it"
        )
    return found


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def root_of(content: bytes) -> str:
    """The BLAKE3 at the end of a sealed file."""
    return content[-_SEAL_BYTES:].decode().split('"')[3]
