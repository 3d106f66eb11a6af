"""Data loaders whose iterators resume in the middle of an epoch, torchdata's stateful ones too.

A `LoaderIterator` takes the place of what ``iter(loader)`` gives. It draws the indices of batches
as the loader's own iterator does, and writes down what is needed to draw them again. Taken up in
another process, it draws again the indices of the batches that were handed out, without reading
their samples, and continues with the next one. New workers take over the random numbers of those
before them, also over the epochs of persistent workers, and the plain numbers and texts among the
attributes of their dataset; what it keeps in lists and dictionaries is taken for a cache. Only of
an iterable dataset, which has no indices, all samples of the epoch are read again.

A worker process has sources of random numbers of its own, seeded when it starts. With each batch it
sends the states that have changed, so that workers of another process can continue from there
without reading again what was read.

*Draws.* They use random numbers, and so does the program between them. To draw a series again, the
sources begin where they began, and are set anew before each draw by which the program had moved
them.

Data that are large and do not change are only referred to: datasets, modules, functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import marshal
import sys
import sysconfig
import types
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.autosave.heap.objects import is_closed
from outlast.autosave.resume.process import (
    Source,
    host_sources,
    random_states,
    set_random_states,
    source_of,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


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
    match value:
        case torch.Tensor():
            return value.detach().clone()
        case np.ndarray():
            return value.copy()
        case dict():
            return dict(value)
        case list() | deque() | set():
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


WorkerStates = dict[int, dict[str, Any]]
"""Number of a worker to the states that differ from those that it was seeded with."""


class Reported(NamedTuple):
    """A batch, and what has changed in the worker that made it.

    Attributes:
        batch: What the loader's `collate_fn` gave.
        worker: Number of the worker.
        changed: States that are not those sent last.
    """

    batch: Any
    worker: int
    changed: dict[str, Any]

    def note(self, states: WorkerStates) -> None:
        """Bring `states` up to date."""
        if self.changed:
            states[self.worker] = states.get(self.worker, {}) | self.changed


class _Watch:
    """The sources of random numbers of a worker, and what its dataset holds; lives in the worker.

    Objects, and their sources, are found in the same order in every process with the same dataset.

    Args:
        worker: Its number.
        roots: Where to begin; modules are looked into, long containers are not.
        states: What the worker is to take over.
    """

    def __init__(self, worker: int, roots: Iterable[Any], states: dict[str, Any]) -> None:
        self.worker = worker
        self._sources = host_sources()
        self._owners: dict[str, Any] = {}
        before = len(self._sources)
        for item in _reached(roots, _is_large):
            source = source_of(item)
            if source is not None:
                self._sources[f"source {len(self._sources) - before}"] = source
            elif not isinstance(item, _CONTAINERS):
                self._owners[f"object {len(self._owners)}"] = item
        self._seen = self._read()
        for name, state in states.items():
            if name in self._sources:
                self._sources[name].write(state)
            else:
                vars(self._owners[name]).update(state)
        self._seen |= {name: state for name, state in states.items() if name in self._seen}

    def changed(self) -> dict[str, Any]:
        """The states that are not those of the last call."""
        now = self._read()
        changed = {name: item for name, item in now.items() if item != self._seen[name]}
        self._seen = now
        return changed

    def _read(self) -> dict[str, Any]:
        """State of each source, and the plain numbers and texts among each object's attributes."""
        found: dict[str, Any] = {name: source.read() for name, source in self._sources.items()}
        for place, owner in self._owners.items():
            found[place] = {
                name: value for name, value in vars(owner).items() if type(value) in ATOMS
            }
        return found


_watch: _Watch | None = None


def _start(
    start: Callable[[int], None] | None, collate: Any, states: WorkerStates, worker: int
) -> None:
    """Take the place of a loader's `worker_init_fn`: begin to watch, after `start` was called.

    Args:
        start: The loader's own function; None for none.
        collate: The loader's own `collate_fn`.
        states: What the workers are to take over.
        worker: Number of this one.
    """
    global _watch  # noqa: PLW0603 (a worker process has one)
    if start is not None:
        start(worker)
    information = get_worker_info()
    assert information is not None
    # Whatever the dataset has drawn so far is drawn again in each process.
    _watch = _Watch(worker, [information.dataset, collate], states.get(worker, {}))


