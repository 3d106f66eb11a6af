"""Threads of the program that fill its queues: what they have done so far is not saved."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.hidden import QUEUES
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

_FILLS = frozenset({"put", "put_nowait"})


def refuse_fed_queues(objects: Mapping[str, Any], files: frozenset[str]) -> None:
    """Refuse a program one of whose threads puts things into a queue.

    Args:
        objects: Path to object: all that set-up has named.
        files: Of the program.

    Raises:
        AutosaveError: With the thread's file and line.
    """
    if threading.active_count() == 1:
        return
    filling = [code for each in threading.enumerate() if (code := _code(each, files)) is not None]
    queue = next((path for path, each in objects.items() if isinstance(each, QUEUES)), None)
    if filling and queue is not None:
        code = filling[0]
        raise AutosaveError(
            f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` fills a queue in a "
            f"thread (`{queue}`), and what the thread has done so far cannot be saved; fill it in "
            "the training loop, or use a DataLoader with workers"
        )


def _code(thread: threading.Thread, files: frozenset[str]) -> CodeType | None:
    """What a living thread executes, if it is of the program and puts things into queues."""
    if thread is threading.main_thread():
        return None
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename in files and not _FILLS.isdisjoint(code.co_names):
            return code
        frame = frame.f_back
    return None
