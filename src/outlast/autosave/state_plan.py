"""The state of a training step: each tensor's class, and why: from trace, graph and content.

Writes of a module's forward pass are told by the signature of its exported graph. `torch.export`
makes a module a function without side effects; after the decompositions (before them, batch
normalisation hides its statistics) the graph's signature lists the buffers that it gives back. A
tensor that is a plain attribute is a constant to it, and writing one an error: which tells what
`state_dict()` misses. Large models are exported in parts, and equal parts once.
"""

from __future__ import annotations

import copy
import io
import re
import time
import types
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from outlast.autosave.cost import StateBytes
from outlast.autosave.heap.names import Names
from outlast.autosave.heap.tensors import gradient
from outlast.autosave.resume.process import random_states, set_random_states
from outlast.autosave.step_trace import (
    Access,
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
    from collections.abc import Callable, Iterator

    from outlast.autosave.step_trace import WeakStorage, Window


Kind = Literal["must-save", "save-once", "derivable", "dead"]
"""`must-save` changes and is read again. `save-once` is read and never changes. `derivable` is
made again by the program's set-up, and never changes. `dead` is written before it is read."""


KINDS: tuple[Kind, ...] = ("must-save", "save-once", "derivable", "dead")
"""From the most careful one on."""


@dataclass(frozen=True)
class TensorState:
    """A storage that the roots lead to.

    Attributes:
        name: What its user calls it, e.g. `model.layer.weight`.
        aliases: Other names of the same storage, and the paths of `heap.Names` that lead there.
        kind: Its class.
        why: What says so: of the trace, the content and the graph.
        dtype: Of its numbers, e.g. `float32`.
        shape: Of the tensor at `name`.
        bytes: Of the whole storage.

        window: Until when the content at the step's beginning can be copied: `always`, `late`
            for up to the optimizer's step, or `early` for not after the step has begun.
        in_state_dict: Whether a module's or optimizer's `state_dict()` has it.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    why: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    window: Window
    in_state_dict: bool


@dataclass(frozen=True)
class StatePlan:
    """Plan of the tensors that must be saved between two steps.

    Attributes:
        tensors: All storages with a name, in the order in which they were found.
        lints: One sentence for each thing that an ordinary checkpoint would lose, or that could
            not be looked at.

        naive_bytes: Of the `state_dict()` of all modules and optimizers.

    """

    tensors: tuple[TensorState, ...]
    lints: tuple[str, ...]
    naive_bytes: int

    @property
    def cost(self) -> StateBytes:
        """Parts of a save, in bytes."""
        late = sum(state.bytes for state in self.of("must-save") if state.window == "late")
        return StateBytes(
            early=self.bytes("must-save") - late,
            late=late,
            constant=self.bytes("save-once"),
            dead=self.bytes("dead"),
            naive=self.naive_bytes,
        )

    def of(self, kind: Kind) -> tuple[TensorState, ...]:
        """The tensors of a class."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    def bytes(self, *kinds: Kind) -> int:
        """Bytes of some classes; of all without one."""
        return sum(tensor.bytes for tensor in self.tensors if not kinds or tensor.kind in kinds)

    def find(self, name: str) -> TensorState:
        """The storage that a name or path leads to.

        Raises:
            KeyError: When none does.
        """
        for tensor in self.tensors:
            if name in (tensor.name, *tensor.aliases):
                return tensor
        raise KeyError(name)

    def table(self) -> str:
        """All tensors, the bytes of each class and the lints, as text."""
        width = max([len(tensor.name) for tensor in self.tensors], default=0)
        lines = [
            f"{tensor.name:{width}}  {tensor.kind:9}  {tensor.bytes:>12}  {tensor.dtype:9}"
            f"  {tensor.window:6}  {'; '.join(tensor.why)}"
            for tensor in self.tensors
        ]
        lines += [
            f"{kind}: {len(self.of(kind))} tensors, {self.bytes(kind)} bytes" for kind in KINDS
        ]
        lines.append(
            f"to save {self.bytes('must-save', 'save-once')} bytes; "
            f"state_dict() has {self.naive_bytes} bytes"
        )
        return "\n".join([*lines, *self.lints])


class Label(NamedTuple):
    """Name and properties of a tensor or array; its storage's bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Boundary:
    """Tensors that the paths led to between two steps.

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
    """Observations of some steps in a row, with a boundary more than traces."""

    boundaries: list[Boundary]
    traces: list[Accesses]
    graph: GraphState


@dataclass
class Finding:
    """Knowledge of a storage; grows with each of its paths.

    Attributes:
        kind: The most careful class so far.
        why: What says so.
        window: The earliest so far.
        unseen: Whether its content changed without an operation that writes it.
    """

    kind: Kind = "dead"
    why: list[str] = field(default_factory=list)
    window: Window = "always"

    unseen: bool = False

    def add(self, other: Finding) -> None:
        """Take over what is more careful in another."""
        self.kind = min(self.kind, other.kind, key=KINDS.index)
        self.why = list(dict.fromkeys([*self.why, *other.why]))
        self.window = max(self.window, other.window, key=_WINDOWS.index)
        self.unseen |= other.unseen


_WINDOWS: tuple[Window, ...] = ("always", "late", "early")


def finding_of(path: str, changed: bool, evidence: Evidence, *, shared: bool) -> Finding:
    """Finding from the trace and the contents of one path.

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
        unseen=changed and not (seen.mutated or seen.new or seen.blind),
    )


@dataclass
class _Seen:
    """History of one path over the traced steps.

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

    @property
    def mutated(self) -> bool:
        return self.written or self.replaced

    def add(self, key: int, after: Boundary, trace: Accesses, path: str) -> None:
        self.met = True
        access = trace.at(key) or Access()
        self.read |= access.first == "read"
        self.escaped |= access.escaped
        if access.written:
            self.written = True
            self.early |= access.early

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


def lints_of(
    states: Iterable[TensorState], objects: Mapping[str, Any], evidence: Evidence, unseen: list[str]
) -> Iterator[str]:
    """The sentences, the gravest first.

    Args:
        states: What was found.
        objects: Path to object.
        evidence: What was seen.
        unseen: Names of what changes without an operation that writes it.
    """
    yield from _out_of_reach(evidence)
    found = set(map(id, _transient_buffers(objects)))
    transient = frozenset(path for path, object_ in objects.items() if id(object_) in found)
    others = [
        path
        for path, object_ in objects.items()
        if not isinstance(object_, (nn.Module, torch.optim.Optimizer, type))
        and callable(getattr(type(object_), "state_dict", None))
    ]
    for state in states:
        if state.kind == "must-save" and not state.in_state_dict:
            owner = next((one for one in others if state.name.startswith(f"{one}.")), "")
            yield _missed(state, not transient.isdisjoint(state.aliases), owner)
    for name in unseen:
        yield (
            f"`{name}` changes without an operation of torch that writes it; whatever changes it "
            "(NumPy, a kernel) is not seen, so its copy windows are closed"
        )
    for operation in sorted({name for trace in evidence.traces for name in trace.untold}):
        yield (
            f"the operation {operation} writes an argument and does not say so; declare it with "
            "`mutates_args` (or `(a!)` in its schema)"
        )
    yield from evidence.graph.lints
    for failure in evidence.graph.failures:
        yield f"not exported, so judged by trace and content alone: {failure}"
    for reason in sorted({trace.skipped for trace in evidence.traces if trace.skipped}):
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


def _out_of_reach(evidence: Evidence) -> Iterator[str]:
    """Storages without a name that steps write, and that were there in an earlier step."""
    told = {key for boundary in evidence.boundaries for key in boundary.keys.values()}
    met: set[int] = set()
    for trace in evidence.traces:
        for key in sorted((trace.written() & met) - told):
            told.add(key)
            yield (
                f"a tensor that no root leads to is changed at {trace.places.get(key, 'a library')}"
                " and used in later steps, too; give find_state() the object that holds it"
            )
        met |= trace.keys()


def named_roots(step: Callable[[], Any], roots: Any) -> dict[str, Any]:
    """The roots by name, then the global names that `step` mentions, then `step` itself.

    Args:
        step: Does one step.
        roots: A mapping of names to objects, several objects, or one. Those without a name get
            the one that `step` knows them by, else that of their class.
    """
    known = _variables(step)
    found: dict[str, Any] = {}
    if isinstance(roots, Mapping):
        found.update(roots)
    else:
        several = isinstance(roots, Iterable) and not isinstance(roots, nn.Module)
        for root in roots if several else [roots]:
            name = next((name for name, other in known.items() if other is root), "")
            name = name or type(root).__name__.lower()
            while name in found:
                name += "_"
            found[name] = root
    given = {id(found_item) for found_item in found.values()}
    for name, known_item in known.items():
        if id(known_item) not in given:
            found.setdefault(name, known_item)
    found.setdefault("step", step)
    return found


def program_modules(roots: Mapping[str, Any]) -> frozenset[str]:
    """Names of the modules that the classes and functions of the roots come from."""
    found = set()
    for root in roots.values():
        name = getattr(root, "__module__", None) or type(root).__module__
        if not f"{name}.".startswith(("torch.", "builtins.", "numpy.")):
            found.add(name)
    return frozenset(found)


def outermost_modules(objects: Iterable[Any]) -> list[nn.Module]:
    """The modules that are part of no other."""
    modules = [object_ for object_ in objects if isinstance(object_, nn.Module)]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def readable_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Identity of a tensor to what its user calls it: `model.layer.weight`, `sgd.state[...]`.

    Args:
        objects: Path to object.
    """
    found: dict[int, str] = {}
    paths = {id(object_): path for path, object_ in objects.items()}
    for module in outermost_modules(objects.values()):
        for inner, part in module.named_modules(prefix=paths[id(module)]):
            for name, item in {**vars(part), **part._parameters, **part._buffers}.items():
                if isinstance(item, torch.Tensor):
                    found.setdefault(id(item), f"{inner}.{name}")
    for path, object_ in objects.items():
        # Not by its attribute, whose uses are watched.
        if isinstance(object_, torch.Tensor) and (grad := gradient(object_)) is not None:
            found.setdefault(id(grad), f"{found.get(id(object_), path)}.grad")
        if isinstance(object_, torch.optim.Optimizer):
            for parameter, state in object_.state.items():
                of = found.get(id(parameter), paths.get(id(parameter), "?"))
                for name, value in state.items() if isinstance(state, dict) else ():
                    found.setdefault(id(value), f"{path}.state[{of}].{name}")
    return found


def in_state_dicts(objects: Iterable[Any]) -> dict[int, int]:
    """Storage keys and bytes of what modules and optimizers give by `state_dict()`."""
    every = list(objects)
    given: list[Any] = [module.state_dict(keep_vars=True) for module in outermost_modules(every)]
    given += [value.state_dict() for value in every if isinstance(value, torch.optim.Optimizer)]
    found: dict[int, int] = {}
    waiting = pytree.tree_leaves(given)
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if hasattr(value, "__tensor_flatten__"):
                waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            elif value.layout == torch.strided:
                found[storage_key(value)] = value.untyped_storage().nbytes()
    return found


def _variables(step: Callable[[], Any]) -> dict[str, Any]:
    """Variables that the functions of a step know by a name: of closures, and of their module."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [step.__func__ if isinstance(step, types.MethodType) else step]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            # A variable that has no value yet is none.
            with suppress(ValueError):
                found.setdefault(name, cell.cell_contents)
        for name in _mentioned(function.__code__):
            if name in function.__globals__:
                found.setdefault(name, function.__globals__[name])
        waiting += [
            value
            for value in found.values()
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__
        ]
    closed = (types.ModuleType, types.FunctionType, type)
    return {name: value for name, value in found.items() if not isinstance(value, closed)}


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _mentioned(const)


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


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module's last call, by position and by name; shapes in place of tensors."""


class _Shape(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@contextmanager
def recorded_inputs(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Inputs]]:
    """Record the last inputs of the modules and their parts while the context lasts."""
    found: dict[nn.Module, Inputs] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[module] = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: _Shape(tuple(tensor.shape), tensor.dtype, tensor.device),
            (args, kwargs),
        )

    with ExitStack() as hooks:
        for part in {part for module in modules for part in module.modules()}:
            hooks.callback(part.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield found


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
    known: dict[str, _Written | str] = {}
    deadline = time.monotonic() + limit_seconds
    for item in (part for module in modules for part in _parts_with_state(module)):
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
        written = known[key]
        if isinstance(written, str):
            found.failures.append(f"{kind}: {written}")
            continue
        buffers, attributes = written
        for name in sorted(buffers | attributes):
            parent, _, last = name.rpartition(".")
            try:
                tensor = getattr(item.get_submodule(parent), last)
            except AttributeError:
                continue
            if isinstance(tensor, torch.Tensor):
                found.mutated.append((tensor, f"written in the forward pass of {kind}"))
                if name in attributes and not isinstance(tensor, nn.Parameter):
                    found.lints.append(
                        f"{kind}.{name} is written in the forward pass, but is neither a buffer "
                        f'nor a parameter; make it one with register_buffer("{last}", ...)'
                    )
    found.lints = list(dict.fromkeys(found.lints))
    found.failures = list(dict.fromkeys(found.failures))
    return found


_Written = tuple[frozenset[str], frozenset[str]]
"""Names of the buffers, and of the plain attributes, that a forward pass writes."""


def _parts_with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that are small, or hold tensors themselves, and have something to write."""
    if not any(map(_has_state, module.modules())):
        return
    leaves = sum(1 for part in module.modules() if next(part.children(), None) is None)
    if leaves <= _LARGE_LEAVES or _has_state(module):
        yield module
    else:
        for child in module.children():
            yield from _parts_with_state(child)


def _has_state(module: nn.Module) -> bool:
    """Return True if a module itself holds tensors besides parameters."""
    return next(module.buffers(recurse=False), None) is not None or any(
        isinstance(variable, torch.Tensor) for variable in vars(module).values()
    )


def _export(module: nn.Module, inputs: Inputs) -> _Written | str:
    """Names that a forward pass writes, or in a phrase why it cannot be exported."""
    states = random_states()
    try:
        # A forward pass may leave traces in Python, which the program's own module must not have.
        whole = copy.deepcopy(module)
        args, kwargs = pytree.tree_map_only(
            _Shape,
            lambda shape: torch.zeros(shape.size, dtype=shape.dtype, device=shape.device),
            inputs,
            is_leaf=lambda value: isinstance(value, _Shape),
        )
        return _signature(whole, args, kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    finally:
        set_random_states(states)


def _signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Written:
    attributes: set[str] = set()
    while True:
        silenced = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with warnings.catch_warnings(record=True) as warned, silenced[0], silenced[1]:
            warnings.simplefilter("always")
            try:
                exported = torch.export.export(module, args, kwargs, strict=False)
                final = exported.run_decompositions()
                break
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
    for item in warned:
        if found := _ASSIGNED.search(str(item.message)):
            attributes |= {name.strip().removeprefix("self.") for name in found[1].split(",")}
    mutated = frozenset(final.graph_signature.buffers_to_mutate.values())
    return mutated - attributes, frozenset(attributes)


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
    set_up = {storage_key(buffer) for buffer in _transient_buffers(objects) if _strided(buffer)}
    # Memory addresses of arrays.
    shared = [
        range(first := object_.__array_interface__["data"][0], first + object_.nbytes)
        for object_ in objects.values()
        if isinstance(object_, np.ndarray) and object_.nbytes
    ]

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
        states.append(_state(names, labels[paths[0]], finding, covered=key in covered))
    states += _gone(evidence)
    return StatePlan(
        tensors=tuple(states),
        lints=tuple(lints_of(states, objects, evidence, unseen)),
        naive_bytes=sum(covered.values()),
    )


def _transient_buffers(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    """Buffers that their modules do not save, since they make them again."""
    return [
        buffer
        for object_ in objects.values()
        if isinstance(object_, nn.Module)
        for name in object_._non_persistent_buffers_set
        if (buffer := object_._buffers.get(name)) is not None
    ]


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
        _state((label.name, path), label, gone, covered=covered)
        for path, (label, covered) in found.items()
        if finding_of(path, True, evidence, shared=False).kind != "dead"
    ]


def _state(names: tuple[str, ...], label: Label, finding: Finding, *, covered: bool) -> TensorState:
    return TensorState(
        name=names[0],
        aliases=tuple(dict.fromkeys(name for name in names if name != names[0])),
        kind=finding.kind,
        why=tuple(finding.why),
        dtype=str(label.dtype).removeprefix("torch."),
        shape=label.shape,
        bytes=label.bytes,
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
