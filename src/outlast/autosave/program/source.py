"""The files of a program: the script and the modules of its own that it imports."""

from __future__ import annotations

import ast
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        """How people are told of it: relative to where they are, if it lies there."""
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
        with tokenize.open(path) as file:
            text = file.read()
        return SourceFile(path, text, ast.parse(text, str(path)))
    except SyntaxError as error:
        raise AutosaveError(
            f"{path}, line {error.lineno}: {error.msg}; Python cannot read this script"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise AutosaveError(f"the script {path} cannot be read: {error}") from None


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
