"""Versions of a store: their state, tensors, coding and values. Needs no torch, no training code.

`difference` compares two versions, `extract` writes one as safetensors, `usage` says what takes the
space and checks a version's content.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from outlast.checkpoint.manifest import ManifestError, root_of, unsealed
from outlast.checkpoint.retention import leading_on, logs_of
from outlast.checkpoint.storage import TEMPORARY, storage_of
from outlast.checkpoint.version import SEAL, Seal, Version, list_versions, load
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from outlast.checkpoint.manifest import Part, TensorFacts
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents


if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint.manifest import Catalogue
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

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
    """Summarize `version` for a list of versions; reads its manifests, no tensor."""
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
    """Summarize the replay logs of a store for a list of versions; None when it has none.

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
    """Raw bytes over stored bytes; None when nothing is stored."""
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
    """Return whether an incomplete version was whole: sealed, or changed since its rename."""
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


@dataclass(frozen=True)
class Coding:
    """Codecs and sizes of some content.

    Attributes:
        stored_bytes: Bytes of its chunks and of the bases of these; a shared chunk counts once.
        codecs: Names of the codecs of its chunks, of the bases too.
        full: Chunks that are stored in full.
        deltas: Chunks that are stored as a difference.
        depth: The longest way from a chunk to its first base; 0: nothing is a difference.
        max_error: Largest error of a lossy chunk, in the kind of its bound; None: all is exact.
    """

    stored_bytes: int
    codecs: tuple[str, ...]
    full: int
    deltas: int
    depth: int
    max_error: float | None


@dataclass(frozen=True)
class TensorReport:
    """One tensor.

    Attributes:
        name: Its name.
        group: The group it is counted in.
        dtype: Name of the element type.
        shape: Global shape.
        pieces: How many boxes of it the ranks saved.
        raw_bytes: Its bytes.
        ratio: Raw by stored bytes; None for an empty tensor.
        bound: Bound of the error, for a lossy tensor.
        coding: How it is stored.
    """

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    pieces: int
    raw_bytes: int
    ratio: float | None
    bound: dict[str, Any] | None
    coding: Coding


@dataclass(frozen=True)
class GroupReport:
    """Tensors of one kind, such as ``model.*`` or ``optimizer.state.*.exp_avg``."""

    name: str
    tensors: int
    dtypes: tuple[str, ...]
    raw_bytes: int
    ratio: float | None
    bounds: tuple[dict[str, Any], ...]
    coding: Coding


@dataclass(frozen=True)
class Description:
    """A complete version.

    Attributes:
        step: Steps done.
        session: Which owner of the store saved it.
        folder: Its folder in the store.
        kind: ``state`` or ``replay``.
        root: BLAKE3 over the whole version; empty without a seal.
        problem: What is damaged, although the version is complete; else empty.
        ranks: How many saved it.
        requires: Steps that a replay log starts from.
        notes: What else was saved with it: versions of the software, layout.
        metrics: The figures that were saved with it.
        raw_bytes: Bytes of its tensors.
        own_bytes: Bytes of the files that were written with it, manifests included.
        referred_bytes: Bytes of the chunks it uses in files of older versions.
        ratio: `raw_bytes` / `own_bytes`.
        coding: How it is stored as a whole.
        groups: Its tensors by kind, the largest first.
        tensors: All tensors by name.
        values: Name to JSON value.
    """

    step: int
    session: int
    folder: str
    kind: str
    root: str
    problem: str
    ranks: int
    requires: tuple[int, ...]
    notes: dict[str, Any]
    metrics: dict[str, float]
    raw_bytes: int
    own_bytes: int
    referred_bytes: int
    ratio: float | None
    coding: Coding
    groups: tuple[GroupReport, ...]
    tensors: tuple[TensorReport, ...]
    values: dict[str, Any]


