"""What a sampler or a dataset holds that its draws may change, written down and put back in place.

Data that are large and do not change are only referred to: datasets, modules, functions.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from outlast.autosave.heap.atoms import is_closed
from outlast.autosave.resume.randomness import Source, source_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ATOMS = (type(None), bool, int, float, complex, str, bytes)
_CLOSED = (*ATOMS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (list, deque, set, dict)
_LONG_ITEMS = 1000
_MANY_OBJECTS = 10_000


class Held(NamedTuple):
    """An object and what it held.

    Attributes:
        owner: The object.
        content: State of a source of random numbers, copy of a tensor or an array, items, or
            attributes; nothing deeper is copied.
    """

    owner: Any
    content: Any


def held_by(roots: Iterable[Any], passed: Iterable[Any] = ()) -> list[Held]:
    """What is reached from `roots` and may change.

    Objects `passed`, datasets, modules and objects of libraries other than samplers stand apart.
    """
    without = list(passed)
    reached = _reached(roots, lambda value: _stands_apart(value, without))
    return [Held(name, content(name)) for name in reached]


def content(value: Any) -> Any:
    """What an object holds now."""
    source = source_of(value)
    if source is not None:
        return source.read()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _CONTAINERS):
        return tuple(value)
    return dict(vars(value))


def put_back(held: Iterable[Held]) -> None:
    """Make objects hold what they held."""
    for owner, seen in held:
        source = source_of(owner)
        if source is not None:
            source.write(seen)
        elif isinstance(owner, torch.Tensor):
            if owner.shape == seen.shape:
                owner.detach().copy_(seen)
        elif isinstance(owner, np.ndarray):
            if owner.shape == seen.shape and owner.flags.writeable:
                owner[...] = seen
        elif isinstance(owner, _CONTAINERS):
            owner.clear()
            (owner.update if isinstance(owner, (dict, set)) else owner.extend)(seen)
        else:
            vars(owner).clear()
            vars(owner).update(seen)


class Atoms:
    """The sources of random numbers and the plain numbers and texts among some objects' attributes.

    It is found in the same order in every process with the same objects.

    Args:
        roots: Where to begin; modules are looked into, long containers are not.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._owners: list[Any] = []
        self._sources: list[Source] = []
        for item in _reached(roots, _is_large):
            source = source_of(item)
            if source is not None:
                self._sources.append(source)
            elif not isinstance(item, _CONTAINERS):
                self._owners.append(item)

    def read(self) -> dict[str, Any]:
        """State of each source, and the atoms of each object, by its place in the order."""
        found: dict[str, Any] = {
            f"source {place}": source.read() for place, source in enumerate(self._sources)
        }
        for place, owner in enumerate(self._owners):
            found[f"object {place}"] = {
                name: value for name, value in vars(owner).items() if type(value) in ATOMS
            }
        return found

    def write(self, states: dict[str, Any]) -> None:
        """Put back what `read` gave, or a part of it."""
        for name, state in states.items():
            kind, place = name.split()
            if kind == "source":
                self._sources[int(place)].write(state)
            else:
                vars(self._owners[int(place)]).update(state)


def _reached(roots: Iterable[Any], closed: Any) -> Iterator[Any]:
    """Objects that hold something, reached from `roots` through what is not `closed`."""
    seen: dict[int, Any] = {}
    waiting = deque((root, True) for root in roots)
    while waiting and len(seen) < _MANY_OBJECTS:
        value, root = waiting.popleft()
        if id(value) in seen or isinstance(value, _CLOSED) or (not root and closed(value)):
            continue
        seen[id(value)] = value
        if isinstance(value, types.MethodType):
            waiting.append((value.__self__, False))
        elif isinstance(value, tuple):
            waiting.extend((item, False) for item in value)
        elif source_of(value) is not None or isinstance(value, (torch.Tensor, np.ndarray)):
            yield value
        elif isinstance(value, _CONTAINERS) or isinstance(getattr(value, "__dict__", None), dict):
            yield value
            waiting.extend((item, False) for item in _inside(value))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    else:
        parts = value if isinstance(value, _CONTAINERS) else vars(value).values()
    return [part for part in parts if type(part) not in ATOMS]


def _stands_apart(value: Any, without: list[Any]) -> bool:
    if isinstance(value, (nn.Module, Dataset)) or any(value is item for item in without):
        return True
    if isinstance(value, (Sampler, torch.Tensor)) or source_of(value) is not None:
        return False
    return _is_of_library(type(value).__module__)


def _is_large(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, (*_CONTAINERS, tuple)):
        return len(value) > _LONG_ITEMS
    return is_closed(type(value)) and source_of(value) is None


@functools.cache
def _is_of_library(module: str) -> bool:
    """Whether the classes of a module come with Python, or were installed."""
    if module in ("builtins", "collections", "numpy"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module != "__main__"
    standard = Path(sysconfig.get_path("stdlib"))
    return "site-packages" in file or "dist-packages" in file or standard in Path(file).parents
