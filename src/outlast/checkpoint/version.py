"""Versions in a store: their names, which are complete, and how they are sealed.

    checkpoints/
      step-00000200-a1/                    step 200, saved by the store's first session
        rank-00000-of-00002.json           what rank 0 saved: published by its rename
        rank-00000-of-00002.pack           the chunks that it stored with this version
        rank-00001-of-00002.json ...
        catalogue-6c3f0d1e9a7b2c45.json    names, types and shapes of all tensors
        version.json                       the seal: written when all parts are there
        group-00003-of-00512.json          of very many ranks: what those of a group saved
        index-of-00512.json                of very many ranks: what the groups hold
      replay/step-00000201-a1/ ...         replay logs, in the format of versions

No pointer says which version is the newest: that is the last one, by session and step, whose parts
together hold every element of every tensor in its catalogue. A session is one owner of the store; a
run that goes back to an earlier step does so in a new session, so its versions come later.

No process reads the manifests of very many ranks: the first rank of each group reads those of its
group and writes what they hold into one file, and rank 0 makes the index from these files. Whoever
restores reads the index, the groups that hold what it wants, and of these the manifests that do.

Replay logs lie beside the versions that they lead on from. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.manifest import (
    FORMAT,
    GROUP_NAME,
    IMPORTED,
    INDEX_NAME,
    MAX_RANKS,
    PART_NAME,
    REPLAY,
    ROOT,
    STATE,
    Catalogue,
    Fields,
    GroupSeal,
    Index,
    ManifestError,
    Part,
    root_of,
    sealed,
    unsealed,
)
from outlast.checkpoint.storage import (
    LocalStorage,
    UnreadableError,
    publish,
    sentence_of,
    storage_of,
)
from outlast.errors import CheckpointError
from outlast.state.box import Box, covers
from outlast.state.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from outlast.checkpoint.storage import Storage

SEAL = "version.json"
INDEXED_ABOVE = 128
"""Versions of more ranks than this are sealed by groups and have an index."""

GROUP_RANKS = 128
"""Ranks of a group."""

# What no counter reaches is no version, and takes no name from the ones to come.
_FOLDER = re.compile(r"step-(\d{8}|[1-9]\d{8,17})-a([1-9]\d{0,17})", re.ASCII)
# Of ranks whose files are not even listed, as a listing that lags behind may hide a few.
_UNLISTED = 64
_NAMED = 8


class UnfinishedError(CheckpointError):
    """A version that was never published: its save was cut short, or is still under way."""


class _DamagedIndexError(CheckpointError):
    """An index or a group's file that is of no use; the manifests may be whole without it."""


@dataclass(frozen=True, order=True)
class Version:
    """One version, complete or not; ordered from old to new."""

    session: int
    step: int

    @property
    def folder(self) -> str:
        """Name of its folder in the store."""
        return f"step-{self.step:08d}-a{self.session}"

    def part_name(self, rank: int, world_size: int) -> str:
        """File with what `rank` saved."""
        return f"{self.folder}/rank-{rank:05d}-of-{world_size:05d}.json"

    def pack_name(self, rank: int, world_size: int, attempt: int = 0) -> str:
        """File with the chunks that `rank` stored; each attempt at a step has a file of its own."""
        again = f".{attempt}" if attempt else ""
        return f"{self.folder}/rank-{rank:05d}-of-{world_size:05d}{again}.pack"

    def catalogue_name(self, root: str) -> str:
        """File with the catalogue whose BLAKE3 is `root`."""
        return f"{self.folder}/catalogue-{root[:16]}.json"

    def group_name(self, group: int, world_size: int) -> str:
        """File with what the ranks of a group saved."""
        return f"{self.folder}/group-{group:05d}-of-{world_size:05d}.json"

    def index_name(self, world_size: int) -> str:
        """File with what the groups of ranks hold."""
        return f"{self.folder}/index-of-{world_size:05d}.json"


