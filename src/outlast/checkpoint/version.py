"""Versions in a store: their names, which are complete, and whether they are as written.

    checkpoints/
      step-00000200-a1/                    step 200, saved by the store's first session
        rank-00000-of-00002.json           what rank 0 saved: published by its rename
        rank-00000-of-00002.pack           the chunks that it stored with this version
        rank-00001-of-00002.json ...
        catalogue-6c3f0d1e9a7b2c45.json    names, types and shapes of all tensors
        version.json                       the seal: written when all parts are there
      replay/step-00000201-a1/ ...         replay logs: see `logs`

No pointer says which version is the newest: that is the last one, by session and step, whose parts
together hold every element of every tensor in its catalogue. A session is one owner of the store; a
run that goes back to an earlier step does so in a new session, so its versions come later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.manifest import (
    FORMAT,
    IMPORTED,
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
from outlast.checkpoint.storage import publish, sentence_of
from outlast.errors import CheckpointError
from outlast.state.box import covers
from outlast.state.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outlast.checkpoint.storage import Storage

SEAL = "version.json"
_FOLDER = re.compile(r"step-(\d{8}|[1-9]\d{8,})-a([1-9]\d*)", re.ASCII)
# Of ranks whose files are not even listed, as a listing that lags behind may hide a few.
_UNLISTED = 64


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
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.parts[0].world_size

    @property
    def requires(self) -> list[Version]:
        """The versions that a replay log starts from."""
        steps = sorted({step for part in self.parts for step in part.requires})
        return [Version(self.version.session, step) for step in steps]

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by which versions are compared."""
        found: dict[str, float] = self.parts[0].notes.get("metrics", {})
        return found

    @property
    def values(self) -> dict[str, Any]:
        """JSON values by name; of several ranks that saved one, the first counts."""
        return {name: value for part in self.parts[::-1] for name, value in part.values.items()}

    @property
    def packs(self) -> set[str]:
        """Files that hold its chunks."""
        return {pack for part in self.parts for pack in part.packs}


def list_versions(storage: Storage) -> list[Version]:
    """All versions, complete or not, from old to new."""
    named = (_FOLDER.fullmatch(folder) for folder in storage.folders())
    return sorted(Version(int(name[2]), int(name[1])) for name in named if name)


def world_sizes(names: Iterable[str]) -> set[int]:
    """Numbers of ranks that saved the parts among the files `names` of a version's folder."""
    return {int(found[2]) for name in names if (found := PART_NAME.fullmatch(name))}


def is_published(storage: Storage, version: Version) -> bool:
    """Return whether `version` is sealed and its files are there, or its parts are complete.

    Raises:
        UnreadableError: When the storage fails to say.
    """
    return seal_or_contents(storage, version, load) is not None


def seal_or_contents(
    storage: Storage, version: Version, read: Callable[[Storage, Version], Contents]
) -> Seal | Contents | None:
    """The seal of `version`, or the manifests if these are complete without one; else None.

    Args:
        storage: The store.
        version: Which.
        read: Reads the manifests, or raises CheckpointError; as `load`.

    Raises:
        UnreadableError: When the storage fails to say.
    """
    unsure: UnreadableError | None = None
    try:
        found = read_seal(storage, version)
    except UnreadableError as error:
        found, unsure = None, error
    if found is not None:
        return found
    try:
        return read(storage, version)
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
    unlisted = 0
    for rank in range(world_size):
        name = version.part_name(rank, world_size)
        if name.partition("/")[2] not in files and unlisted >= _UNLISTED:
            unlisted += 1
            continue
        try:
            content = storage.read(name)
            part = Part.from_bytes(content, f"{storage.location}/{name}")
            if (part.session, part.step) != (version.session, version.step) or (
                (part.rank, part.world_size) != (rank, world_size)
            ):
                raise CheckpointError(f"{storage.location}/{name} belongs to another version")
            parts.append(part)
            roots.append(root_of(content))
        except FileNotFoundError:
            unlisted += 1
            problems.append(f"{storage.location}/{name} is missing")
        except CheckpointError as error:
            cut_short = UnreadableError if cut_short is UnreadableError else CheckpointError
            problems.append(str(error))
        except OSError as error:
            cut_short = UnreadableError
            problems.append(f"{storage.location}/{name} cannot be read: {sentence_of(error)}")
    if unlisted > _UNLISTED:
        problems.append(f"and {unlisted - _UNLISTED} more manifests are missing")
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
    missing = _uncovered(contents)
    # Ranks that planned alone list only what they hold themselves, so each of them is needed.
    if missing or (problems and len(catalogues) > 1):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        which = f": `{missing[0]}`{more} is not whole" if missing else ""
        causes = f" ({'; '.join(problems)})" if problems else ""
        raise cut_short(f"{_place(storage, version)} is incomplete{which}{causes}")
    return contents


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
                    f"{storage.location}/{name} is malformed: the value `{key}` has the tensor "
                    f"`{min(absent)}`, which the catalogue has not"
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


def _uncovered(contents: Contents) -> list[str]:
    """Names of the tensors and values that the parts do not hold completely."""
    held = {name for part in contents.parts for name in part.values}
    missing = [name for name in contents.catalogue.values if name not in held]
    for name, facts in contents.catalogue.tensors.items():
        boxes = [piece.box for part in contents.parts for piece in part.pieces.get(name, ())]
        if not covers(facts.shape, boxes):
            missing.append(name)
    return missing


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


def seal(storage: Storage, version: Version) -> Contents:
    """Check that `version` is complete and write its seal.

    Raises:
        CheckpointError: When it is not complete.
        OSError: When the storage fails.
    """
    contents = load(storage, version)
    write_seal(storage, contents)
    return contents


def write_seal(storage: Storage, contents: Contents) -> None:
    """Write the seal that stands for `contents`; raises OSError when the storage fails."""
    version = contents.version
    names = (version.part_name(part.rank, part.world_size) for part in contents.parts)
    found = Seal(
        {name.partition("/")[2]: root for name, root in zip(names, contents.roots, strict=True)},
        sorted(contents.packs),
        [required.step for required in contents.requires],
        contents.metrics,
        contents.kind,
    )
    publish(storage, f"{version.folder}/{SEAL}", found.to_bytes())


def unreadable(storage: Storage, name: str, error: OSError) -> CheckpointError:
    """Return the error for a file `name` that cannot be read; one that is missing is no puzzle."""
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
