"""What an ordinary checkpoint would lose, and what could not be looked at, in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from outlast.autosave.trace.dispatch import Accesses
    from outlast.autosave.trace.graph import GraphState
    from outlast.autosave.trace.state import TensorState


@dataclass(frozen=True)
class Doubts:
    """What was met that tensors with names do not explain.

    Attributes:
        known: Keys of the storages that had a name between any two steps.
        unseen: Names of what changes without an operation that writes it.
        traces: Of steps one after the other.
        graph: What the forward passes write.
    """

    known: frozenset[int]
    unseen: Sequence[str]
    traces: Sequence[Accesses]
    graph: GraphState


def lints_of(
    states: Iterable[TensorState], objects: Mapping[str, Any], doubts: Doubts
) -> Iterator[str]:
    """The sentences, the gravest first.

    Args:
        states: What was found.
        objects: Path to object.
        doubts: What else was met.
    """
    yield from _out_of_reach(doubts.known, doubts.traces)
    transient = _not_persistent(objects)
    others = _with_state_dicts(objects)
    for state in states:
        if state.kind == "must-save" and not state.in_state_dict:
            owner = next((one for one in others if state.name.startswith(f"{one}.")), "")
            yield _missed(state, not transient.isdisjoint(state.aliases), owner)
    for name in doubts.unseen:
        yield (
            f"`{name}` changes without an operation of torch that writes it; whatever changes it "
            "(NumPy, a kernel) is not seen, so its copy windows are closed"
        )
    for operation in sorted({name for trace in doubts.traces for name in trace.untold}):
        yield (
            f"the operation {operation} writes an argument and does not say so; declare it with "
            "`mutates_args` (or `(a!)` in its schema)"
        )
    yield from doubts.graph.lints
    for failure in doubts.graph.failures:
        yield f"not exported, so judged by trace and content alone: {failure}"
    for reason in sorted({trace.skipped for trace in doubts.traces if trace.skipped}):
        yield f"not traced, so judged by content alone: {reason}"


def _missed(state: TensorState, transient: bool, owner: str) -> str:
    if transient:
        return (
            f"`{state.name}` is a buffer with persistent=False, but changes in training; "
            "state_dict() misses it; register it with persistent=True"
        )
    if state.name.endswith(".grad"):
        return (
            f"`{state.name}` is carried from step to step (accumulated gradients); state_dict() "
            "misses it; save between accumulation cycles or save it, too"
        )
    if owner:
        return (
            f"`{state.name}` changes in training, and no module's or optimizer's state_dict() has "
            f"it; save {owner}.state_dict(), too"
        )
    return (
        f"`{state.name}` changes in training, but the state_dict() of no module or optimizer has "
        "it; make it a buffer of a module with register_buffer(...)"
    )


def _not_persistent(objects: Mapping[str, Any]) -> frozenset[str]:
    """Paths to buffers that their modules do not save."""
    found = {
        id(object_._buffers[name])
        for object_ in objects.values()
        if isinstance(object_, nn.Module)
        for name in object_._non_persistent_buffers_set
    }
    return frozenset(path for path, object_ in objects.items() if id(object_) in found)


def _with_state_dicts(objects: Mapping[str, Any]) -> list[str]:
    """Paths to other objects with a state of their own, as scalers of losses have."""
    return [
        path
        for path, object_ in objects.items()
        if not isinstance(object_, (nn.Module, torch.optim.Optimizer, type))
        and callable(getattr(type(object_), "state_dict", None))
    ]


def _out_of_reach(known: frozenset[int], traces: Sequence[Accesses]) -> Iterator[str]:
    """Storages without a name that steps write, and that were there in an earlier step."""
    met: set[int] = set()
    told: set[int] = set()
    for trace in traces:
        for key in sorted((trace.written() & met) - known - told):
            told.add(key)
            yield (
                f"a tensor that no root leads to is changed at {trace.places.get(key, 'a library')}"
                " and used in later steps, too; give find_state() the object that holds it"
            )
        met |= trace.keys()
