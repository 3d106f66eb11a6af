"""Scripts that are trained by a library's loop: run plainly, saved and resumed by that library.

Its trainers are given Outlast's store, and stop in time, when the library is imported.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from outlast.integrations.handed import HandedOver


class Library(NamedTuple):
    """A library that trains.

    Attributes:
        name: Of its trainer, for people.
        method: Of the trainer, which trains.
        modules: With the trainer; the adapter is called when one of them has been imported.
        adapter: Our module with `take_over`.
    """

    name: str
    method: str
    modules: tuple[str, ...]
    adapter: str


_TRANSFORMERS = Library(
    "Hugging Face's Trainer",
    "train",
    ("transformers.trainer",),
    "outlast.integrations.hf_trainer.unmodified",
)
_LIGHTNING = Library(
    "Lightning's Trainer",
    "fit",
    ("lightning.pytorch",),
    "outlast.integrations.lightning.unmodified",
)
LIBRARIES = {
    "transformers": _TRANSFORMERS,
    "trl": _TRANSFORMERS,
    "lightning": _LIGHTNING,
}
"""Package that a script imports to what trains it."""


@contextmanager
def handing_over(library: Library, handed: HandedOver) -> Iterator[None]:
    """Within, the library's trainers are given what `outlast run` does, once it is imported."""
    undo: list[Callable[[], None]] = []

    def take_over() -> None:
        undo.append(importlib.import_module(library.adapter).take_over(handed))

    watcher = _Watcher(library.modules, take_over)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        sys.meta_path.remove(watcher)
        for item in reversed(undo):
            item()


class _Watcher:
    """Leaves all modules to the finders behind it, and calls back when one of some is there."""

    def __init__(self, names: Sequence[str], call: Callable[[], None]) -> None:
        self._names = set(names)
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that another finder gives, with a loader that calls back."""
        if name not in self._names:
            return None
        others = [part for part in sys.meta_path if part is not self]
        found = (
            other.find_spec(name, path, target) for other in others if hasattr(other, "find_spec")
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._names.discard(name)
            _call_behind(spec.loader, self._call)
        return spec


def _call_behind(loader: Any, call: Callable[[], None]) -> None:
    """Have `loader`, which is that of one module, call `call` when the module is executed."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        call()

    loader.exec_module = exec_module
