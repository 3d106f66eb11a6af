"""Where in a program's text something that cannot be saved got its name."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, NamedTuple

from outlast.autosave.program.bindings import attribute_line, binding_line
from outlast.autosave.program.scopes import code_names
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from outlast.autosave.heap.refusal import Unsaveable
    from outlast.autosave.program.source import SourceFile

PLACES, MODULES, FOREIGN = 1, 2, 6
"""Where a session's values have its frames, its modules and what other modules hold."""

_NO_LINE = sys.maxsize


class _Binding(NamedTuple):
    """A name of the program, and where it gets its value."""

    file: SourceFile
    line: int | None
    name: str


def located(
    error: Unsaveable, files: Sequence[SourceFile], frames: Sequence[FrameType]
) -> AutosaveError:
    """The refusal with file and line of the name, or of the attribute, that leads there.

    Args:
        error: What could not be written down.
        files: The program.
        frames: Of its bodies on the way to the step, outermost first.
    """
    found = _binding(error, files, frames)
    if found is None:
        return error
    line = "" if found.line is None else f", line {found.line}"
    return AutosaveError(
        f"{found.file.name()}{line}: `{found.name}`, a {error.type}, cannot be saved: "
        f"{error.advice}"
    )


def _binding(
    error: Unsaveable, files: Sequence[SourceFile], frames: Sequence[FrameType]
) -> _Binding | None:
    path = list(error.path)
    if error.root is not None:
        return _of_root(error.root, path, files, frames)
    if len(path) > 3 and path[0] == f"[{PLACES}]":
        depth, name = int(path[1][1:-1]), ast.literal_eval(path[3][1:-1])
        return _in_frame(frames[depth], name, path[4:], files)
    if len(path) > 2 and path[0] == f"[{MODULES}]":
        module, name = (ast.literal_eval(part[1:-1]) for part in path[1:3])
        return _in_module(module, name, path[3:], files)
    return None


def _of_root(
    root: str, path: list[str], files: Sequence[SourceFile], frames: Sequence[FrameType]
) -> _Binding | None:
    """Of an object that set-up has made: the attribute set last, else the name that it has."""
    for step in reversed(path):
        if step.startswith("."):
            for file in files:
                if (line := attribute_line(file.tree, step[1:])) is not None:
                    return _Binding(file, line, _as_read(root, path))
    depth, colon, name = root.partition(":")
    if colon and depth.isdigit() and name.isidentifier():
        return _in_frame(frames[int(depth)], name, path, files)
    module, _, name = root.rpartition(".")
    return _in_module(module, name, path, files) if name.isidentifier() else None


def _in_frame(
    frame: FrameType, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    code = frame.f_code
    for file in files:
        if str(file.path) != code.co_filename:
            continue
        for body in file.bodies():
            if code_names(file.tree, body) == (code.co_qualname, code.co_firstlineno):
                line = binding_line(body, name, frame.f_lineno)
                return _Binding(file, line, name + "".join(path))
    return None


def _in_module(
    module: str, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    place = getattr(sys.modules.get(module), "__file__", None)
    for file in files:
        if str(file.path) == place:
            line = binding_line(file.tree, name, _NO_LINE)
            return _Binding(file, line, name + "".join(path))
    return None


def _as_read(root: str, path: list[str]) -> str:
    return root.partition(":")[2] + "".join(path) if ":" in root else root + "".join(path)
