"""Files of a program: open files put back in place, logs cut back to the size that was saved.

A save holds the sizes of the logs that the program had opened by then. A log that it opened later,
or in a run that was killed before its first save, is put back by what is written down here. What
is taken out of a log, or the log that a run has made, is laid down beside the versions: somebody
else may have written it.

Loggers are objects of the process, and what set-up gives them set-up gives them again. Handlers of
files that came later are written by value: their files are opened again, at their ends.

A run that was killed has written more than it had when it was saved. What comes after the place is
cut off, so that the log of a resumed run is that of an uninterrupted one. Set-up runs again, too: a
log that it would empty is laid aside, and what it writes gives way to the log when it is done.

What a killed run has appended to a log that it first opened after its last save, or before the
first, is cut off by the size that the log had then (`first_sizes`).
"""

from __future__ import annotations

import builtins
import contextlib
import csv
import gc
import io
import itertools
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import threading
import types
import warnings
import weakref
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.errors import AutosaveError
from outlast.records import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType


_SIZES = "log-sizes"


_ENDS = "log-ends"


_OF_A_RANK = re.compile(r"rank\d+\.json")


@dataclass(frozen=True)
class FirstSize:
    """Size and beginning of a log before its run.

    Attributes:
        path: Of the log; below the program's folder relative to it.
        size: Bytes; None where it did not exist.
        host: Where it was seen so: another node may have another file of that name.
    """

    path: str
    size: int | None
    host: str


class FirstSizes:
    """Those of the logs that one rank has opened, in this life of the run and in earlier ones.

    Args:
        folder: Of the run; None keeps them in memory.
        rank: Of the process.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._folder = folder
        self._file = None if folder is None else folder / _SIZES / f"rank{rank}.json"
        self._known = {} if self._file is None else {size.path: size for size in _read(self._file)}

    def note(self, path: str, size: int | None) -> None:
        """Write down what a log was, durably if the disk can, unless that is known."""
        if path in self._known:
            return
        self._known[path] = FirstSize(path, size, socket.gethostname())
        if self._file is None:
            return
        noted = [asdict(flag) for flag in self._known.values()]
        # The program must not fail where only a death before the first save would be untidy.
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps(noted, indent=1).encode())

    def appended(self) -> dict[str, int | None]:
        """Path, as it is written down, to size of each log that the run has appended to."""
        return {path: first.size for path, first in self._known.items()}

    def put_back(self, path: str, file: Path) -> str:
        """Make a log what it was before the run, if this rank alone has written it.

        Args:
            path: As it is written down.
            file: The log.

        Returns:
            A sentence of what was done; empty where nothing was.
        """
        first = self._known[path]
        if self._file is None or self._folder is None or first.host != socket.gethostname():
            return ""
        others = (file for file in _files(self._folder) if file != self._file)
        if any(other.path == path for file in others for other in _read(file)):
            # Who comes later must not cut off what another rank has written meanwhile.
            return ""
        return _put_back(file, first.size, self._folder / _ENDS)


def begin_logs(folder: Path, root: Path, *, alive_until: float | None) -> list[str]:
    """Forget what logs were before a run that begins anew.

    Args:
        folder: Of the run.
        root: The program's folder.
        alive_until: Of a run that was killed before its first save: by when it must have written
            all that it wrote, seconds since the epoch. Its logs are put back first, unless
            somebody has written to them later. None: they stay.

    Returns:
        One sentence for each log that was changed, or could not be.
    """
    files, told = _files(folder), []
    if alive_until is not None:
        sizes: dict[Path, int] = {}
        for item in (first for file in files for first in _read(file)):
            if item.host == socket.gethostname():
                # What one rank found there, another may have written: the smallest size counts.
                size = -1 if item.size is None else item.size
                path = root / item.path
                sizes[path] = min(size, sizes.get(path, size))
        for path, size in sizes.items():
            try:
                if path.is_file() and path.stat().st_mtime > alive_until:
                    told.append(
                        f"{path} was written to after the run was killed, so what the run had "
                        "appended to it stays there"
                    )
                else:
                    told.append(_put_back(path, None if size < 0 else size, folder / _ENDS))
            except OSError as error:
                told.append(f"what the killed run appended to {path} stays there: {error.strerror}")
    for file in files:
        file.unlink(missing_ok=True)
    return [number for number in told if number]


def _put_back(log: Path, size: int | None, ends: Path) -> str:
    """Cut a log to the size that it had, or take it away where it did not exist."""
    if not log.is_file() or (size is not None and log.stat().st_size <= size):
        return ""
    ends.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([log.name], (f"{log.name}.{number}" for number in itertools.count(2)))
    end = next(ends / name for name in names if not (ends / name).exists())
    if size is None:
        shutil.move(log, end)
    else:
        with log.open("rb") as whole, end.open("xb") as cut:
            whole.seek(size)
            shutil.copyfileobj(whole, cut)
            cut.flush()
            os.fsync(cut.fileno())
        os.truncate(log, size)
    return f"{log} is again as it was before the run; what was in it since then is in {end}"


def _files(folder: Path) -> list[Path]:
    found = (folder / _SIZES).glob("*.json")
    return sorted(name for name in found if _OF_A_RANK.fullmatch(name.name))


def _read(file: Path) -> Iterable[FirstSize]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [FirstSize(**load) for load in json.loads(file.read_text(encoding="utf-8"))]
    return []


_OUTPUTS = 2


_QUEUED = ".tfevents."
"""Files of TensorBoard, whose writer holds events back in a queue: cut back, they would lack those.

