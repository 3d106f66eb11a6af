"""Where open files stand, written down with the objects of a program, and files put back there."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any

from outlast.autosave.resume.logs import Place, is_regular, program_logs
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)


def place(file: Any) -> Place:
    """Where `file` stands; what was written to it is durable afterwards.

    Raises:
        AutosaveError: For a text that is read line by line in a loop, which hides its place.
    """
    if file.closed:
        return Place(True)
    if not is_regular(file):
        return Place(False)
    try:
        if not file.writable():
            return Place(False, file.tell())
        file.flush()
        os.fsync(file.fileno())
        logs = program_logs()
        path = logs.written(logs.path(file))
        return Place(False, file.tell(), os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise AutosaveError(
            f"the place in the file {file.name} cannot be saved: {error}; read its lines by "
            "`file.readline()`, or all of them before the training loop"
        ) from None


def set_place(file: Any, seen: Place) -> None:
    """Put `file` where it stood; what comes after it is cut off.

    Raises:
        AutosaveError: When the program has closed it this time.
    """
    if seen.closed:
        file.close()
    elif seen.position is not None:
        if file.closed:
            raise AutosaveError(
                f"the file {file.name} was open when the program was saved, and set-up has closed "
                "it this time; set-up must do the same in every run"
            )
        program_logs().place(file, seen)


def _reduced(file: Any) -> Any:
    for name in ("stdin", "stdout", "stderr"):
        if file is getattr(sys, name) or file is getattr(sys, f"__{name}__"):
            return _standard_file, (name,)
    now = place(file)
    if now.closed:
        return _closed, ()
    if now.position is None:
        raise AutosaveError(
            f"the open pipe or device {file.name} cannot be saved; open it before the training "
            "loop, so that every run opens its own"
        )
    logs = program_logs()
    options: dict[str, Any] = dict(logs.options(file))
    if isinstance(file, io.TextIOWrapper):
        options |= {"encoding": file.encoding, "errors": file.errors}
        options["buffering"] = 1 if file.line_buffering else -1
    else:
        options = {"buffering": 0 if isinstance(file, io.FileIO) else -1}
    return _reopened, (logs.written(logs.path(file)), _mode(file), options, now)


def _mode(file: Any) -> str:
    mode: str = file.mode
    binary = "b" if not isinstance(file, io.TextIOWrapper) and "b" not in mode else ""
    return mode.replace("x", "w") + binary


def _standard_file(name: str) -> Any:
    return getattr(sys, name)


def _closed() -> Any:
    made = io.StringIO()
    made.close()
    return made


def _reopened(path: str, mode: str, options: dict[str, Any], seen: Place) -> Any:
    logs = program_logs()
    path = logs.read(path)
    try:
        made = logs.open(path, mode, opener=_open_as_it_is, **options)
    except OSError as error:
        raise AutosaveError(
            f"the file {path} was open when the program was saved and cannot be opened: {error}; "
            "put it back"
        ) from None
    set_place(made, seen)
    return made


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~(os.O_TRUNC | os.O_EXCL), 0o666)


REDUCERS: Mapping[type, Callable[[Any], Any]] = dict.fromkeys(_FILES, _reduced)
"""How files are pickled that were opened after training had begun."""

IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = dict.fromkeys(
    _FILES, (place, set_place)
)
"""Types whose objects are put back in place: what they hold, and how to make them hold it."""
