"""Data loaders whose iterators can be taken up in the middle of an epoch.

A `LoaderIterator` takes the place of what ``iter(loader)`` gives. It draws the indices of batches
as the loader's own iterator does, and writes down what is needed to draw them again. Taken up in
another process, it draws again the indices of the batches that were handed out, without reading
their samples, and goes on with the next one. New workers take over the random numbers of those
before them, also over the epochs of persistent workers, and the plain numbers and texts among the
attributes of their dataset; what it keeps in lists and dictionaries is taken for a cache. Only of
an iterable dataset, which has no indices, all samples of the epoch are read again.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.autosave.resume.draws import Draws, Indices, Series, draws_at_once
from outlast.autosave.resume.randomness import (
    Source,
    random_states,
    set_random_states,
    source_of,
)
from outlast.autosave.resume.stateful import StatefulIterator, resumable_stateful_loaders
from outlast.autosave.resume.watched import Held, content, put_back
from outlast.autosave.resume.workers import Reported, Reporting, Starting, WorkerStates, observe
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class LoaderIterator:
    """The iterator of a `DataLoader`, which can be pickled and goes on from where it was.

    It is taken up again at its first use, when all objects hold what they held. Attributes that it
    does not have are those of the loader's own iterator.

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

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader._index_sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        self._use()
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._use()
        return self._next()

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
        return {
            "loader": self._loader,
            "persistent": self._held is None,
            "epoch": self._epoch,
            "count": self._count,
            "ended": self._ended,
            "born": self._born,
            "started": self._started,
            "handed": self._handed,
            "received": self._received,
            "series": self._draws.series,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["loader"], state["persistent"])
        self._epoch = state["epoch"]
        self._count = state["count"]
        self._ended = state["ended"]
        self._born = state["born"]
        self._started = state["started"]
        self._handed = state["handed"]
        self._received = state["received"]
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
        """Whether the dataset has no indices, so that its samples themselves are drawn."""
        return isinstance(self._loader.dataset, IterableDataset)

    @property
    def _seed(self) -> Source:
        """Where the seed of the workers is drawn from."""
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
            parts["collate_fn"] = Reporting(loader.collate_fn)
            parts["worker_init_fn"] = Starting(loader.worker_init_fn, loader.collate_fn, states)
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
            self._ended = True
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
        """Take the epoch up where it was, if that has not been done."""
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
        if self._epoch == 0:
            self._draws.rewind()
            self._inner = self._built(passing=True)
        else:
            self._seed.write(self._born)
            self._inner = self._built(passing=False)
            self._draws.rewind()
            self._iterate_again()
        try:
            if self._indices is None:
                self._read_again()
            else:
                self._skip(self._indices)
        except StopIteration:
            return False
        return self._draws.settle()

    def _read_again(self) -> None:
        count, self._count, self._handed = self._count, 0, dict(self._started)
        for _ in range(count):
            self._next()

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
        drawn = self._draws.series.drawn
        if self._reads:
            return AutosaveError(
                f"the dataset {type(self._loader.dataset).__qualname__} has ended before batch "
                f"{drawn}, up to which it was read when the program was saved; give it the same "
                "files in the same order"
            )
        sampler = type(self._loader.batch_sampler or self._loader.sampler).__qualname__
        if sampler == "BatchSampler":
            sampler = type(self._loader.sampler).__qualname__
        return AutosaveError(
            f"the sampler {sampler} gives other indices than before the program was saved, in the "
            f"first {drawn} batches of the epoch; keep the dataset's length, "
            "and what the sampler draws from, the same in every run and throughout an epoch"
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


def _iterate(loader: DataLoader[Any]) -> Any:
    """What `DataLoader.__iter__` does, with a `LoaderIterator`."""
    if loader.persistent_workers and loader.num_workers > 0:
        return PersistentIterator(loader)
    return LoaderIterator(loader)


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
    """Within, data loaders give iterators that can be pickled and taken up again."""
    plain = DataLoader.__iter__
    DataLoader.__iter__ = _iterate  # type: ignore[method-assign]
    try:
        with resumable_stateful_loaders():
            yield
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]


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
