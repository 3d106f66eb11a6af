"""Reading boxes of tensors from a version: only the tiles that they touch, each one checked.

Needs no torch. Tiles are fetched in batches of neighbouring chunks by a few threads, checked
against their checksums, and copied into the caller's memory, so the memory needed beside that is a
few batches.

Compiled code checks, decodes and copies a batch in one call (see `compiled`), on as many threads as
the process may use cores; plans are arrays, so that a tile costs the interpreter nothing. What it
cannot do goes through NumPy: differences to older versions, blosc2's codes, several places for one
tile, and whatever it finds wrong, so that one place says what is wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
from outlast.checkpoint.storage import UnreadableError, answer_of
from outlast.checkpoint.version import unreadable
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.compiled import Table
    from outlast.checkpoint.manifest import Chunk, Part, Piece, TensorFacts
    from outlast.checkpoint.storage import RangeReader, Storage
    from outlast.checkpoint.version import Contents
    from outlast.state.box import Box

S = TypeVar("S")
T = TypeVar("T")

_BATCH_BYTES = 4 << 20
_MOST_THREADS = 8
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
        timeout_seconds: Longest wait for the storage to answer one request; None: no limit.

    Raises:
        CheckpointError: When a file is missing.
        UnreadableError: When the storage does not answer, here or later.
    """

    def __init__(
        self, storage: Storage, contents: Contents, timeout_seconds: float | None = None
    ) -> None:
        self.contents = contents
        self.counters = Counters()
        self._storage = storage
        self._coder = codec.Coder()
        self._files: dict[str, RangeReader] = {}
        self._opening = threading.Lock()
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._placing = 0
        self._given_up = False
        packs = sorted(contents.packs)
        try:
            for _ in self._in_turn(self._file, packs if len(packs) <= _FILES_HELD else (), 1):
                pass
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, unless the storage did not answer, when they may be in use."""
        if not self._given_up:
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
        by_name: dict[str, list[Wanted]] = {}
        for item in wanted:
            self.counters.add(needed=item.out.nbytes)
            by_name.setdefault(item.name, []).append(item)
        rest: list[_Fetch] = []
        with collection_paused():
            plan = _CompiledPlan.of(self)
            for name, wants in by_name.items():
                if plan is None or len(wants) > 1:
                    rest += self._plan(name, wants)
                    continue
                pieces = [
                    (part, piece)
                    for part in self.contents.parts
                    for piece in part.pieces.get(name, ())
                ]
                # Several ranks may have saved the same tile.
                taken: set[Box] | None = set() if len(pieces) > 1 else None
                for part, piece in pieces:
                    rest += plan.add(part, name, piece, wants[0], taken)
        if plan is not None:
            plan.run(done)
        self._run([*_batches(rest)], done)

    def check(self, done: Callable[[int], None] | None = None) -> int:
        """Decode and check everything that is stored; returns the number of chunks.

        Raises:
            CheckpointError: Naming the first tile that is not as written.
        """
        plan = _CompiledPlan.of(self)
        fetches: dict[tuple[str, int, int], _Fetch] = {}

        def note(fetch: _Fetch) -> None:
            chunk = fetch.part.chunks[fetch.chain[0]]
            key = fetch.part.packs[chunk.pack], chunk.offset, fetch.itemsize
            fetches.setdefault(key, fetch)

        for part in self.contents.parts:
            for name, pieces in part.pieces.items():
                if plan is not None:
                    for piece in pieces:
                        for fetch in plan.add(part, name, piece, None, None):
                            note(fetch)
                    continue
                facts = self.contents.catalogue.tensors[name]
                for tile, number in part.tiles(name, facts):
                    note(self._fetch(part, name, number, tile, []))
        checked = 0 if plan is None else plan.run(done, once=True)
        self._run([*_batches([*fetches.values()])], done)
        return checked + len(fetches)

    def _run(self, batches: list[list[_Fetch]], done: Callable[[int], None] | None) -> None:
        """Decode batch after batch, while a few more are read ahead.

        Decoding in several threads is slower than in one: they would pass the interpreter's lock to
        and fro between calls of microseconds.
        """
        blocks = self._in_turn(self._read_chunks, batches, self._storage.reads_at_once)
        with contextlib.closing(blocks):
            for batch, found in zip(batches, blocks, strict=True):
                with self._unless_given_up():
                    size = self._place(batch, found)
                if done is not None:
                    done(size)

    def _in_turn(self, work: Callable[[S], T], items: Iterable[S], threads: int) -> Generator[T]:
        """Do what asks the storage, in several threads, each one item ahead; results in order.

        Where the storage does not answer, nobody waits for them, not even the end of the program.
        """
        asked: SimpleQueue[tuple[Future[T], S] | None] = SimpleQueue()
        coming: deque[Future[T]] = deque()
        location, seconds = self._storage.location, self._timeout_seconds

        def serve() -> None:
            for future, item in iter(asked.get, None):
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work(item))
                    except BaseException as error:
                        future.set_exception(error)

        workers: list[threading.Thread] = []
        try:
            for item in items:
                if len(workers) < threads:
                    workers.append(threading.Thread(target=serve, name="restore", daemon=True))
                    workers[-1].start()
                coming.append(Future())
                asked.put((coming[-1], item))
                if len(coming) > 2 * threads:
                    yield answer_of(coming[0], seconds, location)
                    coming.popleft()
            while coming:
                yield answer_of(coming[0], seconds, location)
                coming.popleft()
        except UnreadableError:
            if not coming[0].done():
                seconds = 0.0
            raise
        finally:
            for future in coming:
                future.cancel()
            for _ in workers:
                asked.put(None)
            for worker in workers:
                worker.join(seconds)
                if worker.is_alive():
                    self._give_up()
                    seconds = 0.0

    @contextlib.contextmanager
    def _unless_given_up(self) -> Iterator[None]:
        """Write to the caller's memory in the block, which may be the caller's again by now."""
        with self._changed:
            if self._given_up:
                raise UnreadableError(f"the restore from {self._storage.location} was given up")
            self._placing += 1
        try:
            yield
        finally:
            with self._changed:
                self._placing -= 1
                self._changed.notify_all()

    def _give_up(self) -> None:
        """Let threads that still wait for the storage write nothing when it answers."""
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: not self._placing)

    def _plan(self, name: str, wants: list[Wanted]) -> list[_Fetch]:
        """The tiles of a tensor that overlap with what is wanted, each tile once."""
        facts = self.contents.catalogue.tensors[name]
        fetches = []
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
                    f"{self._manifest(part)} is malformed: chunks[{number}] (in `{tensor:.200}`) "
                    f"has {length} bytes from byte {offset}"
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
            raise unreadable(self._storage, pack, error) from None

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
                        f"{chunk.offset} (in `{fetch.name:.200}`): its content does not have the "
                        "checksum that was written"
                    )
                stored.append(block)
            chunk = part.chunks[alike[0].chain[level]]
            delta, plus, coded = part.codecs[chunk.codec].rpartition("+")
            try:
                found = self._coder.decode(coded, stored, itemsize, chunk.size)
            except CheckpointError as error:
                place = f"{self._storage.location}/{part.packs[chunk.pack]}"
                raise CheckpointError(f"{place}, `{alike[0].name:.200}`: {error}") from None
            if plus:
                assert raw is not None
                found = codec.add(delta, found, raw, itemsize)
            raw = found
        assert raw is not None
        for row, fetch in zip(raw, alike, strict=True):
            if xxhash.xxh3_128_hexdigest(row.data) != part.chunks[fetch.chain[0]].content_hash:
                raise CheckpointError(
                    f"{self._storage.location}: `{fetch.name:.200}` decodes to other content than "
                    "was saved"
                )
        return raw


class _Shape(NamedTuple):
    """The tiles of a piece that go to an array; alike for all tensors that lie alike.

    Attributes:
        boxes: Of the tiles.
        numbers: (tiles,) their numbers in the piece.
        bytes: (tiles,) of each.
        copies: (tiles,) of `COPY`.
        able: (tiles,) whether compiled code can copy it.
    """

    boxes: list[Box]
    numbers: NDArray[np.intp]
    bytes: NDArray[np.int64]
    copies: NDArray[np.void]
    able: NDArray[np.bool_]

    @classmethod
    def of(cls, piece: Box, facts: TensorFacts, to: Place | None) -> _Shape | None:
        """The tiles of `piece` within `to`; all of them where it is None, to go nowhere."""
        common = piece if to is None else piece.overlap(to.box)
        if common is None or not common.elements:
            return None
        found = [*_touched(piece, facts.steps, common)]
        copies, nowhere = [], bytes(COPY.itemsize)
        for _, tile in found:
            copy: bytes | None = nowhere
            if to is not None:
                source = Place.row_major(tile, facts.itemsize)
                copy = copy_of(common.overlap(tile) or tile, facts.itemsize, to, source)
            copies.append(copy)
        return cls(
            [tile for _, tile in found],
            np.array([number for number, _ in found]),
            np.array([tile.elements for _, tile in found]) * facts.itemsize,
            np.frombuffer(b"".join(copy or nowhere for copy in copies), COPY),
            np.array([copy is not None for copy in copies]),
        )


class _Selection(NamedTuple):
    """Tiles of a piece in a plan: their chunks and boxes, and where they go."""

    part: Part
    name: str
    numbers: NDArray[np.intp]
    boxes: list[Box]
    want: Wanted | None


class _CompiledPlan:
    """Tiles that compiled code reads, checks, decodes and places, as arrays.

    Args:
        reader: Of their version.
    """

    @classmethod
    def of(cls, reader: VersionReader) -> _CompiledPlan | None:
        """An empty one; None where there is no compiled code."""
        return None if CompiledTiles.new() is None else cls(reader)

    def __init__(self, reader: VersionReader) -> None:
        self._reader = reader
        self._selections: list[_Selection] = []
        self._tables: list[Table] = []
        self._packs: list[NDArray[np.intp]] = []
        self._numbers: dict[str, int] = {}
        self._of_part: dict[int, tuple[Table, NDArray[np.intp]]] = {}
        self._shapes: dict[tuple[object, ...], _Shape | None] = {}
        self._own = threading.local()
        self._failing = threading.Lock()

    def add(
        self, part: Part, name: str, piece: Piece, want: Wanted | None, taken: set[Box] | None
    ) -> list[_Fetch]:
        """Add the tiles of a piece that are wanted; returns those that NumPy has to read.

        Args:
            part: Which has the piece.
            name: Tensor.
            piece: What was saved of it.
            want: Where to; None: they are checked alone.
            taken: Boxes that were added before, and are not again; None: there are none.
        """
        facts = self._reader.contents.catalogue.tensors[name]
        to = None if want is None else Place(want.box, want.out.strides)
        key = (piece.box, facts, to)
        if key not in self._shapes:
            self._shapes[key] = _Shape.of(piece.box, facts, to)
        if (shape := self._shapes[key]) is None:
            return []
        stored, packs = self._stored(part)
        numbers = np.array(piece.chunks)[shape.numbers]
        table = stored[numbers]
        wrong = table["bytes"] != shape.bytes
        if wrong.any():
            # It says what is wrong.
            row = int(wrong.argmax())
            self._reader._fetch(part, name, int(numbers[row]), shape.boxes[row], [])
        able, boxes = shape.able & (table["codec"] >= 0), shape.boxes
        ready = able
        if taken is not None:
            fresh = np.array([box not in taken for box in boxes])
            taken.update(boxes)
            ready = able & fresh
        table["copy"], table["itemsize"] = shape.copies, facts.itemsize
        table["target"] = 0 if want is None else address_of(want.out)
        chosen = _Selection(part, name, numbers, boxes, want)
        rest: list[_Fetch] = []
        if not ready.all():
            unable = ~able if taken is None else fresh & ~able
            rest = [self._fetch(chosen, row) for row in np.flatnonzero(unable).tolist()]
            kept = np.flatnonzero(ready)
            table, numbers = table[kept], numbers[kept]
            chosen = _Selection(part, name, numbers, [boxes[row] for row in kept], want)
        if len(table):
            self._selections.append(chosen)
            self._tables.append(table)
            self._packs.append(packs[numbers])
        return rest

    def run(self, done: Callable[[int], None] | None, *, once: bool = False) -> int:
        """Read all tiles, several batches at a time; returns how many there are.

        Args:
            done: Called with the number of bytes that were decoded, after each batch.
            once: Whether chunks that stand for several tiles are read once.
        """
        if not self._tables:
            return 0
        # `np.concatenate` compares the fields of any two.
        table = np.frombuffer(b"".join(table.data for table in self._tables), TILE)
        pack = np.concatenate(self._packs)
        order = np.lexsort((table["itemsize"], table["stored"], pack))
        if once:
            keys = np.stack([pack, table["stored"], table["itemsize"]])[:, order]
            order = order[np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)])]
        table, pack = table[order], pack[order]
        turn = np.cumsum(table["length"]) // _BATCH_BYTES
        cuts = np.flatnonzero((np.diff(pack) != 0) | (np.diff(turn) != 0)) + 1
        bounds = [0, *cuts.tolist(), len(table)]
        names = [*self._numbers]

        def read(span: tuple[int, int]) -> int:
            batch = slice(*span)
            return self._read(table[batch], names[pack[span[0]]], order[batch])

        threads = max(_threads(), self._reader._storage.reads_at_once)
        sizes = self._reader._in_turn(read, itertools.pairwise(bounds), threads)
        with contextlib.closing(sizes):
            for size in sizes:
                if done is not None:
                    done(size)
        return len(table)

    def _read(self, table: Table, pack: str, places: NDArray[np.intp]) -> int:
        """Read, check, decode and place tiles of one file, in their order in it.

        Args:
            table: Which, with offsets in place of addresses.
            pack: The file.
            places: Their places in the plan, for those that are wrong.

        Returns:
            Bytes decoded.
        """
        reader = self._reader
        if not hasattr(self._own, "compiled"):
            self._own.compiled, self._own.memory = CompiledTiles.new(), np.empty(0, np.uint8)
        begin = table["stored"]
        reach = np.maximum.accumulate(begin + table["length"])
        # Neighbours are read at once.
        first = np.concatenate([[0], np.flatnonzero(begin[1:] > reach[:-1]) + 1])
        last = np.append(first[1:], len(table)) - 1
        starts, sizes = begin[first], reach[last] - begin[first]
        into = np.cumsum(sizes) - sizes
        file, size = reader._file(pack), int(sizes.sum())
        right = np.zeros(len(table), np.bool_)
        with contextlib.ExitStack() as stack:
            memory: NDArray[np.uint8] | None = None
            if int(reach[-1]) > file.size:
                size = 0
            elif len(first) == 1:
                memory = stack.enter_context(file.mapped(int(starts[0]), size))
            if memory is None and size:
                if self._own.memory.size < size:
                    # Memory that is used again: new pages cost as much as decoding.
                    self._own.memory = np.empty(size, np.uint8)
                memory = self._own.memory[:size]
                for start, place, length in zip(starts, into, sizes, strict=True):
                    span = memory[place : place + length]
                    with reader._readable(pack):
                        # What lies behind an end that came early has no right checksum.
                        span[file.read_into(int(start), span) :] = 0
            if memory is not None:
                reader.counters.add(read=size)
                table["stored"] += np.repeat(address_of(memory) + into - starts, last - first + 1)
                with reader._unless_given_up():
                    right = self._own.compiled.read(table)
        if not right.all():
            ends = np.cumsum([len(table) for table in self._tables])
            wrong = places[~right]
            with self._failing:
                for place, item in zip(wrong, np.searchsorted(ends, wrong, "right"), strict=True):
                    chosen = self._selections[item]
                    fetch = self._fetch(chosen, int(place - ends[item] + len(chosen.numbers)))
                    reader._run([[fetch]], None)
        decoded = int(table["bytes"].sum())
        reader.counters.add(touched=decoded)
        return decoded

    def _fetch(self, chosen: _Selection, row: int) -> _Fetch:
        """One tile, as NumPy reads it."""
        box, want, targets = chosen.boxes[row], chosen.want, []
        if want is not None and (inside := box.overlap(want.box)) is not None:
            here = () if inside == box else inside.within(box)
            targets.append(_Target(want.out, inside.within(want.box), here))
        return self._reader._fetch(chosen.part, chosen.name, int(chosen.numbers[row]), box, targets)

    def _stored(self, part: Part) -> tuple[Table, NDArray[np.intp]]:
        """The chunks of a part: (chunks,) of `TILE`, and the numbers of their files.

        A codec of -1 is none of the compiled ones.
        """
        if id(part) not in self._of_part:
            table = np.zeros(len(part.chunks), TILE)
            pack, begin, length, coded, size, _, content, *_ = zip(*part.chunks, strict=True)
            codes = [CODECS.index(name) if name in CODECS else -1 for name in part.codecs]
            table["stored"], table["length"], table["bytes"] = begin, length, size
            table["codec"] = np.array(codes)[[*coded]]
            table["content_hash"] = hashes_of(content)
            names = [self._numbers.setdefault(name, len(self._numbers)) for name in part.packs]
            self._of_part[id(part)] = table, np.array(names)[[*pack]]
        return self._of_part[id(part)]


def _threads() -> int:
    """Threads that the process may use: one core of several, where each rank has its share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(ValueError):
        cores = min(cores or 1, int(os.environ.get("OMP_NUM_THREADS", "")))
    # With two, the one reads while the other decodes.
    return min(max(cores or 1, 2), _MOST_THREADS)


