"""What the trace, the contents and the graph say of one tensor over several steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from outlast.autosave.trace.dispatch import Access
from outlast.autosave.trace.state import KINDS

if TYPE_CHECKING:
    import torch

    from outlast.autosave.trace.dispatch import Accesses, WeakStorage, Window
    from outlast.autosave.trace.graph import GraphState
    from outlast.autosave.trace.state import Kind


class Label(NamedTuple):
    """What a tensor or array is called and what it is like; its storage's bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Boundary:
    """What the paths led to between two steps.

    Attributes:
        keys: Path to the key of its storage, of tensors.
        digests: Path to the digest of its numbers, of tensors and arrays.
        called: Path to what its user calls it, data type, shape and bytes.
        covered: Storage key to bytes, of what `state_dict()` gives.
        alive: Keep the keys from being used again.
    """

    keys: dict[str, int]
    digests: dict[str, str]
    called: dict[str, Label]
    covered: dict[int, int]
    alive: list[WeakStorage]


@dataclass(frozen=True)
class Evidence:
    """What was seen of some steps one after the other, with a boundary more than traces."""

    boundaries: list[Boundary]
    traces: list[Accesses]
    graph: GraphState


@dataclass
class Finding:
    """What is known of a storage; grows with each of its paths.

    Attributes:
        kind: The most careful class so far.
        why: What says so.
        window: The earliest so far.
        unseen: Whether its content changed without an operation that writes it.
    """

    kind: Kind = "dead"
    why: list[str] = field(default_factory=list)
    window: Window = "always"
    first_write: int | None = None
    last_write: int | None = None
    unseen: bool = False

    def add(self, other: Finding) -> None:
        """Take over what is more careful in another."""
        self.kind = min(self.kind, other.kind, key=KINDS.index)
        self.why = list(dict.fromkeys([*self.why, *other.why]))
        self.window = max(self.window, other.window, key=_WINDOWS.index)
        self.unseen |= other.unseen
        if other.first_write is not None:
            self.first_write, self.last_write = other.first_write, other.last_write


_WINDOWS: tuple[Window, ...] = ("always", "late", "early")


def finding_of(path: str, changed: bool, evidence: Evidence, *, shared: bool) -> Finding:
    """What the trace and the contents say of one path.

    Args:
        path: Of a tensor or array.
        changed: Whether it is not the same, or not there, at every boundary.
        evidence: What was seen.
        shared: Whether an array lies in its storage.
    """
    seen = _Seen()
    for number, trace in enumerate(evidence.traces):
        before, after = evidence.boundaries[number : number + 2]
        if path not in before.digests:
            seen.new = True
        elif path not in before.keys or trace.skipped:
            seen.blind = True
        else:
            seen.add(before.keys[path], after, trace, path)
    if any(
        path in boundary.digests and path not in boundary.keys for boundary in evidence.boundaries
    ):
        # An array, or a tensor of another layout: operations do not tell which memory is its own.
        seen.blind = True
    return Finding(
        *seen.classed(changed, shared=shared),
        window=seen.window(changed),
        first_write=seen.first_write,
        last_write=seen.last_write,
        unseen=changed and not (seen.mutated or seen.new or seen.blind),
    )


@dataclass
class _Seen:
    """What happened to one path over the traced steps.

    Attributes:
        new: Whether it was not there at the beginning of a step.
        met: Whether it was there at the beginning of another.
        blind: Whether operations do not tell what happens to it.
        read: Whether a step read what was there before it wrote.
        written: Whether an operation wrote it.
        replaced: Whether another storage took its place.
        carried: Whether a storage came through a step untouched, here or under another path.
        early: Whether a write came before the optimizer's step.
    """

    new: bool = False
    met: bool = False
    blind: bool = False
    read: bool = False
    written: bool = False
    replaced: bool = False
    carried: bool = False
    escaped: bool = False
    early: bool = False
    first_write: int | None = None
    last_write: int | None = None

    @property
    def mutated(self) -> bool:
        return self.written or self.replaced

    def add(self, key: int, after: Boundary, trace: Accesses, path: str) -> None:
        self.met = True
        access = trace.at(key) or Access()
        self.read |= access.first == "read"
        self.escaped |= access.escaped
        if access.first_write is not None:
            self.written = True
            self.early |= access.early
            self.first_write, self.last_write = access.first_write, access.last_write
        elif key in after.keys.values():
            self.carried = True
        self.replaced |= after.keys.get(path) != key

    def classed(self, changed: bool, *, shared: bool) -> tuple[Kind, list[str]]:
        why = []
        if self.new and not self.met:
            return "must-save", ["content: it was not there before the last step"]
        if changed:
            why.append("content: changes")
        if self.blind:
            return ("must-save", why) if changed else ("save-once", ["content: never changes"])
        if self.read and self.mutated:
            how = "written" if self.written else "replaced"
            return "must-save", [f"trace: read, then {how}", *why]
        if not self.mutated:
            if changed:
                return "must-save", [*why, "trace: no operation writes it"]
            touched = "read, never written" if self.read else "not touched"
            return "save-once", [f"trace: {touched}", "content: never changes"]
        if self.carried:
            return "must-save", ["trace: outlasts a step, is written in another", *why]
        if self.escaped or shared:
            return "must-save", ["trace: its memory is used by others than torch", *why]
        how = "written" if self.written else "replaced"
        return "dead", [f"trace: {how} before it is read"]

    def window(self, changed: bool) -> Window:
        unexplained = changed and not self.mutated
        if self.early or self.new or self.blind or self.escaped or unexplained:
            return "early"
        return "late" if self.written else "always"
