"""One explicit line for a script that is run plainly: `outlast.autosave.loop`."""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from outlast.autosave.heap.names import Names
from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.resume.iterators import REDUCERS, resumable
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.randomness import random_states, set_random_states
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_NAME = "outlast_loop"
"""Of the loop's own entry beside the state."""

_SMALLEST_BYTES = 1 << 16


class Store(Protocol):
    """Where the state is kept, as `outlast.checkpoint.CheckpointStore` does it."""

    def save_async(self, step: int, state: Mapping[str, Any]) -> Any:
        """Begin to save; the objects may change when this returns."""

    def restore(self, state: Mapping[str, Any]) -> Any:
        """Bring the newest state back into the objects; None when there is none."""


def loop(
    iterable: Iterable[Any], *, state: Mapping[str, Any], store: Store, every_steps: int = 100
) -> Iterator[Any]:
    """Go through `iterable`, save every so many steps, and go on from there in another process.

    It is used so::

        store = CheckpointStore("ckpt/")
        for batch in autosave.loop(loader, state={"model": model, "optimizer": opt}, store=store):
            train(batch)

    What was done is skipped: of a `DataLoader` and of iterators that can be pickled nothing is read
    again, other iterables are counted through. The states of random numbers are saved and restored
    with `state`. A loop that is called once per epoch with the same store gives nothing in epochs
    that were done; what stands between them in the script is done again before the state comes
    back. Under `outlast run` the loop is the program's step loop, and `outlast run` saves.

    Args:
        iterable: The batches of a run, or of an epoch.
        state: Name to module, optimizer, or object with `state_dict` and `load_state_dict`.
        store: Keeps the state.
        every_steps: Steps between saves.

    Raises:
        AutosaveError: When `every_steps` is below 1, or a state has the loop's own name.
    """
    if every_steps < 1:
        raise AutosaveError(f"every_steps = {every_steps} saves never; it must be 1 or more")
    if _NAME in state:
        raise AutosaveError(f"state[{_NAME!r}] is the loop's own entry; give it another name")
    if RUNTIME in sys._getframe(1).f_globals:
        return resumable(iterable)
    run = _RUNS.get(store)
    if run is None:
        run = _RUNS[store] = _Run(store)
    return run.steps(iterable, state, every_steps)


class _Run:
    """The loops of a script that save to one store."""

    def __init__(self, store: Store) -> None:
        # Not the store itself, which would never be let go of as its own key.
        self._store = weakref.ref(store)
        self._loops = 0
        self._steps = 0
        self._aim: _Place | None = None
        self._asked = False

    def steps(
        self, iterable: Iterable[Any], state: Mapping[str, Any], every_steps: int
    ) -> Iterator[Any]:
        """The items of the next loop that are still to be done."""
        store = self._store()
        assert store is not None
        number, self._loops = self._loops, self._loops + 1
        place = _Place()
        objects = {**state, _NAME: place}
        if not self._asked:
            self._asked = True
            if store.restore({_NAME: place}) is not None:
                self._aim = place
        if self._aim is not None and number < self._aim.loop:
            return
        if self._aim is None:
            iterator, count = _begun(iterable), 0
            place.begun = random_states()
        else:
            place = self._aim
            objects[_NAME] = place
            store.restore(objects)
            iterator, count = place.iterator(iterable), place.count
            self._steps, self._aim = place.step, None
            set_random_states(place.random)
        for item in iterator:
            yield item
            count, self._steps = count + 1, self._steps + 1
            if self._steps % every_steps == 0:
                place.set(number, self._steps, count, iterable, iterator)
                store.save_async(self._steps, objects)


_RUNS: weakref.WeakKeyDictionary[Store, _Run] = weakref.WeakKeyDictionary()


class _Place:
    """Where a run stands, as an entry of its state.

    Attributes:
        loop: Number of the call of `loop`, from 0.
        step: Steps done in the run.
        count: Items done of this loop.
        random: The states of random numbers.
        begun: Those when this loop had begun.
    """

    def __init__(self) -> None:
        self.loop = self.step = self.count = 0
        self.random: dict[str, Any] = {}
        self.begun: dict[str, Any] = {}
        self._pickled = b""

    def set(
        self, number: int, step: int, count: int, iterable: Iterable[Any], iterator: Any
    ) -> None:
        """Note where the run stands now."""
        self.loop, self.step, self.count = number, step, count
        self.random = random_states()
        self._pickled = b""
        if isinstance(iterable, Iterator):
            # Its parts have names, and what they gave cannot be told of them: it is counted.
            return
        written = io.BytesIO()
        try:
            _Pickler(written, _named(iterable)).dump(iterator)
        except (AutosaveError, TypeError, pickle.PicklingError, NotImplementedError):
            return
        self._pickled = written.getvalue()

    def iterator(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The iterator of `iterable`, behind the items that are done."""
        if self._pickled:
            names = _named(iterable)
            made: Iterator[Any] = _Unpickler(io.BytesIO(self._pickled), names).load()
            return made
        iterator = _begun(iterable)
        set_random_states(self.begun)
        for _ in range(self.count):
            next(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """All of it, as one tensor of a size that seldom changes."""
        content = (self.loop, self.step, self.count, self.random, self.begun, self._pickled)
        written = pickle.dumps(content, protocol=5)
        padded = bytearray(max(_SMALLEST_BYTES, 1 << len(written).bit_length()))
        padded[: len(written)] = written
        return {"place": torch.frombuffer(padded, dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        content = pickle.loads(state["place"].numpy().tobytes())
        self.loop, self.step, self.count, self.random, self.begun, self._pickled = content


def _begun(iterable: Iterable[Any]) -> Iterator[Any]:
    with resumable_loaders():
        return resumable(iterable)


def _named(iterable: Iterable[Any]) -> Names:
    """Names of all that an iterable leads to: it is there in every process, and not written."""
    return Names({"iterable": iterable}, ["__main__"])


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        return self._names.path_of(value)

    def reducer_override(self, value: Any) -> Any:
        reduce: Callable[[Any], Any] | None = REDUCERS.get(type(value))
        return NotImplemented if reduce is None else reduce(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, path: Any) -> Any:
        if path not in self._names.objects:
            raise AutosaveError(
                f"`{path}` was there when the loop was saved, and its iterable has none now; make "
                "the iterable as before"
            )
        return self._names.objects[path]
