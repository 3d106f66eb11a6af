"""Tiers of a store: background copies of versions in slower, safer places. Needs no torch.

    memory (tmpfs)  ->  node-local disk  ->  shared file system or object store

A version is saved to the first tier; `tiers` copies every n-th one on to each lower tier.

Of a *private* tier, such as a node's own disk, other ranks see nothing. Each rank has a store of
its own there, in a folder ``rank-00003``, with all that it holds. Copied on to a shared tier, the
parts of all ranks make a version as any other, in which replicated tensors lie once per rank.

A lower tier that cannot be reached hinders no save. While it is away, its sessions are not known,
and a restore that finds no version in the other tiers fails rather than to start anew.

A background thread for each lower tier copies every n-th version on, all ranks together. A tier
copies from the tier before it if that has the version, else from the first. Retention of a tier
leaves what a lower tier still waits for. Files come in an order in which a version that was copied
by half is none: packs, catalogue, manifests, and last the seal. A copy that fails leaves nothing
behind, is reported and not tried again: the next version that is due takes its place. Beside those
that are due, the newest version is copied when the store is closed, and the newest one that the
session before did not copy any more at the first save of the next.

The store knows of its own copies alone. Who knows of others that use the same bandwidth hands in a
`Pacing`, e.g. one that shares it as a plan says or makes way for strangers (`outlast.cluster`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import xxhash

from outlast.checkpoint.manifest import Part
from outlast.checkpoint.owner import Ownership
from outlast.checkpoint.retention import Retention, prune
from outlast.checkpoint.storage import (
    LocalStorage,
    Pacing,
    RateLimiter,
    UnreadableError,
    describe_failure,
    in_background,
    publish,
    rank_folder,
    sentence_of,
    storage_of,
    within,
)
from outlast.checkpoint.version import (
    SEAL,
    Contents,
    UnfinishedError,
    Version,
    check_contents,
    group_size,
    grouped_ranks,
    is_of_groups,
    is_published,
    leaders,
    led_by,
    list_versions,
    load,
    load_manifests,
    open_version,
    read_catalogue,
    read_part,
    seal,
    seal_group,
    seal_groups,
    unreadable,
    world_sizes,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from outlast.checkpoint.manifest import Chunk
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Seal
    from outlast.distributed.group import Group, StoreAgreement

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """One tier as one rank sees it.

    Attributes:
        storage: Where; of a private tier, the folder of this rank.
        retention: What stays there.
        private: Whether other ranks do not see it.
        rank: This rank.
        world_size: How many save together.
        known: Seals that were read, for the next `prune`.
        damaged: Versions that a restore found damaged.
        verified: Packs whose content here this rank has compared with what it is to be.
        ownership: Of this rank over the place.
        name: Of the tier, for people; may be empty.
    """

    storage: Storage
    retention: Retention
    private: bool
    rank: int
    world_size: int
    name: str = ""
    known: dict[Version, Seal] = field(init=False, default_factory=dict, repr=False, compare=False)
    damaged: set[Version] = field(init=False, default_factory=set, repr=False, compare=False)
    verified: set[str] = field(init=False, default_factory=set, repr=False, compare=False)
    ownership: Ownership = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Begin without the right to write."""
        object.__setattr__(self, "ownership", Ownership(self.storage))

    @classmethod
    def of(
        cls,
        place: str | os.PathLike[str],
        keep: int | Retention,
        ranks: Group,
        *,
        private: bool,
        name: str = "",
    ) -> Place:
        """The place of this rank."""
        storage = storage_of(place)
        if private:
            storage = storage_of(f"{storage.location}/{rank_folder(ranks.rank)}")
        retention = keep if isinstance(keep, Retention) else Retention(keep)
        return cls(storage, retention, private, ranks.rank, ranks.size, name)

    @property
    def keeps_house(self) -> bool:
        """True if this rank seals and prunes here."""
        return self.private or self.rank == 0

    def load(self, version: Version) -> Contents:
        """The manifests of a version; in a private place those of this rank alone.

        Raises:
            UnfinishedError: When it was never published.
            UnreadableError: When the storage fails.
            CheckpointError: When something is missing or damaged, or, in a private place, it was
                saved by another number of ranks.
        """
        return self._read(load, version)

    def open(self, version: Version) -> Contents:
        """As `load`, to restore: of very many ranks, parts are read when they are wanted."""
        return self._read(open_version, version)

    def _read(self, read: Callable[[Storage, Version], Contents], version: Version) -> Contents:
        try:
            return self._own(version) if self.private else read(self.storage, version)
        except CheckpointError:
            raise
        except Exception as error:  # clients of object stores raise what they like
            kind = UnreadableError if isinstance(error, OSError) else CheckpointError
            where = f"{self.storage.location}/{version.folder}"
            raise kind(f"{where} cannot be read: {describe_failure(error)}") from error

    def newest(self) -> Version | None:
        """The newest complete version, verified or not.

        Raises:
            CheckpointError: When the place cannot be listed.
        """
        try:
            versions = list_versions(self.storage)
        except OSError as error:
            raise CheckpointError(
                f"{self.storage.location} cannot be listed: {sentence_of(error)}"
            ) from None
        for version in reversed(versions):
            with contextlib.suppress(CheckpointError):
                if self.private:
                    return self.load(version).version
                if is_published(self.storage, version):
                    return version
        return None

    def seal(self, version: Version) -> None:
        """Seal a version: in a shared place the whole, in a private one what this rank has.

        Raises:
            CheckpointError: When it is not complete, or another process owns the place now.
            OSError: When the storage fails.
        """
        self.ownership.check()
        files = {} if self.private else self.storage.files(version.folder)
        if world_size := grouped_ranks(files):
            seal_groups(self.storage, version, world_size)
        else:
            seal(self.storage, self.load(version))

    @property
    def group(self) -> range:
        """The ranks whose parts this one seals as a group, before rank 0 seals the version."""
        return range(0) if self.private else led_by(self.rank, self.world_size)

    def seal_group(self, version: Version, problem: str, said: Callable[[range], list[str]]) -> str:
        """Seal the group that this rank leads, if it leads one.

        Args:
            version: Which.
            problem: What went wrong on this rank; may be empty.
            said: Gives what went wrong on other ranks, as soon as they have written their parts.

        Returns:
            What went wrong on any rank of the group.

        Raises:
            CheckpointError: When a rank does not come, or its part cannot be used.
            OSError: When the storage fails.
        """
        if not self.group:
            return problem
        problem = next(filter(None, [problem, *said(self.group[1:])]), "")
        if not problem:
            seal_group(self.storage, version, self.rank, self.world_size)
        return problem

    def prune(self, protected: Collection[Version]) -> None:
        """Delete what need not stay, if that is this rank's part; failures wait for next time."""
        if self.keeps_house:
            with contextlib.suppress(OSError, CheckpointError):
                prune(
                    self.storage,
                    self.retention,
                    protected=protected,
                    damaged=self.damaged,
                    read=self._sealed,
                    world_size=self.world_size if self.private else None,
                    cache=self.known,
                )

    def _own(self, version: Version) -> Contents:
        name = version.part_name(self.rank, self.world_size)
        files = self.storage.files(version.folder)
        if name.partition("/")[2] not in files:
            if others := world_sizes(files) - {self.world_size}:
                # No remains of a save, but what another number of ranks relies on.
                saved = max(others)
                raise CheckpointError(
                    f"{self.storage.location}/{version.folder} was saved by {saved} "
                    f"rank{'s' if saved > 1 else ''}, each with its part, and now there "
                    f"{'are' if self.world_size > 1 else 'is'} {self.world_size}; start {saved}, "
                    "or give a shared tier that has the version"
                )
            missing = CheckpointError if SEAL in files else UnfinishedError
            raise missing(f"{self.storage.location}/{name} is missing")
        try:
            part, root = read_part(self.storage, version, self.rank, self.world_size)
        except OSError as error:
            raise unreadable(self.storage, name, error) from None
        catalogue = read_catalogue(self.storage, version, part.catalogue)
        contents = Contents(version, catalogue, [part], [root], [])
        check_contents(self.storage, contents)
        return contents

    def _sealed(self, _: Storage, version: Version) -> Contents:
        """As `load`, but what other ranks may not have is not complete in a private place."""
        if self.private and SEAL not in self.storage.files(version.folder):
            raise UnfinishedError(f"{self.storage.location}/{version.folder} has no seal")
        return self.load(version) if self.private else load_manifests(self.storage, version)


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
        pacing: What else decides how fast each copy is, e.g. a share of what others leave.
        name: For people, e.g. ``shared``; see `CheckpointStore.tier_names`.
    """

    place: str | os.PathLike[str]
    every: int = 1
    keep: int | Retention = 3
    bytes_per_second: float | None = None
    private: bool = False
    pacing: Pacing | None = None
    name: str = ""

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
    """Result of copying one version to a lower tier.

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


