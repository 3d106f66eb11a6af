"""Reading boxes of tensors from a version: only the tiles that they touch, each one checked.

Needs no torch. Tiles are fetched in batches of neighbouring chunks by a few threads, checked
against their checksums before and after decoding, and copied into the caller's memory, so the
memory needed beside that is a few batches.

Compiled code checks, decodes and copies a batch in one call (see `compiled`), on as many threads as
the process may use cores. What it cannot do goes through NumPy: differences to older versions,
blosc2's codes, and whatever it finds wrong, so that one place says what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from outlast.checkpoint import codec
from outlast.checkpoint.compiled import (
    CODECS,
    COPY,
    TILE,
    CompiledTiles,
    Place,
    address_of,
    copy_of,
    hashes_of,
)
from outlast.checkpoint.manifest import ManifestError, collection_paused, tiles, tiles_within
from outlast.checkpoint.storage import sentence_of
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.compiled import Table
    from outlast.checkpoint.manifest import Chunk, Part, TensorFacts
    from outlast.checkpoint.storage import RangeReader, Storage
    from outlast.checkpoint.version import Contents
    from outlast.state.box import Box

# Of a version with more files than this, only those that are read are opened.
_FILES_HELD = 64
_MOST_THREADS = 8
# Decoded together: with all that is made on the way, it fits into a core's second-level cache.
_DECODED_BYTES = 128 << 10


class Wanted(NamedTuple):
    """A box of a tensor and the memory that it goes to.

    Attributes:
        name: Tensor.
        box: Which part of it.
        out: Array of `box.shape` with elements of the tensor's size; may be strided.
    """

    name: str
    box: Box
    out: NDArray[Any]


@dataclass
class Counters:
    """Figures of what was read.

    Attributes:
        needed_bytes: Bytes asked for.
        touched_bytes: Bytes of the tiles that they lie in, after decoding.
        read_bytes: Bytes read from the storage.
    """

    needed_bytes: int = 0
    touched_bytes: int = 0
    read_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, needed: int = 0, touched: int = 0, read: int = 0) -> None:
        """Count more; safe from any thread."""
        with self._lock:
            self.needed_bytes += needed
            self.touched_bytes += touched
            self.read_bytes += read


class _Target(NamedTuple):
    """Destination of some of a tile.

    Attributes:
        out: Array.
        there: Part of it.
        here: Part of the tile; nothing: all.
        copy: The same for compiled code: bytes of a `COPY`; None where it cannot be.
    """

    out: NDArray[Any]
    there: tuple[slice, ...]
    here: tuple[slice, ...]
    copy: bytes | None


class _Fetch(NamedTuple):
    """A tile to fetch, and all places that want some of it."""

    part: Part
    name: str
    chain: tuple[int, ...]
    tile: Box
    itemsize: int
    targets: list[_Target]


class VersionReader:
    """Reads from one complete version.

    Use as a context manager: the version's files, if they are not very many, are opened at the
    start, so that they stay readable when retention deletes the version meanwhile (on POSIX file
    systems).

    Args:
        storage: Where the version lies.
        contents: Its manifests.

    Raises:
        CheckpointError: When a file is missing.
    """

    def __init__(self, storage: Storage, contents: Contents) -> None:
        self.contents = contents
        self.counters = Counters()
        self._storage = storage
        self._coder = codec.Coder()
        self._coding = threading.Lock()
        self._own = threading.local()
        self._tables: dict[int, Table] = {}
        self._files: dict[str, RangeReader] = {}
        self._opening = threading.Lock()
        packs = sorted(contents.packs)
        try:
            for pack in packs if len(packs) <= _FILES_HELD else ():
                self._file(pack)
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def read(self, wanted: list[Wanted], done: Callable[[int], None] | None = None) -> None:
        """Fill the arrays of `wanted`.

        Args:
            wanted: What goes where.
            done: Called with the number of bytes that were decoded, after each batch.

        Raises:
            CheckpointError: Naming the first tile that is missing, cut or changed.
        """
        for item in wanted:
            self.counters.add(needed=item.out.nbytes)
        with collection_paused():
            batches = [*_batches(self._plan(wanted), self._storage.read_bytes)]
        self._run(batches, done)

    def check(self, done: Callable[[int], None] | None = None) -> int:
        """Decode and check everything that is stored; returns the number of chunks.

        Raises:
            CheckpointError: Naming the first tile that is not as written.
        """
        fetches: dict[tuple[str, int, int], _Fetch] = {}
        for part in self.contents.parts:
            for name in part.pieces:
                facts = self.contents.catalogue.tensors[name]
                for tile, number in part.tiles(name, facts):
                    chunk = part.chunks[number]
                    key = (part.packs[chunk.pack], chunk.offset, facts.itemsize)
                    if key not in fetches:
                        fetches[key] = self._fetch(part, name, number, tile, [])
        self._run([*_batches([*fetches.values()], self._storage.read_bytes)], done)
        return len(fetches)

    def _run(self, batches: list[list[_Fetch]], done: Callable[[int], None] | None) -> None:
        """Read and place the batches, several at a time."""
        threads = max(_threads(), self._storage.reads_at_once)
        with ThreadPoolExecutor(threads, thread_name_prefix="restore") as pool:
            try:
                for size in pool.map(self._read_batch, batches):
                    if done is not None:
                        done(size)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _read_batch(self, batch: list[_Fetch]) -> int:
        """Read, check, decode and place a batch of tiles; returns the bytes decoded."""
        if not hasattr(self._own, "compiled"):
            self._own.compiled = CompiledTiles.new()
        rest = batch
        if self._own.compiled is not None:
            rest = self._place_compiled(self._own.compiled, batch)
        if rest:
            # NumPy in several threads is slower than in one: they would pass the interpreter's lock
            # to and fro between calls of microseconds.
            blocks = self._read_chunks(rest)
            with self._coding:
                for alike in _alike(rest):
                    self._place(alike, blocks)
        size = sum(fetch.part.chunks[fetch.chain[0]].size for fetch in batch)
        self.counters.add(touched=size)
        return size

    def _place_compiled(self, compiled: CompiledTiles, batch: list[_Fetch]) -> list[_Fetch]:
        """Read, check, decode and place a batch; returns what is left for NumPy."""
        part = batch[0].part
        stored = self._stored(part)
        numbers = [fetch.chain[0] for fetch in batch]
        able = [
            fetch
            for fetch, codec_number in zip(batch, stored["codec"][numbers].tolist(), strict=True)
            if codec_number >= 0 and (not fetch.targets or fetch.targets[0].copy)
        ]
        if len(able) < len(batch):
            chosen = {id(fetch) for fetch in able}
            rest = [fetch for fetch in batch if id(fetch) not in chosen]
            if not able:
                return rest
            numbers = [fetch.chain[0] for fetch in able]
        else:
            rest = []
        table = stored[numbers]
        begin, end = table["stored"], table["stored"] + table["length"]
        reach = np.maximum.accumulate(end)
        # Neighbours are read at once.
        first = np.concatenate([[0], np.flatnonzero(begin[1:] > reach[:-1]) + 1])
        starts, stops = begin[first], reach[np.concatenate([first[1:], [len(able)]]) - 1]
        places = np.concatenate([[0], np.cumsum(stops - starts)])
        name = part.packs[part.chunks[numbers[0]].pack]
        file = self._file(name)
        if int(stops[-1]) > file.size:
            return batch
        memory = self._memory(int(places[-1]))
        for start, *span in zip(starts.tolist(), places, places[1:], strict=False):
            piece = memory[slice(*span)]
            with self._readable(name):
                read = file.read_into(start, piece)
            self.counters.add(read=read)
            # What lies behind an end that came early has no right checksum.
            piece[read:] = 0
        run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(able))))
        table["stored"] += (address_of(memory) + places[:-1] - starts)[run]
        table["itemsize"] = [fetch.itemsize for fetch in able]
        nowhere = bytes(COPY.itemsize)
        copies = [(fetch.targets and fetch.targets[0].copy) or nowhere for fetch in able]
        table["copy"] = np.frombuffer(b"".join(copies), COPY)
        table["target"] = [
            address_of(fetch.targets[0].out) if fetch.targets else 0 for fetch in able
        ]
        done = compiled.read(table)
        if done.all():
            return rest
        return rest + [fetch for fetch, right in zip(able, done, strict=True) if not right]

    def _stored(self, part: Part) -> Table:
        """The chunks of a part as a table of `TILE`: codec -1 is none of the compiled ones."""
        with self._opening:
            if id(part) not in self._tables:
                table = self._tables[id(part)] = np.zeros(len(part.chunks), TILE)
                _, begin, length, coded, size, _, content, *_ = zip(*part.chunks, strict=True)
                codes = [CODECS.index(name) if name in CODECS else -1 for name in part.codecs]
                table["stored"], table["length"], table["bytes"] = begin, length, size
                table["codec"] = np.array(codes)[[*coded]]
                table["content_hash"] = hashes_of(content)
            return self._tables[id(part)]

    def _place(self, alike: list[_Fetch], blocks: dict[int, memoryview]) -> None:
        """Check, decode and place tiles that are coded alike."""
        for row, fetch in zip(self._decode(alike, blocks), alike, strict=True):
            for target in fetch.targets:
                content = row.view(target.out.dtype).reshape(fetch.tile.shape)
                target.out[target.there] = content[target.here] if target.here else content

    def _plan(self, wanted: list[Wanted]) -> list[_Fetch]:
        """The tiles that overlap with what is wanted, each tile once."""
        by_name: dict[str, list[Wanted]] = {}
        for item in wanted:
            by_name.setdefault(item.name, []).append(item)
        fetches = []
        copies: _Copies = {}
        for name, wants in by_name.items():
            facts = self.contents.catalogue.tensors[name]
            # Several ranks may have saved the same tile.
            taken: set[Box] = set()
            for part in self.contents.parts:
                for piece in part.pieces.get(name, ()):
                    found = _targets(piece.box, facts, wants, copies)
                    for number, (tile, targets) in found.items():
                        if tile not in taken:
                            taken.add(tile)
                            fetch = self._fetch(part, name, piece.chunks[number], tile, targets)
                            fetches.append(fetch)
        return fetches

    def _fetch(
        self, part: Part, name: str, number: int, tile: Box, targets: list[_Target]
    ) -> _Fetch:
        """See that a chunk has the content of its tile, before room is made for it."""
        itemsize = self.contents.catalogue.tensors[name].itemsize
        if part.chunks[number].size != tile.elements * itemsize:
            raise ManifestError(
                f"{self._manifest(part)} is malformed: chunks[{number}] is of "
                f"{part.chunks[number].size} bytes and stands for a tile of "
                f"{tile.elements * itemsize}"
            )
        return _Fetch(part, name, part.chain(number), tile, itemsize, targets)

    def _manifest(self, part: Part) -> str:
        name = self.contents.version.part_name(part.rank, part.world_size)
        return f"{self._storage.location}/{name}"

    def _read_chunks(self, batch: list[_Fetch]) -> dict[int, memoryview]:
        """The stored bytes of the chunks of a batch and of their bases, neighbours in one read."""
        part = batch[0].part
        chunks = part.chunks
        # A chunk begins with its pack and offset.
        ordered = sorted(
            {number for fetch in batch for number in fetch.chain}, key=chunks.__getitem__
        )
        blocks: dict[int, memoryview] = {}
        begin = 0
        while begin < len(ordered):
            pack, start = chunks[ordered[begin]][:2]
            end, stop = begin, start
            while end < len(ordered):
                chunk = chunks[ordered[end]]
                if chunk.pack != pack or chunk.offset > stop:
                    break
                stop = max(stop, chunk.offset + chunk.length)
                end += 1
            name = part.packs[pack]
            file = self._file(name)
            if stop > file.size:
                behind = (
                    number for number in ordered[begin:end] if sum(chunks[number][1:3]) > file.size
                )
                number = next(behind)
                tensor = next(fetch.name for fetch in batch if number in fetch.chain)
                _, offset, length = chunks[number][:3]
                raise ManifestError(
                    f"{self._storage.location}/{name} is cut short at byte {file.size}, or "
                    f"{self._manifest(part)} is malformed: chunks[{number}] (in `{tensor}`) has "
                    f"{length} bytes from byte {offset}"
                )
            with self._readable(name):
                data = memoryview(file.read(start, stop - start))
            self.counters.add(read=len(data))
            for number in ordered[begin:end]:
                chunk = chunks[number]
                blocks[number] = data[chunk.offset - start : chunk.offset - start + chunk.length]
            begin = end
        return blocks

    def _memory(self, size: int) -> NDArray[np.uint8]:
        """Memory of the calling thread, used again: new pages cost as much as decoding."""
        if getattr(self._own, "memory", np.empty(0, np.uint8)).size < size:
            self._own.memory = np.empty(size, np.uint8)
        memory: NDArray[np.uint8] = self._own.memory
        return memory[:size]

    def _file(self, pack: str) -> RangeReader:
        """The open file; of very many, only those that are read are opened."""
        with self._opening:
            if pack not in self._files:
                with self._readable(pack):
                    self._files[pack] = self._storage.open(pack)
            return self._files[pack]

    @contextlib.contextmanager
    def _readable(self, pack: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._storage.location}/{pack} cannot be read: {sentence_of(error)}"
            ) from None

    def _decode(self, alike: list[_Fetch], blocks: dict[int, memoryview]) -> Bytes:
        """The contents of tiles that are coded alike, each from its first base on, checked.

        Args:
            alike: The tiles, with the same codecs and sizes all along their chains.
            blocks: Stored bytes by chunk number.

        Returns:
            (tiles, bytes of each).
        """
        part, itemsize = alike[0].part, alike[0].itemsize
        raw: Bytes | None = None
        for level in reversed(range(len(alike[0].chain))):
            stored = []
            for fetch in alike:
                number = fetch.chain[level]
                block, chunk = blocks[number], part.chunks[number]
                if xxhash.xxh3_128_hexdigest(block) != chunk.stored_hash:
                    cut = "is cut short" if len(block) < chunk.length else "is damaged"
                    raise CheckpointError(
                        f"{self._storage.location}/{part.packs[chunk.pack]} {cut} at byte "
                        f"{chunk.offset} (in `{fetch.name}`): its content does not have the "
                        "checksum that was written"
                    )
                stored.append(block)
            chunk = part.chunks[alike[0].chain[level]]
            delta, plus, coded = part.codecs[chunk.codec].rpartition("+")
            try:
                found = self._coder.decode(coded, stored, itemsize, chunk.size)
            except CheckpointError as error:
                place = f"{self._storage.location}/{part.packs[chunk.pack]}"
                raise CheckpointError(f"{place}, `{alike[0].name}`: {error}") from None
            if plus:
                assert raw is not None
                found = codec.add(delta, found, raw, itemsize)
            raw = found
        assert raw is not None
        for row, fetch in zip(raw, alike, strict=True):
            if xxhash.xxh3_128_hexdigest(row.data) != part.chunks[fetch.chain[0]].content_hash:
                raise CheckpointError(
                    f"{self._storage.location}: `{fetch.name}` decodes to other content than was "
                    "saved"
                )
        return raw


_Copies: TypeAlias = dict[tuple[object, ...], list[tuple[int, "Box", Any, Any, "bytes | None"]]]
"""How pieces lie in what is wanted, to its tiles: many tensors of a model are of one shape."""


def _targets(
    piece: Box, facts: TensorFacts, wants: list[Wanted], copies: _Copies
) -> dict[int, tuple[Box, list[_Target]]]:
    """The tiles of a piece that are wanted, by their numbers, and where they go."""
    found: dict[int, tuple[Box, list[_Target]]] = {}
    for want in wants:
        key = (piece, facts, want.box, want.out.strides)
        if key not in copies:
            copies[key] = [*_copies(piece, facts, want)]
        for number, tile, there, here, copy in copies[key]:
            target = _Target(want.out, there, here, copy)
            found.setdefault(number, (tile, []))[1].append(target)
    return found


def _copies(
    piece: Box, facts: TensorFacts, want: Wanted
) -> Iterator[tuple[int, Box, tuple[slice, ...], tuple[slice, ...], bytes | None]]:
    """Number and box of each tile that is wanted, and where how much of it goes."""
    common = piece.overlap(want.box)
    if common is None:
        return
    # Mostly all of a piece is wanted.
    everything = common == piece
    touched = (
        enumerate(tiles(piece, facts.steps))
        if everything
        else tiles_within(piece, facts.steps, common)
    )
    for number, tile in touched:
        inside = tile if everything else common.overlap(tile)
        assert inside is not None
        here = () if inside == tile else inside.within(tile)
        to, source = Place(want.box, want.out.strides), Place.row_major(tile, facts.itemsize)
        copy = copy_of(inside, facts.itemsize, to, source)
        yield number, tile, inside.within(want.box), here, copy


def _threads() -> int:
    """Threads that the process may use: one core of several, where each rank has its share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(ValueError):
        cores = min(cores or 1, int(os.environ.get("OMP_NUM_THREADS", "")))
    # With two, the one reads while the other decodes.
    return min(max(cores or 1, 2), _MOST_THREADS)


