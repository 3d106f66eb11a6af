"""Names for all that a program's set-up has made: the paths that lead there.

Set-up is the same in every process that runs the program, so a path leads to the same object in
each. It is taken when the first training loop is reached; what is made later has no name, and is
written down as a value.
"""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from outlast.autosave.heap.kinds import ATOMS, PASSED_ON, RANDOM, Content, children, content

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_CLOSED = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.distributed",
    "torch._C", "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio",
    "socket", "ssl", "subprocess", "queue", "weakref", "importlib", "typing", "abc", "tqdm",
    "outlast.autosave",
)  # fmt: skip
"""Modules whose objects are not looked into: their state is that of a process, not of training."""

_BUILTIN = (dict, list, deque, set, bytearray, types.CellType)


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    storage: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Names:
    """The objects that are reached from some roots, when this is made.

    Args:
        roots: Names and objects to begin with.
        modules: Names of the program's own modules, whose classes' objects are its own.

    Attributes:
        objects: Path to object, in the order in which they are reached.
        own: Paths to objects of the program itself, as opposed to those of libraries.
        before: What they held.
    """

    def __init__(self, roots: Mapping[str, Any], modules: Iterable[str]) -> None:
        self._modules = frozenset(modules)
        self.objects: dict[str, Any] = {}
        self.own: set[str] = set()
        self._paths: dict[int, str] = {}
        self._passed: dict[int, Any] = {}
        self._walk(roots)
        self.before = {path: content(each) for path, each in self.objects.items()}
        self.geometry = {
            path: _geometry("", each) for path, each in self.objects.items() if has_storage(each)
        }

    def path_of(self, value: Any) -> str | None:
        """The name of an object; None for one that came later."""
        return self._paths.get(id(value))

    def held(self) -> dict[str, Content]:
        """What the objects hold now: the program's own, and those of libraries that changed."""
        found = {}
        for path, each in self.objects.items():
            now = content(each)
            before = self.before[path]
            if now is not None and (
                self._always(path, now) or before is None or differs(before, now)
            ):
                found[path] = now
        return found

    def _always(self, path: str, now: Content) -> bool:
        return path in self.own and sum(map(_length, now.parts)) < _MANY

    def _walk(self, roots: Mapping[str, Any]) -> None:
        waiting = deque((name, each, True) for name, each in roots.items())
        while waiting:
            path, value, own = waiting.popleft()
            if id(value) in self._paths or id(value) in self._passed or self._atom(value):
                continue
            own = own and (isinstance(value, (*_BUILTIN, *PASSED_ON)) or self._is_own(value))
            if isinstance(value, PASSED_ON):
                # Kept, so that no later object gets its address.
                self._passed[id(value)] = value
            else:
                self._paths[id(value)] = path
                self.objects[path] = value
                if own:
                    self.own.add(path)
            if self._open(value):
                waiting.extend((path + end, each, own) for end, each in children(value))

    def _atom(self, value: Any) -> bool:
        if isinstance(value, type):
            return value.__module__ not in self._modules
        return isinstance(value, ATOMS)

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, (nn.Module, torch.Tensor, np.ndarray)):
            return True
        owner = value if isinstance(value, type) else type(value)
        return owner.__module__ in self._modules

    def _open(self, value: Any) -> bool:
        if isinstance(value, (*RANDOM, np.ndarray)):
            return False
        return not f"{type(value).__module__}.".startswith(tuple(f"{each}." for each in _CLOSED))


_MANY = 10_000
"""Items from which on a container is written down only when it has changed."""


def differs(before: Content, now: Content) -> bool:
    """Whether an object does not hold what it held."""
    from outlast.autosave.heap.kinds import same

    return not same(before, now)


def has_storage(value: Any) -> bool:
    """Whether a value is a tensor with numbers of its own, not one made of others."""
    return (
        isinstance(value, torch.Tensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _geometry(storage: str, tensor: torch.Tensor) -> Geometry:
    return Geometry(
        storage or str(tensor.untyped_storage().data_ptr()),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
    )


def _length(part: Any) -> int:
    return len(part) if isinstance(part, tuple) else 1
