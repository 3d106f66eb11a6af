"""From staged bytes to a durable part: tiles, content addresses, deltas, codecs, files.

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

from outlast.checkpoint import codec
from outlast.checkpoint.codec import DELTAS, LOSSY_DTYPES, Bound, Coder, Compression, round_to_bound
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
    MAX_CHAIN,
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
    """Codec, deltas and error bounds that make the versions of a store smaller.

    Attributes:
        compression: Codec and level of every tile.
        chain: Versions in a row that may be stored as differences to the one before; 0: every
            version is stored in full. Deltas keep a second copy of the state in host memory.
        lossy: Pattern of tensor names (as in `fnmatch`) to the bound of their error; the first
            pattern that fits counts. Empty: everything is exact.

    Raises:
        CheckpointError: When `chain` is longer than what is read back.
    """

    compression: Compression = field(default_factory=Compression)
    chain: int = 0
    lossy: dict[str, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.chain <= MAX_CHAIN:
            raise CheckpointError(f"chain = {self.chain} must be from 0 to {MAX_CHAIN}")

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
        arena: Number of the memory that holds the staged bytes.
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

    arena: int
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


_SAMPLE_BYTES = 16 << 10
_TILES_PER_PLAN = 16


# A delta that saves less is not worth the longer restore.
_DELTA_GAIN = 0.97


# A file of which less is still in use is not referred to again, so that it can be deleted.
_USED_FRACTION = 0.5


# What makes two tiles one chunk: hash of the content, bytes of an element, error made.
_Address = tuple[str, int, float]


class Encoder:
    """Writes the parts of one rank, one after the other, and remembers the last one.

    Args:
        storage: Where to.
        reduction: Codecs and deltas.
        arenas: Memories that hold staged bytes: one, or two where deltas need the one before.
    """

    def __init__(self, storage: Storage, reduction: Reduction, arenas: list[memoryview]) -> None:
        self._storage = storage
        self._reduction = reduction
        self._arenas = [np.frombuffer(arena, np.uint8) for arena in arenas]
        self._last: _Coding | None = None

    def write(self, job: PartJob, check: Callable[[], None]) -> Written:
        """Code, write and publish one part.

        Args:
            job: What to save; its bytes must not change before this returns.
            check: Called between tiles; raises AbandonedError to give up.

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
                coding = _Coding(job, self._reduction, self._arenas, last, pack)
                for piece in job.pieces:
                    coding.add(piece, check)
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
        pieces: Where each piece lies in the arena, and its chunks.
        contents: Content to its chunk.
        deltas: Delta that was found best for a tensor; None: none.
        pack_bytes: Sizes of the packs that the part refers to.
    """

    def __init__(
        self,
        job: PartJob,
        reduction: Reduction,
        arenas: list[Bytes],
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
        self.pieces: dict[tuple[str, Box], tuple[int, list[int]]] = {}
        self.contents: dict[_Address, int] = {}
        self.deltas: dict[str, str | None] = {}
        self.pack_bytes: dict[str, int] = {}
        self._coder = Coder(reduction.compression)
        self._chain = reduction.chain if job.kind == STATE else 0
        self._arenas = arenas
        self._last = last
        self._pack = pack
        self._adopted: dict[int, int] = {}
        self._sources: dict[tuple[Box, TensorFacts], Table] = {}
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

    def add(self, staged: StagedPiece, check: Callable[[], None]) -> None:
        """Code all tiles of one piece."""
        facts = self.job.catalogue.tensors[staged.name]
        array = _view(self._arenas[self.job.arena], staged.start, staged.box, facts.itemsize)
        self.raw_bytes += array.nbytes
        errors = self._round(array, staged, facts)
        source = self._source(array, staged, facts)
        numbers: list[int] = []
        if source.delta is None and self._coder.takes_all(facts.dtype):
            numbers += self._add_all(array, source, errors, check)
        behind = itertools.islice(tiles(staged.box, facts.steps), len(numbers), None)
        for number, tile in enumerate(behind, len(numbers)):
            check()
            raw = _tile(array, tile, staged.box)
            content = xxhash.xxh3_128_hexdigest(raw.data)
            # Codecs depend on the size of elements, and an error is said of each tile.
            address = (content, facts.itemsize, errors[number] if errors else 0.0)
            known = self._known(address)
            if known is None:
                chunk = self._code(raw, content, source, tile, number)
                known = self._append(chunk._replace(max_error=address[2]))
                self.contents[address] = known
            numbers.append(known)
        self.part.pieces.setdefault(staged.name, []).append(Piece(staged.box, numbers))
        self.pieces[staged.name, staged.box] = staged.start, numbers

    def _add_all(
        self, array: NDArray[Any], source: _Source, errors: list[float], check: Callable[[], None]
    ) -> Iterator[int]:
        """Code the tiles of a piece in full, many in a call; yields their chunks.

        None, where they are not such as compiled code copies.
        """
        facts, box = source.facts, source.box
        key = (box, facts)
        if key not in self._sources:
            self._sources[key] = _sources(box, facts)
        table = self._sources[key]
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
                self._store_all(sources[[*news.values()]], [*news], array, source)
            yield from (self.contents[address] for address in addresses)

    def _store_all(
        self, sources: Table, addresses: list[_Address], array: NDArray[Any], source: _Source
    ) -> None:
        """Code tiles, append them to the pack, and note their chunks."""
        start, size = int(sources["copy"]["from"]["start"][0]), int(sources["bytes"][0])
        raw = array.reshape(-1).view(np.uint8)[start : start + size]
        plan = self._coder.plan(raw, source.facts.dtype, delta=False)
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
        """Round a lossy piece in the arena, so that later deltas start from what was stored.

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
            number = None if self._last is None else self._last.contents.get(address)
            if number is None or not self._may_refer_to(number):
                return None
            self.contents[address] = self._adopt(number)
        return self.contents[address]

    def _source(self, array: NDArray[Any], staged: StagedPiece, facts: TensorFacts) -> _Source:
        """Choose the delta to the version before, if its bytes are still in memory.

        The smallest one is found by a sample in the middle of the piece.
        """
        last, name, source = self._last, staged.name, _Source(facts, staged.box)
        if self._chain == 0 or last is None or last.job.arena == self.job.arena:
            return source
        same = last.job.catalogue.tensors.get(name) == facts
        if not same or (name, staged.box) not in last.pieces or not staged.box.elements:
            return source
        start, source.chunks = last.pieces[name, staged.box]
        source.base = _view(self._arenas[last.job.arena], start, staged.box, facts.itemsize)
        if name in last.deltas and last.part.chunks[source.chunks[0]].base >= 0:
            # Within a chain, what was found at its first delta holds on.
            source.delta = self.deltas[name] = last.deltas[name]
            return source
        count = _SAMPLE_BYTES // facts.itemsize
        first = max((array.size - count) // 2, 0)
        now, before = (
            np.ascontiguousarray(item.reshape(-1)[first : first + count]).view(np.uint8)
            for item in (array, source.base)
        )
        sizes = {
            delta: self._size(codec.subtract(delta, now, before, facts.itemsize), facts, delta=True)
            for delta in DELTAS
        }
        best = min(sizes, key=lambda delta: sizes[delta])
        pays = sizes[best] < _DELTA_GAIN * self._size(now, facts, delta=False)
        source.delta = self.deltas[name] = best if pays else None
        return source

    def _size(self, sample: Bytes, facts: TensorFacts, *, delta: bool) -> int:
        """Bytes of `sample` when it is coded."""
        plan = self._coder.plan(sample, facts.dtype, delta=delta)
        return len(self._coder.encode(sample, facts.itemsize, plan, delta=delta)[1])

    def _code(self, raw: Bytes, content: str, source: _Source, tile: Box, number: int) -> Chunk:
        """Store one tile, as a delta where that was chosen and the chain allows it."""
        itemsize, base, prefix, coded = source.facts.itemsize, -1, "", raw
        if self._last is not None and source.base is not None and source.delta is not None:
            before = source.chunks[number]
            depth = len(self._last.part.chain(before))
            if depth <= self._chain and self._may_refer_to(before):
                base, prefix = self._adopt(before), f"{source.delta}+"
                base_tile = _tile(source.base, tile, source.box)
                coded = codec.subtract(source.delta, raw, base_tile, itemsize)
        is_delta = bool(prefix)
        made_for, plan = source.plans.get(is_delta, (-_TILES_PER_PLAN, None))
        if number - made_for >= _TILES_PER_PLAN:
            plan = self._coder.plan(coded, source.facts.dtype, delta=is_delta)
            source.plans[is_delta] = number, plan
        name, stored = self._coder.encode(coded, itemsize, plan, delta=is_delta)
        return Chunk(
            self._number(self.part.packs, self._pack.name),
            self._pack.append(stored),
            len(stored),
            self._number(self.part.codecs, prefix + name),
            raw.size,
            xxhash.xxh3_128_hexdigest(stored),
            content,
            base,
        )

    def _may_refer_to(self, number: int) -> bool:
        """Return whether the last part's chunk `number` and its bases lie in files that stay."""
        assert self._last is not None
        part = self._last.part
        return all(part.chunks[item].pack in self._reusable for item in part.chain(number))

    def _adopt(self, number: int) -> int:
        """Take chunk `number` of the last part, and what it needs, into this part."""
        assert self._last is not None
        if number not in self._adopted:
            last = self._last.part
            chunk = last.chunks[number]
            self._adopted[number] = self._append(
                chunk._replace(
                    pack=self._number(self.part.packs, last.packs[chunk.pack]),
                    codec=self._number(self.part.codecs, last.codecs[chunk.codec]),
                    base=-1 if chunk.base < 0 else self._adopt(chunk.base),
                )
            )
        return self._adopted[number]

    def _append(self, chunk: Chunk) -> int:
        self.part.chunks.append(chunk)
        return len(self.part.chunks) - 1

    @staticmethod
    def _number(names: list[str], name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)


@dataclass
class _Source:
    """Way in which the tiles of one piece are coded.

    Attributes:
        facts: Of the tensor.
        box: Of the piece.
        delta: Kind of the difference to the version before; None: every tile in full.
        base: The piece in the version before, if its bytes are in memory.
        chunks: The chunks of the part before that hold it.
        plans: By whether tiles are deltas: the plan for them, and the tile for which it was made;
            it is made anew every few tiles.
    """

    facts: TensorFacts
    box: Box
    delta: str | None = None
    base: NDArray[Any] | None = None
    chunks: list[int] = field(default_factory=list)
    plans: dict[bool, tuple[int, PlanePlan | None]] = field(default_factory=dict)


def _view(arena: Bytes, start: int, box: Box, itemsize: int) -> NDArray[Any]:
    """The piece at byte `start` as an array of `box.shape` opaque elements."""
    size = box.elements * itemsize
    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    return arena[start : start + size].view(f"{kind}{itemsize}").reshape(box.shape)


def _sources(box: Box, facts: TensorFacts) -> Table:
    """The tiles of a piece as (tiles,) of `SOURCE`; none, where compiled code cannot copy them."""
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
    return table


def _tile(array: NDArray[Any], tile: Box, box: Box) -> Bytes:
    """The bytes of `tile` out of the array of `box`, row-major."""
    return np.ascontiguousarray(array[tile.within(box)]).reshape(-1).view(np.uint8)
