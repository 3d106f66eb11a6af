"""Writes of a module's forward pass, by the signature of its exported graph.

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
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from outlast.autosave.resume.process import random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        found[module] = Inputs(*pytree.tree_map_only(torch.Tensor, _shape_of, (args, kwargs)))

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
        key = _key(item, inputs[item])
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


def _key(module: nn.Module, inputs: Inputs) -> str:
    """Equal for modules that do the same with other numbers, as far as they can be told apart."""
    settings = {
        name: variable
        for name, variable in vars(module).items()
        if isinstance(variable, (int, float, str, bool, type(None)))
    }
    shapes = [(name, tuple(item.shape)) for name, item in module.named_buffers()]
    return f"{type(module)} {module!r} {settings} {shapes} {inputs}"


def _export(module: nn.Module, inputs: Inputs) -> _Signature | str:
    """The signature, or in a phrase why there is none."""
    states = random_states()
    try:
        # A forward pass may leave traces in Python, which the program's own module must not have.
        whole = copy.deepcopy(module)
        filled = pytree.tree_map_only(_Shape, _filled, tuple(inputs), is_leaf=_is_shape)
        return _signature(whole, *filled)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    finally:
        set_random_states(states)


def _signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
    attributes: set[str] = set()
    while True:
        with warnings.catch_warnings(record=True) as warned, _quiet():
            warnings.simplefilter("always")
            try:
                exported = torch.export.export(module, args, kwargs, strict=False)
                final = exported.run_decompositions()
            except RuntimeError as error:
                name = _CONSTANT.search(str(error))
                if name is None or name[1] in attributes:
                    raise
                attributes.add(name[1])
                _make_buffer(module, name[1])
                continue
        for item in warned:
            found = _ASSIGNED.search(str(item.message))
            if found:
                attributes |= {name.strip().removeprefix("self.") for name in found[1].split(",")}
        mutated = frozenset(final.graph_signature.buffers_to_mutate.values())
        return _Signature(mutated - attributes, frozenset(attributes))


@contextmanager
def _quiet() -> Iterator[None]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _make_buffer(module: nn.Module, name: str) -> None:
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    tensor = getattr(owner, last)
    delattr(owner, last)
    owner.register_buffer(last, tensor)


def _attribute(module: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    try:
        return getattr(module.get_submodule(parent), last, None)
    except AttributeError:
        return None


def _shape_of(tensor: torch.Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.device)


def _is_shape(value: Any) -> bool:
    return isinstance(value, _Shape)


def _filled(shape: _Shape) -> torch.Tensor:
    return torch.zeros(shape.size, dtype=shape.dtype, device=shape.device)
