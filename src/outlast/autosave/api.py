"""One explicit line for a script that is run plainly: `outlast.autosave.loop`."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from outlast.autosave.position import Position
from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.resume.iterators import resumable
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_NAME = "outlast_loop"
"""Of the loop's own entry beside the state."""


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
        self._aim: Position | None = None
        self._asked = False

    def steps(
        self, iterable: Iterable[Any], state: Mapping[str, Any], every_steps: int
    ) -> Iterator[Any]:
        """The items of the next loop that are still to be done."""
        store = self._store()
        assert store is not None
        number, self._loops = self._loops, self._loops + 1
        position = Position()
        objects = {**state, _NAME: position}
        if not self._asked:
            self._asked = True
            if store.restore({_NAME: position}) is not None:
                self._aim = position
        if self._aim is not None and number < self._aim.loop:
            return
        if self._aim is None:
            iterator = position.begin(iterable)
            position.loop = number
        else:
            position = objects[_NAME] = self._aim
            store.restore(objects)
            self._steps, self._aim = position.step, None
            iterator = position.resume(iterable)
        count = position.count
        for item in iterator:
            yield item
            count, self._steps = count + 1, self._steps + 1
            if self._steps % every_steps == 0:
                position.note(self._steps, count, iterable, iterator)
                store.save_async(self._steps, objects)


_RUNS: weakref.WeakKeyDictionary[Store, _Run] = weakref.WeakKeyDictionary()
