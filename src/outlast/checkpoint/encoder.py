"""From staged bytes to a durable part: tiles, content addresses, codecs, files.

Needs neither torch nor the training process: the writer process runs it on shared memory.
"""

from __future__ import annotations

import fnmatch
import itertools
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from outlast.checkpoint.codec import LOSSY_DTYPES, Bound, Coder, Compression, round_to_bound
from outlast.checkpoint.compiled import (
    CODECS,
    COPY,
    SOURCE,
    Place,
    address_of,
    copy_of,
    digests_of,
)
from outlast.checkpoint.manifest import (
    STATE,
    Catalogue,
    Chunk,
    Part,
    Piece,
    collection_paused,
    root_of,
    tiles,
)
from outlast.checkpoint.storage import publish
from outlast.checkpoint.version import SEAL, Version, is_published
from outlast.errors import CheckpointError
from outlast.state.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.compiled import Table
    from outlast.checkpoint.manifest import TensorFacts
    from outlast.checkpoint.planes import PlanePlan
    from outlast.checkpoint.storage import PendingFile, Storage


@dataclass(frozen=True)
class Reduction:
    """Codec and error bounds that make the versions of a store smaller.

    Attributes:
        compression: Codec and level of every tile.
        lossy: Pattern of tensor names (as in `fnmatch`) to the bound of their error; the first
            pattern that fits counts. Empty: everything is exact.
    """

    compression: Compression = field(default_factory=Compression)
    lossy: dict[str, Bound] = field(default_factory=dict)

    def bounds_of(self, catalogue: Catalogue, names: Iterable[str]) -> dict[str, Bound]:
        """Error bound of each lossy tensor among `names`; scalars, such as counters, stay exact.

        Raises:
            CheckpointError: When a pattern takes in a tensor that cannot be rounded.
        """
        found = {}
        for name in names:
            facts = catalogue.tensors[name]
            fits = (item for item in self.lossy if fnmatch.fnmatchcase(name, item))
            pattern = next(fits, None)
            if pattern is None or not facts.shape:
                continue
            if facts.dtype not in LOSSY_DTYPES:
                raise CheckpointError(
                    f'lossy = "{pattern}" takes in `{name}` of type {facts.dtype}, which cannot be '
                    "rounded; give a narrower pattern"
                )
            found[name] = self.lossy[pattern]
        return found


@dataclass(frozen=True)
class StagedPiece:
    """A box of a tensor in the arena: contiguous, row-major, from byte `start`."""

    name: str
    box: Box
    start: int


@dataclass(frozen=True)
class PartJob:
    """All that the writer needs to know of one save.

    Attributes:
        version: Session and step.
        rank: Who saves.
        world_size: How many save.
        catalogue: Facts of all tensors of all ranks.
        pieces: What to save.
        values: JSON values to save.
        bounds: Tensor name to its error bound, for the lossy ones.
        kind: ``state`` or ``replay``.
        requires: Steps that a replay log needs.
        notes: Free JSON for the manifest.
        alone: Whether the version counts without a seal, because ranks do not coordinate.
    """

    version: Version
    rank: int
    world_size: int
    catalogue: Catalogue
    pieces: list[StagedPiece]
    values: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)
    kind: str = STATE
    requires: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def name(self) -> str:
        """File of the part."""
        return self.version.part_name(self.rank, self.world_size)


@dataclass(frozen=True)
class Written:
    """Figures of a written part.

    Attributes:
        raw_bytes: Bytes of the staged content.
        stored_bytes: Bytes that this save wrote.
    """

    raw_bytes: int
    stored_bytes: int


class AbandonedError(Exception):
    """The save was given up: a newer one replaces it, or its trainer is gone."""


_TILES_PER_PLAN = 16


# A file of which less is still in use is not referred to again, so that it can be deleted.
_USED_FRACTION = 0.5


# What makes two tiles one chunk: hash of the content, bytes of an element, error made.
_Address = tuple[str, int, float]


