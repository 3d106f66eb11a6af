"""Which versions a store holds and in what state they are. Needs no torch, no training code.

`verification` checks a version's content, `description` says what it consists of, `difference`
compares two, `extract` writes one as safetensors, `usage` says what takes the space.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.checkpoint.format.logs import leading_on, logs_of
from outlast.checkpoint.format.manifest import ManifestError, root_of, unsealed
from outlast.checkpoint.format.storage import TEMPORARY, storage_of
from outlast.checkpoint.format.version import SEAL, Seal, Version, list_versions, load
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint.format.manifest import Catalogue
    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Contents

    Progress = Callable[[int, int], None]
    """Called with the bytes done so far and the bytes in all."""

Place = tuple[str, int]
"""File and first byte of a chunk; every stored chunk has its own."""

_RUN_FOLDER = "checkpoints"


def open_store(place: str | os.PathLike[str]) -> Storage:
    """The store at a directory or fsspec URL, or that of the run whose directory is given.

    Raises:
        CheckpointError: When there is no version of a checkpoint.
    """
    text = os.fspath(place)
    for item in (text, f"{text.rstrip('/')}/{_RUN_FOLDER}"):
        storage = storage_of(item)
        try:
            if list_versions(storage):
                return storage
            files = storage.files("")
        except CheckpointError:
            raise
        except Exception as error:  # every fsspec implementation has errors of its own
            raise CheckpointError(f"{item} cannot be read: {error}") from None
        if item == text and not files and not storage.folders():
            raise CheckpointError(
                f"{text} does not exist, is empty or is a file; give a checkpoint store, a run "
                "directory (e.g. runs/quickstart) or an fsspec URL"
            )
    raise CheckpointError(
        f"{text} holds no checkpoint: there is no folder such as {Version(1, 100).folder} in it or "
        f"in its folder {_RUN_FOLDER}; give a store, a run directory or an fsspec URL"
    )


def list_saved(storage: Storage) -> list[Version]:
    """Versions with at least one manifest, complete or not, from old to new.

    A folder without any holds chunks that later versions refer to, or remains of a killed save.
    """
    return [
        version
        for version in list_versions(storage)
        if any(name.endswith(".json") for name in storage.files(version.folder))
    ]


def list_begun(storage: Storage) -> list[Version]:
    """As `list_saved`, with the newest folders in which there is no manifest yet, or none any more.

    Older ones may hold chunks that a version refers to.
    """
    saved = set(list_saved(storage))
    newest = max(saved, default=None)
    return [
        version
        for version in list_versions(storage)
        if version in saved or newest is None or version > newest
    ]


def newest_complete(storage: Storage) -> Version | None:
    """The newest version whose manifests are all there and right; None when there is none."""
    for version in reversed(list_saved(storage)):
        with contextlib.suppress(CheckpointError):
            return load(storage, version).version
    return None


def find_version(storage: Storage, step: int | None = None) -> Contents:
    """The newest complete version, or the newest complete one of `step`.

    Raises:
        CheckpointError: When there is none; says what is wrong with those that there are.
    """
    versions = list_saved(storage)[::-1]
    chosen = [version for version in versions if step is None or version.step == step]
    if not versions:
        raise CheckpointError(f"{storage.location} holds no complete version")
    if not chosen:
        raise CheckpointError(
            f"step = {step} is not in {storage.location}; the steps there are {_steps(versions)}"
        )
    problems = []
    for version in chosen:
        try:
            return load(storage, version)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError("; ".join(problems))


def _steps(versions: list[Version]) -> str:
    steps = [str(step) for step in sorted({version.step for version in versions})]
    return ", ".join(steps if len(steps) <= 12 else [*steps[:5], "...", *steps[-5:]])


@dataclass(frozen=True)
class VersionSummary:
    """One version in a list.

    Attributes:
        step: Steps done.
        session: Which owner of the store saved it, from 1.
        folder: Its folder in the store.
        kind: ``state``, ``replay``, or empty when no manifest can be read.
        state: ``complete``; ``incomplete``: the save did not finish, or still goes on; ``damaged``:
            what was published is not there any more as it was.
        problem: What is missing or damaged; may also be given for a complete version, of which
            something is damaged that is not needed to restore it.
        root: BLAKE3 over the whole version; empty without a seal.
        ranks: How many saved it; None when it is not complete.
        tensors: Number of tensors; None when it is not complete.
        raw_bytes: Bytes of its tensors; None when it is not complete.
        stored_bytes: Bytes of the files that were written with it, manifests included.
        referred_bytes: Bytes of the chunks it uses in files of older versions; None as above.
        ratio: `raw_bytes` / `stored_bytes`; None as above.
        metrics: The figures that were saved with it.
    """

    step: int
    session: int
    folder: str
    kind: str
    state: Literal["complete", "incomplete", "damaged"]
    problem: str
    root: str
    ranks: int | None
    tensors: int | None
    raw_bytes: int | None
    stored_bytes: int
    referred_bytes: int | None
    ratio: float | None
    metrics: dict[str, float]


def summarize(storage: Storage, version: Version) -> VersionSummary:
    """What a list of versions says about `version`; reads its manifests, no tensor."""
    files = storage.files(version.folder)
    stored_bytes = sum(size for name, size in files.items() if not name.endswith(TEMPORARY))
    root, problems = _seal_problems(storage, version, files)
    try:
        contents = load(storage, version, files)
    except CheckpointError as error:
        return VersionSummary(
            version.step,
            version.session,
            version.folder,
            "",
            "damaged"
            if isinstance(error, ManifestError) or _was_published(storage, version, files)
            else "incomplete",
            "; ".join([str(error), *problems]),
            root,
            ranks=None,
            tensors=None,
            raw_bytes=None,
            stored_bytes=stored_bytes,
            referred_bytes=None,
            ratio=None,
            metrics={},
        )
    own = f"{version.folder}/"
    referred = {
        (part.packs[chunk.pack], chunk.offset): chunk.length
        for part in contents.parts
        for chunk in part.chunks
        if not part.packs[chunk.pack].startswith(own)
    }
    raw_bytes = raw_size(contents.catalogue)
    return VersionSummary(
        version.step,
        version.session,
        version.folder,
        contents.kind,
        "complete",
        "; ".join([*contents.problems, *problems]),
        root,
        contents.parts[0].world_size,
        len(contents.catalogue.tensors),
        raw_bytes,
        stored_bytes,
        sum(referred.values()),
        ratio(raw_bytes, stored_bytes),
        contents.parts[0].notes.get("metrics", {}),
    )


@dataclass(frozen=True)
class LogsSummary:
    """The replay logs of a store.

    Attributes:
        logs: Number of logs, of use or not.
        base: Step of the newest complete version; None when there is none.
        leading_on: Number of logs that lead on from that version without a gap.
        step: The step that they lead to; None when there are none.
        problem: Why newer logs do not lead on; may be empty.
        stored_bytes: Bytes of the files of all logs.
    """

    logs: int
    base: int | None
    leading_on: int
    step: int | None
    problem: str
    stored_bytes: int


def summarize_logs(storage: Storage, base: Version | None) -> LogsSummary | None:
    """What a list of versions says about the replay logs of a store; None when it has none.

    Args:
        storage: The store.
        base: Its newest complete version.
    """
    logs = logs_of(storage)
    count = len(list_saved(logs))
    if not count:
        return None
    run, problem = ([], "") if base is None else leading_on(logs, base)
    return LogsSummary(
        count,
        None if base is None else base.step,
        len(run),
        run[-1].step if run else None,
        problem,
        logs_size(storage),
    )


def logs_size(storage: Storage) -> int:
    """Bytes of all files among the replay logs of a store."""
    logs = logs_of(storage)
    return sum(sum(logs.files(folder).values()) for folder in ("", *logs.folders()))


def raw_size(catalogue: Catalogue) -> int:
    """Bytes of all tensors, each counted once."""
    return sum(math.prod(facts.shape) * facts.itemsize for facts in catalogue.tensors.values())


def ratio(raw_bytes: int, stored_bytes: int) -> float | None:
    """How many times smaller the stored bytes are; None when nothing is stored."""
    return raw_bytes / stored_bytes if stored_bytes else None


def _seal_problems(
    storage: Storage, version: Version, files: dict[str, int]
) -> tuple[str, list[str]]:
    """The root that the seal names, and what is wrong with the seal."""
    if SEAL not in files:
        return "", []
    name = f"{version.folder}/{SEAL}"
    try:
        content = storage.read(name)
        Seal.from_bytes(content, f"{storage.location}/{name}")
    except OSError as error:
        return "", [f"{storage.location}/{name} cannot be read: {error.strerror or error}"]
    except CheckpointError as error:
        return "", [str(error)]
    return root_of(content), []


def _was_published(storage: Storage, version: Version, files: dict[str, int]) -> bool:
    """Whether an incomplete version was whole: it is sealed, or a file changed since its rename."""
    if SEAL in files:
        return True
    for name in files:
        if name.endswith(".json"):
            try:
                unsealed(storage.read(f"{version.folder}/{name}"), name)
            except OSError:
                continue
            except CheckpointError:
                return True
    return False