def whole_step(step: int) -> int:
    """A step as JSON can hold it; of NumPy and torch, too."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step = {step!r} cannot be saved; steps are counted from 0")
    return number


def led_by(rank: int, world_size: int) -> range:
    """The ranks whose parts `rank` seals as a group; none where it leads none, or there are none.

    Args:
        rank: Which.
        world_size: How many ranks save a version together.
    """
    if world_size <= INDEXED_ABOVE or rank % GROUP_RANKS:
        return range(0)
    return range(rank, min(rank + GROUP_RANKS, world_size))


def leaders(world_size: int) -> range:
    """The ranks that lead groups; where there are no groups, all."""
    return range(0, world_size, GROUP_RANKS if world_size > INDEXED_ABOVE else 1)


@dataclass(frozen=True)
class Seal:
    """Mark that rank 0 writes when a version is complete.

    Attributes:
        roots: Name of each part's file in the version's folder to the part's BLAKE3; where there
            is an index, its name and those of the groups' files instead.
        packs: Files that the version needs, its own and older ones.
        requires: Steps of the same session that it needs.
        metrics: Figures by which versions are compared, e.g. a validation loss.
        kind: ``state`` or ``replay``.
    """

    roots: dict[str, str]
    packs: list[str]
    requires: list[int]
    metrics: dict[str, float]
    kind: str

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.indexed or max(world_sizes(self.roots), default=0)

    @property
    def indexed(self) -> int:
        """Number of ranks that saved it, where it has an index; else 0."""
        named = (INDEX_NAME.fullmatch(name) for name in self.roots)
        return next((int(found[1]) for found in named if found), 0)

    def to_bytes(self) -> bytes:
        """The content of the seal's file; its own hash is the root over the whole version."""
        return sealed(
            {
                "format": FORMAT,
                "parts": self.roots,
                "packs": self.packs,
                "requires": self.requires,
                "metrics": self.metrics,
                "kind": self.kind,
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Seal:
        """Read a seal.

        Raises:
            CheckpointError: When it is damaged.
            ManifestError: When it is malformed.
        """
        found = Fields(name, unsealed(content, name))
        found.only("parts", "packs", "requires", "metrics", "kind")
        roots = found.table("parts")
        named = [name for name in roots if INDEX_NAME.fullmatch(name)]
        for part, root in roots.items():
            if part not in named:
                found.checked_text("parts", part, GROUP_NAME if named else PART_NAME)
            found.checked_text(f"parts[{part}]", root, ROOT)
        sizes = [int(name[len("index-of-") : -len(".json")]) for name in named]
        if len(named) > 1 or not all(0 < size <= MAX_RANKS for size in sizes):
            raise found.error("parts", f"has {', '.join(named):.200}, which is no one index")
        return cls(
            roots,
            found.packs(),
            [found.checked_number("requires", step) for step in found.rows("requires")],
            found.metrics(found.content["metrics"]),
            found.one_of("kind", found.content["kind"], (STATE, REPLAY)),
        )


@dataclass(frozen=True)
class Contents:
    """The manifests of a complete version.

    Attributes:
        version: Which.
        catalogue: All tensors and values.
        parts: What the ranks saved; a rank may be missing if others hold the same.
        roots: BLAKE3 of each part.
        problems: A sentence for each manifest that could not be used.
        on_demand: Reads more of the parts, where not all were read; see `open_version`.
        remarks: A sentence where index or groups were of no use, and all manifests were read.
    """

    version: Version
    catalogue: Catalogue
    parts: list[Part]
    roots: list[str]
    problems: list[str]
    on_demand: ManifestsOnDemand | None = field(default=None, compare=False)
    remarks: list[str] = field(default_factory=list, compare=False)

    @property
    def kind(self) -> str:
        """``state`` or ``replay``."""
        return self.parts[0].kind if self.on_demand is None else self.on_demand.index.kind

    @property
    def requires(self) -> list[int]:
        """Steps of the same session that a replay log starts from."""
        return sorted({step for part in self.parts for step in part.requires})

    @property
    def seal(self) -> Seal:
        """The seal that stands for them."""
        names = (self.version.part_name(part.rank, part.world_size) for part in self.parts)
        files = (name.partition("/")[2] for name in names)
        return Seal(
            dict(zip(files, self.roots, strict=True)),
            sorted(self.packs),
            self.requires,
            self.parts[0].notes.get("metrics", {}),
            self.kind,
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """JSON values by name; of several ranks that saved one, the first counts."""
        if self.on_demand is not None:
            return _ValuesOnDemand(self.on_demand)
        return {name: value for part in self.parts[::-1] for name, value in part.values.items()}

    @property
    def packs(self) -> set[str]:
        """Files that hold its chunks."""
        return {pack for part in self.parts for pack in part.packs}


class ManifestsOnDemand:
    """The manifests of a version with an index, read when something of them is wanted.

    Where index or groups turn out to be of no use, all manifests are read.

    Args:
        storage: The store.
        version: Which version.
        index: Its index.
        catalogue: All its tensors and values.

    Attributes:
        index: As given.
        contents: The version with the parts that were read so far.
        failure: What was wrong with the first file that could not be used; None: nothing so far.
    """

    def __init__(
        self, storage: Storage, version: Version, index: Index, catalogue: Catalogue
    ) -> None:
        self.index = index
        self.contents = Contents(version, catalogue, [], [], [], self)
        self.failure: CheckpointError | None = None
        self._storage = storage
        self._groups: dict[int, GroupSeal] = {}
        self._parts: dict[int, Part] = {}
        self._all_values: Mapping[str, Any] | None = None

    def value(self, name: str) -> Any:
        """A value of the version.

        Raises:
            KeyError: When there is none of that name.
            CheckpointError: When the manifest that has it cannot be used.
        """
        group = self.index.values[name]
        with self._noted():
            try:
                if self._all_values is None:
                    return self._value(group, name)
            except _DamagedIndexError as error:
                self._all_values = self._read_all(error)
            return self._all_values[name]

    def _value(self, group: int, name: str) -> Any:
        rank = self._group(group).values.get(name)
        part = None if rank is None else self._part(group, rank)
        if part is None or name not in part.values:
            raise _DamagedIndexError(self._contradiction(group, name))
        return part.values[name]

    def read(self, boxes: dict[str, Box]) -> None:
        """Read the manifests that hold any of the given boxes of tensors, and see that all is held.

        Tensors that the version has not are passed over.

        Raises:
            CheckpointError: When one cannot be used.
        """
        held = {name: box for name, box in boxes.items() if name in self.contents.catalogue.tensors}
        with self._noted():
            try:
                if self._all_values is None:
                    self._read(held)
            except _DamagedIndexError as error:
                self._all_values = self._read_all(error)

    def _read(self, held: dict[str, Box]) -> None:
        wanted: dict[int, dict[str, Box]] = {}
        for name, box in held.items():
            for group, around in self.index.tensors.get(name, ()):
                if around is None or _meet(around, box):
                    wanted.setdefault(group, {})[name] = box
        for group, of_group in wanted.items():
            sealed_ranks = {
                rank
                for name, box in of_group.items()
                for rank, piece in self._group(group).pieces.get(name, ())
                if _meet(piece, box)
            }
            for rank in sorted(sealed_ranks):
                self._part(group, rank)
        if lacking := not_held(self.contents, held):
            file = self.contents.version.index_name(self.index.world_size)
            raise _DamagedIndexError(
                f"{self._storage.location}/{file} does not name all that holds `{lacking:.200}`"
            )

    def _read_all(self, error: _DamagedIndexError) -> Mapping[str, Any]:
        """Read all manifests because of `error`; the values of the version."""
        known = self.contents
        found = _without_index(self._storage, known.version, error)
        if found.catalogue != known.catalogue:
            raise error
        known.parts[:], known.roots[:] = found.parts, found.roots
        known.remarks[:] = found.remarks
        return found.values

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.failure = self.failure or error
            raise

    def _group(self, group: int) -> GroupSeal:
        if group not in self._groups:
            with _of_index():
                self._groups[group] = _read_group(
                    self._storage, self.contents.version, self.index, group
                )
        return self._groups[group]

    def _part(self, group: int, rank: int) -> Part:
        if rank not in self._parts:
            version, sealed_group = self.contents.version, self._group(group)
            part, root = _readable_part(self._storage, version, rank, self.index.world_size)
            if root != sealed_group.roots[rank - sealed_group.first]:
                # The seal stands for another manifest than is there: to read it would not help.
                raise CheckpointError(
                    self._contradiction(group, version.part_name(rank, self.index.world_size))
                )
            alone = Contents(version, self.contents.catalogue, [part], [root], [])
            check_contents(self._storage, alone)
            self._parts[rank] = part
            self.contents.parts.append(part)
            self.contents.roots.append(root)
        return self._parts[rank]

    def _contradiction(self, group: int, name: str) -> str:
        file = self.contents.version.group_name(group, self.index.world_size)
        return f"{self._storage.location}/{file} does not fit `{name:.200}`, which it names"


class _ValuesOnDemand(Mapping[str, Any]):
    """The values of a version whose manifests are read when they are wanted."""

    def __init__(self, manifests: ManifestsOnDemand) -> None:
        self._manifests = manifests

    def __getitem__(self, name: str) -> Any:
        return self._manifests.value(name)

    def __contains__(self, name: object) -> bool:
        return name in self._manifests.index.values

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifests.index.values)

    def __len__(self) -> int:
        return len(self._manifests.index.values)


def _meet(one: Box, other: Box) -> bool:
    return len(one.shape) == len(other.shape) and one.overlap(other) is not None


def listing(problems: Sequence[str]) -> str:
    """Sentences as one, the first ones of very many."""
    more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
    return "; ".join([*problems[:_NAMED], *more])


def list_versions(storage: Storage) -> list[Version]:
    """All versions, complete or not, from old to new."""
    named = (_FOLDER.fullmatch(folder) for folder in storage.folders())
    return sorted(Version(int(name[2]), int(name[1])) for name in named if name)


def world_sizes(names: Iterable[str]) -> set[int]:
    """Numbers of ranks that saved the parts among the files `names` of a version's folder."""
    found = {int(named[2]) for name in names if (named := PART_NAME.fullmatch(name))}
    return {size for size in found if size <= MAX_RANKS}


def group_size(name: str) -> int:
    """Number of ranks that saved the version, of the file of a group; 0: it is none."""
    named = GROUP_NAME.fullmatch(name)
    return int(named[2]) if named else 0


def grouped_ranks(files: Collection[str]) -> int:
    """Number of ranks that saved the version whose folder has `files`; 0: not all groups are there.

    A save that was killed may leave some of them.
    """
    world_size = max(world_sizes(files), default=0)
    groups = sum(group_size(name) == world_size for name in files)
    return world_size if groups == len(leaders(world_size)) else 0


def is_of_groups(name: str) -> bool:
    """Return whether a file in a version's folder is of a group, or the index of all groups."""
    return bool(GROUP_NAME.fullmatch(name) or INDEX_NAME.fullmatch(name))


def is_published(storage: Storage, version: Version) -> bool:
    """Return whether `version` is sealed and its files are there, or its parts are complete.

    Raises:
        UnreadableError: When the storage fails to say.
    """
    return find_seal(storage, version, load_manifests) is not None


def find_seal(
    storage: Storage, version: Version, read: Callable[[Storage, Version], Contents]
) -> tuple[Seal, bool] | None:
    """The seal of `version`, or that of manifests which are complete without one; else None.

    Args:
        storage: The store.
        version: Which.
        read: Reads the manifests, or raises CheckpointError; as `load`.

    Returns:
        The seal, and whether it is in the store.

    Raises:
        UnreadableError: When the storage fails to say.
    """
    unsure: UnreadableError | None = None
    try:
        if (found := read_seal(storage, version)) is not None:
            return found, True
    except UnreadableError as error:
        unsure = error
    try:
        return read(storage, version).seal, False
    except UnreadableError:
        raise
    except CheckpointError:
        if unsure is not None:
            raise unsure from None
        return None


def load(storage: Storage, version: Version, files: dict[str, int] | None = None) -> Contents:
    """Read the manifests of `version` and see that nothing is missing.

    Raises:
        UnfinishedError: When it was never published.
        UnreadableError: When the storage fails.
        CheckpointError: When it is incomplete; says what is missing or damaged.
    """
    files = _files(storage, version) if files is None else files
    mark = _seal_of(storage, version) if SEAL in files else None
    return _load(storage, version, files, mark)


def load_manifests(storage: Storage, version: Version) -> Contents:
    """As `load`, whatever index and groups say, which manifests that are whole do not need.

    Raises:
        UnfinishedError, UnreadableError, CheckpointError: As `load`.
    """
    return _load(storage, version, _files(storage, version), None)


def open_version(storage: Storage, version: Version) -> Contents:
    """As `load`; of a version with an index, a part is read when something in it is wanted.

    Where index or groups are of no use, all manifests are read, and `Contents.remarks` says so.

    Raises:
        UnfinishedError, UnreadableError, CheckpointError: As `load`.
    """
    mark = _seal_of(storage, version)
    if mark is None or not mark.indexed:
        return _load(storage, version, _files(storage, version), mark)
    try:
        with _of_index():
            index = _read_index(storage, version, mark)
    except _DamagedIndexError as error:
        return _without_index(storage, version, error)
    catalogue = _merged_catalogue(storage, version, index.catalogues)
    return ManifestsOnDemand(storage, version, index, catalogue).contents


@contextlib.contextmanager
def _of_index() -> Iterator[None]:
    """Damage of an index or of a group's file, other than a storage that fails."""
    try:
        yield
    except UnreadableError:
        raise
    except CheckpointError as error:
        raise _DamagedIndexError(str(error)) from error


def _without_index(storage: Storage, version: Version, error: _DamagedIndexError) -> Contents:
    contents = load_manifests(storage, version)
    contents.remarks.append(f"{error}; all manifests of the version were read instead")
    return contents


def _load(storage: Storage, version: Version, files: dict[str, int], mark: Seal | None) -> Contents:
    sizes = world_sizes(files)
    cut_short: type[CheckpointError] = CheckpointError if SEAL in files else UnfinishedError
    if not sizes:
        raise cut_short(f"{_place(storage, version)} has no manifest")
    parts, roots, problems = [], [], []
    # A listing may lag behind, so parts are asked for by their names.
    world_size = max(sizes)
    named = (PART_NAME.fullmatch(name) for name in files)
    listed = {int(found[1]) for found in named if found and int(found[2]) == world_size}
    listed.intersection_update(range(world_size))
    others = (rank for rank in range(world_size) if rank not in listed)
    asked = sorted([*listed, *itertools.islice(others, _UNLISTED)])
    for rank in asked:
        name = version.part_name(rank, world_size)
        try:
            part, root = read_part(storage, version, rank, world_size)
            parts.append(part)
            roots.append(root)
        except FileNotFoundError:
            problems.append(f"{storage.location}/{name} is missing")
        except CheckpointError as error:
            cut_short = UnreadableError if cut_short is UnreadableError else CheckpointError
            problems.append(str(error))
        except OSError as error:
            cut_short = UnreadableError
            problems.append(f"{storage.location}/{name} cannot be read: {sentence_of(error)}")
    unnamed = world_size - len(asked) + max(len(problems) - _NAMED, 0)
    if unnamed:
        problems[_NAMED:] = [f"and {unnamed} more manifests are missing or damaged"]
    if not parts:
        raise (UnreadableError if cut_short is UnreadableError else CheckpointError)(
            "; ".join(problems)
        )
    catalogues = {part.catalogue for part in parts}
    catalogue = _merged_catalogue(storage, version, catalogues)
    contents = Contents(version, catalogue, parts, roots, problems)
    check_contents(storage, contents)
    if mark is not None and mark.indexed:
        _check_index(storage, contents, mark)
    held = {name for part in parts for name in part.values}
    missing = [name for name in catalogue.values if name not in held]
    for name, facts in catalogue.tensors.items():
        if not covers(
            facts.shape, [piece.box for part in parts for piece in part.pieces.get(name, ())]
        ):
            missing.append(name)
    # Ranks that planned alone list only what they hold themselves, so each of them is needed.
    if missing or (problems and len(catalogues) > 1):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        which = f": `{missing[0]:.200}`{more} is not whole" if missing else ""
        causes = f" ({'; '.join(problems)})" if problems else ""
        raise cut_short(f"{_place(storage, version)} is incomplete{which}{causes}")
    return contents


def read_part(storage: Storage, version: Version, rank: int, world_size: int) -> tuple[Part, str]:
    """The manifest of a rank's part, and its BLAKE3.

    Raises:
        CheckpointError: When it is damaged, or belongs to another version.
        OSError: When the storage fails.
    """
    name = version.part_name(rank, world_size)
    content = storage.read(name)
    part = Part.from_bytes(content, f"{storage.location}/{name}")
    written = part.session, part.step, part.rank, part.world_size
    if written != (version.session, version.step, rank, world_size):
        raise CheckpointError(f"{storage.location}/{name} belongs to another version")
    return part, root_of(content)


def _readable_part(
    storage: Storage, version: Version, rank: int, world_size: int
) -> tuple[Part, str]:
    """As `read_part`, but a storage that fails is a CheckpointError too."""
    try:
        return read_part(storage, version, rank, world_size)
    except OSError as error:
        raise unreadable(storage, version.part_name(rank, world_size), error) from None


def _merged_catalogue(storage: Storage, version: Version, roots: Iterable[str]) -> Catalogue:
    first, *others = (read_catalogue(storage, version, root) for root in roots)
    return functools.reduce(Catalogue.merged, others, first)


def _seal_of(storage: Storage, version: Version) -> Seal | None:
    """The seal of a version; None when there is none that can be read."""
    name = f"{version.folder}/{SEAL}"
    with contextlib.suppress(OSError, CheckpointError):
        return Seal.from_bytes(storage.read(name), f"{storage.location}/{name}")
    return None


def _sealed_file(storage: Storage, name: str, root: str) -> bytes:
    """A file whose BLAKE3 is to be `root`; one that ends with it is checked when it is parsed."""
    try:
        content = storage.read(name)
    except OSError as error:
        raise unreadable(storage, name, error) from None
    if root.encode() not in content[-len(root) - 4 :]:
        raise CheckpointError(f"{storage.location}/{name} is damaged, or of another version")
    return content


def _read_index(storage: Storage, version: Version, mark: Seal) -> Index:
    """The index that a seal names."""
    world_size = mark.indexed
    name = version.index_name(world_size)
    place = f"{storage.location}/{name}"
    content = _sealed_file(storage, name, mark.roots[name.partition("/")[2]])
    index = Index.from_bytes(content, place)
    groups = {
        version.group_name(number, world_size).partition("/")[2]: root
        for number, root in enumerate(index.groups)
    }
    written = index.session, index.step, index.world_size, index.kind
    if written != (version.session, version.step, world_size, mark.kind):
        raise CheckpointError(f"{place} belongs to another version")
    if {**groups, name.partition("/")[2]: root_of(content)} != mark.roots:
        raise CheckpointError(f"{place} names other groups than {version.folder}/{SEAL}")
    if not index.catalogues:
        raise ManifestError(f"{place} is malformed: catalogues is empty")
    return index


def _read_group(storage: Storage, version: Version, index: Index, number: int) -> GroupSeal:
    """A group's file that an index names."""
    name = version.group_name(number, index.world_size)
    content = _sealed_file(storage, name, index.groups[number])
    group = GroupSeal.from_bytes(content, f"{storage.location}/{name}")
    written = group.session, group.step, group.world_size, group.kind, group.ranks
    expected = version.session, version.step, index.world_size, index.kind, index.ranks_of(number)
    if written != expected:
        raise CheckpointError(f"{storage.location}/{name} belongs to another version or group")
    return group


def _check_index(storage: Storage, contents: Contents, mark: Seal) -> None:
    """See that index and groups say of the parts what these say; all parts have to be there.

    Raises:
        CheckpointError: When they do not.
    """
    version, parts = contents.version, contents.parts
    if contents.problems:
        raise CheckpointError(
            f"{_place(storage, version)} is incomplete ({listing(contents.problems)})"
        )
    index = _read_index(storage, version, mark)
    ranks = [index.ranks_of(number) for number in range(len(index.groups))]
    if ranks[-1].stop != len(parts):
        raise CheckpointError(f"{_place(storage, version)} has another index than manifests")
    groups = [
        GroupSeal.of(parts[found.start : found.stop], contents.roots[found.start : found.stop])
        for found in ranks
    ]
    for number, group in enumerate(groups):
        name = version.group_name(number, index.world_size)
        if _sealed_file(storage, name, index.groups[number]) != group.to_bytes():
            raise CheckpointError(
                f"{storage.location}/{name} does not say what the manifests of its group say"
            )
    if index != Index.of(groups, index.groups):
        name = version.index_name(index.world_size)
        raise CheckpointError(f"{storage.location}/{name} does not say what its groups hold")


def check_contents(storage: Storage, contents: Contents) -> None:
    """See that the manifests of a version fit its catalogue.

    Raises:
        ManifestError: When they do not.
    """
    tensors = contents.catalogue.tensors
    for part in contents.parts:
        name = contents.version.part_name(part.rank, part.world_size)
        part.check_pieces(contents.catalogue, f"{storage.location}/{name}")
        for key, value in part.values.items():
            # What was imported names its tensors without the prefix that they have here.
            absent = () if key == IMPORTED else set(tensors_of(value)).difference(tensors)
            if absent:
                raise ManifestError(
                    f"{storage.location}/{name} is malformed: the value `{key:.200}` has the "
                    f"tensor `{min(absent):.200}`, which the catalogue has not"
                )


def read_catalogue(storage: Storage, version: Version, root: str) -> Catalogue:
    """The catalogue of `version` whose BLAKE3 is `root`; raises CheckpointError if it is not."""
    name = version.catalogue_name(root)
    try:
        content = storage.read(name)
    except OSError as error:
        raise unreadable(storage, name, error) from None
    catalogue = Catalogue.from_bytes(content, f"{storage.location}/{name}")
    if root_of(content) != root:
        raise CheckpointError(f"{storage.location}/{name} is not the catalogue of its version")
    return catalogue


def read_seal(storage: Storage, version: Version) -> Seal | None:
    """The seal of `version`, or None when there is none, or files that it stands for are gone.

    Raises:
        UnreadableError: When the storage fails.
    """
    name = f"{version.folder}/{SEAL}"
    try:
        found = Seal.from_bytes(storage.read(name), name)
    except (FileNotFoundError, CheckpointError):
        return None
    except OSError as error:
        raise unreadable(storage, name, error) from None
    packs = (pack.partition("/") for pack in found.packs)
    needed = {*found.roots, *(name for folder, _, name in packs if folder == version.folder)}
    for rank in range(found.indexed):
        needed.add(version.part_name(rank, found.indexed).partition("/")[2])
    return found if needed <= _files(storage, version).keys() else None


def seal(storage: Storage, contents: Contents) -> None:
    """Write the seal that stands for `contents`, with an index where there are very many parts.

    Raises:
        CheckpointError: When groups that were sealed before do not fit.
        OSError: When the storage fails.
    """
    version, parts = contents.version, contents.parts
    world_size = parts[0].world_size
    if not len(parts) == world_size > INDEXED_ABOVE:
        publish(storage, f"{version.folder}/{SEAL}", contents.seal.to_bytes())
        return
    for first in leaders(world_size):
        ranks = led_by(first, world_size)
        found = parts[ranks.start : ranks.stop], contents.roots[ranks.start : ranks.stop]
        _publish_group(storage, version, GroupSeal.of(*found))
    seal_groups(storage, version, world_size)


def seal_group(storage: Storage, version: Version, rank: int, world_size: int) -> None:
    """Read the parts of the group that `rank` leads, and write what they hold.

    Raises:
        CheckpointError: When a part cannot be used.
        OSError: When the storage fails to write.
    """
    parts, roots = [], []
    for member in led_by(rank, world_size):
        part, root = _readable_part(storage, version, member, world_size)
        parts.append(part)
        roots.append(root)
    catalogue = _merged_catalogue(storage, version, {part.catalogue for part in parts})
    check_contents(storage, Contents(version, catalogue, parts, roots, []))
    _publish_group(storage, version, GroupSeal.of(parts, roots))


def _publish_group(storage: Storage, version: Version, group: GroupSeal) -> None:
    name = version.group_name(group.first // GROUP_RANKS, group.world_size)
    publish(storage, name, group.to_bytes())


def seal_groups(storage: Storage, version: Version, world_size: int) -> None:
    """Write index and seal of a version whose groups are sealed, without reading a manifest.

    Raises:
        CheckpointError: When groups together do not hold everything.
        OSError: When the storage fails to write.
    """
    groups: list[GroupSeal] = []
    roots: list[str] = []
    while not groups or groups[-1].ranks.stop < world_size:
        number = len(groups)
        name = version.group_name(number, world_size)
        place = f"{storage.location}/{name}"
        try:
            content = storage.read(name)
        except OSError as error:
            raise unreadable(storage, name, error) from None
        group = GroupSeal.from_bytes(content, place)
        written = group.session, group.step, group.world_size, group.first
        first = groups[-1].ranks.stop if groups else 0
        if written != (version.session, version.step, world_size, first):
            raise CheckpointError(f"{place} belongs to another version or group")
        groups.append(group)
        roots.append(root_of(content))
    index = Index.of(groups, roots)
    catalogue = _merged_catalogue(storage, version, index.catalogues)
    missing = [name for name in catalogue.values if name not in index.values]
    for name, facts in catalogue.tensors.items():
        held = [groups[number].pieces[name] for number, _ in index.tensors.get(name, ())]
        if not covers(facts.shape, [box for of_group in held for _, box in of_group]):
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{_place(storage, version)} is incomplete: `{missing[0]:.200}` is not whole"
        )
    content, name = index.to_bytes(), version.index_name(world_size)
    publish(storage, name, content)
    names = [name, *(version.group_name(number, world_size) for number in range(len(groups)))]
    files = (file.partition("/")[2] for file in names)
    mark = Seal(
        dict(zip(files, [root_of(content), *roots], strict=True)),
        sorted({pack for group in groups for pack in group.packs}),
        index.requires,
        groups[0].metrics,
        index.kind,
    )
    publish(storage, f"{version.folder}/{SEAL}", mark.to_bytes())


def unreadable(storage: Storage, name: str, error: OSError) -> CheckpointError:
    """Return the error for a file `name` that cannot be read; one that is missing is damage."""
    missing = isinstance(error, FileNotFoundError)
    return (CheckpointError if missing else UnreadableError)(
        f"{storage.location}/{name} cannot be read: {sentence_of(error)}"
    )


def _files(storage: Storage, version: Version) -> dict[str, int]:
    try:
        return storage.files(version.folder)
    except OSError as error:
        raise UnreadableError(
            f"{_place(storage, version)} cannot be listed: {sentence_of(error)}"
        ) from None


def _place(storage: Storage, version: Version) -> str:
    return f"{storage.location}/{version.folder}"


def not_held(contents: Contents, boxes: dict[str, Box]) -> str:
    """The first tensor of which `contents` lacks a part of the given box; empty when none."""
    for name, box in boxes.items():
        pieces = [piece.box for part in contents.parts for piece in part.pieces.get(name, ())]
        if name not in contents.catalogue.tensors or box in pieces or not box.elements:
            continue
        common = (box.overlap(piece) for piece in pieces if len(piece.shape) == len(box.shape))
        inside = [
            Box(tuple(a - b for a, b in zip(item.offset, box.offset, strict=True)), item.shape)
            for item in common
            if item is not None
        ]
        if not covers(box.shape, inside):
            return name
    return ""


_LOGS = "replay"


def logs_of(storage: Storage) -> Storage:
    """Storage of a store's replay logs: below its versions, since step and log must not meet.

    Args:
        storage: The store.
    """
    return storage_of(f"{storage.location}/{_LOGS}")


def states_of(logs: Storage) -> Storage:
    """The store whose versions the logs in `logs` start from: the inverse of `logs_of`."""
    if isinstance(logs, LocalStorage):
        return LocalStorage(logs.root.parent)
    return storage_of(logs.location.rpartition("/")[0])


def leading_on(
    storage: Storage, base: Version, read: Callable[[Storage, Version], Contents] = load
) -> tuple[list[Version], str]:
    """The complete logs that lead on from `base` without a gap, and why newer ones do not.

    A newest log that was cut short is passed over without a word: its step was not yet safe.

    Args:
        storage: The storage of the logs alone.
        base: A version of the state.
        read: Reads the manifests of a complete log, or raises CheckpointError; as `load`.
    """
    later = [version for version in list_versions(storage) if version > base]
    run: list[Version] = []
    cause = ""
    for log in later:
        expected = Version(base.session, base.step + len(run) + 1)
        if log != expected:
            cause = f"that of step {expected.step} is missing"
            if log.session != base.session:
                cause = "the version that they start from cannot be used"
            break
        problem = ""
        if SEAL not in storage.files(log.folder):
            # A sealed one was published, even if it is damaged.
            try:
                read(storage, log)
            except UnfinishedError:
                problem = f"that of step {log.step} is incomplete"
            except CheckpointError as error:
                problem = str(error)
        if problem:
            cause = problem if log != later[-1] else ""
            break
        run.append(log)
    rest = later[len(run) :]
    if not cause:
        return run, ""
    steps = f"step {rest[0].step}"
    if len(rest) > 1:
        steps = f"steps {rest[0].step} to {rest[-1].step}"
    return run, f"the replay logs of {steps} cannot be used: {cause}"
