"""How large each log was when its run first appended to it, in a file beside the run's versions.

A save holds the sizes of the logs that the program had opened by then. A log that it opened later,
or in a run that was killed before its first save, is put back by what is written down here.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = "logs"


@dataclass(frozen=True)
class FirstSize:
    """What a log was before its run.

    Attributes:
        path: Of the log; below the program's folder relative to it.
        size: Bytes; None where it did not exist.
        appended: Whether it was opened to be appended to; otherwise to be made.
    """

    path: str
    size: int | None
    appended: bool


class FirstSizes:
    """Those of the logs that one rank has opened, in this life of the run and in earlier ones.

    Args:
        file: Where they are written down, a line each; None keeps them in memory.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known = {each.path: each for each in _read(file)} if file is not None else {}

    def note(self, first: FirstSize) -> None:
        """Write down what a log was, durably, unless that is known."""
        if first.path in self._known:
            return
        self._known[first.path] = first
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # A line that a kill has cut short is ended by the next one.
        cut_short = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_short else "") + json.dumps(asdict(first)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def appended(self) -> dict[str, int | None]:
        """Path, as it is written down, to size of each log that the run has appended to."""
        return {each.path: each.size for each in self._known.values() if each.appended}


def first_sizes_file(folder: Path, rank: int) -> Path:
    """Where a rank writes them down.

    Args:
        folder: Of the run.
        rank: Of the process.
    """
    return folder / (f"{_NAME}.rank{rank}.jsonl" if rank else f"{_NAME}.jsonl")


def begin_logs(folder: Path, root: Path, *, killed: bool) -> None:
    """Forget what logs were before a run that begins anew.

    Args:
        folder: Of the run.
        root: The program's folder.
        killed: Whether the run was killed before its first save. Its logs are put back first: cut
            to what they were, and removed where it had made them.
    """
    files = sorted(folder.glob(f"{_NAME}*.jsonl"))
    if killed:
        # What one rank found there, another may have written: the smallest size counts.
        sizes: dict[Path, int] = {}
        for each in (first for file in files for first in _read(file)):
            size = -1 if each.size is None else each.size
            path = root / each.path
            sizes[path] = min(size, sizes.get(path, size))
        for path, size in sizes.items():
            put_back(path, None if size < 0 else size)
    for file in files:
        file.unlink(missing_ok=True)


def put_back(path: Path, size: int | None) -> None:
    """Cut a log to the size that it had, or remove it where it did not exist."""
    if not path.is_file():
        return
    if size is None:
        path.unlink()
    elif path.stat().st_size > size:
        os.truncate(path, size)


def _read(file: Path) -> Iterable[FirstSize]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        # One that a kill has cut short: its log was not opened yet.
        with contextlib.suppress(ValueError, TypeError):
            yield FirstSize(**json.loads(line))
