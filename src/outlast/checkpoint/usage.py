"""Space that a store takes, its pruning, and the verification of a version. Needs no torch.

A version's chunks may lie in files of older versions, which stay as long as one version needs them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.inspection import logs_size, raw_size, summarize
from outlast.checkpoint.manifest import REPLAY, Part, Piece
from outlast.checkpoint.owner import Ownership, refuse_if_held
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.retention import (
    Retention,
    complete_versions,
    prune,
    states_of,
    to_keep,
)
from outlast.checkpoint.storage import TEMPORARY, LocalStorage, sentence_of
from outlast.checkpoint.version import SEAL, Seal, Version, list_versions, load, read_seal
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.checkpoint.inspection import Place, Progress
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents


_MANIFEST, _PACK = ".json", ".pack"


@dataclass(frozen=True)
class VersionUsage:
    """Space that one version takes.

    Attributes:
        step: Steps done.
        session: Which owner of the store saved it.
        folder: Its folder in the store.
        complete: Whether it can be restored.
        raw_bytes: Bytes of its tensors; None when it is not complete.
        own_bytes: Bytes of the files with chunks that no other version needs.
        shared_bytes: Bytes of the files with chunks that it needs and others too.
        manifest_bytes: Bytes of its manifests.
        freed_bytes: What deleting this version alone would free: own files and manifests.
    """

    step: int
    session: int
    folder: str
    complete: bool
    raw_bytes: int | None
    own_bytes: int
    shared_bytes: int
    manifest_bytes: int
    freed_bytes: int


@dataclass(frozen=True)
class Usage:
    """Space that a store takes; `total_bytes` is the sum of the six below it.

    Attributes:
        versions: From old to new.
        raw_bytes: Bytes of the tensors of all complete versions.
        total_bytes: Bytes of all files.
        own_bytes: Files with chunks that one version needs.
        shared_bytes: Files with chunks that several versions need, each counted once.
        manifest_bytes: Manifests.
        temporary_bytes: Temporary files: of killed saves, or of one under way.
        orphan_bytes: Other files that no version refers to.
        log_bytes: Replay logs, and what killed saves left behind among them.
        ratio: `raw_bytes` / (`total_bytes` - `log_bytes`).
    """

    versions: tuple[VersionUsage, ...]
    raw_bytes: int
    total_bytes: int
    own_bytes: int
    shared_bytes: int
    manifest_bytes: int
    temporary_bytes: int
    orphan_bytes: int
    log_bytes: int
    ratio: float


def usage(storage: Storage) -> Usage:
    """Add up the files of a store by what they are needed for; reads manifests, no tensor."""
    folders = {version: storage.files(version.folder) for version in list_versions(storage)}
    needs = {key: _needs(storage, key, files) for key, files in folders.items()}
    sizes = {
        f"{version.folder}/{name}": size
        for version, files in folders.items()
        for name, size in files.items()
    }
    users: dict[str, int] = {}
    for need in needs.values():
        for pack in need.packs:
            users[pack] = users.get(pack, 0) + 1
    versions = []
    for version, files in folders.items():
        manifest_bytes = sum(size for name, size in files.items() if name.endswith(_MANIFEST))
        if not manifest_bytes:
            continue
        need = needs[version]
        own_bytes = sum(sizes.get(pack, 0) for pack in need.packs if users[pack] == 1)
        versions.append(
            VersionUsage(
                version.step,
                version.session,
                version.folder,
                need.raw_bytes is not None,
                need.raw_bytes,
                own_bytes,
                sum(sizes.get(pack, 0) for pack in need.packs if users[pack] > 1),
                manifest_bytes,
                own_bytes + manifest_bytes,
            )
        )
    temporary = {name: size for name, size in sizes.items() if name.endswith(TEMPORARY)}
    temporary |= {n: size for n, size in storage.files("").items() if n.endswith(TEMPORARY)}
    version_bytes = sum({**sizes, **temporary}.values())
    log_bytes = logs_size(storage)
    own_bytes = sum(version.own_bytes for version in versions)
    shared_bytes = sum(sizes.get(pack, 0) for pack, count in users.items() if count > 1)
    manifest_bytes = sum(version.manifest_bytes for version in versions)
    temporary_bytes = sum(temporary.values())
    raw_bytes = sum(version.raw_bytes or 0 for version in versions)
    return Usage(
        tuple(versions),
        raw_bytes,
        version_bytes + log_bytes,
        own_bytes,
        shared_bytes,
        manifest_bytes,
        temporary_bytes,
        version_bytes - own_bytes - shared_bytes - manifest_bytes - temporary_bytes,
        log_bytes,
        raw_bytes / version_bytes if version_bytes else 0.0,
    )


@dataclass(frozen=True)
class _Needs:
    packs: frozenset[str]
    raw_bytes: int | None


def _needs(storage: Storage, version: Version, files: dict[str, int]) -> _Needs:
    """List the files that a version needs, as far as an incomplete one can still say."""
    manifests = [name for name in files if name.endswith(_MANIFEST)]
    if not manifests:
        return _Needs(frozenset(), None)
    try:
        contents = load(storage, version, files)
        return _Needs(frozenset(contents.packs), raw_size(contents.catalogue))
    except CheckpointError:
        packs = {f"{version.folder}/{name}" for name in files if name.endswith(_PACK)}
    with contextlib.suppress(CheckpointError):
        seal = read_seal(storage, version)
        if seal is not None:
            return _Needs(frozenset(packs.union(seal.packs)), None)
    for name in manifests:
        if name.startswith("rank-"):
            with contextlib.suppress(OSError, CheckpointError):
                part = Part.from_bytes(storage.read(f"{version.folder}/{name}"), name)
                packs.update(part.packs)
    return _Needs(frozenset(packs), None)


@dataclass(frozen=True)
class Pruned:
    """Result of applying a retention policy.

    Attributes:
        deleted: Folders of the versions deleted, or that would be, from old to new.
        kept: Folders of the complete versions that stay.
        freed_bytes: Bytes of the files deleted, or that would be; remains of killed saves too.
        dry_run: Whether nothing was deleted.
    """

    deleted: tuple[str, ...]
    kept: tuple[str, ...]
    freed_bytes: int
    dry_run: bool


def prune_store(storage: Storage, policy: Retention, *, dry_run: bool = False) -> Pruned:
    """Delete the versions that `policy` does not keep; see `retention.prune`.

    Replay logs are left to the store, which deletes those of no more use when it saves.

    Raises:
        CheckpointError: When a live process owns the store, a version that would stay is damaged,
            no version has the metric by which the best are chosen, or these are replay logs.
    """
    if dry_run:
        return _prune(storage, policy, dry_run=True)
    with hold(storage):
        return _prune(storage, policy, dry_run=False)


def _prune(storage: Storage, policy: Retention, *, dry_run: bool) -> Pruned:
    known = complete_versions(storage)
    if any(known_item.kind == REPLAY for known_item in known):
        raise CheckpointError(
            f"{storage.location} holds replay logs, each of which needs those before it; give the "
            "store above it"
        )
    metrics = sorted({name for known_item in known for name in known_item.metrics})
    if policy.best and policy.metric not in metrics:
        raise CheckpointError(
            f'metric = "{policy.metric}" was saved with no version of {storage.location}, so that '
            f"the best cannot be kept; the metrics there are {', '.join(metrics) or 'none'}"
        )
    if not known:
        return Pruned((), (), 0, dry_run)
    kept = to_keep(known, policy)
    _check_kept(storage, [version for version in list_versions(storage) if version in kept])
    packs = {
        pack for known_item in known if known_item.version in kept for pack in known_item.packs
    }
    doomed = {
        f"{version.folder}/{name}": size
        for version in list_versions(storage)
        if version not in kept and version < known[-1].version
        for name, size in storage.files(version.folder).items()
        if f"{version.folder}/{name}" not in packs
    }
    deleted = prune(storage, policy, dry_run=dry_run)
    if not dry_run:
        # What could not be deleted is not counted.
        for folder in {name.partition("/")[0] for name in doomed}:
            for name in storage.files(folder):
                doomed.pop(f"{folder}/{name}", None)
    return Pruned(
        tuple(version.folder for version in deleted),
        tuple(
            known_item.version.folder for known_item in known if known_item.version not in deleted
        ),
        sum(doomed.values()),
        dry_run,
    )


def _check_kept(storage: Storage, kept: list[Version]) -> None:
    """Refuse to delete good versions for the sake of one whose seal is all that is left."""
    for version in kept:
        try:
            load(storage, version)
        except CheckpointError as error:
            raise CheckpointError(
                f"{version.folder} would stay but cannot be restored: {error}; bring back its "
                "files or delete its folder, then prune again"
            ) from None


@contextlib.contextmanager
def hold(storage: Storage) -> Iterator[None]:
    """Own a store of a file system; in an object store, see that no one of this host saves.

    Raises:
        CheckpointError: When a live process owns it.
    """
    if not isinstance(storage, LocalStorage):
        refuse_if_held(storage)
    ownership = Ownership(storage)
    ownership.lock(remedy="wait for it to end")
    try:
        yield
    finally:
        ownership.release()


@dataclass(frozen=True)
class Verification:
    """Result of verifying a version.

    Attributes:
        step: Steps done.
        session: Which owner of the store saved it.
        folder: Its folder in the store.
        state: ``ok``; ``damaged``; or ``incomplete``: a save that did not finish or still goes on,
            which is no damage.
        problems: A sentence for each thing that is wrong.
        restorable: Whether everything that was saved is there and right, whatever else is damaged.
        root: BLAKE3 over the whole version; empty without a usable seal.
        chunks: How many chunks were decoded and found right.
        known_chunks: How many more were found right before, with another version.
        content_bytes: Bytes of the chunks decoded now.
        read_bytes: Bytes read from the storage for that.
    """

    step: int
    session: int
    folder: str
    state: Literal["ok", "damaged", "incomplete"]
    problems: tuple[str, ...] = ()
    restorable: bool = False
    root: str = ""
    chunks: int = 0
    known_chunks: int = 0
    content_bytes: int = 0
    read_bytes: int = 0


Known = tuple[int, tuple[tuple[str, int, str, str], ...]]
"""Bytes of an element (which decoding depends on), and for a chunk and its bases: file, first byte,
hash of the stored bytes, hash of the content."""


def verify(
    storage: Storage,
    version: Version,
    known: set[Known] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Decode everything that `version` stores and compare it with all its checksums.

    Args:
        storage: The store.
        version: Which version.
        known: Chunks that were found right with other versions; they are not read again, and those
            of this version are added when all of them are right.
        progress: Told how much is done.
    """
    known = set() if known is None else known
    try:
        return _verified(storage, version, known, progress)
    except CheckpointError as error:
        return _verdict(version, "damaged", [str(error)], "")
    except OSError as error:
        problem = f"{storage.location}/{version.folder} cannot be read: {sentence_of(error)}"
        return _verdict(version, "damaged", [problem], "")


