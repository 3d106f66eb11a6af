"""Reading boxes of tensors from a version: only the tiles that they touch, each one checked.

Needs no torch. Tiles are fetched in batches of neighbouring chunks by a few threads, checked
against their checksums before and after decoding, and copied into the caller's memory, so the
memory needed beside that is a few batches.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.storage import sentence_of
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from outlast.checkpoint.format.codec import Bytes
    from outlast.checkpoint.format.geometry import Box
    from outlast.checkpoint.format.manifest import Chunk, Part
    from outlast.checkpoint.format.storage import RangeReader, Storage
    from outlast.checkpoint.format.version import Contents

_BATCH_BYTES = 4 << 20
_FILES_HELD = 256


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
    """What was read.

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


class _Fetch(NamedTuple):
    """A tile to fetch, and all places that want some of it."""

    part: Part
    chunk: int
    tile: Box
    itemsize: int
    wanted: list[Wanted]


class VersionReader:
    """Reads from one complete version.

    Use as a context manager: the version's files are opened at the start, so that they stay
    readable when retention deletes the version meanwhile (on POSIX file systems).

    Args:
        storage: Where the version lies.
        contents: Its manifests.
        threads: How many batches are fetched at a time; default: the cores of this process.

    Raises:
        CheckpointError: When a file is missing.
    """

    def __init__(self, storage: Storage, contents: Contents, threads: int | None = None) -> None:
        self.contents = contents
        self.counters = Counters()
        self._storage = storage
        self._threads = threads or len(os.sched_getaffinity(0))
        self._files: dict[str, RangeReader] = {}
        self._local = threading.local()
        self._opening = threading.Lock()
        packs = sorted(contents.packs)
        try:
            for pack in packs[:_FILES_HELD]:
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
        for each in wanted:
            self.counters.add(needed=each.out.nbytes)
        batches = list(_batches(self._plan(wanted)))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="restore") as pool:
            futures = [pool.submit(self._fetch, batch) for batch in batches]
            try:
                for future in futures:
                    size = future.result()
                    if done is not None:
                        done(size)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def tiles(self) -> Iterator[tuple[str, Box, Bytes]]:
        """Every saved tile: tensor name, box, content; for checks of the whole version."""
        for part in self.contents.parts:
            for name in part.pieces:
                facts = self.contents.catalogue.tensors[name]
                for tile, chunk in part.tiles(name, facts):
                    blocks = self._read_chunks(part, [chunk])
                    yield name, tile, self._decode(part, chunk, facts.itemsize, blocks, name)

    def check(self, done: Callable[[int], None] | None = None) -> int:
        """Decode and check everything that is stored; returns the number of chunks.

        Raises:
            CheckpointError: Naming the first tile that is not as written.
        """
        seen: set[tuple[str, int, int]] = set()
        fetches = []
        for part in self.contents.parts:
            for name in part.pieces:
                facts = self.contents.catalogue.tensors[name]
                for tile, number in part.tiles(name, facts):
                    chunk = part.chunks[number]
                    key = (part.packs[chunk.pack], chunk.offset, facts.itemsize)
                    if key not in seen:
                        seen.add(key)
                        nowhere = Wanted(name, tile, np.empty(0, np.uint8))
                        fetches.append(_Fetch(part, number, tile, facts.itemsize, [nowhere]))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="verify") as pool:
            for size in pool.map(self._fetch, list(_batches(fetches))):
                if done is not None:
                    done(size)
        return len(seen)

    def _plan(self, wanted: list[Wanted]) -> list[_Fetch]:
        """The tiles that overlap with what is wanted, each tile once."""
        by_name: dict[str, list[Wanted]] = {}
        for each in wanted:
            by_name.setdefault(each.name, []).append(each)
        fetches = []
        for name, wants in by_name.items():
            facts = self.contents.catalogue.tensors[name]
            taken: set[Box] = set()
            for part in self.contents.parts:
                for tile, chunk in part.tiles(name, facts):
                    hits = [want for want in wants if want.box.overlap(tile) is not None]
                    # Several ranks may have saved the same tile.
                    if hits and tile not in taken:
                        taken.add(tile)
                        fetches.append(_Fetch(part, chunk, tile, facts.itemsize, hits))
        return fetches

    def _fetch(self, batch: list[_Fetch]) -> int:
        """Read, check, decode and place a batch of tiles; returns the bytes decoded."""
        size = 0
        part = batch[0].part
        blocks = self._read_chunks(part, [fetch.chunk for fetch in batch])
        for fetch in batch:
            name = fetch.wanted[0].name
            raw = self._decode(part, fetch.chunk, fetch.itemsize, blocks, name)
            size += raw.size
            for want in fetch.wanted:
                common = want.box.overlap(fetch.tile)
                if common is not None and want.out.size:
                    tile = raw.view(want.out.dtype).reshape(fetch.tile.shape)
                    want.out[common.within(want.box)] = tile[common.within(fetch.tile)]
        self.counters.add(touched=size)
        return size

    @property
    def _coder(self) -> codec.Coder:
        """This thread's own."""
        if not hasattr(self._local, "coder"):
            self._local.coder = codec.Coder()
        coder: codec.Coder = self._local.coder
        return coder

    def _read_chunks(self, part: Part, numbers: list[int]) -> dict[int, memoryview]:
        """The stored bytes of chunks and of their bases, neighbours in one read."""
        chain = {number: part.chunks[number] for first in numbers for number in part.chain(first)}
        ordered = sorted(chain, key=lambda number: (chain[number].pack, chain[number].offset))
        blocks: dict[int, memoryview] = {}
        begin = 0
        while begin < len(ordered):
            first = chain[ordered[begin]]
            end, stop = begin, first.offset
            while end < len(ordered):
                chunk = chain[ordered[end]]
                if chunk.pack != first.pack or chunk.offset > stop:
                    break
                stop = max(stop, chunk.offset + chunk.length)
                end += 1
            data = memoryview(self._read(part.packs[first.pack], first.offset, stop - first.offset))
            for number in ordered[begin:end]:
                chunk = chain[number]
                at = chunk.offset - first.offset
                blocks[number] = data[at : at + chunk.length]
            begin = end
        return blocks

    def _file(self, pack: str) -> RangeReader:
        """The open file; of very many, only those that are read are opened."""
        with self._opening:
            if pack not in self._files:
                try:
                    self._files[pack] = self._storage.open(pack)
                except OSError as error:
                    raise CheckpointError(
                        f"{self._storage.location}/{pack} cannot be read: {sentence_of(error)}"
                    ) from None
            return self._files[pack]

    def _read(self, pack: str, offset: int, length: int) -> bytes:
        try:
            data = self._file(pack).read(offset, length)
        except OSError as error:
            raise CheckpointError(
                f"{self._storage.location}/{pack} cannot be read: {sentence_of(error)}"
            ) from None
        self.counters.add(read=len(data))
        return data

    def _decode(
        self, part: Part, number: int, itemsize: int, blocks: dict[int, memoryview], name: str
    ) -> Bytes:
        """The content of a chunk, from its first base on, with every checksum checked."""
        raw: Bytes | None = None
        for each in reversed(part.chain(number)):
            chunk = part.chunks[each]
            where = f"{self._storage.location}/{part.packs[chunk.pack]}"
            stored = blocks[each]
            if xxhash.xxh3_128_hexdigest(stored) != chunk.stored_hash:
                cut = "is cut short" if len(stored) < chunk.length else "is damaged"
                raise CheckpointError(
                    f"{where} {cut} at byte {chunk.offset} (in `{name}`): its content does not "
                    "have the checksum that was written"
                )
            delta, plus, coded = part.codecs[chunk.codec].rpartition("+")
            try:
                found = self._coder.decode(coded, stored, itemsize, chunk.size)
            except CheckpointError as error:
                raise CheckpointError(f"{where}, `{name}`: {error}") from None
            if plus:
                assert raw is not None
                found = codec.add(delta, found, raw, itemsize)
            raw = found
        assert raw is not None
        if xxhash.xxh3_128_hexdigest(raw.data) != part.chunks[number].content_hash:
            raise CheckpointError(
                f"{self._storage.location}: `{name}` decodes to other content than was saved"
            )
        return raw


def _batches(fetches: list[_Fetch]) -> Iterator[list[_Fetch]]:
    """Tiles of one part whose chunks lie near each other, a few MiB at a time."""

    def place(fetch: _Fetch) -> tuple[int, str, int]:
        chunk: Chunk = fetch.part.chunks[fetch.chunk]
        return id(fetch.part), fetch.part.packs[chunk.pack], chunk.offset

    batch: list[_Fetch] = []
    size = 0
    for fetch in sorted(fetches, key=place):
        if batch and (size >= _BATCH_BYTES or fetch.part is not batch[0].part):
            yield batch
            batch, size = [], 0
        batch.append(fetch)
        size += fetch.part.chunks[fetch.chunk].length
    if batch:
        yield batch