def _report(collate: Callable[[Any], Any], samples: Any) -> Reported:
    """Take the place of a loader's `collate_fn` in its workers: make and report a batch."""
    batch = collate(samples)
    assert _watch is not None
    return Reported(batch, _watch.worker, _watch.changed())


def observe(inner: Any, states: WorkerStates) -> None:
    """Note in `states` all that workers send to a loader's iterator, also what it throws away.

    Persistent workers read ahead; what they have read when an epoch is left early is thrown away,
    but has moved their random numbers.
    """
    reference = weakref.ref(inner)

    def get_data() -> Any:
        found = reference()
        assert found is not None
        received = type(found)._get_data(found)
        if isinstance(received[1], Reported):
            received[1].note(states)
        return received

    inner._get_data = get_data


class _Resumed:
    """An iterator of a loader that is taken up where it was at its first use.

    By then all objects hold what they held. Attributes that it does not have are those of the
    loader's own iterator.
    """

    _inner: Any
    _ended: bool

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        self._use()
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._use()
        try:
            return self._next()
        except StopIteration:
            self._ended = True
            raise

    def _next(self) -> Any:
        return next(self._inner)

    def _use(self) -> None:
        """Let the iterator continue where it was, if that has not been done."""


class StatefulIterator(_Resumed):
    """The iterator of a `StatefulDataLoader`, saved as what the loader's `state_dict` gives.

    What the loader does not save, as the random numbers of workers, begins anew.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._begun = random_states()
        self._state: dict[str, Any] | None = None
        self._ended = False
        self._inner = _stateful()[1](loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        if self._inner is not None and not self._ended:
            state = self._inner.state_dict()
        return {"loader": self._loader, "begun": self._begun, "state": state, "ended": self._ended}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._loader = state["loader"]
        self._begun = state["begun"]
        self._state = state["state"]
        self._ended = state["ended"]
        self._inner = None

    def _use(self) -> None:
        if self._inner is not None or self._ended:
            return
        loader, now = self._loader, random_states()
        reached = held_by([loader._index_sampler, loader.generator], [loader.dataset])
        sources = [held for held in reached if source_of(held.owner) is not None]
        try:
            set_random_states(self._begun)
            loader.load_state_dict(self._state)
            self._inner = _stateful()[1](loader)
        finally:
            put_back(sources)
            set_random_states(now)


@functools.cache
def _stateful() -> tuple[Any, Any]:
    """Torchdata's loader, and its own `__iter__`; to be asked for before that is replaced."""
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return loader, loader.__iter__


_SAVED = ("epoch", "count", "ended", "born", "started", "handed", "received")


