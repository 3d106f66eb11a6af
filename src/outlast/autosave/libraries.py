"""Scripts that are trained by a library's loop: run plainly, saved and resumed by that library.

Its trainers are given Outlast's store, and stop in time, when the library is imported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.errors import AutosaveError
from outlast.records import replace_file
from outlast.runtime.cadence import UNASKED_SECONDS, Every, SaveCadence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from outlast.autosave.program.source import Rewritten, SourceFile
    from outlast.autosave.program.training import Training


@dataclass
class HandedOver:
    """A run whose saving and resuming is a framework's own, with Outlast's store.

    Attributes:
        every: How often to save; "auto" leaves it to the script, if that saves at all.
        stores: File with the stores that this run saves to.
        root: Folder of the script, which the file's paths are relative to.
        limit_seconds: How long the program may run, from when this is made; None: for ever.
        step: Steps done, as far as is known.
        trained: Whether a training has begun.
    """

    every: Every
    stores: Path
    root: Path
    limit_seconds: float | None = None
    step: int = 0
    trained: bool = False
    _begun: float = field(default_factory=time.monotonic)
    _used: set[str] = field(default_factory=set)

    def seconds_left(self) -> float | None:
        """Seconds that are left of the limit; None without one."""
        if self.limit_seconds is None:
            return None
        return max(0.0, self.limit_seconds - (time.monotonic() - self._begun))

    def pace(self, *, saves_by_itself: bool) -> SaveCadence | None:
        """The cadence of saves beside those that the script asks for; None: there are none.

        Args:
            saves_by_itself: Whether the script asks its trainer for checkpoints.
        """
        if self.every != Every():
            return SaveCadence(self.every)
        return None if saves_by_itself else SaveCadence(Every(seconds=UNASKED_SECONDS))

    def begins(self, store: Path) -> bool:
        """A training that saves to `store` begins: whether there is a version to resume from.

        Raises:
            AutosaveError: When there is one of another run, or of an earlier training of this
                process, whose last state would be taken for this one's.
        """
        from outlast.checkpoint.storage import storage_of
        from outlast.checkpoint.version import is_published, list_versions

        self.trained = True
        known: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            known = [str(load) for load in json.loads(self.stores.read_text(encoding="utf-8"))]
        own = os.path.relpath(store, self.root)
        if own in self._used:
            raise AutosaveError(
                f"{store} is used by a second training of this script, which would continue from "
                "the end of the first one: give each training a Trainer and an output directory of "
                "its own"
            )
        self._used.add(own)
        found = False
        if store.is_dir():
            storage = storage_of(store)
            found = any(is_published(storage, version) for version in list_versions(storage))
        if found and own not in known:
            raise AutosaveError(
                f"{store} has the checkpoints of another run; move them away, or give this run "
                "another output directory"
            )
        if own not in known and os.environ.get("RANK", "0") == "0":
            replace_file(self.stores, json.dumps([*known, own]).encode())
        return found


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
    "Hugging Face's Trainer", "train", ("transformers.trainer",), "outlast.integrations.hf_trainer"
)


_LIGHTNING = Library(
    "Lightning's Trainer", "fit", ("lightning.pytorch",), "outlast.integrations.lightning"
)


LIBRARIES = {"transformers": _TRANSFORMERS, "trl": _TRANSFORMERS, "lightning": _LIGHTNING}
"""Package that a script imports to what trains it."""


@contextlib.contextmanager
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


_OTHER_NAME = "pytorch_lightning"


_PACKAGES = {*LIBRARIES, _OTHER_NAME}


_MAKES_ITS_TRAINER = "LightningCLI"


_ASKS = frozenset({"isinstance", "issubclass"})


def library_of(files: Sequence[SourceFile]) -> Library | None:
    """The library that trains a program without a loop of its own.

    It is the one whose trainer the program makes or derives from, and whose training it calls;
    that a library is imported says nothing.

    Raises:
        AutosaveError: For two of them, and for one under another name, which is not followed.
    """
    used = {package for source in files for package in _Uses(source.tree).packages}
    called = {
        node.func.attr
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if _OTHER_NAME in used and LIBRARIES["lightning"].method in called:
        raise AutosaveError(
            f"{files[0].name()} imports {_OTHER_NAME}, which is not followed; import "
            "lightning.pytorch, the same library, in its place"
        )
    found = dict.fromkeys(
        library
        for package, library in LIBRARIES.items()
        if package in used and library.method in called
    )
    if len(found) > 1:
        raise AutosaveError(
            f"{files[0].name()} has {' and '.join(name.name for name in found)}, and one library "
            "at a time is followed; give each training a script of its own"
        )
    return next(iter(found), None)


class _Uses(ast.NodeVisitor):
    """The packages whose trainers a file makes, derives from, or keeps to make later."""

    def __init__(self, tree: ast.Module) -> None:
        self.packages: set[str] = set()
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            self._names.update(_bound(node))
        self.visit(tree)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node)
        # What a trainer's class is asked for makes none.
        if self._trainer(node.value) is None:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in _ASKS):
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """Its annotation makes nothing."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in (*node.decorator_list, node.args, *node.body):
            self.visit(statement)

    def _note(self, node: ast.expr) -> None:
        package = self._trainer(node)
        if package is not None:
            self.packages.add(package)

    def _trainer(self, node: ast.expr) -> str | None:
        """The package of the trainer that an expression names."""
        full = self._full(node) or ""
        package, last = full.partition(".")[0], full.rpartition(".")[2]
        is_trainer = last.endswith("Trainer") or last == _MAKES_ITS_TRAINER
        return package if package in _PACKAGES and is_trainer else None

    def _full(self, node: ast.expr) -> str | None:
        """Full dotted name of what a name means outside of its file."""
        if isinstance(node, ast.Attribute):
            value = self._full(node.value)
            return value and f"{value}.{node.attr}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._names.get(node.id, f"{self._names.get('*', '')}.{node.id}")
        return None


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that an import of an outer package binds, and what they mean; ``*`` for all others."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        for alias in node.names:
            if alias.name == "*":
                if node.module.partition(".")[0] in _PACKAGES:
                    yield "*", node.module
            else:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def read_and_rewrite(
    script: Path, loop: str | None = None
) -> tuple[list[Rewritten], Library | None]:
    """The program of a script, rewritten so that it can be resumed.

    Args:
        script: The script.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Returns:
        Its files; and the library that trains it, in which case they are as they were.

    Raises:
        AutosaveError: When it cannot be read, has no training loop, or one that cannot be followed.
    """
    from outlast.autosave.program.rewrite import rewrite
    from outlast.autosave.program.source import Rewritten

    files, training = _read(script, loop)
    if isinstance(training, Library):
        return [Rewritten(file, file.tree) for file in files], training
    return rewrite(files, training), None


def _read(script: Path, loop: str | None) -> tuple[list[SourceFile], Training | Library]:
    """The files of a program, and its own training loops or the library that trains it."""
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import NoTrainingLoopError, find_training

    files = read_program(script)
    try:
        return files, find_training(files, loop)
    except NoTrainingLoopError:
        library = library_of(files)
        if library is None:
            raise
        return files, library


def read_training(script: Path, loop: str | None = None) -> tuple[list[SourceFile], Training]:
    """The files of a program and its own training loops.

    Raises:
        AutosaveError: When it cannot be read, or has no training loop of its own.
    """
    files, training = _read(script, loop)
    if isinstance(training, Library):
        raise AutosaveError(
            f"{script} is trained by {training.name}, whose loop is not the script's own: `outlast "
            "run` leaves saving and resuming to it, with Outlast's store, and there is no state of "
            "the script's own to look at"
        )
    return files, training