class Encoder:
    """Writes the parts of one rank, one after the other, and remembers the last one.

    Args:
        storage: Where to.
        reduction: Codecs and error bounds.
        arena: Memory that holds staged bytes; nothing where every `write` is given contents.
    """

    def __init__(
        self, storage: Storage, reduction: Reduction, arena: memoryview | bytes = b""
    ) -> None:
        self._storage = storage
        self._reduction = reduction
        self._arena = np.frombuffer(arena, np.uint8)
        self._last: _Coding | None = None

    def write(
        self,
        job: PartJob,
        check: Callable[[], None],
        contents: Iterable[Bytes] | None = None,
    ) -> Written:
        """Code, write and publish one part.

        Args:
            job: What to save; its bytes must not change before this returns.
            check: Called between tiles; raises AbandonedError to give up.
            contents: (bytes,) of every piece in turn, where they are not in the arena; one is
                asked for when the one before is stored. Those of lossy pieces are rounded in place.

        Raises:
            OSError: When the storage fails; nothing is published then.
            AbandonedError: When `check` raised it; nothing is published then.
            CheckpointError: When the version is published already.
        """
        files = self._storage.files(job.version.folder)
        own = job.name.partition("/")[2]
        alone = job.alone and own in files and is_published(self._storage, job.version)
        if alone or SEAL in files:
            raise CheckpointError(
                f"{job.version.folder} is published already and is never overwritten; save another "
                "step"
            )
        last = self._last
        if last is not None and (
            last.job.version.session != job.version.session or last.job.version == job.version
        ):
            last = None
        # What an earlier try of this step has left may be referred to by its manifest.
        attempt = sum(name.endswith(".pack") and name.startswith(own[:-5]) for name in files)
        pack_name = job.version.pack_name(job.rank, job.world_size, attempt)
        # No other writer has this session; if one comes all the same, the first one's part stays.
        again = own in files
        made: list[str] = []
        try:
            with _Pack(self._storage, pack_name) as pack, collection_paused():
                coding = _Coding(job, self._reduction.compression, last, pack)
                staged = self._staged(job) if contents is None else contents
                for piece, memory in zip(job.pieces, staged, strict=True):
                    coding.add(piece, memory, check)
            if pack.length:
                made.append(pack_name)
            catalogue = job.catalogue.to_bytes()
            coding.part.catalogue = root_of(catalogue)
            name = job.version.catalogue_name(coding.part.catalogue)
            folder, _, file_name = name.partition("/")
            # Another rank may have written it.
            if self._storage.files(folder).get(file_name) != len(catalogue):
                with self._storage.create(name) as file:
                    file.write(catalogue)
                made += [name] if job.world_size == 1 else []
            content = coding.part.to_bytes()
            check()
            if again:
                with self._storage.create(job.name) as file:
                    file.write(content)
            else:
                publish(self._storage, job.name, content)
        except BaseException:
            # A full disk is not filled further by saves that fail.
            for name in made:
                with suppress(OSError):
                    self._storage.remove(name)
            raise
        coding.end()
        self._last = coding
        return Written(coding.raw_bytes, pack.length + len(content))

    def _staged(self, job: PartJob) -> Iterator[Bytes]:
        """The pieces as they lie in the arena."""
        for piece in job.pieces:
            itemsize = job.catalogue.tensors[piece.name].itemsize
            yield self._arena[piece.start : piece.start + piece.box.elements * itemsize]