What a killed run had written there stays, and the resumed run writes the same into a new file.
"""


_CALLED_FOR_OTHERS = ("pathlib", "fsspec")


_plain_open = io.open


class Place(NamedTuple):
    """Position in a file.

    Attributes:
        closed: Whether it is closed.
        position: As `tell` gives it; None for what has no places, as pipes and terminals.
        size: Bytes; None for a file that is only read.
        path: Of what is written; None for a file that is only read.
    """

    closed: bool
    position: int | None = None
    size: int | None = None
    path: str | None = None


class _Opened(NamedTuple):
    """A file that was opened for writing, and how."""

    reference: weakref.ref[Any]
    path: str
    newline: str | None


class Logs:
    """The files that a program opens for writing.

    Args:
        resuming: Whether there is a run to continue with, whose logs set-up must not empty.
        root: The program's folder. Files below it are written down relative to it, so that it may
            be moved.
        first: What the logs were before the run.

    Attributes:
        root: The program's folder.
    """

    def __init__(
        self, resuming: bool, root: Path | None = None, first: FirstSizes | None = None
    ) -> None:
        self._resuming = resuming
        self.root = root
        self._first = first or FirstSizes()
        self._noted: set[str] = set()
        self._kept: set[str] = set()
        self._open: dict[int, _Opened] = {}
        self._placed: weakref.WeakSet[Any] = weakref.WeakSet()

    def sizes(self) -> dict[str, int]:
        """Path to size in bytes of each log: open for writing, or appended to at any time.

        They are durable afterwards as far as that, as what is saved with them will be.
        """
        paths = {self.read(path) for path in self._first.appended()}
        for file, path in self._writable():
            # A thread may close it meanwhile.
            with suppress(ValueError):
                file.flush()
                os.fsync(file.fileno())
                paths.add(path)
        return {
            self.written(path): Path(path).stat().st_size
            for path in sorted(paths)
            if Path(path).is_file()
        }

    def cut_back(self, saved: Mapping[str, int] | None) -> None:
        """Make the logs again what they were; to be called when set-up is done.

        Args:
            saved: What `sizes` gave when the program was saved; None for a new run.
        """
        sizes = {self.read(path): size for path, size in (saved or {}).items()}
        if saved is not None:
            # Those that the run opened after it was saved become what they were before it.
            for name in self._first.appended():
                path = self.read(name)
                if path in sizes or path in self._noted:
                    continue
                if told := self._first.put_back(name, Path(path)):
                    warnings.warn(told, stacklevel=1)
        for path, size in sizes.items():
            self.cut(path, size)
        for file, path in self._writable():
            if path in sizes and file not in self._placed:
                file.seek(0, os.SEEK_END)
        for path in self._kept:
            _aside(path).unlink(missing_ok=True)
        self._kept, self._resuming = set(), False

    def cut(self, path: str, size: int) -> int:
        """Make one log what it was; gives its size."""
        for file, opened in self._writable():
            if opened == path:
                file.flush()
        aside = _aside(path)
        if path in self._kept:
            # In place, since the program may have the file open; another rank may have done it.
            with suppress(FileNotFoundError):
                _copy(aside, path, "r+b" if Path(path).is_file() else "wb")
                aside.unlink()
            self._kept.discard(path)
        return _cut(path, size) if Path(path).is_file() else 0

    def give_up(self) -> None:
        """Put the logs that were laid aside back, when the program did not come to where it was."""
        for path in self._kept:
            with suppress(FileNotFoundError):
                _aside(path).replace(path)
        self._kept = set()

    def place(self, file: Any, seen: Place) -> None:
        """Put a log where it stood."""
        assert seen.position is not None
        position = seen.position
        if seen.size is not None:
            file.flush()
            if seen.path is not None:
                self._move(file, self.read(seen.path))
            position = min(position, self.cut(self.path(file), seen.size))
        file.seek(position)
        self._placed.add(file)

    def _move(self, file: Any, path: str) -> None:
        """Have an open file write where it did, if set-up has given it another name this time."""
        opened = self._open.get(id(file))
        if opened is None or opened.path == path or not Path(path).is_file():
            return
        # It was opened for this: what it had is what it continues with.
        flags = os.O_RDWR if file.readable() else os.O_WRONLY
        appends = os.O_APPEND if "a" in getattr(file, "mode", "") else 0
        number = os.open(path, flags | appends)
        os.dup2(number, file.fileno(), inheritable=False)
        os.close(number)
        self._open[id(file)] = opened._replace(path=path)

    def options(self, file: Any) -> dict[str, Any]:
        """Options of `open` that the file itself does not tell."""
        opened = self._open.get(id(file))
        return {} if opened is None else {"newline": opened.newline}

    def open(  # noqa: PLR0917 (as Python's)
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        """As the function that Python has; a file that it would empty is laid aside first."""
        path = None if isinstance(file, int) or not _by_the_program() else _absolute(file)
        if path is not None and opener is None and not {"w", "x"}.isdisjoint(mode):
            self._lay_aside(path, mode)
        appends = path is not None and opener is None and "a" in mode and _QUEUED not in path
        before = None
        if path is not None and appends:
            with suppress(OSError):
                before = Path(path).stat().st_size
        made = _plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if path is not None and not {"w", "x", "a", "+"}.isdisjoint(mode):
            key = id(made)
            reference = weakref.ref(made, lambda _: self._open.pop(key, None))
            self._open[key] = _Opened(reference, path, newline)
        if path is not None and appends and path not in self._noted:
            self._noted.add(path)
            self._first.note(self.written(path), before)
        return made

    def _lay_aside(self, path: str, mode: str) -> None:
        """Keep a log of the run to continue with from being emptied; the oldest one, if killed."""
        aside = _aside(path)
        if not self._resuming:
            # Of an earlier run, which was killed in its set-up.
            aside.unlink(missing_ok=True)
            return
        if not aside.exists() and Path(path).is_file():
            # Another rank may do the same: the first that has all of it is the one that counts.
            own = aside.with_name(f"{aside.name}.{os.getpid()}")
            _copy(path, own, "wb")
            try:
                with suppress(FileExistsError):
                    aside.hardlink_to(own)
            except OSError:  # a file system without links
                own.replace(aside)
            own.unlink(missing_ok=True)
        if aside.exists():
            self._kept.add(path)
            if "x" in mode:
                Path(path).unlink(missing_ok=True)

    def _writable(self) -> list[tuple[Any, str]]:
        # A file may go away meanwhile, with a thread; one call copies the list at one moment.
        files = [(opened.reference(), opened.path) for opened in list(self._open.values())]
        return [
            (file, path)
            for file, path in files
            if file is not None and not file.closed and file.writable() and is_regular(file)
        ]

    def path(self, file: Any) -> str:
        """Absolute path of an open file, as it was when it was opened."""
        opened = self._open.get(id(file))
        return _absolute(file.name) if opened is None else opened.path

    def written(self, path: str) -> str:
        """An absolute path as it is written down."""
        if self.root is not None and Path(path).is_relative_to(self.root):
            return str(Path(path).relative_to(self.root))
        return path

    def read(self, path: str) -> str:
        """The absolute path that was written down so."""
        return path if self.root is None else str(self.root / path)


_logs = Logs(False)


@contextmanager
def reopened_logs(
    resuming: bool, root: Path | None = None, first: FirstSizes | None = None
) -> Iterator[Logs]:
    """Within, the files that a program opens are known, and logs to continue with are not emptied.

    Args:
        resuming: Whether there is a run to continue with.
        root: The program's folder; see `Logs`.
        first: What the logs were before the run; None knows of none.
    """
    global _logs  # noqa: PLW0603 (a process has one function `open`)
    before, _logs = _logs, Logs(resuming, root, first)
    builtins.open = io.open = _logs.open
    try:
        yield _logs
    finally:
        builtins.open = io.open = _plain_open
        _logs.give_up()
        _logs = before


def program_logs() -> Logs:
    """The files of the program that runs."""
    return _logs


def program_folder() -> Path | None:
    """The folder of the program that runs, which may have been moved since it was saved."""
    return _logs.root


def _by_the_program() -> bool:
    """Return True if the program opens a file itself, not a thread nor what saves it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _package(frame) in _CALLED_FOR_OTHERS:
        frame = frame.f_back
    return threading.current_thread() is threading.main_thread() and _package(frame) != "outlast"


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _copy(source: str | Path, target: str | Path, mode: str) -> None:
    """Copy a file's content into another, durably."""
    with _plain_open(source, "rb") as old, _plain_open(target, mode) as new:
        new.truncate(0)
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def _cut(path: str, size: int) -> int:
    """Cut a file to `size` bytes; gives the bytes that it then has."""
    now = Path(path).stat().st_size
    if now < size:
        warnings.warn(
            f"the log {path} has {now} bytes, and had {size} when the program was saved: what is "
            "missing was lost or removed; it continues at its end",
            stacklevel=2,
        )
    elif now > size:
        os.truncate(path, size)
    return min(now, size)