def _alike(batch: list[_Fetch]) -> Iterator[list[_Fetch]]:
    """Tiles with the same codecs and sizes all along their chains, as many as fit into a cache."""
    found: dict[tuple[object, ...], list[_Fetch]] = {}
    for fetch in batch:
        chunks = fetch.part.chunks
        size = chunks[fetch.chain[0]].size
        key = (fetch.itemsize, size, *(chunks[number].codec for number in fetch.chain))
        group = found.setdefault(key, [])
        group.append(fetch)
        if len(group) * size >= _DECODED_BYTES:
            yield found.pop(key)
    yield from found.values()


def _batches(fetches: list[_Fetch], most_bytes: int) -> Iterator[list[_Fetch]]:
    """Tiles of one part whose chunks lie near each other, a few MiB at a time."""

    def place(fetch: _Fetch) -> tuple[int, str, int]:
        chunk: Chunk = fetch.part.chunks[fetch.chain[0]]
        return id(fetch.part), fetch.part.packs[chunk.pack], chunk.offset

    batch: list[_Fetch] = []
    size = 0
    for fetch in sorted(fetches, key=place):
        if batch and (size >= most_bytes or place(fetch)[:2] != place(batch[0])[:2]):
            yield batch
            batch, size = [], 0
        batch.append(fetch)
        size += fetch.part.chunks[fetch.chain[0]].length
    if batch:
        yield batch
