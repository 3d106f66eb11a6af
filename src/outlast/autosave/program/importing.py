"""Imports of a program's own modules in their rewritten form."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

from outlast.autosave.program.sites import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType, ModuleType

    from outlast.autosave.program.sites import Rewritten


@contextmanager
def rewritten_imports(files: Iterable[Rewritten], runtime: Any) -> Iterator[None]:
    """Within, modules of `files` that are imported are compiled from their rewritten trees.

    Modules that are not rewritten are imported as ever. Nothing is written to bytecode caches.

    Args:
        files: The program.
        runtime: What rewritten bodies call: the global `__outlast__` of each module.
    """
    finder = _Finder(files, runtime)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds modules as Python does, and gives those of the program a loader of their own."""

    def __init__(self, files: Iterable[Rewritten], runtime: Any) -> None:
        self._files = {str(file.source.path): file for file in files if file.sites}
        self._runtime = runtime

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of a module of the program; None leaves all others to Python."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        found = self._files.get(os.path.realpath(spec.origin))
        if found is None:
            return None
        spec.loader = _Loader(name, str(found.source.path), found, self._runtime)
        spec.cached = None
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, rewritten: Rewritten, runtime: Any) -> None:
        super().__init__(name, path)
        self._rewritten = rewritten
        self._runtime = runtime

    def get_code(self, fullname: str) -> CodeType:
        """The rewritten module, compiled."""
        path = str(self._rewritten.source.path)
        code: CodeType = compile(self._rewritten.tree, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, with the runtime that it calls."""
        setattr(module, RUNTIME, self._runtime)
        super().exec_module(module)