def describe(storage: Storage, contents: Contents) -> Description:
    """Describe a version in numbers, from its `contents`; reads no tensor."""
    summary = summarize(storage, contents.version)
    bounds = {name: bound for part in contents.parts for name, bound in part.bounds.items()}
    optimizers = optimizer_keys(contents)
    whole = _Count()
    groups: dict[str, _Group] = {}
    tensors = []
    for name, facts in sorted(contents.catalogue.tensors.items()):
        report = _tensor(name, facts, contents.parts, group_of(name, optimizers), bounds.get(name))
        group = groups.setdefault(report.group, _Group())
        group.add(report)
        for part in contents.parts:
            for _, number in part.tiles(name, facts):
                group.count.add(part, number)
                whole.add(part, number)
        tensors.append(report)
    first = contents.parts[0]
    return Description(
        step=first.step,
        session=first.session,
        folder=contents.version.folder,
        kind=contents.kind,
        root=summary.root,
        problem=summary.problem,
        ranks=first.world_size,
        requires=tuple(require.step for require in contents.requires),
        notes={name: note for name, note in first.notes.items() if name != "metrics"},
        metrics=summary.metrics,
        raw_bytes=raw_size(contents.catalogue),
        own_bytes=summary.stored_bytes,
        referred_bytes=summary.referred_bytes or 0,
        ratio=summary.ratio,
        coding=whole.coding(),
        groups=tuple(
            sorted(
                (group.report(name) for name, group in groups.items()),
                key=lambda group: -group.raw_bytes,
            )
        ),
        tensors=tuple(tensors),
        values=values_of(contents),
    )


def values_of(contents: Contents) -> dict[str, Any]:
    """All values of all ranks, by name."""
    return dict(sorted(contents.values.items()))


def optimizer_keys(contents: Contents) -> set[str]:
    """Under which names optimizers were saved: they have settings for each parameter."""
    names = (name.partition(".groups.") for name in contents.catalogue.values)
    return {key for key, separator, _ in names if separator}


def group_of(name: str, optimizers: set[str]) -> str:
    """The kind of a tensor or of an optimizer's setting.

    Optimizer states of all parameters belong together, other tensors by the object they are of.
    """
    key, _, rest = name.partition(".")
    kind = rest.partition(".")[0]
    if key in optimizers and kind == "state":
        return f"{key}.state.*.{name.rpartition('.')[2]}"
    if key in optimizers and kind in ("groups", "other"):
        return f"{key}.{kind}.*"
    return f"{key}.*" if rest else key


def _tensor(
    name: str, facts: TensorFacts, parts: list[Part], group: str, bound: dict[str, Any] | None
) -> TensorReport:
    count = _Count()
    for part in parts:
        for _, number in part.tiles(name, facts):
            count.add(part, number)
    coding = count.coding()
    raw_bytes = math.prod(facts.shape) * facts.itemsize
    return TensorReport(
        name,
        group,
        facts.dtype,
        facts.shape,
        sum(len(part.pieces.get(name, ())) for part in parts),
        raw_bytes,
        ratio(raw_bytes, coding.stored_bytes),
        bound,
        coding,
    )


@dataclass
class _Count:
    """Chunks, each counted once however often it is referred to."""

    heads: dict[Place, int] = field(default_factory=dict)
    lengths: dict[Place, int] = field(default_factory=dict)
    codecs: set[str] = field(default_factory=set)
    max_error: float = 0.0

    def add(self, part: Part, number: int) -> None:
        chain = part.chain(number)
        for link in chain:
            chunk = part.chunks[link]
            self.lengths[part.packs[chunk.pack], chunk.offset] = chunk.length
            self.codecs.add(part.codecs[chunk.codec])
        head = part.chunks[number]
        self.heads[part.packs[head.pack], head.offset] = len(chain) - 1
        self.max_error = max(self.max_error, head.max_error)

    def coding(self) -> Coding:
        deltas = sum(depth > 0 for depth in self.heads.values())
        return Coding(
            sum(self.lengths.values()),
            tuple(sorted(self.codecs)),
            len(self.heads) - deltas,
            deltas,
            max(self.heads.values(), default=0),
            self.max_error or None,
        )


@dataclass
class _Group:
    """Tensors of one kind, added up."""

    tensors: int = 0
    raw_bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    bounds: list[dict[str, Any]] = field(default_factory=list)
    count: _Count = field(default_factory=_Count)

    def add(self, report: TensorReport) -> None:
        self.tensors += 1
        self.raw_bytes += report.raw_bytes
        self.dtypes.add(report.dtype)
        if report.bound is not None and report.bound not in self.bounds:
            self.bounds.append(report.bound)

    def report(self, name: str) -> GroupReport:
        coding = self.count.coding()
        return GroupReport(
            name,
            self.tensors,
            tuple(sorted(self.dtypes)),
            self.raw_bytes,
            ratio(self.raw_bytes, coding.stored_bytes),
            tuple(self.bounds),
            coding,
        )