class LoaderIterator(_Resumed):
    """The iterator of a `DataLoader`, which can be pickled and continues from where it was.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._hold(loader, loader.persistent_workers)
        self._epoch = 0
        self._count = 0
        self._ended = False
        self._born = self._seed.read()
        self._started: WorkerStates = {}
        self._handed: WorkerStates = {}
        self._received: WorkerStates = {}
        self._draws = self._begun()
        self._inner: Any = self._built(passing=True)
        self._prime()

    def __len__(self) -> int:
        return len(self._loader._index_sampler)

    def restart(self) -> None:
        """Begin another epoch with the same workers, as a loader with persistent ones does."""
        self._use()
        revived = self._inner is None
        self._epoch, self._count, self._ended = self._epoch + 1, 0, False
        self._draws = self._begun()
        if revived:
            self._started = self._handed = self._received
            # New workers take the place of those that were seeded when the loader was first used.
            now = self._seed.read()
            self._seed.write(self._born)
            self._inner = self._built(passing=False)
            self._seed.write(now)
            self._iterate_again()
        else:
            if self._indices is not None:
                self._indices.draws, self._indices.opened = self._draws, False
            self._inner._reset(self._loader)
        self._started, self._handed = dict(self._received), dict(self._received)
        self._prime()

    def __getstate__(self) -> dict[str, Any]:
        if not self._ended and not self._loader.in_order and self._loader.num_workers > 1:
            raise AutosaveError(
                "a DataLoader with in_order=False hands out batches in an order that no second run "
                "repeats, and cannot be saved in the middle of an epoch; set in_order=True"
            )
        state = {"loader": self._loader, "persistent": self._held is None}
        state |= {name: getattr(self, f"_{name}") for name in _SAVED}
        return state | {"series": self._draws.series}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["loader"], state["persistent"])
        for name in _SAVED:
            setattr(self, f"_{name}", state[name])
        self._draws = Draws(state["series"])
        self._inner = None

    def _hold(self, loader: DataLoader[Any], persistent: bool) -> None:
        """Remember the loader; one with persistent workers holds this, and is not held in turn."""
        self._held = None if persistent else loader
        self._reference = weakref.ref(loader)

    @property
    def _loader(self) -> DataLoader[Any]:
        loader = self._reference()
        assert loader is not None
        return loader

    @property
    def _reads(self) -> bool:
        """Return True if the dataset has no indices, so that its samples themselves are drawn."""
        return isinstance(self._loader.dataset, IterableDataset)

    @property
    def _seed(self) -> Source:
        """Generator from which the seed of the workers is drawn."""
        source = source_of(self._loader.generator or torch.default_generator)
        assert source is not None
        return source

    def _begun(self, series: Series | None = None) -> Draws:
        """Draws of an epoch: of a new one, or to draw `series` again."""
        loader = self._loader
        if self._reads:
            # In workers, samples are drawn with the workers' random numbers.
            at_once, roots = loader.num_workers > 0, [loader.generator]
            roots += [] if at_once else [loader.dataset, loader.collate_fn]
            passed: list[Any] = []
        else:
            at_once, passed = draws_at_once(loader._index_sampler), [loader.dataset]
            roots = [loader._index_sampler, loader.generator]
        return Draws(series, at_once) if series else Draws.begin(roots, passed, at_once)

    def _built(self, passing: bool) -> Any:
        """The loader's own iterator, with no index drawn yet."""
        loader = self._loader
        parts: dict[str, Any] = {}
        self._indices: Indices | None = None
        if not self._reads:
            indices = Indices(loader._index_sampler, self._draws, self._seed)
            indices.passing, self._indices = passing, indices
            parts["batch_sampler" if loader._auto_collation else "sampler"] = indices
        if loader.num_workers > 0:
            states = self._started if self._reads else self._handed
            own = loader.collate_fn
            parts["collate_fn"] = functools.partial(_report, own)
            parts["worker_init_fn"] = functools.partial(_start, loader.worker_init_fn, own, states)
        with _replaced(loader, parts):
            inner = loader._get_iterator()
        if self._indices is not None and passing:
            assert self._indices.born is not None
            self._born = self._indices.born
        if loader.persistent_workers:
            observe(inner, self._received)
        return inner

    def _prime(self) -> None:
        """Let indices be drawn, and workers begin to read ahead."""
        if self._indices is None:
            return
        self._indices.opened = True
        if self._loader.num_workers > 0:
            for _ in range(self._inner._prefetch_factor * self._loader.num_workers):
                self._inner._try_put_index()

    def _next(self) -> Any:
        try:
            if self._reads:
                data = self._draws.take(self._inner.__next__)
                self._draws.note(None)
            else:
                data = next(self._inner)
        except StopIteration:
            raise
        except Exception:
            # The batch that could not be read is passed over, as the loader's own iterator does.
            self._count += 1
            raise
        self._count += 1
        if isinstance(data, Reported):
            data.note(self._handed)
            return data.batch
        return data

    def _use(self) -> None:
        if self._inner is not None or self._ended:
            return
        now = random_states()
        held = [Held(owner, content(owner)) for owner, _ in self._draws.series.held]
        if self._reads:
            # What the dataset holds belongs to the samples that it reads again.
            held = [item for item in held if source_of(item.owner) is not None]
        try:
            again = self._drawn_again()
        finally:
            put_back(held)
            set_random_states(now)
        if not again:
            self._inner = None
            raise self._other_draws()

    def _drawn_again(self) -> bool:
        """Draw the epoch again; whether it was the same."""
        self._draws = self._begun(self._draws.series)
        self._received = dict(self._started if self._reads else self._handed)
        first = self._epoch == 0
        if first:
            self._draws.rewind()
        else:
            self._seed.write(self._born)
        self._inner = self._built(passing=first)
        if not first:
            self._draws.rewind()
            self._iterate_again()
        try:
            if self._indices is None:
                count, self._count, self._handed = self._count, 0, dict(self._started)
                for _ in range(count):
                    self._next()
            else:
                self._skip(self._indices)
        except StopIteration:
            self._ended = self._ended or self._indices is None
            return False
        return self._draws.settle()

    def _skip(self, indices: Indices) -> None:
        """Draw the indices of the batches that were handed out."""
        inner, workers = self._inner, self._loader.num_workers
        indices.opened = True
        skipped = self._count if workers else self._draws.series.drawn
        for _ in range(skipped):
            next(indices)
        inner._num_yielded = self._count
        if workers:
            # Each batch is read by the worker that would have read it.
            inner._send_idx = inner._rcvd_idx = skipped
            for _ in range(skipped % workers):
                next(inner._worker_queue_idx_cycle)
        self._prime()

    def _iterate_again(self) -> None:
        """Begin an iteration of the sampler with an iterator that was built without one."""
        if self._indices is not None:
            self._indices.passing = True
            self._inner._sampler_iter = iter(self._indices)

    def _other_draws(self) -> AutosaveError:
        loader, drawn = self._loader, self._draws.series.drawn
        if self._reads:
            return AutosaveError(
                f"the dataset {type(loader.dataset).__qualname__} has ended before batch {drawn}, "
                "up to which it was read when the program was saved; give it the same files in the "
                "same order"
            )
        sampler = type(loader.batch_sampler or loader.sampler).__qualname__
        if sampler == "BatchSampler":
            sampler = type(loader.sampler).__qualname__
        return AutosaveError(
            f"the sampler {sampler} gives other indices than before the program was saved, in the "
            f"first {drawn} batches of the epoch; keep the dataset's length, and what the sampler "
            "draws from, the same in every run and throughout an epoch"
        )


