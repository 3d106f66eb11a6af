"""What one version consists of: tensors, how they are coded, values. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.inspection.listing import ratio, raw_size, summarize

if TYPE_CHECKING:
    from outlast.checkpoint.format.manifest import Part, TensorFacts
    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Contents
    from outlast.checkpoint.inspection.listing import Place


@dataclass(frozen=True)
class Coding:
    """How some content is stored.

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
    """What `contents` says of its version, in numbers; reads no tensor."""
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