class _Pack:
    """The file with the new chunks; there is none unless there are new chunks."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self.length = 0
        self._storage = storage
        self._stack = ExitStack()
        self._file: PendingFile | None = None

    def append(self, stored: bytes | memoryview) -> int:
        """Append `stored`; returns its offset."""
        if self._file is None:
            file = self._storage.create(self.name, exclusive=True)
            self._file = self._stack.enter_context(file)
        offset = self.length
        self._file.write(stored)
        self.length += len(stored)
        return offset

    def __enter__(self) -> _Pack:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Coding:
    """A part that is being built, and afterwards what the next one may refer to.

    Attributes:
        job: What is saved.
        part: Its manifest.
        raw_bytes: Bytes of the content.
        contents: Content to its chunk.
        pack_bytes: Sizes of the packs that the part refers to.
    """

    def __init__(
        self,
        job: PartJob,
        compression: Compression,
        last: _Coding | None,
        pack: _Pack,
    ) -> None:
        self.job = job
        self.part = Part(
            step=job.version.step,
            session=job.version.session,
            rank=job.rank,
            world_size=job.world_size,
            kind=job.kind,
            requires=job.requires,
            values=job.values,
            bounds={name: bound.to_dict() for name, bound in job.bounds.items()},
            notes=job.notes,
        )
        self.raw_bytes = 0
        self.contents: dict[_Address, int] = {}
        self.pack_bytes: dict[str, int] = {}
        self._coder = Coder(compression)
        self._last = last
        self._pack = pack
        self._sources: dict[tuple[Box, TensorFacts], tuple[Table, list[Box]]] = {}
        # Packs of which enough is still in use to continue referring to them.
        self._reusable: set[int] = set()
        if last is not None:
            used = dict.fromkeys(range(len(last.part.packs)), 0)
            for chunk in last.part.chunks:
                used[chunk.pack] += chunk.length
            self._reusable = {
                number
                for number, name in enumerate(last.part.packs)
                if used[number] >= _USED_FRACTION * last.pack_bytes.get(name, 0)
            }

    def end(self) -> None:
        """Note the sizes of the packs, and let go of the part before."""
        sizes = {} if self._last is None else self._last.pack_bytes
        sizes = {**sizes, self._pack.name: self._pack.length}
        self.pack_bytes = {name: size for name, size in sizes.items() if name in self.part.packs}
        self._last = None

    def add(self, staged: StagedPiece, memory: Bytes, check: Callable[[], None]) -> None:
        """Code all tiles of one piece, whose (bytes,) are in `memory`."""
        facts = self.job.catalogue.tensors[staged.name]
        array = _view(memory, staged.box, facts.itemsize)
        self.raw_bytes += array.nbytes
        errors = self._round(array, staged, facts)
        numbers: list[int] = []
        if self._coder.takes_all(facts.dtype):
            numbers += self._add_all(array, staged.box, facts, errors, check)
        plan, planned = None, -1
        behind = itertools.islice(tiles(staged.box, facts.steps), len(numbers), None)
        for number, tile in enumerate(behind, len(numbers)):
            check()
            raw = _tile(array, tile, staged.box)
            content = xxhash.xxh3_128_hexdigest(raw.data)
            # Codecs depend on the size of elements, and an error is said of each tile.
            address = (content, facts.itemsize, errors[number] if errors else 0.0)
            known = self._known(address)
            if known is None:
                if number // _TILES_PER_PLAN != planned:
                    plan, planned = self._coder.plan(raw, facts.dtype), number // _TILES_PER_PLAN
                name, stored = self._coder.encode(raw, facts.itemsize, plan)
                known = self.contents[address] = self._append(
                    Chunk(
                        self._number(self.part.packs, self._pack.name),
                        self._pack.append(stored),
                        len(stored),
                        self._number(self.part.codecs, name),
                        raw.size,
                        xxhash.xxh3_128_hexdigest(stored),
                        content,
                        max_error=address[2],
                    )
                )
            numbers.append(known)
        self.part.pieces.setdefault(staged.name, []).append(Piece(staged.box, numbers))

    def _add_all(
        self,
        array: NDArray[Any],
        box: Box,
        facts: TensorFacts,
        errors: list[float],
        check: Callable[[], None],
    ) -> Iterator[int]:
        """Code the tiles of a piece, many in a call; yields their chunks.

        None, where they are not such as compiled code copies.
        """
        key = (box, facts)
        if key not in self._sources:
            self._sources[key] = _sources(box, facts)
        table, boxes = self._sources[key]
        for begin in range(0, len(table), _TILES_PER_PLAN):
            check()
            sources = table[begin : begin + _TILES_PER_PLAN].copy()
            sources["memory"] = address_of(array)
            digests = self._coder.hash_all(sources)
            addresses: list[_Address] = [
                (digest, facts.itemsize, errors[number] if errors else 0.0)
                for number, digest in enumerate(digests, begin)
            ]
            news: dict[_Address, int] = {}
            for row, address in enumerate(addresses):
                if address not in news and self._known(address) is None:
                    news[address] = row
            if news:
                rows = [*news.values()]
                sample = _tile(array, boxes[begin + rows[0]], box)
                plan = self._coder.plan(sample, facts.dtype)
                self._store_all(sources[rows], [*news], plan)
            yield from (self.contents[address] for address in addresses)

    def _store_all(self, sources: Table, addresses: list[_Address], plan: PlanePlan | None) -> None:
        """Code tiles, append them to the pack, and note their chunks."""
        stored = self._coder.encode_all(sources, plan)
        pack, offset = self._number(self.part.packs, self._pack.name), self._pack.append(stored)
        codecs = [
            self._number(self.part.codecs, CODECS[number]) for number in sources["codec"].tolist()
        ]
        for address, code, length, size, digest in zip(
            addresses,
            codecs,
            sources["length"].tolist(),
            sources["bytes"].tolist(),
            digests_of(sources["stored_hash"]),
            strict=True,
        ):
            chunk = Chunk(
                pack, offset, length, code, size, digest, address[0], max_error=address[2]
            )
            self.contents[address] = self._append(chunk)
            offset += length

    def _round(self, array: NDArray[Any], staged: StagedPiece, facts: TensorFacts) -> list[float]:
        """Round a lossy piece in its place.

        Returns:
            The largest error of each tile; nothing for an exact piece.
        """
        bound, errors = self.job.bounds.get(staged.name), []
        if bound is None:
            return []
        for tile in tiles(staged.box, facts.steps):
            # Another seed for every tile and step keeps stochastic rounding unbiased over time.
            place = f"{staged.name} {self.job.version.step} {tile.offset}"
            seed = xxhash.xxh3_64_intdigest(place.encode())
            rounded, error = round_to_bound(
                _tile(array, tile, staged.box), facts.dtype, bound, seed=seed
            )
            array[tile.within(staged.box)] = rounded.view(array.dtype).reshape(tile.shape)
            errors.append(error)
        return errors

    def _known(self, address: _Address) -> int | None:
        """The number of a chunk with this content, from this part or the one before."""
        if address not in self.contents:
            if self._last is None or address not in self._last.contents:
                return None
            last = self._last.part
            chunk = last.chunks[self._last.contents[address]]
            if chunk.pack not in self._reusable:
                return None
            self.contents[address] = self._append(
                chunk._replace(
                    pack=self._number(self.part.packs, last.packs[chunk.pack]),
                    codec=self._number(self.part.codecs, last.codecs[chunk.codec]),
                )
            )
        return self.contents[address]

    def _append(self, chunk: Chunk) -> int:
        self.part.chunks.append(chunk)
        return len(self.part.chunks) - 1

    @staticmethod
    def _number(names: list[str], name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)


def _view(memory: Bytes, box: Box, itemsize: int) -> NDArray[Any]:
    """The (bytes,) of a piece as an array of `box.shape` opaque elements."""
    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    return memory.view(f"{kind}{itemsize}").reshape(box.shape)


def _sources(box: Box, facts: TensorFacts) -> tuple[Table, list[Box]]:
    """The tiles of a piece as (tiles,) of `SOURCE`, and their boxes.

    None, where compiled code cannot copy them.
    """
    whole, found = Place.row_major(box, facts.itemsize), [*tiles(box, facts.steps)]
    copies = [
        copy_of(tile, facts.itemsize, Place.row_major(tile, facts.itemsize), whole)
        for tile in found
    ]
    table = np.zeros(0 if None in copies else len(found), SOURCE)
    if len(table):
        table["itemsize"] = facts.itemsize
        table["bytes"] = [tile.elements * facts.itemsize for tile in found]
        table["copy"] = np.frombuffer(b"".join(filter(None, copies)), COPY)
    return table, found


def _tile(array: NDArray[Any], tile: Box, box: Box) -> Bytes:
    """The bytes of `tile` out of the array of `box`, row-major."""
    return np.ascontiguousarray(array[tile.within(box)]).reshape(-1).view(np.uint8)