def _touched(piece: Box, steps: tuple[int, ...], common: Box) -> Iterator[tuple[int, Box]]:
    """The tiles of a piece that a part of it touches; mostly it is all of it."""
    return enumerate(tiles(piece, steps)) if common == piece else tiles_within(piece, steps, common)


def _targets(
    piece: Box, steps: tuple[int, ...], wants: list[Wanted]
) -> dict[int, tuple[Box, list[_Target]]]:
    """The tiles of a piece that are wanted, by their numbers, and where they go."""
    found: dict[int, tuple[Box, list[_Target]]] = {}
    for want in wants:
        common = piece.overlap(want.box)
        if common is None:
            continue
        for number, tile in _touched(piece, steps, common):
            inside = tile if common == piece else common.overlap(tile)
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


def untied(contents: Contents, tied: list[list[str]]) -> str:
    """The sentence on a live tensor of several names that were saved with different content."""
    for first, *others in tied:
        for other in others:
            if _differ(contents, first, other):
                return (
                    f"`{first}` and `{other}` are one tensor in the model, but were saved with "
                    "different content; untie them"
                )
    return ""


def _differ(contents: Contents, first: str, other: str) -> bool:
    facts, known = contents.catalogue.tensors, {}
    # What is alike was stored once; rounded tensors are only nearly alike.
    parts = [
        part
        for part in contents.parts
        if part.pieces.get(first) != part.pieces.get(other) and not part.bounds
    ]
    for part in parts:
        for tile, number in part.tiles(first, facts[first]):
            known[tile] = part.chunks[number].content_hash
    found = ((part, pair) for part in parts for pair in part.tiles(other, facts[other]))
    return any(
        known.get(tile, part.chunks[number].content_hash) != part.chunks[number].content_hash
        for part, (tile, number) in found
    )
