"""Find the state of a step: from its trace, from the graph and from what changes.

Writes of a module's forward pass, by the signature of its exported graph.

`torch.export` makes a module a function without side effects; after the decompositions (before
them, batch normalisation hides its statistics) the graph's signature lists the buffers that it
gives back. A tensor that is a plain attribute is a constant to it, and writing one an error: which
tells what `state_dict()` misses. Large models are exported in parts, and equal parts once.
"""

from __future__ import annotations

import copy
import io
import re
import time
import warnings
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from outlast.autosave.heap.names import Names
from outlast.autosave.resume.process import random_states, set_random_states
from outlast.autosave.state_plan import (
    Boundary,
    Doubts,
    Evidence,
    Finding,
    Label,
    StatePlan,
    TensorState,
    codec_of,
    finding_of,
    in_state_dicts,
    lints_of,
    named_roots,
    outermost_modules,
    program_modules,
    readable_names,
)
from outlast.autosave.step_trace import (
    Accesses,
    changed_over,
    digests,
    holds_numbers,
    storage_key,
    traced_step,
    weak_storage,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


_LARGE_LEAVES = 8


"""A module of more leaf modules than this is exported in parts."""


_CONSTANT = re.compile(r"Constant (\S+) is mutated")


_ASSIGNED = re.compile(r"tensor attributes? (.+?) (?:was|were) assigned during export")


@dataclass
class GraphState:
    """Writes of forward passes, as far as they could be exported.

    Attributes:
        mutated: Written tensors, each with what says so.
        lints: One sentence per tensor that is written and is no buffer.
        failures: What could not be exported, and why.
    """

    mutated: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    lints: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Inputs(NamedTuple):
    """Inputs of a module's last call; shapes in place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Shape(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@contextmanager
def recorded_inputs(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Inputs]]:
    """Record the last inputs of the modules and their parts while the context lasts."""
    found: dict[nn.Module, Inputs] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: _Shape(tuple(tensor.shape), tensor.dtype, tensor.device),
            (args, kwargs),
        )
        found[module] = Inputs(*shapes)

    every = {part for module in modules for part in module.modules()}
    handles = [said.register_forward_pre_hook(note, with_kwargs=True) for said in every]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def graph_state(
    modules: Iterable[nn.Module], inputs: dict[nn.Module, Inputs], limit_seconds: float = 4.0
) -> GraphState:
    """Export what of the modules has tensors besides parameters.

    Args:
        modules: Outermost ones.
        inputs: What they and their parts were called with.
        limit_seconds: Wall time after which no further part is begun.
    """
    found = GraphState()
    known: dict[str, _Signature | str] = {}
    deadline = time.monotonic() + limit_seconds
    for item in (part for module in modules for part in _parts(module)):
        if item not in inputs:
            continue
        kind = type(item).__name__
        # Equal for modules that do the same with other numbers, as far as they can be told apart.
        settings = {
            name: variable
            for name, variable in vars(item).items()
            if isinstance(variable, (int, float, str, bool, type(None)))
        }
        shapes = [(name, tuple(buffer.shape)) for name, buffer in item.named_buffers()]
        key = f"{type(item)} {item!r} {settings} {shapes} {inputs[item]}"
        if key not in known:
            if time.monotonic() > deadline:
                found.failures.append(f"{kind}: {limit_seconds:g} s of exports had passed")
                continue
            known[key] = _export(item, inputs[item])
        signature = known[key]
        if isinstance(signature, str):
            found.failures.append(f"{kind}: {signature}")
            continue
        for name in sorted(signature.buffers | signature.attributes):
            tensor = _attribute(item, name)
            if isinstance(tensor, torch.Tensor):
                found.mutated.append((tensor, f"written in the forward pass of {kind}"))
                if name in signature.attributes and not isinstance(tensor, nn.Parameter):
                    found.lints.append(
                        f"{kind}.{name} is written in the forward pass, but is neither a buffer "
                        "nor a parameter; make it one with "
                        f'register_buffer("{name.rpartition(".")[2]}", ...)'
                    )
    found.lints = list(dict.fromkeys(found.lints))
    found.failures = list(dict.fromkeys(found.failures))
    return found


@dataclass(frozen=True)
class _Signature:
    buffers: frozenset[str]
    attributes: frozenset[str]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that are small, or hold tensors themselves, and have something to write."""
    if not _has_state(module, deep=True):
        return
    leaves = sum(1 for pair in module.modules() if next(pair.children(), None) is None)
    if leaves <= _LARGE_LEAVES or _has_state(module, deep=False):
        yield module
    else:
        for child in module.children():
            yield from _parts(child)


def _has_state(module: nn.Module, *, deep: bool) -> bool:
    return any(
        next(pair.buffers(recurse=False), None) is not None
        or [name for name, variable in vars(pair).items() if isinstance(variable, torch.Tensor)]
        for pair in (module.modules() if deep else [module])
    )


def _export(module: nn.Module, inputs: Inputs) -> _Signature | str:
    """The signature, or in a phrase why there is none."""
    states = random_states()
    try:
        # A forward pass may leave traces in Python, which the program's own module must not have.
        whole = copy.deepcopy(module)
        filled = pytree.tree_map_only(
            _Shape, _filled, tuple(inputs), is_leaf=lambda value: isinstance(value, _Shape)
        )
        return _signature(whole, *filled)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    finally:
        set_random_states(states)


def _signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
    attributes: set[str] = set()
    while True:
        silenced = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with warnings.catch_warnings(record=True) as warned, silenced[0], silenced[1]:
            warnings.simplefilter("always")
            try:
                exported = torch.export.export(module, args, kwargs, strict=False)
                final = exported.run_decompositions()
            except RuntimeError as error:
                name = _CONSTANT.search(str(error))
                if name is None or name[1] in attributes:
                    raise
                attributes.add(name[1])
                parent, _, last = name[1].rpartition(".")
                owner = module.get_submodule(parent)
                tensor = getattr(owner, last)
                delattr(owner, last)
                owner.register_buffer(last, tensor)
                continue
        for item in warned:
            found = _ASSIGNED.search(str(item.message))
            if found:
                attributes |= {name.strip().removeprefix("self.") for name in found[1].split(",")}
        mutated = frozenset(final.graph_signature.buffers_to_mutate.values())
        return _Signature(mutated - attributes, frozenset(attributes))


def _attribute(module: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    try:
        return getattr(module.get_submodule(parent), last, None)
    except AttributeError:
        return None


def _filled(shape: _Shape) -> torch.Tensor:
    return torch.zeros(shape.size, dtype=shape.dtype, device=shape.device)


def find_state(step: Callable[[], Any], roots: Any = (), steps: int = 3) -> StatePlan:
    """Run `1 + steps` steps and class every tensor that is reached from `roots` and from `step`.

    The first step is not traced: optimizers make their state in it. Where the trace, the graph
    and the contents disagree, the more careful class holds. What is `dead` is so in all steps
    seen; a program that reads it outside of its steps must save it all the same.

    Args:
        step: Does one step, with data of its own.
        roots: Modules, optimizers and other objects; a mapping of names to them, several, or one.
        steps: Steps to look at, at least 2.

    Raises:
        AutosaveError: When `steps` is too small.
    """
    if steps < 2:
        raise AutosaveError(
            f"steps = {steps} is too few to tell what changes from what does not; use at least 2"
        )
    finder = StateFinder(lambda: reached(step, roots))
    for _ in range(1 + steps):
        finder.begin_step()
        step()
        finder.end_step()
    return finder.plan()


def reached(step: Callable[[], Any], roots: Any) -> dict[str, Any]:
    """Path to object, of all that `roots` and `step` lead to now."""
    named = named_roots(step, roots)
    return dict(Names(named, program_modules(named)).objects)


class StateFinder:
    """Looks at steps as they come.

    Args:
        look: Gives path to object of all that the program leads to.
    """

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look
        self._modules = outermost_modules(look().values())
        self._inputs: dict[nn.Module, Inputs] = {}
        self._boundaries: list[Boundary] = []
        self._traces: list[Accesses] = []
        self._step = ExitStack()

    def begin_step(self) -> None:
        """Before a step; the first one is not traced, since optimizers make their state in it."""
        if not self._boundaries:
            self._inputs = self._step.enter_context(recorded_inputs(self._modules))
        else:
            self._traces.append(self._step.enter_context(traced_step()))

    def end_step(self) -> None:
        """After a step."""
        self._step.close()
        self._boundaries.append(_boundary(self._look()))

    def plan(self) -> StatePlan:
        """The state of the program, after at least three steps."""
        graph = graph_state(self._modules, self._inputs)
        return _plan(self._look(), Evidence(self._boundaries, self._traces, graph))


def _boundary(objects: dict[str, Any]) -> Boundary:
    tensors = {path: object_ for path, object_ in objects.items() if _strided(object_)}
    called = readable_names(objects)
    return Boundary(
        {path: storage_key(tensor) for path, tensor in tensors.items()},
        digests(objects),
        {
            path: _label(called.get(id(object_), path), object_)
            for path, object_ in objects.items()
            if holds_numbers(object_)
        },
        in_state_dicts(objects.values()),
        [weak_storage(tensor) for tensor in tensors.values()],
    )


def _label(name: str, value: Any) -> Label:
    if isinstance(value, np.ndarray):
        dtype = torch.from_numpy(np.empty(0, value.dtype)).dtype
    else:
        dtype = value.dtype
    stored = value.untyped_storage().nbytes() if _strided(value) else value.nbytes
    return Label(name, dtype, tuple(value.shape), stored)


def _strided(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and holds_numbers(value) and value.layout == torch.strided
    )


def _plan(objects: dict[str, Any], evidence: Evidence) -> StatePlan:
    changed = changed_over(boundary.digests for boundary in evidence.boundaries)
    graph = evidence.graph
    written: dict[int, list[str]] = {}
    for tensor, why in graph.mutated:
        if _strided(tensor):
            written.setdefault(storage_key(tensor), []).append(f"graph: {why}")
    covered = evidence.boundaries[-1].covered
    # Storages of buffers that their modules declare to make again.
    set_up = {
        storage_key(buffer)
        for object_ in objects.values()
        if isinstance(object_, nn.Module)
        for name in object_._non_persistent_buffers_set
        if (buffer := object_._buffers.get(name)) is not None and _strided(buffer)
    }
    # Memory addresses of arrays.
    shared = [
        range(first := object_.__array_interface__["data"][0], first + object_.nbytes)
        for object_ in objects.values()
        if isinstance(object_, np.ndarray) and object_.nbytes
    ]
    # Paths to what optimizers keep for each parameter.
    kept = {
        id(value)
        for object_ in objects.values()
        if isinstance(object_, torch.optim.Optimizer)
        for state in object_.state.values()
        if isinstance(state, dict)
        for value in state.values()
    }
    optimizers = frozenset(path for path, object_ in objects.items() if id(object_) in kept)
    groups: dict[Any, list[str]] = {}
    for path, object_ in objects.items():
        if holds_numbers(object_):
            groups.setdefault(storage_key(object_) if _strided(object_) else path, []).append(path)
    labels = evidence.boundaries[-1].called
    states = []
    unseen = []
    for key, paths in groups.items():
        value = objects[paths[0]]
        finding = Finding()
        for path in paths:
            finding.add(finding_of(path, path in changed, evidence, shared=_shared(value, shared)))
        if key in written:
            finding.add(Finding("must-save", written[key]))
        if finding.kind == "save-once" and key in set_up:
            finding.add(Finding(why=["set-up makes it again: a buffer with persistent=False"]))
            finding.kind = "derivable"
        names = (*(labels[path].name for path in paths), *paths)
        if finding.unseen:
            unseen.append(names[0])
        optimizer = not optimizers.isdisjoint(paths)
        states.append(_state(names, labels[paths[0]], finding, key in covered, optimizer))
    states += _gone(evidence)
    known = frozenset(key for boundary in evidence.boundaries for key in boundary.keys.values())
    last = evidence.traces[-1]
    return StatePlan(
        tensors=tuple(states),
        lints=tuple(
            lints_of(states, objects, Doubts(known, unseen, evidence.traces, evidence.graph))
        ),
        operations=last.operations,
        optimizer_begins=last.optimizer_begins,
        naive_bytes=sum(covered.values()),
        random=any(trace.random for trace in evidence.traces),
    )


def _gone(evidence: Evidence) -> list[TensorState]:
    """Tensors that lived between some steps and are gone now, such as accumulated gradients."""
    last = evidence.boundaries[-1]
    now = frozenset(last.keys.values())
    found = {
        path: (label, boundary.keys.get(path) in boundary.covered)
        for boundary in evidence.boundaries[:-1]
        for path, label in boundary.called.items()
        if path not in last.called and boundary.keys.get(path) not in now
    }
    gone = Finding("must-save", ["content: it is there between some steps"], "early")
    return [
        _state((label.name, path), label, gone, covered=covered, optimizer=False)
        for path, (label, covered) in found.items()
        if finding_of(path, True, evidence, shared=False).kind != "dead"
    ]


def _state(
    names: tuple[str, ...], label: Label, finding: Finding, covered: bool, optimizer: bool
) -> TensorState:
    return TensorState(
        name=names[0],
        aliases=tuple(dict.fromkeys(name for name in names if name != names[0])),
        kind=finding.kind,
        why=tuple(finding.why),
        dtype=str(label.dtype).removeprefix("torch."),
        shape=label.shape,
        bytes=label.bytes,
        codec=codec_of(label.dtype, optimizer=optimizer, kind=finding.kind),
        first_write=finding.first_write,
        last_write=finding.last_write,
        window=finding.window,
        in_state_dict=covered,
    )


def _shared(value: Any, memory: list[range]) -> bool:
    """Return True if an array lies in the storage of a tensor."""
    if not _strided(value) or value.device.type != "cpu":
        return False
    storage = value.untyped_storage()
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return any(range_.start < last and first < range_.stop for range_ in memory)


@dataclass(frozen=True)
class Difference:
    """Something that is not the same after a number of steps.

    Attributes:
        step: The first step after which it differs.
        name: Of the tensor, or where the value is.
        expected: Digest or value in the original; empty when it is not there.
        found: In the other.
    """

    step: int
    name: str
    expected: str
    found: str

    def sentence(self) -> str:
        """For people."""
        if not self.expected:
            return f"step {self.step}: {self.name} is there, but should not be"
        if not self.found:
            return f"step {self.step}: {self.name} is missing"
        return f"step {self.step}: {self.name} is {self.found}, should be {self.expected}"


def first_differences(
    expected: Mapping[int, Mapping[str, str]], found: Mapping[int, Mapping[str, str]]
) -> Iterator[Difference]:
    """Each name that differs once, at the first step where it does."""
    told: set[str] = set()
    for step, names in expected.items():
        for difference in differences(step, names, found.get(step, {})):
            if difference.name not in told:
                told.add(difference.name)
                yield difference


def differences(
    step: int, expected: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[Difference]:
    """The names whose digests or values are not the same."""
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name, "") != found.get(name, ""):
            yield Difference(step, name, expected.get(name, ""), found.get(name, ""))
