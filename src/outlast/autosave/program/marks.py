"""Loops that a person has pointed out: with `outlast.autosave.loop`, or by file and line."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.autosave.program.source import Loop
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.autosave.program.source import SourceFile

_PACKAGE = "outlast.autosave"


def marked_loops(files: Sequence[SourceFile]) -> list[Loop]:
    """The `for` loops whose iterable is within a call of `outlast.autosave.loop`."""
    found: list[Loop] = []
    for source in files:
        names = _names_of_loop(source.tree)
        found += [
            node
            for node in ast.walk(source.tree)
            if isinstance(node, ast.For)
            and any(
                isinstance(item, ast.Call) and ast.unparse(item.func) in names
                for item in ast.walk(node.iter)
            )
        ]
    return found


def chosen_loops(files: Sequence[SourceFile], chosen: str) -> list[Loop]:
    """The loop at ``FILE:LINE``.

    Raises:
        AutosaveError: When no loop begins there.
    """
    name, _, line = chosen.rpartition(":")
    loops = [
        (source, node)
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, Loop)
    ]
    found: list[Loop] = [
        node
        for source, node in loops
        if str(node.lineno) == line
        and name
        and f"/{source.path.as_posix()}".endswith(f"/{name.removeprefix('./').lstrip('/')}")
    ]
    if not found:
        known = ", ".join(f"{source.path.name}:{node.lineno}" for source, node in loops)
        raise AutosaveError(
            f"--loop {chosen}: no `for` or `while` begins there; the program's loops are at "
            f"{known or 'no line at all'}"
        )
    return found[:1]


def _names_of_loop(tree: ast.Module) -> set[str]:
    """How a file writes `outlast.autosave.loop`."""
    names = {f"{_PACKAGE}.loop"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                f"{name.asname}.loop"
                for name in node.names
                if name.name == _PACKAGE and name.asname
            }
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                written = name.asname or name.name
                if f"{node.module}.{name.name}" == _PACKAGE:
                    names.add(f"{written}.loop")
                elif (node.module, name.name) == (_PACKAGE, "loop"):
                    names.add(written)
    return names