def _aside(path: str) -> Path:
    """Path to which a log is laid aside."""
    return Path(path).with_name(f".{Path(path).name}.before")


def _absolute(path: Any) -> str:
    # Of the file itself: a link may lead elsewhere later.
    return os.path.realpath(os.fsdecode(path))


def is_regular(file: Any) -> bool:
    """Return True for an open file on a disk that is none of the three that every process has."""
    try:
        number = file.fileno()
    except (OSError, ValueError):
        return False
    return number > _OUTPUTS and stat.S_ISREG(os.fstat(number).st_mode)


_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)


def place(file: Any) -> Place:
    """Position of `file`; what was written to it is durable afterwards.

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


def _reduced_file(file: Any) -> Any:
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


IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = dict.fromkeys(
    _FILES, (place, set_place)
)
"""Types whose objects are put back in place: what they hold, and how to make them hold it."""


_OF_PROCESS = ("lock", "stream", "_builtin_open")


Handlers = dict[str, list[logging.FileHandler]]


def file_handlers() -> Handlers:
    """Name of each logger that writes to files, and its handlers that do."""
    found: Handlers = {}
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            own = [item for item in logger.handlers if isinstance(item, logging.FileHandler)]
            found |= {logger.name: own} if own else {}
    return found


def later_handlers(before: Handlers) -> Handlers:
    """Those that loggers have and had not `before`."""
    return {
        name: [handler for handler in handlers if handler not in before.get(name, ())]
        for name, handlers in file_handlers().items()
    }


def add_handlers(handlers: Handlers) -> None:
    """Give loggers their later handlers again."""
    for name, later in handlers.items():
        for handler in later:
            logging.getLogger(name).addHandler(handler)


def reduced_handler(handler: logging.FileHandler) -> Any:
    """Reduce a handler that set-up has not made, as `object.__reduce__` does."""
    state = {name: variable for name, variable in vars(handler).items() if name not in _OF_PROCESS}
    return _made_handler, (type(handler), state, handler.stream is not None)


def _made_handler(
    kind: type[logging.FileHandler], state: Mapping[str, Any], opened: bool
) -> logging.FileHandler:
    handler = kind.__new__(kind)
    vars(handler).update(state, stream=None, _builtin_open=open)
    handler.createLock()
    if opened:
        mode, handler.mode = handler.mode, "a"
        handler.stream = handler._open()
        handler.mode = mode
    logging._addHandlerRef(handler)  # type: ignore[attr-defined]
    return handler


_DIALECT = (
    "delimiter", "quotechar", "escapechar", "doublequote", "skipinitialspace", "lineterminator",
    "quoting", "strict",
)  # fmt: skip


_METHODS = (types.BuiltinMethodType, types.MethodType)


def _reduced_writer(writer: Any) -> Any:
    # It shows its settings, but not what it writes with.
    found = (referent for referent in gc.get_referents(writer) if callable(referent))
    write: Any = next((name for name in found if not isinstance(name, type)), None)
    if write is None:
        raise AutosaveError(
            "what a csv.writer writes with cannot be seen; make it with a file that open() gives"
        )
    settings = {name: getattr(writer.dialect, name) for name in _DIALECT}
    if isinstance(write, _METHODS):
        return _made_writer, (write.__self__, settings)
    return _made_with, (write, settings)


def _made_writer(file: Any, settings: dict[str, Any]) -> Any:
    return csv.writer(file, **settings)


def _made_with(write: Any, settings: dict[str, Any]) -> Any:
    # Files of `tempfile` give a function of their own.
    return csv.writer(types.SimpleNamespace(write=write), **settings)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    **dict.fromkeys(_FILES, _reduced_file),
    type(csv.writer(io.StringIO())): _reduced_writer,
    logging.FileHandler: reduced_handler,
}
"""Pickling of files opened after training had begun, of writers of tables and of log handlers."""
