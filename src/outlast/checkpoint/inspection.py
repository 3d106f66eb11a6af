"""Looking into stores: versions, tensors, coding, values and space; verifying and pruning.

Needs neither torch nor the training's code. `outlast.checkpoint.content` compares two
versions and writes one as safetensors.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast.checkpoint.manifest import REPLAY, ManifestError, Part, Piece, root_of, unsealed
from outlast.checkpoint.owner import Ownership, refuse_if_held
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.retention import Retention, complete_versions, prune, to_keep
from outlast.checkpoint.storage import TEMPORARY, LocalStorage, sentence_of, storage_of
from outlast.checkpoint.version import (
    SEAL,
    Seal,
    Version,
    leading_on,
    list_versions,
    listing,
    load,
    logs_of,
    read_seal,
    states_of,
)
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    if not text:
        raise CheckpointError("STORE is empty; give a checkpoint store or a run directory")
    for item in (text, f"{text.rstrip('/')}/{_RUN_FOLDER}"):
        storage = storage_of(item)
        try:
            if list_versions(storage):
                return storage
            if Path(item).is_symlink():
                # A link that leads nowhere, or in a circle, is no empty folder.
                Path(item).stat()
            files = storage.files("")
        except CheckpointError:
            raise
        except Exception as error:  # every fsspec implementation has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{item} cannot be read: {reason}; give another") from None
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
        steps = [str(step) for step in sorted({version.step for version in versions})]
        listed = ", ".join(steps if len(steps) <= 12 else [*steps[:5], "...", *steps[-5:]])
        raise CheckpointError(
            f"step = {step} is not in {storage.location}; the steps there are {listed}"
        )
    problems = []
    for version in chosen:
        try:
            return load(storage, version)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"{listing(problems)}; restore the files from a copy")


@dataclass(frozen=True)
class Named:
    """The version that something is said of.

    Attributes:
        step: Steps done.
        session: Which owner of the store saved it, from 1.
        folder: Its folder in the store.
    """

    step: int
    session: int
    folder: str


def _named(version: Version) -> tuple[int, int, str]:
    return version.step, version.session, version.folder


@dataclass(frozen=True)
class VersionSummary(Named):
    """One version in a list.

    Attributes:
        kind: ``state``, ``replay``, or empty when no manifest can be read.
        state: ``complete``; ``incomplete``: the save did not finish, or still continues;
            ``damaged``: what was published is not there any more as it was.
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

    kind: str = ""
    state: Literal["complete", "incomplete", "damaged"] = "complete"
    problem: str = ""
    root: str = ""
    ranks: int | None = None
    tensors: int | None = None
    raw_bytes: int | None = None
    stored_bytes: int = 0
    referred_bytes: int | None = None
    ratio: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def _root(storage: Storage, version: Version) -> tuple[str, list[str]]:
    """BLAKE3 over a sealed version, or none and what is wrong with its seal."""
    name = f"{version.folder}/{SEAL}"
    try:
        content = storage.read(name)
        Seal.from_bytes(content, f"{storage.location}/{name}")
        return root_of(content), []
    except OSError as error:
        return "", [f"{storage.location}/{name} cannot be read: {error.strerror or error}"]
    except CheckpointError as error:
        return "", [str(error)]


