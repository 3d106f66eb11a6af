"""A wish for another number of processes, left in the run directory and met at a step boundary.

`ask` writes ``resize.json``, `wish` reads it; whoever has met it calls `met`. The file is replaced
as a whole, so that a reader sees one wish or the other, and the newest counts.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records import replace_file

if TYPE_CHECKING:
    from pathlib import Path

FILE = "resize.json"
RESIZE = "resize"
"""Why an attempt has stopped when its run continues with another number of processes."""


@dataclass(frozen=True)
class Wish:
    """A requested number of processes.

    Attributes:
        processes: The number of processes to continue with.
        name: Tells one wish from the next.
    """

    processes: int
    name: str


def ask(directory: Path, processes: int) -> None:
    """Ask the run in `directory` to continue with `processes` processes.

    Raises:
        OSError: When the file cannot be written.
    """
    content = {"processes": processes, "name": uuid.uuid4().hex}
    replace_file(directory / FILE, json.dumps(content).encode())


def wish(directory: Path) -> Wish | None:
    """The wish that is not met yet; None without one. Takes microseconds where there is none."""
    try:
        content = json.loads((directory / FILE).read_bytes())
        found, name = content["processes"], content["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Wish(found, str(name)) if isinstance(found, int) and found > 0 else None


def is_wanted(directory: Path) -> bool:
    """Return whether there is a wish that is not met yet."""
    return wish(directory) is not None


def met(directory: Path, done: Wish) -> None:
    """Take `done` away, unless another wish has come since."""
    if wish(directory) == done:
        (directory / FILE).unlink(missing_ok=True)
