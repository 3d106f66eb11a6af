"""One explicit line for a script that is run plainly: `outlast.autosave.loop`."""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from outlast.autosave.position import Position
from outlast.autosave.program.source import RUNTIME
from outlast.autosave.resume.iterators import resumable
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_NAME = "outlast_loop"
"""Of the loop's own entries beside the state: ``outlast_loop``, and of each process another."""


class Saving(Protocol):
    """A save under way, as `outlast.checkpoint.SaveHandle`."""

    def done(self) -> bool:
        """Return True once the save has ended."""

    def result(self) -> Any:
        """Wait for the end; a failure is in its `error`."""


class Store(Protocol):
    """Store for the state, such as `outlast.checkpoint.CheckpointStore`."""

    def save_async(self, step: int, state: Mapping[str, Any]) -> Saving:
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
    back. A save that fails is a warning, and the loop goes on. Under `outlast run` the loop is the
    program's step loop, and `outlast run` saves.

    With a default process group, all its processes go through the loop together, save at the same
    steps into one store, and go on as many as they were; each has its own place in its own data.

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

    def __init__(self, store: Store) -> None:
        # Not the store itself, which would never be let go of as its own key.
        self._store = weakref.ref(store)
        self._loops = 0
        self._steps = 0
        self._aim: Position | None = None
        self._asked = False
        self._saving: Saving | None = None

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


def _aim_of(store: Store, position: Position) -> Position | None:
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
            f"the state was saved by {processes.count} processes and {here} go on: each has its "
            "own place in its own data; start as many as before, or use outlast.Run, which shares "
            "the data out anew"
        )
    store.restore({_own_name(): position})
    return position


def _own_name() -> str:
    return f"{_NAME}_{dist.get_rank() if _in_group() else 0}"


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


_RUNS: weakref.WeakKeyDictionary[Store, _Run] = weakref.WeakKeyDictionary()
