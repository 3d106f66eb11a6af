"""Versions in a store: their names, which are complete, which stay, and what is deleted.

    checkpoints/
      step-00000200-a1/                    step 200, saved by the store's first session
        rank-00000-of-00002.json           what rank 0 saved: published by its rename
        rank-00000-of-00002.pack           the chunks that it stored with this version
        rank-00001-of-00002.json ...
        catalogue-6c3f0d1e9a7b2c45.json    names, types and shapes of all tensors
        version.json                       the seal: written when all parts are there
      replay/step-00000201-a1/ ...         replay logs, in the format of versions

No pointer says which version is the newest: that is the last one, by session and step, whose parts
together hold every element of every tensor in its catalogue. A session is one owner of the store; a
run that goes back to an earlier step does so in a new session, so its versions come later.

Replay logs lie beside the versions that they lead on from; those of no more use are deleted here,
too. Needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outlast.checkpoint.manifest import (
    FORMAT,
    IMPORTED,
    MAX_RANKS,
    PART_NAME,
    REPLAY,
    ROOT,
    STATE,
    Catalogue,
    Fields,
    ManifestError,
    Part,
    root_of,
    sealed,
    unsealed,
)
from outlast.checkpoint.storage import LocalStorage, publish, sentence_of, storage_of
from outlast.errors import CheckpointError
from outlast.state.box import Box, covers
from outlast.state.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from outlast.checkpoint.storage import Storage

SEAL = "version.json"
_FOLDER = re.compile(r"step-(\d{8}|[1-9]\d{8,})-a([1-9]\d*)", re.ASCII)
# Of ranks whose files are not even listed, as a listing that lags behind may hide a few.
_UNLISTED = 64
_NAMED = 8


class UnfinishedError(CheckpointError):
    """A version that was never published: its save was cut short, or is still under way."""


class UnreadableError(CheckpointError):
    """A version that may be whole: the storage failed to say."""


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


@dataclass(frozen=True)
class Seal:
    """Mark that rank 0 writes when a version is complete.

    Attributes:
        roots: Name of each part's file in the version's folder to the part's BLAKE3.
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
        return max(world_sizes(self.roots), default=0)

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
        for part, root in roots.items():
            found.checked_text("parts", part, PART_NAME)
            found.checked_text(f"parts[{part}]", root, ROOT)
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
    """

    version: Version
    catalogue: Catalogue
    parts: list[Part]
    roots: list[str]
    problems: list[str]

    @property
    def kind(self) -> str:
        """``state`` or ``replay``."""
        return self.parts[0].kind

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
    def values(self) -> dict[str, Any]:
        """JSON values by name; of several ranks that saved one, the first counts."""
        return {name: value for part in self.parts[::-1] for name, value in part.values.items()}

    @property
    def packs(self) -> set[str]:
        """Files that hold its chunks."""
        return {pack for part in self.parts for pack in part.packs}


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


def is_published(storage: Storage, version: Version) -> bool:
    """Return whether `version` is sealed and its files are there, or its parts are complete.

    Raises:
        UnreadableError: When the storage fails to say.
    """
    return find_seal(storage, version, load) is not None


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
    catalogue = Catalogue({})
    catalogues = {part.catalogue for part in parts}
    for root in catalogues:
        catalogue = catalogue.merged(read_catalogue(storage, version, root))
    contents = Contents(version, catalogue, parts, roots, problems)
    check_contents(storage, contents)
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
    return found if needed <= _files(storage, version).keys() else None


def seal(storage: Storage, contents: Contents) -> None:
    """Write the seal that stands for `contents`; raises OSError when the storage fails."""
    publish(storage, f"{contents.version.folder}/{SEAL}", contents.seal.to_bytes())


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


@dataclass(frozen=True)
class Retention:
    """Rule for the versions of a store that stay.

    Attributes:
        keep: The newest ones.
        every: Also all whose step is a multiple of this, for ever; 0: none.
        best: Also this many with the best figure; 0: none.
        metric: Name of the figure, as given to `save_async`.
        mode: Whether a small (``min``) or a large (``max``) figure is good.
    """

    keep: int = 3
    every: int = 0
    best: int = 0
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse what would keep nothing or cannot be decided."""
        if self.keep < 1:
            raise CheckpointError(f"keep = {self.keep} keeps no checkpoint; it must be at least 1")
        if self.every < 0 or self.best < 0:
            raise CheckpointError(
                f"every = {self.every} and best = {self.best} must be 0 (none) or larger"
            )
        if self.best and not self.metric:
            raise CheckpointError(
                f"best = {self.best} needs the name of a metric to compare, e.g. metric='loss'"
            )


def complete_versions(storage: Storage) -> dict[Version, Seal]:
    """All complete versions and their seals, from old to new; unsealed ones' manifests are read.

    Raises:
        UnreadableError: When the storage fails.
        OSError: When it cannot be listed.
    """
    found = {version: find_seal(storage, version, load) for version in list_versions(storage)}
    return {version: seal[0] for version, seal in found.items() if seal is not None}