def summarize(storage: Storage, version: Version) -> VersionSummary:
    """Summarize `version` for a list of versions; reads its manifests, no tensor."""
    files = storage.files(version.folder)
    stored_bytes = sum(size for name, size in files.items() if not name.endswith(TEMPORARY))
    root, problems = _root(storage, version) if SEAL in files else ("", [])
    summary = VersionSummary(*_named(version), root=root, stored_bytes=stored_bytes)
    try:
        contents = load(storage, version, files)
    except CheckpointError as error:
        damaged = isinstance(error, ManifestError) or _was_published(storage, version, files)
        problem = "; ".join([str(error), *problems])
        return replace(summary, state="damaged" if damaged else "incomplete", problem=problem)
    own = f"{version.folder}/"
    referred = {
        (part.packs[chunk.pack], chunk.offset): chunk.length
        for part in contents.parts
        for chunk in part.chunks
        if not part.packs[chunk.pack].startswith(own)
    }
    raw_bytes = raw_size(contents.catalogue)
    return replace(
        summary,
        kind=contents.kind,
        problem="; ".join([*contents.problems, *problems]),
        ranks=contents.parts[0].world_size,
        tensors=len(contents.catalogue.tensors),
        raw_bytes=raw_bytes,
        referred_bytes=sum(referred.values()),
        ratio=ratio(raw_bytes, stored_bytes),
        metrics=contents.seal.metrics,
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
    return sum(facts.bytes for facts in catalogue.tensors.values())


def ratio(raw_bytes: int, stored_bytes: int) -> float | None:
    """Raw bytes over stored bytes; None when nothing is stored."""
    return raw_bytes / stored_bytes if stored_bytes else None


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
class Description(Named):
    """A complete version.

    Attributes:
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
    counts: dict[str, _Count] = defaultdict(_Count)
    groups: dict[str, list[TensorReport]] = {}
    for name, facts in sorted(contents.catalogue.tensors.items()):
        group, count = group_of(name, optimizers), _Count()
        for part in contents.parts:
            for _, number in part.tiles(name, facts):
                for tally in (count, counts[group], whole):
                    tally.add(part, number)
        coding = count.coding()
        report = TensorReport(
            name,
            group,
            facts.dtype,
            facts.shape,
            sum(len(part.pieces.get(name, ())) for part in contents.parts),
            facts.bytes,
            ratio(facts.bytes, coding.stored_bytes),
            bounds.get(name),
            coding,
        )
        groups.setdefault(group, []).append(report)
    found = []
    for group, reports in groups.items():
        raw_bytes, coding = sum(report.raw_bytes for report in reports), counts[group].coding()
        given = [report.bound for report in reports if report.bound is not None]
        found.append(
            GroupReport(
                group,
                len(reports),
                tuple(sorted({report.dtype for report in reports})),
                raw_bytes,
                ratio(raw_bytes, coding.stored_bytes),
                tuple(bound for n, bound in enumerate(given) if bound not in given[:n]),
                coding,
            )
        )
    notes = contents.parts[0].notes
    tensors = (report for reports in groups.values() for report in reports)
    return Description(
        *_named(contents.version),
        kind=contents.kind,
        root=summary.root,
        problem=summary.problem,
        ranks=contents.parts[0].world_size,
        requires=tuple(contents.requires),
        notes={name: note for name, note in notes.items() if name != "metrics"},
        metrics=summary.metrics,
        raw_bytes=raw_size(contents.catalogue),
        own_bytes=summary.stored_bytes,
        referred_bytes=summary.referred_bytes or 0,
        ratio=summary.ratio,
        coding=whole.coding(),
        groups=tuple(sorted(found, key=lambda group: -group.raw_bytes)),
        tensors=tuple(sorted(tensors, key=lambda report: report.name)),
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


_MANIFEST, _PACK = ".json", ".pack"


@dataclass(frozen=True)
class VersionUsage(Named):
    """Space that one version takes.

    Attributes:
        complete: Whether it can be restored.
        raw_bytes: Bytes of its tensors; None when it is not complete.
        own_bytes: Bytes of the files with chunks that no other version needs.
        shared_bytes: Bytes of the files with chunks that it needs and others too.
        manifest_bytes: Bytes of its manifests.
        freed_bytes: What deleting this version alone would free: own files and manifests.
    """

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
    needs = {version: _needs(storage, version, files) for version, files in folders.items()}
    sizes = {
        f"{version.folder}/{name}": size
        for version, files in folders.items()
        for name, size in files.items()
    }
    users = Counter(pack for packs, _ in needs.values() for pack in packs)
    versions = []
    for version, files in folders.items():
        manifest_bytes = sum(size for name, size in files.items() if name.endswith(_MANIFEST))
        if not manifest_bytes:
            continue
        packs, raw = needs[version]
        own_bytes = sum(sizes.get(pack, 0) for pack in packs if users[pack] == 1)
        shared_bytes = sum(sizes.get(pack, 0) for pack in packs if users[pack] > 1)
        freed_bytes = own_bytes + manifest_bytes
        named, is_complete = _named(version), raw is not None
        versions.append(
            VersionUsage(
                *named, is_complete, raw, own_bytes, shared_bytes, manifest_bytes, freed_bytes
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


def _needs(
    storage: Storage, version: Version, files: dict[str, int]
) -> tuple[set[str], int | None]:
    """The packs that a version needs, as far as an incomplete one can still say; and raw bytes."""
    manifests = [name for name in files if name.endswith(_MANIFEST)]
    if not manifests:
        return set(), None
    with contextlib.suppress(CheckpointError):
        contents = load(storage, version, files)
        return contents.packs, raw_size(contents.catalogue)
    packs = {f"{version.folder}/{name}" for name in files if name.endswith(_PACK)}
    with contextlib.suppress(CheckpointError):
        if (seal := read_seal(storage, version)) is not None:
            return packs.union(seal.packs), None
    for name in manifests:
        if name.startswith("rank-"):
            with contextlib.suppress(OSError, CheckpointError):
                part = Part.from_bytes(storage.read(f"{version.folder}/{name}"), name)
                packs.update(part.packs)
    return packs, None


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
        CheckpointError: When a live process owns the store, the manifests of a version that would
            stay are damaged, or the content of all of them is, no version has the metric by which
            the best are chosen, or these are replay logs.
    """
    with contextlib.nullcontext() if dry_run else hold(storage):
        known = complete_versions(storage)
        if any(seal.kind == REPLAY for seal in known.values()):
            raise CheckpointError(
                f"{storage.location} holds replay logs, each of which needs those before it; give "
                "the store above it"
            )
        metrics = sorted({name for seal in known.values() for name in seal.metrics})
        if policy.best and policy.metric not in metrics:
            raise CheckpointError(
                f'metric = "{policy.metric}" was saved with no version of {storage.location}, so '
                f"that the best cannot be kept; the metrics there are "
                f"{', '.join(metrics) or 'none'}"
            )
        if not known:
            return Pruned((), (), 0, dry_run)
        kept = to_keep(known, policy)
        versions = list_versions(storage)
        for version in versions:
            # Refuse to delete good versions for the sake of one whose seal is all that is left.
            try:
                if version in kept:
                    load(storage, version)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{version.folder} would stay but cannot be restored: {error}; bring back its "
                    "files or delete its folder, then prune again"
                ) from None
        packs = {pack for version in known if version in kept for pack in known[version].packs}
        doomed = {
            f"{version.folder}/{name}": size
            for version in versions
            if version not in kept and version < max(known)
            for name, size in storage.files(version.folder).items()
            if f"{version.folder}/{name}" not in packs
        }
        deleted = prune(storage, policy, dry_run=True)
        if any(version in known for version in deleted):
            _refuse_to_lose(storage, sorted(kept, reverse=True))
        if not dry_run:
            prune(storage, policy)
            # What could not be deleted is not counted.
            for folder in {name.partition("/")[0] for name in doomed}:
                for name in storage.files(folder):
                    doomed.pop(f"{folder}/{name}", None)
    stays = (version.folder for version in known if version not in deleted)
    gone = (version.folder for version in deleted)
    return Pruned(tuple(gone), tuple(stays), sum(doomed.values()), dry_run)


