"""Reading boxes of tensors from a version: only the tiles that they touch, each one checked.

Needs no torch. Tiles are fetched in batches of neighbouring chunks by a few threads, checked
against their checksums before and after decoding, and copied into the caller's memory, so the
memory needed beside that is a few batches.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from outlast.checkpoint import codec
from outlast.checkpoint.manifest import ManifestError, collection_paused, tiles, tiles_within
from outlast.checkpoint.storage import sentence_of
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.manifest import Chunk, Part
    from outlast.checkpoint.storage import RangeReader, Storage
    from outlast.checkpoint.version import Contents
    from outlast.state.box import Box

_BATCH_BYTES = 4 << 20
# Of a version with more files than this, only those that are read are opened.
_FILES_HELD = 64
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
    """Destination of some of a tile: an array, which part of it, and of the tile (nothing: all)."""

    out: NDArray[Any]
    there: tuple[slice, ...]
    here: tuple[slice, ...]


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
            batches = list(_batches(self._plan(wanted)))
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
        self._run(list(_batches([*fetches.values()])), done)
        return len(fetches)

    def _run(self, batches: list[list[_Fetch]], done: Callable[[int], None] | None) -> None:
        """Decode batch after batch, while as many more are read ahead as the storage likes.

        Decoding in several threads is slower than in one: they would pass the interpreter's lock to
        and fro between calls of microseconds.
        """
        coming: deque[tuple[list[_Fetch], Future[dict[int, memoryview]]]] = deque()
        ahead = self._storage.reads_at_once
        with ThreadPoolExecutor(ahead, thread_name_prefix="restore") as pool:
            try:
                for number in range(len(batches) + ahead):
                    if number < len(batches):
                        batch = batches[number]
                        coming.append((batch, pool.submit(self._read_chunks, batch)))
                    if number >= ahead:
                        batch, blocks = coming.popleft()
                        size = self._place(batch, blocks.result())
                        if done is not None:
                            done(size)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _plan(self, wanted: list[Wanted]) -> list[_Fetch]:
        """The tiles that overlap with what is wanted, each tile once."""
        by_name: dict[str, list[Wanted]] = {}
        for item in wanted:
            by_name.setdefault(item.name, []).append(item)
        fetches = []
        for name, wants in by_name.items():
            facts = self.contents.catalogue.tensors[name]
            # Several ranks may have saved the same tile.
            taken: set[Box] = set()
            for part in self.contents.parts:
                for piece in part.pieces.get(name, ()):
                    found = _targets(piece.box, facts.steps, wants)
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

    def _place(self, batch: list[_Fetch], blocks: dict[int, memoryview]) -> int:
        """Check, decode and place a batch of tiles; returns the bytes decoded."""
        size = 0
        for alike in _alike(batch):
            raw = self._decode(alike, blocks)
            size += raw.size
            for row, fetch in zip(raw, alike, strict=True):
                for target in fetch.targets:
                    content = row.view(target.out.dtype).reshape(fetch.tile.shape)
                    target.out[target.there] = content[target.here] if target.here else content
        self.counters.add(touched=size)
        return size

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


def _targets(
    piece: Box, steps: tuple[int, ...], wants: list[Wanted]
) -> dict[int, tuple[Box, list[_Target]]]:
    """The tiles of a piece that are wanted, by their numbers, and where they go."""
    found: dict[int, tuple[Box, list[_Target]]] = {}
    for want in wants:
        common = piece.overlap(want.box)
        if common is None:
            continue
        # Mostly all of a piece is wanted.
        everything = common == piece
        touched = (
            enumerate(tiles(piece, steps)) if everything else tiles_within(piece, steps, common)
        )
        for number, tile in touched:
            inside = tile if everything else common.overlap(tile)
            assert inside is not None
            here = () if inside == tile else inside.within(tile)
            target = _Target(want.out, inside.within(want.box), here)
            found.setdefault(number, (tile, []))[1].append(target)
    return found


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


def _batches(fetches: list[_Fetch]) -> Iterator[list[_Fetch]]:
    """Tiles of one part whose chunks lie near each other, a few MiB at a time."""

    def place(fetch: _Fetch) -> tuple[int, str, int]:
        chunk: Chunk = fetch.part.chunks[fetch.chain[0]]
        return id(fetch.part), fetch.part.packs[chunk.pack], chunk.offset

    batch: list[_Fetch] = []
    size = 0
    for fetch in sorted(fetches, key=place):
        if batch and (size >= _BATCH_BYTES or fetch.part is not batch[0].part):
            yield batch
            batch, size = [], 0
        batch.append(fetch)
        size += fetch.part.chunks[fetch.chain[0]].length
    if batch:
        yield batch
