"""A wish for another number of processes, left in the run directory and met at a step boundary.

`ask` writes ``resize.json``, `wish` reads it; whoever has met it calls `met`. The file is replaced
as a whole, so that a reader sees one wish or the other, and the newest counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records import replace_file

if TYPE_CHECKING:
    from pathlib import Path

FILE = "resize.json"
RESIZE = "resize"
"""Why an attempt has stopped when its run goes on with another number of processes."""


@dataclass(frozen=True)
class Wish:
    """What was asked for.

    Attributes:
        processes: The number of processes to go on with.
        stamp: Of the file, in ns; tells one wish from the next.
    """

    processes: int
    stamp: int


def ask(directory: Path, processes: int) -> None:
    """Ask the run in `directory` to go on with `processes` processes.

    Raises:
        OSError: When the file cannot be written.
    """
    replace_file(directory / FILE, json.dumps({"processes": processes}).encode())


def wish(directory: Path) -> Wish | None:
    """The wish that is not met yet; None without one. Takes microseconds where there is none."""
    path = directory / FILE
    try:
        stamp = path.stat().st_mtime_ns
        found = json.loads(path.read_bytes())["processes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Wish(found, stamp) if isinstance(found, int) and found > 0 else None


def is_wanted(directory: Path) -> bool:
    """Whether there is a wish that is not met yet."""
    return wish(directory) is not None


def met(directory: Path, done: Wish) -> None:
    """Take `done` away, unless another wish has come since."""
    path = directory / FILE
    try:
        if path.stat().st_mtime_ns == done.stamp:
            path.unlink()
    except OSError:
        return
