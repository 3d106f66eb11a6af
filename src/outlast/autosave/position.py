"""One line for a script that is run plainly, `outlast.autosave.loop`, and a loop's position.

The position is that in the iterable, and in the random numbers to come.
"""

from __future__ import annotations

import atexit
import io
import pickle
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.autosave.heap.names import Names
from outlast.autosave.heap.objects import Unpickler
from outlast.autosave.program.source import RUNTIME
from outlast.autosave.resume.iterators import REDUCERS, resumable
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.process import random_states, set_random_states
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from outlast.checkpoint import CheckpointStore, SaveHandle

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


_NAME = "outlast_loop"
"""Of the loop's own entries beside the state: ``outlast_loop``, and of each process another."""


def loop(
    iterable: Iterable[Any],
    *,
    state: Mapping[str, Any],
    store: CheckpointStore,
    every_steps: int = 100,
) -> Iterator[Any]:
    """Go through `iterable`, save every so many steps, and continue from there in another process.

    It is used so::

        store = CheckpointStore("ckpt/")
        for batch in autosave.loop(loader, state={"model": model, "optimizer": opt}, store=store):
            train(batch)

    What was done is skipped: of a `DataLoader` and of iterators that can be pickled nothing is read
    again, other iterables are counted through. The states of random numbers are saved and restored
    with `state`. A loop that is called once per epoch with the same store gives nothing in epochs
    that were done; what stands between them in the script is done again before the state comes
    back. A save that fails is a warning, and the loop continues. Under `outlast run` the loop is
    the program's step loop, and `outlast run` saves.

    With a default process group, all its processes go through the loop together, save at the same
    steps into one store, and continue as many as they were; each has its own place in its own data.

    Args:
        iterable: The batches of a run, or of an epoch.
        state: Name to module, optimizer, or object with `state_dict` and `load_state_dict`.
        store: Keeps the state.
        every_steps: Steps between saves.

    Raises:
        AutosaveError: When `every_steps` is below 1, a state has the loop's own name, or, at the
            first step, the state was saved by another number of processes.
    """
    if every_steps < 1:
        raise AutosaveError(f"every_steps = {every_steps} saves never; it must be 1 or more")
    for name in state:
        if name.startswith(_NAME):
            raise AutosaveError(f"state[{name!r}] is the loop's own entry; give it another name")
    if RUNTIME in sys._getframe(1).f_globals:
        return resumable(iterable)
    run = _RUNS.get(store)
    if run is None:
        run = _RUNS[store] = _Run(store)
    return run.steps(iterable, state, every_steps)


class _Processes:
    """Number of processes that go through the loop, as an entry of the state."""

    def __init__(self) -> None:
        self.count = dist.get_world_size() if _in_group() else 1

    def state_dict(self) -> dict[str, int]:
        """The number."""
        return {"processes": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what was saved."""
        self.count = state["processes"]


class _Run:
    """The loops of a script that save to one store."""

    def __init__(self, store: CheckpointStore) -> None:
        # Not the store itself, which would never be let go of as its own key.
        self._store = weakref.ref(store)
        self._loops = 0
        self._steps = 0
        self._aim: Position | None = None
        self._asked = False
        self._saving: SaveHandle | None = None

    def steps(
        self, iterable: Iterable[Any], state: Mapping[str, Any], every_steps: int
    ) -> Iterator[Any]:
        """The items of the next loop that are still to be done."""
        store = self._store()
        assert store is not None
        number, self._loops = self._loops, self._loops + 1
        position = Position()
        if not self._asked:
            self._asked = True
            atexit.register(self.tell_failure)
            self._aim = _aim_of(store, position)
        if self._aim is not None and number < self._aim.loop:
            return
        if self._aim is None:
            iterator = position.begin(iterable)
            position.loop = number
        else:
            position = self._aim
            store.restore({**state, _own_name(): position})
            self._steps, self._aim = position.step, None
            iterator = position.resume(iterable)
        objects = {**state, _NAME: _Processes(), _own_name(): position}
        count = position.count
        for item in iterator:
            yield item
            count, self._steps = count + 1, self._steps + 1
            if self._steps % every_steps == 0:
                position.note(self._steps, count, iterable, iterator)
                saving = store.save_async(self._steps, objects)
                # The store has waited for the save before this one.
                self.tell_failure()
                self._saving = saving
        self.tell_failure()

    def tell_failure(self) -> None:
        """Warn of the last save, if it has failed by now."""
        if self._saving is None or not self._saving.done():
            return
        error, self._saving = self._saving.result().error, None
        if error is not None:
            warnings.warn(f"a save of outlast.autosave.loop failed: {error}", stacklevel=3)


def _aim_of(store: CheckpointStore, position: Position) -> Position | None:
    """Position of this process in its newest state; None when there is none.

    Raises:
        AutosaveError: When other processes have saved it.
    """
    processes = _Processes()
    here = processes.count
    if store.restore({_NAME: processes}) is None:
        return None
    if processes.count != here:
        raise AutosaveError(
            f"the state was saved by {processes.count} processes and {here} continue: each has its "
            "own place in its own data; start as many as before, or use outlast.Run, which shares "
            "the data out anew"
        )
    store.restore({_own_name(): position})
    return position


def _own_name() -> str:
    return f"{_NAME}_{dist.get_rank() if _in_group() else 0}"


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


_RUNS: weakref.WeakKeyDictionary[CheckpointStore, _Run] = weakref.WeakKeyDictionary()
