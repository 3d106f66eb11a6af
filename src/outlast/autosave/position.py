"""Position of a loop in its iterable, and the random numbers to come."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from outlast.autosave.heap.names import Names
from outlast.autosave.heap.objects import Unpickler
from outlast.autosave.resume.iterators import REDUCERS, resumable
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.process import random_states, set_random_states
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_SMALLEST_BYTES = 1 << 16


class Position:
    """A place in the training data of one process, as an entry of its state.

    It is used so::

        position = Position()
        batches = position.begin(loader)         # or position.resume(loader) after a restore
        for count, batch in enumerate(batches, 1):
            train(batch)
            position.note(step, count, loader, batches)      # before each save
            store.save_async(step, {"model": model, "position": position})

    Of a `DataLoader`, and of iterators that can be pickled, nothing is read again; other iterables
    are counted through.

    Args:
        may_be_missing: Whether it stays as it is where none was saved under its name.

    Attributes:
        loop: Which loop of the program it is in, from 0; an epoch's number, for example.
        step: Steps done in the run.
        count: Items done of this loop.
    """

    def __init__(self, *, may_be_missing: bool = False) -> None:
        self.may_be_missing = may_be_missing
        self.loop = self.step = self.count = 0
        self._random: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._pickled = b""
        self._named: tuple[Any, Names] | None = None

    def begin(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """An iterator of `iterable` from its first item."""
        self._name(iterable)
        # An iterator draws the seed of its workers when it is made.
        self._begun = random_states()
        self.count, self._pickled = 0, b""
        return _begun(iterable)

    def note(
        self, step: int, count: int, iterable: Iterable[Any], iterator: Any, *, ahead: bool = False
    ) -> None:
        """Note where the loop stands now.

        Args:
            step: Steps done in the run.
            count: Items done of this loop.
            iterable: What the loop goes through.
            iterator: What `begin` or `resume` gave for it.
            ahead: Whether it has given one more item, which is to be given again.
        """
        self.step, self.count = step, count
        self._random = random_states()
        self._pickled = b""
        if ahead or isinstance(iterable, Iterator):
            # The parts of an iterator have names, and what they gave cannot be told of them.
            return
        written = io.BytesIO()
        try:
            _Pickler(written, self._name(iterable)).dump(iterator)
        except (AutosaveError, TypeError, pickle.PicklingError, NotImplementedError):
            return
        self._pickled = written.getvalue()

    def pause(self, step: int) -> None:
        """Note that one going-through is over and the next has not begun.

        Args:
            step: Steps done in the run.
        """
        self.step, self.count = step, 0
        self._random, self._begun, self._pickled = random_states(), {}, b""

    def resume(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The iterator of `iterable` behind the items that are done; sets the random numbers.

        Raises:
            AutosaveError: When `iterable` is not what it was.
        """
        names = self._name(iterable)
        if not self._begun:
            set_random_states(self._random)
            return self.begin(iterable)
        if self._pickled:
            found: Iterator[Any] = _Unpickler(io.BytesIO(self._pickled), names).load()
        else:
            set_random_states(self._begun)
            found = _begun(iterable)
            for _ in range(self.count):
                next(found)
        set_random_states(self._random)
        return found

    def skip(self, iterable: Iterable[Any], count: int) -> Iterator[Any]:
        """An iterator of `iterable` behind its first `count` items, whoever has done them.

        For another number of processes than before, where each goes through another part.
        """
        found = self.begin(iterable)
        for _ in range(count):
            next(found)
        self.count = count
        return found

    def _name(self, iterable: Iterable[Any]) -> Names:
        """Names of all that an iterable leads to: it is there in every process, and not written.

        They are those of its first use: a new process has no others. To look at a large dataset
        takes time, too.
        """
        if self._named is None or self._named[0] is not iterable:
            self._named = iterable, Names({"iterable": iterable}, ["__main__"])
        return self._named[1]

    def state_dict(self) -> dict[str, Any]:
        """All of it, as one tensor of a size that seldom changes."""
        content = (self.loop, self.step, self.count, self._random, self._begun, self._pickled)
        written = pickle.dumps(content, protocol=5)
        padded = bytearray(max(_SMALLEST_BYTES, 1 << len(written).bit_length()))
        padded[: len(written)] = written
        return {"place": torch.frombuffer(padded, dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        content = pickle.loads(state["place"].numpy().tobytes())
        self.loop, self.step, self.count, self._random, self._begun, self._pickled = content


def _begun(iterable: Iterable[Any]) -> Iterator[Any]:
    with resumable_loaders():
        return resumable(iterable)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Names) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        return self._names.path_of(value)

    def reducer_override(self, value: Any) -> Any:
        reduce: Callable[[Any], Any] | None = REDUCERS.get(type(value))
        return NotImplemented if reduce is None else reduce(value)


class _Unpickler(Unpickler):
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
