"""Tiers: copies of versions in slower, safer places than the one that a store saves to.

    memory (tmpfs)  ->  node-local disk  ->  shared file system or object store

A version is saved to the first tier; a background thread for each lower tier copies every n-th one
on, file by file: packs, catalogue, manifests, and last the seal, so a version that was copied by
half is none. A tier copies from the tier before it if that has the version, else from the first.
Retention of a tier leaves what a lower tier still waits for. A copy that fails is reported and not
tried again: the next version that is due takes its place. Beside those that are due, the newest
version is copied when the store is closed, and the newest one that the session before did not copy
any more at the first save of the next.

Of a *private* tier, such as a node's own disk, other ranks see nothing. Each rank has a store of
its own there, in a folder ``rank-00003``, with all that it holds. Copied on to a shared tier, the
parts of all ranks make a version as any other, in which replicated tensors lie once per rank.

A lower tier that cannot be reached hinders no save. While it is away, its sessions are not known,
and a restore that finds no version in the other tiers fails rather than to start anew.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from outlast.checkpoint.format.geometry import Box, covers
from outlast.checkpoint.format.manifest import Catalogue, Part, root_of
from outlast.checkpoint.format.retention import Retention, prune
from outlast.checkpoint.format.storage import sentence_of, storage_of
from outlast.checkpoint.format.version import (
    SEAL,
    Contents,
    UnfinishedError,
    is_published,
    list_versions,
    load,
    seal,
    write_seal,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Sequence

    from outlast.checkpoint.agreement import Ranks, Signals
    from outlast.checkpoint.format.manifest import Chunk
    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Version

_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 16 << 10
# With a bandwidth cap, blocks are as small as this time allows, so that the flow is even.
_BLOCK_SECONDS = 0.1
_RESULTS = 1000
_JOIN_SECONDS = 1.0
_PART = re.compile(r"rank-\d{5,}-of-(\d{5,})\.json", re.ASCII)


@dataclass(frozen=True)
class Tier:
    """A lower tier of a store.

    Attributes:
        place: A directory, made if missing, or any fsspec URL.
        every: Every how many-th save of the store is copied here, whatever the tiers between do,
            counted from the first save of this `CheckpointStore`.
        keep: Newest versions kept here, or a `Retention`.
        bytes_per_second: Most that each rank writes here; None: no limit.
        private: Whether ranks do not see each other's files here, as on a node's own disk.
    """

    place: str | os.PathLike[str]
    every: int = 1
    keep: int | Retention = 3
    bytes_per_second: float | None = None
    private: bool = False

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if self.every < 1:
            raise CheckpointError(f"every = {self.every} of tier {self.place} must be at least 1")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise CheckpointError(
                f"bytes_per_second = {self.bytes_per_second} of tier {self.place} must be larger "
                "than 0, or None for no limit"
            )


@dataclass(frozen=True)
class DrainResult:
    """How the copy of one version to a lower tier went.

    Attributes:
        place: The tier.
        step: The version's step; -1 for what concerns the tier and no version.
        seconds: Time of the copy, without the wait before it.
        bytes: Bytes that this rank wrote there.
        error: Why it failed, or None.
        skipped: Why it was not made, although nothing failed; else empty.
    """

    place: str
    step: int
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Place:
    """One tier as one rank sees it.

    Attributes:
        storage: Where; of a private tier, the folder of this rank.
        retention: What stays there.
        private: Whether other ranks do not see it.
        rank: This rank.
        world_size: How many save together.
    """

    storage: Storage
    retention: Retention
    private: bool
    rank: int
    world_size: int

    @classmethod
    def of(
        cls,
        place: str | os.PathLike[str],
        keep: int | Retention,
        ranks: Ranks,
        *,
        private: bool,
    ) -> Place:
        """The place of this rank."""
        storage = storage_of(place)
        if private:
            storage = storage_of(f"{storage.location}/rank-{ranks.rank:05d}")
        retention = keep if isinstance(keep, Retention) else Retention(keep)
        return cls(storage, retention, private, ranks.rank, ranks.size)

    @property
    def keeps_house(self) -> bool:
        """Whether this rank seals and prunes here."""
        return self.private or self.rank == 0

    def load(self, version: Version) -> Contents:
        """The manifests of a version; in a private place those of this rank alone.

        Raises:
            CheckpointError: When something is missing or damaged.
        """
        try:
            return self._own(version) if self.private else load(self.storage, version)
        except CheckpointError:
            raise
        except Exception as error:  # clients of object stores raise what they like
            raise CheckpointError(
                f"{self.storage.location}/{version.folder} cannot be read: {_words(error)}"
            ) from error

    def newest(self) -> Version | None:
        """The newest complete version, verified or not."""
        return next(filter(self._holds, reversed(list_versions(self.storage))), None)

    def seal(self, version: Version) -> None:
        """Seal a version: in a shared place the whole, in a private one what this rank has.

        Raises:
            CheckpointError: When it is not complete.
            OSError: When the storage fails.
        """
        if not self.private:
            seal(self.storage, version)
            return
        write_seal(self.storage, self.load(version))

    def prune(self, protected: Collection[Version]) -> None:
        """Delete what need not stay, if that is this rank's part; failures wait for next time."""
        if self.keeps_house:
            with contextlib.suppress(OSError, CheckpointError):
                prune(self.storage, self.retention, protected=protected, read=self._sealed)

    def _own(self, version: Version) -> Contents:
        name = version.part_name(self.rank, self.world_size)
        if name.partition("/")[2] not in self.storage.files(version.folder):
            raise UnfinishedError(f"{self.storage.location}/{name} is missing")
        content = self._read(name)
        part = Part.from_bytes(content, f"{self.storage.location}/{name}")
        listed = version.catalogue_name(part.catalogue)
        catalogue = self._read(listed)
        if root_of(catalogue) != part.catalogue:
            raise CheckpointError(f"{self.storage.location}/{listed} is not that of its version")
        return Contents(
            version,
            Catalogue.from_bytes(catalogue, f"{self.storage.location}/{listed}"),
            [part],
            [root_of(content)],
            [],
        )

    def _sealed(self, version: Version) -> Contents:
        """As `load`, but what other ranks may not have is not complete in a private place."""
        if self.private and SEAL not in self.storage.files(version.folder):
            raise UnfinishedError(f"{self.storage.location}/{version.folder} has no seal")
        return self.load(version)

    def _holds(self, version: Version) -> bool:
        if not self.private:
            return is_published(self.storage, version)
        try:
            self.load(version)
        except CheckpointError:
            return False
        return True

    def _read(self, name: str) -> bytes:
        try:
            return self.storage.read(name)
        except OSError as error:
            raise CheckpointError(
                f"{self.storage.location}/{name} cannot be read: {sentence_of(error)}"
            ) from None


