"""The files of a program: the script and the modules of its own that it imports."""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast.errors import AutosaveError
from outlast.paths import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType, ModuleType


Function = ast.FunctionDef | ast.AsyncFunctionDef


Body = ast.Module | Function
"""What is executed as one frame."""


Loop = ast.For | ast.While


@dataclass(frozen=True)
class SourceFile:
    """One file of the program.

    Attributes:
        path: The file.
        text: Its text.
        tree: Its syntax tree.
    """

    path: Path
    text: str
    tree: ast.Module

    def name(self) -> str:
        """Path of the file for people: relative to the working directory, if it lies there."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def bodies(self) -> Iterator[Body]:
        """The module and each function in it, nested ones and methods too."""
        yield self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


def read_program(script: Path) -> list[SourceFile]:
    """The script and, one after the other, the modules beside it that it imports.

    Raises:
        AutosaveError: When the script cannot be read or is no Python.
    """
    files: dict[Path, SourceFile] = {}
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop(0).resolve()
        if path not in files:
            files[path] = _read(path)
            waiting += _imported(files[path], script.resolve().parent)
    return list(files.values())


def _read(path: Path) -> SourceFile:
    try:
        check_regular(path)
        with tokenize.open(path) as file:
            text = file.read()
        return SourceFile(path, text, ast.parse(text, str(path)))
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise AutosaveError(f"{path}{line}: {error.msg}; Python cannot read this script") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise AutosaveError(f"the script {path} cannot be read: {reason}") from None


def _imported(source: SourceFile, root: Path) -> Iterator[Path]:
    """Files below `root` that `source` imports."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(root, alias.name)
        elif isinstance(node, ast.ImportFrom):
            # Relative to the package that the file is in, else to where the script lies.
            places = source.path.parents
            start = places[node.level - 1] if node.level else root
            name = node.module or ""
            yield from _module_files(start, name)
            for alias in node.names:
                yield from _module_files(start, f"{name}.{alias.name}".lstrip("."))


def _module_files(root: Path, name: str) -> Iterator[Path]:
    place = root
    for part in name.split(".") if name else []:
        for found in ((place / part).with_suffix(".py"), place / part / "__init__.py"):
            if found.is_file():
                yield found
        place /= part


RUNTIME = "__outlast__"
"""What rewritten bodies call; a global name of each module of the program."""


GENERATORS = f"{RUNTIME}.generators"
"""What rewritten generator functions call."""


Kind = Literal["step", "loop", "call", "branch", "yield"]


@dataclass(frozen=True)
class Site:
    """A statement on the way to a step, or to a `yield` in a generator function.

    Attributes:
        number: Its number in the program.
        body: Name of the body that it is in, as `body_name` gives it.
        line: First line in the file.
        column: Where it begins there, in bytes of UTF-8 from 0.
        last_line: Last line.
        last_column: Where it ends there.
        kind: A `step` loop, a `loop` around one, a `call`, a `branch` (if, with, try) or a `yield`.
        around: Numbers of the sites of the same body that it is in, outermost first.
        names: Local names that are live there, those of the iterators around included.
        dead: Other local names of the body; they are not needed.
        defined: Names that are bound in one place, by a definition or an import.
    """

    number: int
    body: str
    line: int
    column: int
    last_line: int
    last_column: int
    kind: Kind
    around: tuple[int, ...]
    names: frozenset[str]
    dead: frozenset[str]
    defined: frozenset[str]

    def covers(self, line: int | None, column: int | None) -> bool:
        """Return True if a place in the file is within the statement; a column of None is any."""
        if line is None or not self.line <= line <= self.last_line:
            return False
        if column is None:
            return True
        return (self.line, self.column) <= (line, column) <= (self.last_line, self.last_column)


@dataclass
class Rewritten:
    """A file in its new form.

    Attributes:
        source: What it was made from.
        tree: The new syntax tree, with the lines of the old one.
        sites: Its sites.
        bodies: Names of the bodies that were rewritten on the way to training.
        generators: Names of the generator functions that were rewritten.
        plain: Names of those that could not be, with the reason.
        reads_gradients: Whether the program reads gradients where no step is done.
    """

    source: SourceFile
    tree: ast.Module
    sites: list[Site] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)
    generators: set[str] = field(default_factory=set)
    plain: dict[str, str] = field(default_factory=dict)
    reads_gradients: bool = True


def iterator_name(number: int) -> str:
    """Name of the local variable that holds the iterator of loop `number`."""
    return f"__outlast_{number}__"


def item_name(number: int) -> str:
    """Name of the local variable that holds what the iterator of loop `number` gave."""
    return f"__outlast_item_{number}__"


def spilled_name(number: int, place: int) -> str:
    """Name of the local variable that holds a value which call `number` is given."""
    return f"__outlast_kept_{number}_{place}__"


def context_name(number: int, place: int) -> str:
    """Name of the local variable that holds the context of item `place` of `with` `number`."""
    return f"__outlast_with_{number}_{place}__"


def body_name(file: str, qualified_name: str, line: int) -> str:
    """Name of a body: unique in a program, and the same for its text and its code object."""
    return f"{file}:{line}:{qualified_name}"


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
        code: CodeType = compile(self._rewritten.tree, self.path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, with the runtime that it calls."""
        setattr(module, RUNTIME, self._runtime)
        super().exec_module(module)
