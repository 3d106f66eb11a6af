"""Whether a version is as it was written, to the last byte. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.format.logs import states_of
from outlast.checkpoint.format.manifest import Part, Piece
from outlast.checkpoint.format.reader import VersionReader
from outlast.checkpoint.format.storage import sentence_of
from outlast.checkpoint.format.version import SEAL, Seal, Version, load
from outlast.checkpoint.inspection.listing import summarize
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Contents
    from outlast.checkpoint.inspection.listing import Place, Progress


@dataclass(frozen=True)
class Verdict:
    """Whether a version is as it was written.

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
) -> Verdict:
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
) -> Verdict:
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
) -> Verdict:
    return Verdict(version.step, version.session, version.folder, state, tuple(problems), root=root)


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
    """What is left without known chunks: contents, chunks, bytes; and how many are left out."""
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
                key = _known(part, number, facts.itemsize)
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


def _known(part: Part, number: int, itemsize: int) -> Known:
    chain = (part.chunks[item] for item in part.chain(number))
    return itemsize, tuple(
        (part.packs[link.pack], link.offset, link.stored_hash, link.content_hash) for link in chain
    )
