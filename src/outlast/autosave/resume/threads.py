"""Threads of the program that fill its queues: what they have done so far is not saved."""

from __future__ import annotations

import itertools
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.content import vars_of
from outlast.autosave.heap.hidden import QUEUES
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from outlast.autosave.heap.names import Names

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
        seen = (item for value in _used(frame) for item in _reached(value, files, _DEPTH))
        found = (queues.get(id(number)) for number in itertools.islice(seen, _AT_MOST))
        path = next((tensor for tensor in found if tensor is not None), None)
        if path is not None:
            raise AutosaveError(
                f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` fills a queue "
                f"in a thread (`{path}`), and what the thread has done so far cannot be saved; "
                "fill it in the training loop, or use a DataLoader with workers"
            )


def _filling(files: frozenset[str]) -> Iterator[FrameType]:
    """What living threads execute, where it is of the program and puts things somewhere."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread is threading.main_thread() else frames.get(thread.ident or 0)
        while frame is not None:
            code = frame.f_code
            if code.co_filename in files and not _FILLS.isdisjoint(code.co_names):
                yield frame
            frame = frame.f_back


def _used(frame: FrameType) -> Iterator[Any]:
    """The local variables of a frame, and the global ones that its code names."""
    yield from list(frame.f_locals.values())
    yield from (frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals)


def _reached(value: Any, files: frozenset[str], depth: int) -> Iterator[Any]:
    """What an object leads to, and itself."""
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