class PersistentIterator:
    """A `LoaderIterator` that belongs to a loader with persistent workers, and that loader.

    Args:
        loader: The loader, whose `_iterator` is the iterator itself.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        made: Any = loader._iterator
        if isinstance(made, LoaderIterator):
            made.restart()
        else:
            made = loader._iterator = LoaderIterator(loader)  # type: ignore[assignment]
        self._loader = loader
        self._iterator: LoaderIterator = made

    def __iter__(self) -> PersistentIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_iterator" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._iterator, name)


@contextmanager
def _replaced(loader: DataLoader[Any], parts: dict[str, Any]) -> Iterator[None]:
    """Give a loader other attributes for a while, also those that it does not let be set."""
    own = vars(loader)
    before = {name: own[name] for name in parts}
    own.update(parts)
    try:
        yield
    finally:
        own.update(before)


@contextmanager
def resumable_loaders() -> Iterator[None]:
    """Within, data loaders, torchdata's too, give iterators that can be pickled and taken up."""

    def iterate(loader: DataLoader[Any]) -> Any:
        persistent = loader.persistent_workers and loader.num_workers > 0
        return PersistentIterator(loader) if persistent else LoaderIterator(loader)

    def iterate_stateful(loader: Any) -> StatefulIterator:
        # A class as such would not be given the loader.
        return StatefulIterator(loader)

    replaced: list[tuple[Any, Any, Any]] = [(DataLoader, DataLoader.__iter__, iterate)]
    if importlib.util.find_spec("torchdata") is not None:
        replaced.append((*_stateful(), iterate_stateful))
    for kind, _, ours in replaced:
        kind.__iter__ = ours
    try:
        yield
    finally:
        for kind, plain, _ in replaced:
            kind.__iter__ = plain


def _reduced(inner: Any) -> Any:
    if type(inner).__module__.startswith("torchdata."):
        # Its loader makes another one from the state that a `StatefulIterator` keeps.
        return type(None), ()
    raise AutosaveError(
        f"the iterator {type(inner).__qualname__} of a data loader was not made by "
        "iter(DataLoader(...)) and cannot be saved; iterate over the loader itself"
    )


REDUCERS: Mapping[type, Callable[[Any], Any]] = {_BaseDataLoaderIter: _reduced}
"""How objects of these types, and of types derived from them, are pickled."""


IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    LoaderIterator: (LoaderIterator.__getstate__, LoaderIterator.__setstate__),
    StatefulIterator: (StatefulIterator.__getstate__, StatefulIterator.__setstate__),
}
"""Types whose objects are put back in place: what they hold, and how to make them hold it."""