def survey(
    storage: Storage,
    versions: list[Version],
    read: Callable[[Storage, Version], Contents] = load,
    cache: dict[Version, Seal] | None = None,
) -> tuple[dict[Version, Seal], Version | None]:
    """The complete ones of `versions`, and the newest one of which the storage fails to say.

    Args:
        storage: The store.
        versions: All its versions, from old to new.
        read: Reads the manifests of an unsealed version, or raises CheckpointError; as `load`.
        cache: The seals that are known from the last time, brought up to date.
    """
    cache = {} if cache is None else cache
    for gone in cache.keys() - set(versions):
        del cache[gone]
    known, unclear = {}, None
    for version in versions:
        if version in cache:
            known[version] = cache[version]
            continue
        try:
            found = find_seal(storage, version, read)
        except (UnreadableError, OSError):
            unclear = version
            continue
        if found is not None:
            known[version], is_stored = found
            # Without a seal, parts may still come, and need more packs.
            if is_stored:
                cache[version] = known[version]
    return known, unclear


def to_keep(known: dict[Version, Seal], policy: Retention) -> set[Version]:
    """The versions that stay; `known` runs from old to new."""
    kept = set([*known][-policy.keep :])
    if policy.every:
        kept |= {version for version in known if version.step % policy.every == 0}
    if policy.best:
        sign = 1.0 if policy.mode == "min" else -1.0
        rated = [
            (sign * seal.metrics[policy.metric], -version.step, number, version)
            for number, (version, seal) in enumerate(known.items())
            if policy.metric in seal.metrics
        ]
        kept |= {version for *_, version in sorted(rated)[: policy.best]}
    return kept


def prune(
    storage: Storage,
    policy: Retention,
    *,
    protected: Collection[Version] = (),
    damaged: Collection[Version] = (),
    read: Callable[[Storage, Version], Contents] = load,
    world_size: int | None = None,
    cache: dict[Version, Seal] | None = None,
    dry_run: bool = False,
) -> list[Version]:
    """Delete the versions that need not stay, and the remains of saves that were cut short.

    Nothing newer than the newest complete version is touched: it may be under way. Chunks that a
    kept version refers to stay, whatever version they were first stored with. Where the storage
    fails to say what a version needs, that one and all older ones stay until it does.

    Args:
        storage: The store.
        policy: What stays.
        protected: Versions that stay too, because they are being copied.
        damaged: Versions that a restore has passed over. They count for nothing, and stay until
            as many intact ones as `policy` keeps are newer.
        read: See `survey`.
        world_size: Where only as many ranks as saved a version can restore it, how many there are
            now: what others saved goes only when a newer version of these ranks is complete.
        cache: See `survey`.
        dry_run: Delete nothing.

    Returns:
        The versions deleted (or that would be), incomplete ones included.
    """
    versions = list_versions(storage)
    cache = {} if cache is None else cache
    known, unclear = survey(storage, versions, read, cache)
    intact = {version: seal for version, seal in known.items() if version not in damaged}
    ours = {
        version: seal for version, seal in intact.items() if world_size in (None, seal.world_size)
    }
    if not ours:
        return []
    newest = max(ours)
    kept = to_keep(intact, policy) | to_keep(ours, policy) | set(protected)
    kept |= {bad for bad in damaged if sum(version > bad for version in ours) < policy.keep}
    kept |= {
        version
        for version in versions
        if version >= newest or (unclear is not None and version <= unclear)
    }
    packs = {pack for version in known if version in kept for pack in known[version].packs}
    deleted = []
    for version in versions:
        if version in kept:
            continue
        files = storage.files(version.folder)
        if any(name.endswith(".json") for name in files):
            deleted.append(version)
        if not dry_run:
            # Its folder may stay, for packs that others need.
            cache.pop(version, None)
            delete(storage, version, files, packs)
    return deleted


def delete(storage: Storage, version: Version, files: dict[str, int], packs: set[str]) -> None:
    """Delete a version but for `packs`; what cannot be deleted now waits for next time.

    The manifests go first, so that what a cut deletion leaves is no version.

    Args:
        storage: The store.
        version: Which.
        files: The files in its folder.
        packs: Files that other versions need.
    """
    names = [f"{version.folder}/{name}" for name in files]
    manifests = sorted(name for name in names if name.endswith(".json"))
    manifests.sort(key=lambda name: not name.endswith(SEAL))
    needed = [name for name in names if name in packs]
    with contextlib.suppress(OSError):
        for name in manifests:
            storage.remove(name)
        if needed:
            for name in names:
                if name not in packs and name not in manifests:
                    storage.remove(name)
        else:
            storage.remove_folder(version.folder)


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
        return LocalStorage(logs.root.absolute().parent)
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


def prune_logs(storage: Storage, newest: Version) -> None:
    """Delete the replay logs that lead to `newest`, the newest complete version of the state.

    The newest complete log stays, and all after it, which may be under way.

    Args:
        storage: The storage of the logs alone.
        newest: The version that logs have to come after to be of use.
    """
    versions = list_versions(storage)
    known, unclear = survey(storage, versions)
    # What comes next may refer to the packs of the last one.
    needed = min(newest, max(known, default=newest))
    if unclear is not None and unclear >= needed:
        return
    packs = {pack for version, seal in known.items() if version >= needed for pack in seal.packs}
    for version in versions:
        if version < needed:
            delete(storage, version, storage.files(version.folder), packs)
