"""Draws from samplers and datasets that can be repeated, number by number.

Draws use random numbers, and so does the program between them. To draw a series again, the sources
begin where they began, and are set anew before each draw by which the program had moved them.

Data that are large and do not change are only referred to: datasets, modules, functions.
"""

from __future__ import annotations

import functools
import marshal
import sys
import sysconfig
import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlast.autosave.heap.objects import is_closed
from outlast.autosave.resume.process import Source, host_sources, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


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
    """Objects reached from `roots` that may change.

    Objects `passed`, datasets, modules and objects of libraries other than samplers stand apart.
    """
    without = list(passed)
    reached = _reached(roots, lambda value: _stands_apart(value, without))
    return [Held(name, content(name)) for name in reached]


def content(value: Any) -> Any:
    """Present content of an object."""
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
            if isinstance(value, dict):
                parts: Iterable[Any] = value.values()
            else:
                parts = value if isinstance(value, _CONTAINERS) else vars(value).values()
            waiting.extend((part, False) for part in parts if type(part) not in ATOMS)


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
    """Return True if the classes of a module come with Python, or were installed."""
    if module in ("builtins", "collections", "numpy"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module != "__main__"
    standard = Path(sysconfig.get_path("stdlib"))
    return "site-packages" in file or "dist-packages" in file or standard in Path(file).parents


_T = TypeVar("_T")


_AT_ONCE = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass
class Series:
    """Record of a series of draws.

    Attributes:
        begun: States of the host's sources of random numbers at the beginning.
        held: What the sampler held at the beginning.
        jumps: Number of a draw to the states before it of the sources that were moved in between.
        drawn: Draws so far.
        digest: Hash of all that was drawn, in order.
    """

    begun: dict[str, bytes]
    held: list[Held]
    jumps: dict[int, dict[str, bytes]] = field(default_factory=dict)
    drawn: int = 0
    digest: bytes = b""


class Draws:
    """Draws, and writes down what is needed to draw again.

    Args:
        series: The series to draw again; what is drawn after it is written down there.
        at_once: Whether all random numbers are drawn with the first draw.
    """

    def __init__(self, series: Series, at_once: bool = False) -> None:
        self.series = series
        self._at_once = at_once
        self._sources: dict[str, Source] = host_sources()
        for place, (owner, _) in enumerate(series.held):
            source = source_of(owner)
            if source is not None:
                self._sources[f"held {place}"] = source
        self._drawn = 0
        self._until = series.drawn
        self._digest = b""
        self._left: dict[str, bytes] | None = None

    @classmethod
    def begin(cls, roots: Iterable[Any], passed: Iterable[Any], at_once: bool = False) -> Draws:
        """A new series from what `roots` lead to; objects `passed` are not looked into."""
        begun = {name: source.read() for name, source in host_sources().items()}
        draws = cls(Series(begun, held_by(roots, passed)), at_once)
        draws._left = draws._read()
        return draws

    def rewind(self) -> None:
        """Set all sources, and all that the sampler holds, to the beginning."""
        put_back(self.series.held)
        for name, source in host_sources().items():
            source.write(self.series.begun[name])

    def take(self, draw: Callable[[], _T]) -> _T:
        """Draw; within the series, with the random numbers that were drawn then.

        Raises:
            StopIteration: When the sampler or dataset has ended.
        """
        again = self._drawn < self._until
        if again:
            for name, state in self.series.jumps.get(self._drawn, {}).items():
                self._sources[name].write(state)
            value = draw()
        elif self._at_once and self._drawn:
            value = draw()
        else:
            if self._left is None:
                # All of the series has been drawn again, and nothing else in between.
                self._left = self._read()
            before = self._read()
            value = draw()
            for name, source in self._sources.items():
                after = source.read()
                if after != before[name]:
                    if before[name] != self._left[name]:
                        self.series.jumps.setdefault(self._drawn, {})[name] = before[name]
                    self._left[name] = after
        self._drawn += 1
        return value

    def note(self, value: Any) -> None:
        """Add what was drawn to the hash."""
        self._digest = xxhash.xxh3_128(self._digest + written(value)).digest()
        if self._drawn > self._until:
            self.series.drawn, self.series.digest = self._drawn, self._digest

    def settle(self) -> bool:
        """End drawing again; whether the same was drawn.

        To be called while the sources are as the last draw left them.
        """
        self._left = self._read()
        return (self._drawn, self._digest) == (self.series.drawn, self.series.digest)

    def _read(self) -> dict[str, bytes]:
        return {name: source.read() for name, source in self._sources.items()}


class Indices:
    """Stands in for the sampler in a loader's iterator; its own iterator.

    Args:
        sampler: Gives the indices of samples, or of batches.
        draws: Draws them.
        seed: The source of the seed of the loader's workers.

    Attributes:
        opened: Whether indices are given; until then, there seem to be none.
        passing: Whether a new iteration begins one of the sampler, too.
        born: State of `seed` after the first iteration began, which gives the workers' seed.
    """

    def __init__(self, sampler: Any, draws: Draws, seed: Source) -> None:
        self._sampler = sampler
        self._seed = seed
        self._inner: Iterator[Any] = iter(())
        self.draws = draws
        self.opened = False
        self.passing = True
        self.born: bytes | None = None

    def __iter__(self) -> Indices:
        if self.passing:
            self._inner = iter(self._sampler)
        if self.born is None:
            self.born = self._seed.read()
        return self

    def __next__(self) -> Any:
        if not self.opened:
            raise StopIteration
        index = self.draws.take(self._inner.__next__)
        self.draws.note(index)
        return index

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)


def draws_at_once(sampler: Any) -> bool:
    """Return True if a sampler of torch's own draws all its random numbers with its first index."""
    if type(sampler) is BatchSampler:
        return draws_at_once(sampler.sampler)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _AT_ONCE


def written(value: Any) -> bytes:
    """Indices as bytes, by value: the same in every process."""
    try:
        # Version 2 knows no references, which would tell equal objects from identical ones.
        return marshal.dumps(value, 2)
    except ValueError:
        pass
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if isinstance(value, (list, tuple)):
        return b"(" + b",".join(map(written, value)) + b")"
    if isinstance(value, dict):
        return b"{" + b",".join(map(written, value.items())) + b"}"
    return type(value).__qualname__.encode()
