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
    from types import CodeType, FrameType, FunctionType

    from outlast.autosave.program.source import Body, SourceFile

_KEEP = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "put", "register", "setdefault", "update"}
)
"""Methods that keep what they are given."""


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
    running = [frame for frame in frames if frame.f_code.co_cellvars]

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
        if body is not None and _changes(body, name, frame, code):
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


def _changes(body: Body, name: str, frame: FrameType, code: CodeType) -> bool:
    """Whether a variable of a body may get another value while a function has it.

    Args:
        body: Where the variable is.
        name: Its name.
        frame: Executes the body.
        code: Of a function that was made there.
    """
    if any(isinstance(node, ast.Nonlocal) and name in node.names for node in ast.walk(body)):
        return True
    stores, made = list(bindings_of(body, name)), code.co_firstlineno
    loops = [node for node in ast.walk(body) if isinstance(node, Loop)]
    if "<locals>" in code.co_qualname.removeprefix(f"{frame.f_code.co_qualname}.<locals>."):
        # It is made whenever the function within is called.
        return len(stores) > 1 or any(_has(loop, line) for loop in loops for line in stores)
    return any(
        line > made or _changes_next_turn(body, loops, line, made, frame.f_lineno)
        for line in stores
    )


def _changes_next_turn(body: Body, loops: list[Loop], line: int, made: int, now: int) -> bool:
    """Whether a value given above the making of a function changes while the function is in use.

    In the next turn of a loop around both it does, but then another function is made.
    """
    turn = _innermost([loop for loop in loops if _has(loop, made)], line)
    if turn is None:
        return False
    from_an_earlier_turn = _has(turn, now) and now < made
    return from_an_earlier_turn or _innermost(loops, line) is not turn or _is_kept(body, made, turn)


def _is_kept(body: Body, made: int, turn: Loop) -> bool:
    """Whether the statement in a line puts something where it stays after a turn of a loop."""
    statements = (node for node in ast.walk(body) if isinstance(node, ast.stmt) and node != body)
    match min(
        (statement for statement in statements if _has(statement, made)), key=_lines, default=None
    ):
        case ast.Assign(targets=targets):
            places = [target for target in targets if not isinstance(target, ast.Name)]
        case ast.AugAssign(target=target):
            places = [target]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr, value=value))) if attr in _KEEP:
            places = [value]
        case _:
            return False
    fresh = {
        node.id
        for node in ast.walk(turn)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return any(_root(place) not in fresh for place in places)


def _root(place: ast.expr) -> str | None:
    while isinstance(place, (ast.Attribute, ast.Subscript)):
        place = place.value
    return place.id if isinstance(place, ast.Name) else None


def _innermost(loops: list[Loop], line: int) -> Loop | None:
    return min((loop for loop in loops if _has(loop, line)), key=_lines, default=None)


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno
