"""The files that a program writes: their sizes are saved, and logs are cut back and go on.

A run that was killed has written more than it had when it was saved. What comes after the place is
cut off, so that the log of a resumed run is that of an uninterrupted one. Set-up runs again, too: a
log that it would empty is laid aside, and what it writes gives way to the log when it is done.

What a killed run has appended to a log that it first opened after its last save, or before the
first, is cut off by the size that the log had then (`first_sizes`).
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import sys
import threading
import warnings
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.resume.first_sizes import FirstSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

_OUTPUTS = 2
_QUEUED = ".tfevents."
"""Files of TensorBoard, whose writer holds events back in a queue: cut back, they would lack those.

What a killed run had written there stays, and the resumed run writes the same into a new file.
"""
_CALLED_FOR_OTHERS = ("pathlib", "fsspec")
_plain_open = io.open


class Place(NamedTuple):
    """Where a file stands.

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
        resuming: Whether there is a run to go on with, whose logs set-up must not empty.
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
            self._put_back_later_ones(sizes)
        for path, size in sizes.items():
            self.cut(path, size)
        for file, path in self._writable():
            if path in sizes and file not in self._placed:
                file.seek(0, os.SEEK_END)
        for path in self._kept:
            _aside(path).unlink(missing_ok=True)
        self._kept, self._resuming = set(), False

    def _put_back_later_ones(self, sizes: Mapping[str, int]) -> None:
        """Make those what they were before the run that it opened after it was saved."""
        for name in self._first.appended():
            path = self.read(name)
            if path in sizes or path in self._noted:
                continue
            if told := self._first.put_back(name, Path(path)):
                warnings.warn(told, stacklevel=2)

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
        # It was opened for this: what it had is what it goes on with.
        flags = os.O_RDWR if file.readable() else os.O_WRONLY
        appends = os.O_APPEND if "a" in getattr(file, "mode", "") else 0
        number = os.open(path, flags | appends)
        os.dup2(number, file.fileno(), inheritable=False)
        os.close(number)
        self._open[id(file)] = opened._replace(path=path)

    def options(self, file: Any) -> dict[str, Any]:
        """What `open` was told of a file and the file itself does not tell."""
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
        before = _size(path) if path is not None and appends else None
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
        """Keep a log of the run to go on with from being emptied; the oldest one, if killed."""
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
                aside.hardlink_to(own)
            except FileExistsError:
                pass
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
    """Within, the files that a program opens are known, and logs to go on with are not emptied.

    Args:
        resuming: Whether there is a run to go on with.
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
    """Whether a file is opened by the program: not by a thread, nor for what saves the program."""
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
            "missing was lost or removed; it goes on at its end",
            stacklevel=2,
        )
    elif now > size:
        os.truncate(path, size)
    return min(now, size)


def _size(path: str) -> int | None:
    """Bytes of a file; None if it does not exist."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _aside(path: str) -> Path:
    """Where a log is laid aside."""
    return Path(path).with_name(f".{Path(path).name}.before")


def _absolute(path: Any) -> str:
    # Of the file itself: a link may lead elsewhere later.
    return os.path.realpath(os.fsdecode(path))


def is_regular(file: Any) -> bool:
    """Whether an open file is one of a disk, and not one of the three that every process has."""
    try:
        number = file.fileno()
    except (OSError, ValueError):
        return False
    return number > _OUTPUTS and stat.S_ISREG(os.fstat(number).st_mode)