class Copy:
    """Copies what one rank is to copy of one version."""

    def __init__(self, source: Place, target: Place, version: Version, pace: RateLimiter) -> None:
        self.bytes = 0
        self._source = source
        self._target = target
        self._from, self._to = source.storage, target.storage
        self._version = version
        self._pace = pace
        self._made: list[str] = []

    def run(self) -> None:
        """Copy packs, catalogues, manifests and what was sealed of groups, in this order.

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
        for name in self._groups():
            self._publish(name)

    def undo(self) -> None:
        """Delete what was copied, so that failures do not fill the tier."""
        folder, names = self._version.folder, list[str]()
        if self._made:
            with contextlib.suppress(Exception):
                # What was made of the copies.
                names = [name for name in self._to.files(folder) if is_of_groups(name)]
            names = [f"{folder}/{name}" for name in [SEAL, *names]] + self._made[::-1]
        for name in names:
            # Another rank may have found this catalogue there and rely on it.
            if "/catalogue-" not in name:
                with contextlib.suppress(Exception):
                    self._to.remove(name)
        self._target.verified.difference_update(self._made)

    def _parts(self) -> Iterable[tuple[str, bytes, Part]]:
        """The parts that are this rank's to copy: its own, or its share of another world's."""
        rank, world_size = self._source.rank, self._source.world_size
        if self._source.private:
            ranks = range(rank, rank + 1)
            saved = world_size
        else:
            files = self._from.files(self._version.folder)
            saved = max(world_sizes(files), default=0)
            ranks = range(rank, saved, world_size)
        for number in ranks:
            name = self._version.part_name(number, saved)
            try:
                content = self._from.read(name)
            except FileNotFoundError:
                if saved == world_size:
                    raise CheckpointError(f"{self._from.location}/{name} is missing") from None
                # Others may hold the same; the seal shows whether something is missing.
                continue
            self._pace.take(0)
            yield name, content, Part.from_bytes(content, f"{self._from.location}/{name}")

    def _groups(self) -> list[str]:
        """The groups' files that are this rank's to copy; the index is made of them anew."""
        if self._source.private or self._target.private:
            return []
        files = self._from.files(self._version.folder)
        saved = max(world_sizes(files), default=0)
        names = sorted(name for name in files if group_size(name) == saved)
        own = names[self._source.rank :: self._source.world_size]
        return [f"{self._version.folder}/{name}" for name in own]

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
            if name not in self._target.verified:
                hint = "; it is of another run, or damaged; take an empty place"
                for _ in self._blocks(self._to, name, size, chunks, hint):
                    self._pace.take(0)
                self._target.verified.add(name)
            return
        with self._to.create(name, exclusive=True) as file:
            for block in self._blocks(self._from, name, size, chunks):
                file.write(block)
                self.bytes += len(block)
                self._pace.take(len(block))
        self._made.append(name)
        self._target.verified.add(name)

    def _blocks(
        self, storage: Storage, name: str, size: int, chunks: list[Chunk], hint: str = ""
    ) -> Iterator[bytes | memoryview]:
        """Yield a file of `size` bytes, block by block, while comparing its chunks' checksums.

        Raises:
            CheckpointError: Before the block in which a damaged chunk ends, or at the end, when
                chunks are left.
        """
        where = f"{storage.location}/{name}"
        found = {(chunk.offset, chunk.length, chunk.stored_hash) for chunk in chunks}
        unchecked = deque(sorted(row for row in found if row[1]))
        checksum, at = xxhash.xxh3_128(), 0
        with contextlib.closing(storage.open(name)) as reader:
            while block := reader.read(at, min(self._pace.block_bytes, size - at)):
                view, end = memoryview(block), at + len(block)
                while unchecked and unchecked[0][0] < end:
                    offset, length, expected = unchecked[0]
                    first, last = max(offset, at), min(offset + length, end)
                    checksum.update(view[first - at : last - at])
                    if last < offset + length:
                        break
                    if checksum.hexdigest() != expected:
                        raise CheckpointError(f"{where} is damaged at byte {offset}{hint}")
                    unchecked.popleft()
                    checksum = xxhash.xxh3_128()
                yield block
                at = end
        if unchecked:
            raise CheckpointError(f"{where} is cut short at byte {at}{hint}")

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
        publish(self._to, name, content)
        self._made.append(name)
        self.bytes += len(content)
        self._pace.take(len(content))


def _size(storage: Storage, name: str) -> int | None:
    folder, _, file = name.partition("/")
    return storage.files(folder).get(file)


@dataclass
class Job:
    """A version on its way to a tier, and the place that it is copied from."""

    version: Version
    source: int

    def key(self, index: int) -> str:
        """Key of this copy to tier `index` among the ranks."""
        return f"{self.version.folder}/tier-{index}"


def failed(
    place: Place, version: Version, problem: str, seconds: float = 0.0, size: int = 0
) -> DrainResult:
    """The result of a copy to `place` that failed after `seconds` and `size` bytes."""
    location, step = place.storage.location, version.step
    sentence = f"the copy of step {step} to {location} failed: {problem}"
    return DrainResult(location, step, seconds, size, sentence)


def _undo(copy: Copy, made: Future[None]) -> None:
    """Delete what was copied, when the copy has ended."""
    wait([made])
    copy.undo()


def _attempt(work: Callable[[], None]) -> str:
    """Run `work`; returns what went wrong."""
    try:
        work()
    except Exception as error:  # clients of object stores raise what they like
        return describe_failure(error)
    return ""


_RESULTS = 1000
_JOIN_SECONDS = 1.0
_ANSWERED = 0.75
"""Share of the time limit in which a storage has to answer where other ranks wait for this one."""


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

    Attributes:
        places: As given, the first one first.
        answer_seconds: Longest wait of a restore for an answer of a storage.
        seen: The newest session that was in the object stores when this rank looked last, before
            it restored; None: not known.

    Raises:
        CheckpointError: When the tiers are in an order that cannot work, or two are the same.
    """

    def __init__(
        self, first: Place, lower: Sequence[Tier], ranks: Group, timeout_seconds: float
    ) -> None:
        self.places = [
            first,
            *(
                Place.of(tier.place, tier.keep, ranks, private=tier.private, name=tier.name)
                for tier in lower
            ),
        ]
        locations = [place.storage.location for place in self.places]
        for number, place in enumerate(self.places):
            if locations[number] in locations[:number]:
                raise CheckpointError(f"two tiers have the place {locations[number]}")
            if number and place.private and not self.places[number - 1].private:
                raise CheckpointError(
                    f"the private tier {locations[number]} comes after the shared tier "
                    f"{locations[number - 1]}; give private tiers first"
                )
        count = len(self.places)
        self._ranks = ranks
        self.timeout_seconds = timeout_seconds
        self.answer_seconds = timeout_seconds * (_ANSWERED if ranks.size > 1 else 1.0)
        self._every = [1, *(tier.every for tier in lower)]
        self._signals: StoreAgreement | None = None
        self._coordinated = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._lower = tuple(lower)
        self._waiting: list[list[Job]] = [[] for _ in range(count)]
        self._current: list[Job | None] = [None] * count
        # Copied, and not told yet: who waits for results waits for these too.
        self._telling = 0
        self._slots = [0] * count
        self._last: list[Version | None] = [None] * count
        self._threads: dict[int, threading.Thread] = {}
        # What the last copy to each tier left to be undone, once its storage answers.
        self._undoing: dict[int, Future[None]] = {}
        self._results: deque[DrainResult] = deque(maxlen=_RESULTS)
        self.seen: int | None = None

    @property
    def first(self) -> Place:
        """The place to which the store saves."""
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
        for index, answer in self._asked(lambda place: list_versions(place.storage)).items():
            try:
                mine += [(index, version) for version in answer.result()]
            except Exception as error:  # clients of object stores raise what they like
                location = self.places[index].storage.location
                problems[index] = f"{location} cannot be listed: {describe_failure(error)}"
        found: set[tuple[int, Version]] = set()
        for versions, troubles in self._ranks.gather((mine, problems)):
            found.update(versions)
            problems = {**troubles, **problems}
        if 0 in problems:
            raise CheckpointError(problems[0])
        ordered = sorted(found, key=lambda pair: (pair[1], -pair[0]), reverse=True)
        return [(self.places[index], version) for index, version in ordered], {
            self.places[index].storage.location: problems[index] for index in sorted(problems)
        }

    def _asked(self, ask: Callable[[Place], T], first: int = 0) -> dict[int, Future[T]]:
        """Ask all places from `first` on at once that this rank looks after; answers by place."""
        return {
            index: in_background(
                functools.partial(
                    within,
                    self.answer_seconds,
                    functools.partial(ask, place),
                    place.storage.location,
                )
            )
            for index, place in enumerate(self.places)
            if index >= first and place.keeps_house
        }

    def look(self) -> None:
        """Remember the newest session, now that this process takes the state from here."""
        self.seen = None
        # Who cannot tell now learns of another writer at its first save.
        with contextlib.suppress(Exception):
            sessions = [0]
            for place in self.places:
                if place.keeps_house and not isinstance(place.storage, LocalStorage):
                    sessions += self._claimed(place)
                    asks = functools.partial(list_versions, place.storage)
                    there = within(self.timeout_seconds, asks, place.storage.location)
                    sessions += [version.session for version in there]
            self.seen = max(sessions)

    def claimed(self) -> int:
        """The newest session that another writer claimed in a place that answers; 0: none."""
        newest = 0
        for place in self.places:
            if place.keeps_house:
                with contextlib.suppress(Exception):
                    newest = max(newest, *self._claimed(place))
        return newest

    def _claimed(self, place: Place) -> dict[int, str]:
        return within(self.timeout_seconds, place.ownership.others, place.storage.location)

    def own(self, session: int) -> None:
        """Become the only one who writes to these places, as far as they answer.

        Raises:
            OwnedError: When another process does.
            OSError: When the first place fails.
        """
        first, *lower = self.places
        if first.keeps_house:
            first.ownership.claim(session)
        # A lower tier that hangs hinders no save; the caller has a time limit for all of them.
        claims = [
            in_background(functools.partial(place.ownership.claim, session))
            for place in lower
            if place.keeps_house
        ]
        for claim in wait(claims, _ANSWERED * self.timeout_seconds).done:
            with contextlib.suppress(OSError):
                claim.result()

    def disown(self) -> None:
        """Let others write to these places, as far as they answer."""
        for place in self.places:
            # No thread starts while the interpreter ends.
            with contextlib.suppress(CheckpointError, RuntimeError):
                within(self.timeout_seconds, place.ownership.release, place.storage.location)

    def newest(self) -> Version | None:
        """The newest complete version of the first tier and of those that answer."""
        lower = (_head(place, self.timeout_seconds) for place in self.places[1:])
        first = self.first
        mine = within(self.timeout_seconds, first.newest, first.storage.location)
        found = [mine, *lower]
        return max((pair for pair in found if pair is not None), default=None)

    def behind(self, step: int) -> bool:
        """As `CheckpointStore.behind`."""
        if len(self.places) == 1:
            return False
        is_behind = False
        for answer in self._asked(Place.newest, first=1).values():
            # One that is away could be given nothing.
            with contextlib.suppress(Exception):
                newest = answer.result()
                is_behind = is_behind or newest is None or newest.step < step
        return any(self._ranks.gather(is_behind))

    def begin(self, signals: StoreAgreement, *, coordinated: bool) -> None:
        """Start a session; what the one before saved and did not copy any more is copied now.

        All ranks call it together, before the first version is offered.

        Args:
            signals: Words between the ranks.
            coordinated: Whether the ranks use them.
        """
        if self._signals is not None or len(self.places) == 1:
            return
        self._signals, self._coordinated = signals, coordinated
        mine = [
            _head(place, self.timeout_seconds) if place.keeps_house else None
            for place in self.places
        ]
        everyone = self._ranks.gather(mine)
        heads = [
            (everyone[0][index] if len({said[index] for said in everyone}) == 1 else None)
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
                    self._put(index, Job(version, -source))

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
            dropped = [name for n in due for name in self._make_room(n)] if self._leads else []
            # At once: a copy that began in between would wait for ranks that have dropped it.
            self._forget(dropped)
        if self._leads:
            with contextlib.suppress(CheckpointError):
                self._signals.tell(key, " ".join(dropped))
        else:
            with contextlib.suppress(CheckpointError):
                dropped = self._signals.hear(key, "").split()
        with self._changed:
            if not self._leads:
                self._forget(dropped)
            for index in due:
                self._put(index, Job(version, 0))

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
            self._changed.wait_for(
                lambda: not (any(self._waiting) or any(self._current) or self._telling),
                self.timeout_seconds,
            )

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
                        self._put(index, Job(self._last[0], 0))
            self.settle()
        with self._changed:
            self._stop.set()
            left = [job.key(n) for n, waiting in enumerate(self._waiting) for job in waiting]
            self._forget(left, "the store was closed before")
            for index, job in enumerate(self._current):
                if drain and job is not None:
                    reason = f"it took longer than {self.timeout_seconds:g} s (timeout_seconds)"
                    self._results.append(failed(self.places[index], job.version, reason))
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(_JOIN_SECONDS)

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0 or not self._coordinated

    def _put(self, index: int, job: Job) -> None:
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
        return [job.key(index) for job in self._waiting[index] if job.version not in begun]

    def _forget(self, dropped: list[str], reason: str = "a newer one came first") -> None:
        """Take dropped jobs out of the queues; rank 0 tells those who already ask to begin."""
        for index, waiting in enumerate(self._waiting):
            for job in [node for node in waiting if node.key(index) in dropped]:
                waiting.remove(job)
                place = self.places[index].storage.location
                self._results.append(DrainResult(place, job.version.step, skipped=reason))
                if self._leads and self._signals is not None:
                    with contextlib.suppress(CheckpointError):
                        self._signals.tell(f"{job.key(index)}/start", reason)
        self._changed.notify_all()

    def _next(self, index: int) -> Job | None:
        """The job that may begin: a tier before this one copies the same version first."""
        if not self._waiting[index]:
            return None
        job = self._waiting[index][0]
        before = [*self._current[:index], *(item for w in self._waiting[:index] for item in w)]
        if any(other is not None and other.version == job.version for other in before):
            return None
        return self._waiting[index].pop(0)

    def _drain(self, index: int, job: Job) -> DrainResult:
        """Copy one version to tier `index`, with the other ranks."""
        assert self._signals is not None
        tier, target, key = self._lower[index - 1], self.places[index], job.key(index)
        rate = None if tier.pacing is None else tier.pacing(job.version.step)
        pace = RateLimiter(tier.bytes_per_second, self._stop, rate)
        copy = Copy(self.places[job.source], target, job.version, pace)
        if self._leads:
            self._signals.tell(f"{key}/start", "")
        elif dropped := self._signals.hear(f"{key}/start", ""):
            return DrainResult(target.storage.location, job.version.step, skipped=dropped)
        begun = time.perf_counter()
        made, problem = self._copy(index, copy, pace)
        copied, asked = time.monotonic(), None
        if self._coordinated and self.places[job.source].private and not target.private:
            # What one rank alone can see has no groups yet.
            asked = leaders(target.world_size)[1:]
            problem = self._seal_group(target, job.version, f"{key}/done", problem)
        if self._leads:
            try:
                said = self._signals.gather(f"{key}/done", problem, asked, begun=copied)
                problem = next(filter(None, said), "")
            except CheckpointError as error:
                problem = str(error)
            # Without the seal of a shared tier, a version counts once all parts are there.
            seals = target.rank == 0 and (self._coordinated or target.world_size == 1)
            if not problem and not target.private and seals:
                # The others wait half as long again for the outcome, whatever came before.
                left = 1.4 * self.timeout_seconds - (time.monotonic() - copied)
                problem = self._seal(target, job.version, min(self.timeout_seconds, left))
            self._signals.tell(f"{key}/done", problem)
        else:
            problem = self._signals.hear(f"{key}/done", problem)
        if not problem and target.private:
            problem = self._seal(target, job.version, self.timeout_seconds)
        seconds = time.perf_counter() - begun
        if problem and made is not None:
            self._undoing[index] = in_background(functools.partial(_undo, copy, made))
            wait([self._undoing[index]], self.timeout_seconds if made.done() else 0.0)
        if problem:
            return failed(target, job.version, problem, seconds, copy.bytes)
        return DrainResult(target.storage.location, job.version.step, seconds, copy.bytes)

    def _copy(self, index: int, copy: Copy, pace: RateLimiter) -> tuple[Future[None] | None, str]:
        """Make a copy, which may wait for its turn as long as it has to.

        Returns:
            The copy, which may be under way where the storage hangs, and what went wrong.
        """
        if (before := self._undoing.get(index)) is not None and not before.done():
            return None, "its storage has not answered since the copy before"

        def paced() -> None:
            with pace:
                copy.run()

        made = in_background(paced)
        while not wait([made], min(1.0, self.timeout_seconds)).done:
            asked = pace.asked
            if asked is not None and time.monotonic() - asked > self.timeout_seconds:
                pace.give_up()
                return made, (
                    f"the storage did not answer within {self.timeout_seconds:g} s "
                    "(timeout_seconds); see whether it hangs"
                )
        return made, _attempt(made.result)

    def _seal(self, target: Place, version: Version, seconds: float) -> str:
        """Seal a copied version; returns what went wrong."""
        seals = functools.partial(target.seal, version)
        return _attempt(lambda: within(seconds, seals, target.storage.location))

    def _seal_group(self, target: Place, version: Version, key: str, problem: str) -> str:
        """Seal the group that this rank leads, if it leads one; returns what went wrong."""
        assert self._signals is not None
        gather = functools.partial(self._signals.gather, key, "", passed_on=True)
        seals = functools.partial(target.seal_group, version, problem, gather)
        try:
            # Rank 0 waits no longer, either.
            return within(self.timeout_seconds, seals, target.storage.location)
        except Exception as error:  # clients of object stores raise what they like
            return describe_failure(error)

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
                result = failed(self.places[index], job.version, describe_failure(error))
            done = result.error is None and not result.skipped
            with self._changed:
                if done:
                    for lower in self._waiting[index + 1 :]:
                        for item in lower:
                            item.source = index if item.version == job.version else item.source
                self._current[index] = None
                self._telling += 1
            if done:
                place = self.places[index].storage.location
                with contextlib.suppress(Exception):
                    prunes = functools.partial(self.prune, index)
                    within(self.timeout_seconds, prunes, place)
            with self._changed:
                self._results.append(result)
                self._telling -= 1
                self._changed.notify_all()


def _head(place: Place, timeout_seconds: float) -> Version | None:
    """The newest version of a place; None also when it cannot be reached."""
    with contextlib.suppress(Exception):
        return within(timeout_seconds, place.newest, place.storage.location)
    return None
