"""Functions that share a variable with a running function: they would no longer do so afterwards.

What a function encloses is written by value when the function was made after set-up and its
definition is not one that the way back executes again, as of a `lambda` in a list. The running
function has the variable, too; each of them would go on with one of its own.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.autosave.program.bindings import bindings_of
from outlast.autosave.program.scopes import code_names
from outlast.autosave.program.source import Loop
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType, FunctionType

    from outlast.autosave.program.source import Body, SourceFile


def refuse_shared(
    frames: Iterable[FrameType], files: Sequence[SourceFile]
) -> Callable[[FunctionType], None]:
    """What is asked of each function that is written by value.

    Args:
        frames: Those on the way to the step.
        files: The program.

    Returns:
        Raises an `AutosaveError` where the function shares a variable that may change.
    """
    running = [each for each in frames if each.f_code.co_cellvars]

    def ask(function: FunctionType) -> None:
        for frame in running:
            if function.__qualname__.startswith(f"{frame.f_code.co_qualname}.<locals>."):
                _refuse(function, frame, files)

    return ask


def _refuse(function: FunctionType, frame: FrameType, files: Sequence[SourceFile]) -> None:
    code, values = function.__code__, frame.f_locals
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        shared = name in frame.f_code.co_cellvars and name in values and _holds(cell, values[name])
        body = _body_of(frame, files) if shared else None
        if body is not None and _changes(body, name):
            raise AutosaveError(
                f"{code.co_filename}, line {code.co_firstlineno}: `{function.__qualname__}` was "
                f"made after set-up and shares the variable `{name}` with "
                f"`{frame.f_code.co_qualname}`, which is still running; keep it in a list or an "
                "attribute of an object, which both of them refer to"
            )


def _holds(cell: object, value: object) -> bool:
    try:
        return cell.cell_contents is value  # type: ignore[attr-defined]
    except ValueError:
        return False


def _body_of(frame: FrameType, files: Sequence[SourceFile]) -> Body | None:
    code = frame.f_code
    names = (code.co_qualname, code.co_firstlineno)
    return next(
        (
            body
            for file in files
            if str(file.path) == code.co_filename
            for body in file.bodies()
            if code_names(file.tree, body) == names
        ),
        None,
    )


def _changes(body: Body, name: str) -> bool:
    """Whether a variable of a body may get another value while the body runs."""
    if any(isinstance(each, ast.Nonlocal) and name in each.names for each in ast.walk(body)):
        return True
    in_loops = any(
        isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
        for loop in ast.walk(body)
        if isinstance(loop, Loop)
        for each in ast.walk(loop)
    )
    return in_loops or len(list(bindings_of(body, name))) > 1