def _verified(
    storage: Storage, version: Version, known: set[Known], progress: Progress | None
) -> Verification:
    summary = summarize(storage, version)
    if summary.state != "complete":
        state: Literal["damaged", "incomplete"] = summary.state
        return _verdict(version, state, [summary.problem], summary.root)
    contents = load(storage, version)
    problems = [summary.problem] if summary.problem else []
    problems += _disagreements(storage, contents)
    problems += _lacking(storage, contents)
    unknown, news, content_bytes, known_chunks = _without(contents, known)
    done_bytes, chunks, read_bytes = 0, 0, 0
    restorable = False

    def done(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        if progress is not None:
            progress(done_bytes, content_bytes)

    try:
        with VersionReader(storage, unknown) as reader:
            chunks = reader.check(done)
            read_bytes = reader.counters.read_bytes
        known |= news
        restorable = True
    except CheckpointError as error:
        problems.append(str(error))
    return replace(
        _verdict(version, "damaged" if problems else "ok", problems, summary.root),
        restorable=restorable,
        chunks=chunks,
        known_chunks=known_chunks,
        content_bytes=done_bytes,
        read_bytes=read_bytes,
    )


def _verdict(
    version: Version, state: Literal["ok", "damaged", "incomplete"], problems: list[str], root: str
) -> Verification:
    return Verification(
        version.step, version.session, version.folder, state, tuple(problems), root=root
    )


def _lacking(storage: Storage, contents: Contents) -> Iterator[str]:
    """A sentence for each version that a replay log starts from and that is not complete."""
    for required in contents.requires:
        try:
            load(states_of(storage), required)
        except CheckpointError as error:
            yield f"it starts from step {required.step}, which cannot be used: {error}"


def _disagreements(storage: Storage, contents: Contents) -> Iterator[str]:
    """A sentence for each thing in which the seal and the manifests do not agree."""
    name = f"{contents.version.folder}/{SEAL}"
    try:
        seal = Seal.from_bytes(storage.read(name), name)
    except (OSError, CheckpointError):
        return
    place = f"{storage.location}/{name}"
    for part, root in zip(contents.parts, contents.roots, strict=True):
        file = contents.version.part_name(part.rank, part.world_size).partition("/")[2]
        if seal.roots.get(file) != root:
            yield f"{place} names another manifest of rank {part.rank} than is there"
    if not contents.problems and len(seal.roots) != len(contents.parts):
        yield f"{place} names {len(seal.roots)} manifests where {len(contents.parts)} are"
    if not contents.problems and set(seal.packs) != contents.packs:
        yield f"{place} names other files than the manifests"
    if seal.kind != contents.kind:
        yield f"{place} says that this is a {seal.kind}, the manifests say {contents.kind}"


def _without(contents: Contents, known: set[Known]) -> tuple[Contents, set[Known], int, int]:
    """Leave known chunks out: contents, chunks, bytes that remain; and how many are left out."""
    parts: list[Part] = []
    news: set[Known] = set()
    places: set[tuple[Place, int]] = set()
    left_out: set[Known] = set()
    content_bytes = 0
    for part in contents.parts:
        pieces: dict[str, list[Piece]] = {}
        for name in part.pieces:
            facts = contents.catalogue.tensors[name]
            for tile, number in part.tiles(name, facts):
                chain = (part.chunks[item] for item in part.chain(number))
                key = (
                    facts.itemsize,
                    tuple(
                        (part.packs[link.pack], link.offset, link.stored_hash, link.content_hash)
                        for link in chain
                    ),
                )
                if key in known:
                    left_out.add(key)
                    continue
                pieces.setdefault(name, []).append(Piece(tile, [number]))
                news.add(key)
                chunk = part.chunks[number]
                place = (part.packs[chunk.pack], chunk.offset), facts.itemsize
                if place not in places:
                    places.add(place)
                    content_bytes += chunk.size
        parts.append(replace(part, pieces=pieces))
    return replace(contents, parts=parts), news, content_bytes, len(left_out)
