"""The data loaders of torchdata, which know themselves how to go on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outlast.autosave.resume.randomness import random_states, set_random_states, source_of
from outlast.autosave.resume.watched import held_by, put_back

if TYPE_CHECKING:
    from collections.abc import Iterator


class StatefulIterator:
    """The iterator of a `StatefulDataLoader`, saved as what the loader's `state_dict` gives.

    It is taken up again at its first use, when all objects hold what they held. What the loader
    does not save, as the random numbers of workers, begins anew.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._begun = random_states()
        self._state: dict[str, Any] | None = None
        self._ended = False
        self._inner: Any = _plain()(loader)

    def __iter__(self) -> StatefulIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

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
            return next(self._inner)
        except StopIteration:
            self._ended = True
            raise

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        if self._inner is not None and not self._ended:
            state = self._inner.state_dict()
        return {
            "loader": self._loader,
            "begun": self._begun,
            "state": state,
            "ended": self._ended,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._loader = state["loader"]
        self._begun = state["begun"]
        self._state = state["state"]
        self._ended = state["ended"]
        self._inner = None

    def _use(self) -> None:
        """Let the loader go on where it was, if that has not been done."""
        if self._inner is not None or self._ended:
            return
        loader, now = self._loader, random_states()
        reached = held_by([loader._index_sampler, loader.generator], [loader.dataset])
        sources = [held for held in reached if source_of(held.owner) is not None]
        try:
            set_random_states(self._begun)
            loader.load_state_dict(self._state)
            self._inner = _plain()(loader)
        finally:
            put_back(sources)
            set_random_states(now)


@contextmanager
def resumable_stateful_loaders() -> Iterator[None]:
    """Within, loaders of torchdata, if it is installed, give iterators that can be pickled."""
    if importlib.util.find_spec("torchdata") is None:
        yield
        return
    loader, plain = _loader_type(), _plain()
    loader.__iter__ = _iterate
    try:
        yield
    finally:
        loader.__iter__ = plain


def _iterate(loader: Any) -> StatefulIterator:
    return StatefulIterator(loader)


@functools.cache
def _loader_type() -> Any:
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader


@functools.cache
def _plain() -> Any:
    """The loader's own `__iter__`; to be asked for before it is replaced."""
    return _loader_type().__iter__
