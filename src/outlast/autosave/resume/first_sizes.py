"""How large each log was when its run first appended to it, in a file beside the run's versions.

A save holds the sizes of the logs that the program had opened by then. A log that it opened later,
or in a run that was killed before its first save, is put back by what is written down here. What
is taken out of a log, or the log that a run has made, is laid down beside the versions: somebody
else may have written it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.records import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable

_SIZES = "log-sizes"
_ENDS = "log-ends"
_OF_A_RANK = re.compile(r"rank\d+\.json")


@dataclass(frozen=True)
class FirstSize:
    """What a log was before its run.

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
        return {path: known_item.size for path, known_item in self._known.items()}

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
        if any(first.path == path for other in others for first in _read(other)):
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
    end = ends / log.name
    number = 1
    while end.exists():
        number += 1
        end = ends / f"{log.name}.{number}"
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
