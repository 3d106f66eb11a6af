"""What the workers of a data loader tell of their random numbers, and how new ones take them over.

A worker process has sources of random numbers of its own, seeded when it starts. With each batch it
sends the states that have changed, so that workers of another process can go on from there without
reading again what was read.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from outlast.autosave.resume.randomness import host_sources
from outlast.autosave.resume.watched import Atoms

if TYPE_CHECKING:
    from collections.abc import Callable

WorkerStates = dict[int, dict[str, Any]]
"""Number of a worker to the states that differ from those that it was seeded with."""


class Reported:
    """A batch, and what has changed in the worker that made it.

    Attributes:
        batch: What the loader's `collate_fn` gave.
        worker: Number of the worker.
        changed: States that are not those sent last.
    """

    __slots__ = ("batch", "changed", "worker")

    def __init__(self, batch: Any, worker: int, changed: dict[str, Any]) -> None:
        self.batch = batch
        self.worker = worker
        self.changed = changed

    def pin_memory(self) -> Reported:
        """The same with the batch in pinned memory, as the loader's thread asks for it."""
        pinned = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return Reported(pinned, self.worker, self.changed)

    def note(self, states: WorkerStates) -> None:
        """Bring `states` up to date."""
        if self.changed:
            states[self.worker] = states.get(self.worker, {}) | self.changed


class _Watch:
    """Watches a worker's sources of random numbers and its dataset; lives in the worker."""

    def __init__(self, worker: int, atoms: Atoms, states: dict[str, Any]) -> None:
        self.worker = worker
        self._host = host_sources()
        self._atoms = atoms
        self._seen = self._read()
        for name, item in self._host.items():
            if name in states:
                item.write(states[name])
        atoms.write({name: state for name, state in states.items() if name not in self._host})
        self._seen |= {name: state for name, state in states.items() if name in self._seen}

    def changed(self) -> dict[str, Any]:
        """The states that are not those of the last call."""
        now = self._read()
        changed = {name: item for name, item in now.items() if item != self._seen[name]}
        self._seen = now
        return changed

    def _read(self) -> dict[str, Any]:
        return {name: item.read() for name, item in self._host.items()} | self._atoms.read()


_watch: _Watch | None = None


class Starting:
    """Takes the place of a loader's `worker_init_fn`: begins to watch, after that was called.

    Args:
        start: The loader's own function; None for none.
        collate: The loader's own `collate_fn`.
        states: What the workers are to take over.
    """

    def __init__(
        self, start: Callable[[int], None] | None, collate: Any, states: WorkerStates
    ) -> None:
        self._start = start
        self._collate = collate
        self._states = states

    def __call__(self, worker: int) -> None:
        """Start in the worker process of this number."""
        global _watch  # noqa: PLW0603 (a worker process has one)
        if self._start is not None:
            self._start(worker)
        information = get_worker_info()
        assert information is not None
        # Whatever the dataset has drawn so far is drawn again in each process.
        atoms = Atoms([information.dataset, self._collate])
        _watch = _Watch(worker, atoms, self._states.get(worker, {}))


class Reporting:
    """Takes the place of a loader's `collate_fn` in its workers.

    Args:
        collate: The loader's own function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """Make a batch, and report with it."""
        batch = self._collate(samples)
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
