"""The JSON files of a store: what a rank saved, the list of all tensors, the seal of a version.

Format 2; the page ``docs/checkpoint.md`` specifies it. Every file ends with a BLAKE3 of all that
stands before it, and names the files and chunks that it relies on by their hashes, so one root
covers a whole version. No file contains a pickle.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import blake3

from outlast.checkpoint.format.geometry import grid, tiles
from outlast.errors import CheckpointError
from outlast.state.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 2
STATE, REPLAY = "state", "replay"

_BITS = re.compile(r"\d+")


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
        steps: Distance of the lines of its tile grid; see `geometry.grid`.
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
    """What one rank saved of one version; its file makes the rank's share of the version real.

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
        base = self.chunks[number].base
        return (number,) if base < 0 else (number, *self.chain(base))

    def tiles(self, name: str, facts: TensorFacts) -> Iterator[tuple[Box, int]]:
        """Every saved tile of tensor `name` with the number of its chunk."""
        for piece in self.pieces.get(name, ()):
            yield from zip(tiles(piece.box, facts.steps), piece.chunks, strict=True)

    def to_bytes(self) -> bytes:
        """The content of the part's file."""
        content = {
            "format": FORMAT,
            **{each.name: getattr(self, each.name) for each in fields(self)},
        }
        content["pieces"] = {
            name: [[piece.box.offset, piece.box.shape, piece.chunks] for piece in pieces]
            for name, pieces in self.pieces.items()
        }
        return sealed(content)

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Part:
        """Read a part's file; raises CheckpointError when it is damaged."""
        with collection_paused():
            found = unsealed(content, name)
            found["chunks"] = [Chunk(*row) for row in found["chunks"]]
        found["pieces"] = {
            tensor: [
                Piece(Box(tuple(offset), tuple(shape)), chunks) for offset, shape, chunks in pieces
            ]
            for tensor, pieces in found["pieces"].items()
        }
        return cls(**found)


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
        """Read a catalogue's file; raises CheckpointError when it is damaged."""
        found = unsealed(content, name)
        tensors = {
            tensor: TensorFacts(dtype, tuple(shape), tuple(steps))
            for tensor, (dtype, shape, steps) in found["tensors"].items()
        }
        return cls(tensors, tuple(found["values"]))

    def merged(self, other: Catalogue) -> Catalogue:
        """Everything that is in one or the other."""
        values = tuple(sorted({*self.values, *other.values}))
        return Catalogue({**self.tensors, **other.tensors}, values)


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
    body = content[:-_SEAL_BYTES]
    if content[-_SEAL_BYTES:] != (_SEAL % blake3.blake3(body).hexdigest()).encode():
        raise CheckpointError(f"{name} is damaged: its content does not have the hash it names")
    found: dict[str, Any] = json.loads(body + b"}")
    version = found.pop("format", None)
    if version != FORMAT:
        raise CheckpointError(
            f"{name} has format {version}, this Outlast reads format {FORMAT}; use the Outlast "
            "that wrote it"
        )
    return found


def root_of(content: bytes) -> str:
    """The BLAKE3 at the end of a sealed file."""
    return content[-_SEAL_BYTES:].decode().split('"')[3]
