"""Refusals: what cannot be saved, with its place in the program's text and the remedy.

*Shared variables.* The closure of a function is written by value when the function was made after
set-up and its definition is not one that the way back executes again, as of a `lambda` in a list.
The running function has the variable, too; each of them would go on with one of its own.
"""

from __future__ import annotations

import ast
import itertools
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.heap.hidden import QUEUES
from outlast.autosave.heap.objects import vars_of
from outlast.autosave.program.scopes import attribute_line, binding_line, bindings_of, code_names
from outlast.autosave.program.source import Loop
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import CodeType, FrameType, FunctionType

    from outlast.autosave.heap.names import Names, Unsaveable
    from outlast.autosave.program.source import Body, SourceFile


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
                    return _Binding(file, line, root[root.find(":") + 1 :] + "".join(path))
    depth, colon, name = root.partition(":")
    if colon and depth.isdigit() and name.isidentifier():
        return _in_frame(frames[int(depth)], name, path, files)
    module, _, name = root.rpartition(".")
    return _in_module(module, name, path, files) if name.isidentifier() else None


def _in_frame(
    frame: FrameType, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    found = _body_of(frame, files)
    if found is None:
        return None
    file, body = found
    return _Binding(file, binding_line(body, name, frame.f_lineno), name + "".join(path))


def _in_module(
    module: str, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    place = getattr(sys.modules.get(module), "__file__", None)
    for file in files:
        if str(file.path) == place:
            line = binding_line(file.tree, name, _NO_LINE)
            return _Binding(file, line, name + "".join(path))
    return None


_KEEP = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "put", "register", "setdefault", "update"}
)
"""Methods that keep what they are given."""


def refuse_shared(
    frames: Iterable[FrameType], files: Sequence[SourceFile]
) -> Callable[[FunctionType], None]:
    """Check each function that is written by value.

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
        found = _body_of(frame, files) if shared else None
        if found is not None and _changes(found[1], name, frame, code):
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


def _body_of(frame: FrameType, files: Iterable[SourceFile]) -> tuple[SourceFile, Body] | None:
    """The body of the program that a frame executes, and its file."""
    code = frame.f_code
    names = (code.co_qualname, code.co_firstlineno)
    return next(
        (
            (file, body)
            for file in files
            if str(file.path) == code.co_filename
            for body in file.bodies()
            if code_names(file.tree, body) == names
        ),
        None,
    )


def _changes(body: Body, name: str, frame: FrameType, code: CodeType) -> bool:
    """Return True if a variable of a body may get another value while a function has it.

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
    """Return True if a value from above a function's making changes while the function is in use.

    In the next turn of a loop around both it does, but then another function is made.
    """
    turn = _innermost([loop for loop in loops if _has(loop, made)], line)
    if turn is None:
        return False
    from_an_earlier_turn = _has(turn, now) and now < made
    return from_an_earlier_turn or _innermost(loops, line) is not turn or _is_kept(body, made, turn)


def _is_kept(body: Body, made: int, turn: Loop) -> bool:
    """Return True if the statement in a line puts something where it outlives a turn."""
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


_FILLS = frozenset({"put", "put_nowait"})


_DEPTH = 3


_MANY = 100


_AT_MOST = 10_000
"""How far a queue is looked for, in how many items of a collection, in how many objects."""


def refuse_fed_queues(names: Names, files: frozenset[str]) -> None:
    """Refuse a program one of whose threads puts things into one of its queues.

    Args:
        names: All that set-up has named.
        files: Of the program.

    Raises:
        AutosaveError: With the thread's file and line.
    """
    if threading.active_count() == 1:
        return
    queues = {
        id(object_): path
        for path, object_ in names.objects.items()
        if isinstance(object_, QUEUES) and names.is_own(path)
    }
    for frame in _filling(files) if queues else ():
        code = frame.f_code
        # Its local variables, and the global ones that its code names.
        used = list(frame.f_locals.values())
        used += [frame.f_globals[name] for name in code.co_names if name in frame.f_globals]
        seen = (item for value in used for item in _reached(value, files, _DEPTH))
        found = (queues.get(id(number)) for number in itertools.islice(seen, _AT_MOST))
        path = next((tensor for tensor in found if tensor is not None), None)
        if path is not None:
            raise AutosaveError(
                f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` fills a queue "
                f"in a thread (`{path}`), and what the thread has done so far cannot be saved; "
                "fill it in the training loop, or use a DataLoader with workers"
            )


def _filling(files: frozenset[str]) -> Iterator[FrameType]:
    """Frames of living threads that are of the program and fill a container."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread is threading.main_thread() else frames.get(thread.ident or 0)
        while frame is not None:
            code = frame.f_code
            if code.co_filename in files and not _FILLS.isdisjoint(code.co_names):
                yield frame
            frame = frame.f_back


def _reached(value: Any, files: frozenset[str], depth: int) -> Iterator[Any]:
    """Objects reachable from an object, and itself."""
    yield value
    if depth == 0:
        return
    inner: list[Any] = []
    if isinstance(value, (list, tuple)):
        inner = list(value[:_MANY])
    elif isinstance(value, dict):
        inner = list(value.values())[:_MANY]
    elif isinstance(value, types.MethodType):
        inner = [value.__self__]
    elif not isinstance(value, types.ModuleType) or getattr(value, "__file__", None) in files:
        inner = list(vars_of(value).values())
    for item in inner:
        yield from _reached(item, files, depth - 1)