def not_held(contents: Contents, boxes: dict[str, Box]) -> str:
    """The first tensor of which `contents` lacks a part of the given box; empty when none."""
    for name, box in boxes.items():
        pieces = [piece.box for part in contents.parts for piece in part.pieces.get(name, ())]
        if name not in contents.catalogue.tensors or box in pieces or not box.elements:
            continue
        common = (box.overlap(piece) for piece in pieces if len(piece.shape) == len(box.shape))
        inside = [
            Box(tuple(a - b for a, b in zip(each.offset, box.offset, strict=True)), each.shape)
            for each in common
            if each is not None
        ]
        if not covers(box.shape, inside):
            return name
    return ""


@dataclass
class _Job:
    """A version on its way to a tier, and the place that it is copied from."""

    version: Version
    source: int


class Tiers:
    """All places of a store, nearest first, and the threads that copy versions downwards.

    At most one version waits for each tier, beside one that a tier before it is just being given.
    Ranks that coordinate copy the same versions: rank 0 says which are dropped, when a copy begins
    and whether all parts arrived.

    Args:
        first: Where the store saves.
        lower: The other tiers.
        ranks: This process among those that save together.
        timeout_seconds: Longest wait for the copies.

    Raises:
        CheckpointError: When the tiers are in an order that cannot work, or two are the same.
    """

    def __init__(
        self, first: Place, lower: Sequence[Tier], ranks: Ranks, timeout_seconds: float
    ) -> None:
        self.places = [
            first,
            *(Place.of(each.place, each.keep, ranks, private=each.private) for each in lower),
        ]
        _check_order(self.places)
        count = len(self.places)
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._every = [1, *(each.every for each in lower)]
        self._signals: Signals | None = None
        self._coordinated = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._pace = [_Pace(None, self._stop)] + [
            _Pace(each.bytes_per_second, self._stop) for each in lower
        ]
        self._waiting: list[list[_Job]] = [[] for _ in range(count)]
        self._current: list[_Job | None] = [None] * count
        self._slots = [0] * count
        self._last: list[Version | None] = [None] * count
        self._threads: dict[int, threading.Thread] = {}
        self._results: deque[DrainResult] = deque(maxlen=_RESULTS)

    @property
    def first(self) -> Place:
        """Where the store saves."""
        return self.places[0]

    def listed(self) -> tuple[list[tuple[Place, Version]], dict[str, str]]:
        """All versions, complete or not: newest first, of equal ones the nearest first.

        All ranks call it together; those of private tiers are listed if any rank has them.

        Returns:
            The versions, and a sentence for the location of each tier that cannot be listed.

        Raises:
            CheckpointError: When the first tier cannot be listed.
        """
        mine: list[tuple[int, Version]] = []
        problems: dict[int, str] = {}
        for index, place in enumerate(self.places):
            if place.keeps_house:
                try:
                    mine += [(index, version) for version in list_versions(place.storage)]
                except Exception as error:  # clients of object stores raise what they like
                    problems[index] = f"{place.storage.location} cannot be listed: {_words(error)}"
        found: set[tuple[int, Version]] = set()
        for versions, troubles in self._ranks.gather((mine, problems)):
            found.update(versions)
            problems = {**troubles, **problems}
        if 0 in problems:
            raise CheckpointError(problems[0])
        ordered = sorted(found, key=lambda each: (each[1], -each[0]), reverse=True)
        return [(self.places[index], version) for index, version in ordered], {
            self.places[index].storage.location: problems[index] for index in sorted(problems)
        }

    def newest(self) -> Version | None:
        """The newest complete version of the first tier and of those that answer."""
        found = [self.first.newest(), *map(_head, self.places[1:])]
        return max((each for each in found if each is not None), default=None)

    def begin(self, signals: Signals, *, coordinated: bool) -> None:
        """Start a session; what the one before saved and did not copy any more is copied now.

        All ranks call it together, before the first version is offered.

        Args:
            signals: Words between the ranks.
            coordinated: Whether the ranks use them.
        """
        if self._signals is not None or len(self.places) == 1:
            return
        self._signals, self._coordinated = signals, coordinated
        mine = [_head(place) if place.keeps_house else None for place in self.places]
        everyone = self._ranks.gather(mine)
        heads = [
            (everyone[0][index] if len({each[index] for each in everyone}) == 1 else None)
            if place.private
            else everyone[0][index]
            for index, place in enumerate(self.places)
        ]
        with self._changed:
            self._last = [None, *heads[1:]]
            for index in range(1, len(self.places)):
                above = [(head, -n) for n, head in enumerate(heads[:index]) if head is not None]
                version, source = max(above, default=(None, 0))
                held = heads[index]
                if version is not None and (held is None or version > held):
                    self._put(index, _Job(version, -source))

    def offer(self, version: Version, number: int) -> None:
        """A version of the first tier was published, by the store's save `number` (from 1).

        Rank 0 calls it before the others hear of the publication.
        """
        if self._signals is None:
            return
        key = f"{version.folder}/dropped"
        with self._changed:
            self._last[0] = version
            slots = [number // every for every in self._every]
            due = [n for n in range(1, len(slots)) if slots[n] > self._slots[n]]
            self._slots = [max(pair) for pair in zip(slots, self._slots, strict=True)]
            dropped = [each for n in due for each in self._make_room(n)] if self._leads else []
        if self._leads:
            with contextlib.suppress(RuntimeError):
                self._signals.tell(key, " ".join(dropped))
        else:
            with contextlib.suppress(CheckpointError):
                dropped = self._signals.hear(key, "").split()
        with self._changed:
            self._forget(dropped)
            for index in due:
                self._put(index, _Job(version, 0))

    def protected(self, index: int) -> set[Version]:
        """Versions in place `index` that lower tiers still need."""
        with self._changed:
            jobs = [*self._current, *(job for waiting in self._waiting for job in waiting)]
            return {job.version for job in jobs if job is not None and job.source == index}

    def prune(self, index: int = 0) -> None:
        """Delete what need not stay in a place and is not waited for."""
        self.places[index].prune(self.protected(index))

    def report(self, result: DrainResult) -> None:
        """Add to the results."""
        with self._changed:
            self._results.append(result)

    def results(self) -> list[DrainResult]:
        """The newest thousand results, oldest first."""
        with self._changed:
            return list(self._results)

    def settle(self) -> None:
        """Wait for the copies under way and waiting, at most the time limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy(), self._timeout_seconds)

    def close(self, *, drain: bool) -> None:
        """End the threads.

        Args:
            drain: Copy the newest version to all tiers that have it not, due or not, and wait;
                False: give up the copies under way.
        """
        if drain and self._signals is not None and not self._stop.is_set():
            with self._changed:
                for index in range(1, len(self.places)):
                    if self._last[0] is not None and self._last[index] != self._last[0]:
                        if self._leads:
                            self._forget(self._make_room(index))
                        self._put(index, _Job(self._last[0], 0))
            self.settle()
        with self._changed:
            self._stop.set()
            left = [_key(n, job) for n, waiting in enumerate(self._waiting) for job in waiting]
            self._forget(left, "the store was closed before")
            for index, job in enumerate(self._current):
                if drain and job is not None:
                    reason = f"it took longer than {self._timeout_seconds:g} s (timeout_seconds)"
                    self._results.append(self._failed(index, job, reason))
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(_JOIN_SECONDS)

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0 or not self._coordinated

    def _busy(self) -> bool:
        return any(self._waiting) or any(job is not None for job in self._current)

    def _put(self, index: int, job: _Job) -> None:
        """Queue a job and start the thread of its tier."""
        self._waiting[index].append(job)
        self._last[index] = job.version
        if index not in self._threads:
            thread = threading.Thread(
                target=self._serve, args=(index,), name=f"tier-{index}", daemon=True
            )
            self._threads[index] = thread
            thread.start()
        self._changed.notify_all()

    def _make_room(self, index: int) -> list[str]:
        """The keys of the waiting jobs that a newer one replaces; a tier before has begun none."""
        begun = {job.version for job in self._current[:index] if job is not None}
        return [_key(index, job) for job in self._waiting[index] if job.version not in begun]

    def _forget(self, dropped: list[str], reason: str = "a newer one came first") -> None:
        """Take dropped jobs out of the queues; rank 0 tells those who already ask to begin."""
        for index, waiting in enumerate(self._waiting):
            for job in [each for each in waiting if _key(index, each) in dropped]:
                waiting.remove(job)
                place = self.places[index].storage.location
                self._results.append(DrainResult(place, job.version.step, skipped=reason))
                if self._leads and self._signals is not None:
                    with contextlib.suppress(RuntimeError):
                        self._signals.tell(f"{_key(index, job)}/start", reason)
        self._changed.notify_all()

    def _next(self, index: int) -> _Job | None:
        """The job that may begin: a tier before this one copies the same version first."""
        if not self._waiting[index]:
            return None
        job = self._waiting[index][0]
        before = [*self._current[:index], *(each for w in self._waiting[:index] for each in w)]
        if any(each is not None and each.version == job.version for each in before):
            return None
        return self._waiting[index].pop(0)

    def _serve(self, index: int) -> None:
        """The thread of one tier."""
        while True:
            with self._changed:
                while (job := self._next(index)) is None:
                    if self._stop.is_set():
                        return
                    self._changed.wait()
                self._current[index] = job
            try:
                result = self._drain(index, job)
            except Exception as error:
                result = self._failed(index, job, _words(error))
            done = result.error is None and not result.skipped
            with self._changed:
                if done:
                    for lower in self._waiting[index + 1 :]:
                        for each in lower:
                            each.source = index if each.version == job.version else each.source
                self._current[index] = None
            if done:
                with contextlib.suppress(Exception):
                    self.prune(index)
            with self._changed:
                self._results.append(result)
                self._changed.notify_all()

    def _drain(self, index: int, job: _Job) -> DrainResult:
        """Copy one version to one tier, with the other ranks."""
        assert self._signals is not None
        target, key = self.places[index], _key(index, job)
        copy = _Copy(self.places[job.source], target, job.version, self._pace[index])
        if self._leads:
            self._signals.tell(f"{key}/start", "")
        elif dropped := self._signals.hear(f"{key}/start", ""):
            return DrainResult(target.storage.location, job.version.step, skipped=dropped)
        begun = time.perf_counter()
        problem = _attempt(copy.run)
        if self._leads:
            problem = self._gathered(f"{key}/done", problem)
            if not problem and not target.private and self._seals(target):
                problem = _attempt(lambda: target.seal(job.version))
            self._signals.tell(f"{key}/done", problem)
        else:
            problem = self._signals.hear(f"{key}/done", problem)
        if not problem and target.private:
            problem = _attempt(lambda: target.seal(job.version))
        seconds = time.perf_counter() - begun
        if problem:
            copy.undo()
            return self._failed(index, job, problem, seconds, copy.bytes)
        return DrainResult(target.storage.location, job.version.step, seconds, copy.bytes)

    def _gathered(self, key: str, problem: str) -> str:
        """What went wrong on any rank."""
        assert self._signals is not None
        try:
            return next((each for each in self._signals.gather(key, problem) if each), "")
        except CheckpointError as error:
            return str(error)

    def _seals(self, target: Place) -> bool:
        """Whether a shared tier gets a seal; without, a version counts once all parts are there."""
        return target.rank == 0 and (self._coordinated or target.world_size == 1)

    def _failed(
        self, index: int, job: _Job, problem: str, seconds: float = 0.0, size: int = 0
    ) -> DrainResult:
        place, step = self.places[index].storage.location, job.version.step
        sentence = f"the copy of step {step} to {place} failed: {problem}"
        return DrainResult(place, step, seconds, size, sentence)


class _Pace:
    """Keeps a rate: after each block, waits until the rate allows for it."""

    def __init__(self, bytes_per_second: float | None, stop: threading.Event) -> None:
        self._rate = bytes_per_second
        self._stop = stop
        self._free_at = 0.0
        even = _BLOCK_BYTES if bytes_per_second is None else int(bytes_per_second * _BLOCK_SECONDS)
        self.block_bytes = min(max(even, _SMALLEST_BLOCK_BYTES), _BLOCK_BYTES)

    def take(self, size: int) -> None:
        """Count `size` bytes; raises CheckpointError when the store was closed."""
        if self._rate is not None:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            self._stop.wait(self._free_at - now)
        if self._stop.is_set():
            raise CheckpointError("the store was closed")


class _Copy:
    """Copies what one rank is to copy of one version."""

    def __init__(self, source: Place, target: Place, version: Version, pace: _Pace) -> None:
        self.bytes = 0
        self._source = source
        self._from, self._to = source.storage, target.storage
        self._version = version
        self._pace = pace
        self._made: list[str] = []

    def run(self) -> None:
        """Copy packs, catalogues and manifests, in this order.

        Raises:
            CheckpointError: When the source is damaged, or the target has other content.
            OSError: When a storage fails.
        """
        parts = list(self._parts())
        for _, _, part in parts:
            for number, pack in enumerate(part.packs):
                self._copy_pack(pack, [chunk for chunk in part.chunks if chunk.pack == number])
        for root in {part.catalogue for _, _, part in parts}:
            self._publish(self._version.catalogue_name(root))
        for name, content, _ in parts:
            self._publish(name, content)

    def undo(self) -> None:
        """Delete what was copied, so that failures do not fill the tier."""
        seal_name = f"{self._version.folder}/{SEAL}"
        for name in [seal_name, *reversed(self._made)] if self._made else []:
            # Another rank may have found this catalogue there and rely on it.
            if "/catalogue-" not in name:
                with contextlib.suppress(Exception):
                    self._to.remove(name)

    def _parts(self) -> Iterable[tuple[str, bytes, Part]]:
        """The parts that are this rank's to copy: its own, or its share of another world's."""
        rank, world_size = self._source.rank, self._source.world_size
        if self._source.private:
            ranks = range(rank, rank + 1)
            saved = world_size
        else:
            files = self._from.files(self._version.folder)
            sizes = [int(found[1]) for name in files if (found := _PART.fullmatch(name))]
            saved = max(sizes, default=0)
            ranks = range(rank, saved, world_size)
        for each in ranks:
            name = self._version.part_name(each, saved)
            try:
                content = self._from.read(name)
            except FileNotFoundError:
                if saved == world_size:
                    raise CheckpointError(f"{self._from.location}/{name} is missing") from None
                # Others may hold the same; the seal shows whether something is missing.
                continue
            yield name, content, Part.from_bytes(content, f"{self._from.location}/{name}")

    def _copy_pack(self, name: str, chunks: list[Chunk]) -> None:
        size = _size(self._from, name)
        if size is None:
            raise CheckpointError(f"{self._from.location}/{name} is missing")
        present = _size(self._to, name)
        if present is not None:
            if present != size:
                raise CheckpointError(
                    f"{self._to.location}/{name} has {present} bytes instead of {size}: it is of "
                    "another run, or damaged; take an empty place"
                )
            return
        check = _Check(f"{self._from.location}/{name}", chunks)
        reader = self._from.open(name)
        try:
            with self._to.create(name) as file:
                offset = 0
                while block := reader.read(offset, min(self._pace.block_bytes, size - offset)):
                    check.update(block)
                    file.write(block)
                    offset += len(block)
                    self.bytes += len(block)
                    self._pace.take(len(block))
                check.finish()
        finally:
            reader.close()
        self._made.append(name)

    def _publish(self, name: str, content: bytes | None = None) -> None:
        """Copy a small file, unless the same is there."""
        content = self._from.read(name) if content is None else content
        with contextlib.suppress(FileNotFoundError):
            if self._to.read(name) == content:
                return
            raise CheckpointError(
                f"{self._to.location}/{name} is there with other content: it is of another run, or "
                "damaged; take an empty place"
            )
        with self._to.create(name) as file:
            file.write(content)
        self._made.append(name)
        self.bytes += len(content)
        self._pace.take(len(content))


class _Check:
    """Compares the chunks of a file with their checksums while the file goes by."""

    def __init__(self, where: str, chunks: list[Chunk]) -> None:
        self._where = where
        found = {(chunk.offset, chunk.length, chunk.stored_hash) for chunk in chunks}
        self._chunks = deque(sorted(each for each in found if each[1]))
        self._hash = xxhash.xxh3_128()
        self._at = 0

    def update(self, block: bytes) -> None:
        """The next bytes; raises CheckpointError when a chunk that ends in them is damaged."""
        view, end = memoryview(block), self._at + len(block)
        while self._chunks and self._chunks[0][0] < end:
            offset, length, expected = self._chunks[0]
            first, last = max(offset, self._at), min(offset + length, end)
            self._hash.update(view[first - self._at : last - self._at])
            if last < offset + length:
                break
            if self._hash.hexdigest() != expected:
                raise CheckpointError(f"{self._where} is damaged at byte {offset}")
            self._chunks.popleft()
            self._hash = xxhash.xxh3_128()
        self._at = end

    def finish(self) -> None:
        """The file ends; raises CheckpointError when chunks are left."""
        if self._chunks:
            raise CheckpointError(f"{self._where} is cut short at byte {self._at}")


def _check_order(places: list[Place]) -> None:
    locations = [each.storage.location for each in places]
    for number, place in enumerate(places):
        if locations[number] in locations[:number]:
            raise CheckpointError(f"two tiers have the place {locations[number]}")
        if number and place.private and not places[number - 1].private:
            raise CheckpointError(
                f"the private tier {locations[number]} comes after the shared tier "
                f"{locations[number - 1]}; give private tiers first"
            )


def _head(place: Place) -> Version | None:
    """The newest version of a place; None also when it cannot be reached."""
    with contextlib.suppress(Exception):
        return place.newest()
    return None


def _key(index: int, job: _Job) -> str:
    return f"{job.version.folder}/tier-{index}"


def _size(storage: Storage, name: str) -> int | None:
    folder, _, file = name.partition("/")
    return storage.files(folder).get(file)


def _attempt(work: Callable[[], None]) -> str:
    """Run `work`; returns what went wrong."""
    try:
        work()
    except Exception as error:  # clients of object stores raise what they like
        return _words(error)
    return ""


def _words(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return sentence_of(error)
    return f"{type(error).__name__}: {error}"