def _refuse_to_lose(storage: Storage, kept: list[Version]) -> None:
    """See that one version at least stays that is right to the last bit; mostly the first."""
    problems: list[str] = []
    for version in kept:
        verdict = verify(storage, version)
        if verdict.restorable:
            return
        problems += verdict.problems
    raise CheckpointError(
        f"none of the versions that would stay in {storage.location} can be restored: "
        f"{listing(problems)}; keep more of them, or bring back their files"
    )


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
class Verification(Named):
    """Result of verifying a version.

    Attributes:
        state: ``ok``; ``damaged``; or ``incomplete``: a save that did not finish or is under way,
            which is no damage.
        problems: A sentence for each thing that is wrong.
        restorable: Whether everything that was saved is there and right, whatever else is damaged.
        root: BLAKE3 over the whole version; empty without a usable seal.
        chunks: How many chunks were decoded and found right.
        known_chunks: How many more were found right before, with another version.
        content_bytes: Bytes of the chunks decoded now.
        read_bytes: Bytes read from the storage for that.
    """

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
    found = Verification(*_named(version), state="damaged")
    known = set() if known is None else known
    done_bytes = 0

    def done(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        if progress is not None:
            progress(done_bytes, content_bytes)

    try:
        summary = summarize(storage, version)
        if summary.state != "complete":
            said = (summary.problem,)
            return replace(found, state=summary.state, problems=said, root=summary.root)
        contents = load(storage, version)
        problems = [summary.problem] if summary.problem else []
        problems += _disagreements(storage, contents)
        for step in contents.requires:
            try:
                load(states_of(storage), Version(contents.version.session, step))
            except CheckpointError as error:
                problems.append(f"it starts from step {step}, which cannot be used: {error}")
        unknown, news, content_bytes, known_chunks = _without(contents, known)
        chunks, read_bytes, restorable = 0, 0, False
        try:
            with VersionReader(storage, unknown) as reader:
                chunks = reader.check(done)
                read_bytes = reader.counters.read_bytes
            known |= news
            restorable = True
        except CheckpointError as error:
            problems.append(str(error))
        return replace(
            found,
            state="damaged" if problems else "ok",
            problems=tuple(problems),
            restorable=restorable,
            root=summary.root,
            chunks=chunks,
            known_chunks=known_chunks,
            content_bytes=done_bytes,
            read_bytes=read_bytes,
        )
    except CheckpointError as error:
        return replace(found, problems=(str(error),))
    except OSError as error:
        problem = f"{storage.location}/{version.folder} cannot be read: {sentence_of(error)}"
        return replace(found, problems=(problem,))


def _disagreements(storage: Storage, contents: Contents) -> Iterator[str]:
    """A sentence for each thing in which the seal and the manifests do not agree."""
    name = f"{contents.version.folder}/{SEAL}"
    try:
        seal = Seal.from_bytes(storage.read(name), name)
    except (OSError, CheckpointError):
        return
    place = f"{storage.location}/{name}"
    # Where there is an index, all of it was compared with the manifests when they were read.
    named = [] if seal.indexed else [*zip(contents.parts, contents.roots, strict=True)]
    for part, root in named:
        file = contents.version.part_name(part.rank, part.world_size).partition("/")[2]
        if seal.roots.get(file) != root:
            yield f"{place} names another manifest of rank {part.rank} than is there"
    if named and not contents.problems and len(seal.roots) != len(contents.parts):
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
