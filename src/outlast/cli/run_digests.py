"""Digests of the steps after a save, kept to be compared when the run comes back there."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SAVES_KEPT = 8
_SYNCED = 2
"""Steps after a save whose digests also outlive a machine."""


class Digests:
    """Those of one rank after one save, in a file of lines.

    Args:
        folder: Of all of the run.
        rank: Of this process.
        base: Step of the save.
    """

    def __init__(self, folder: Path, rank: int, base: int) -> None:
        self._base = base
        self._folder = folder
        self._ending = f".rank{rank}.jsonl"
        self._file = folder / f"{base}{self._ending}"
        # A run that has come here before has done the same steps.
        self._known = _read(self._file)

    def keep(self, step: int, text: str) -> str | None:
        """The digest of `step` that is kept already; else None, and `text` is kept."""
        if step in self._known:
            return self._known[step]
        first = not self._file.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, text]) + "\n")
            file.flush()
            # What is lost with the machine's power is a comparison, and disks are slow.
            if step - self._base <= _SYNCED:
                os.fsync(file.fileno())
        if first:
            self._prune()
        return None

    def _prune(self) -> None:
        files = sorted(self._folder.glob(f"*{self._ending}"), key=lambda path: _base(path.name))
        for file in files[:-_SAVES_KEPT]:
            with contextlib.suppress(OSError):
                file.unlink()


def _read(file: Path) -> dict[int, str]:
    known = {}
    # The last line may have been cut short.
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            step, text = json.loads(line)
            known[int(step)] = str(text)
    return known


def _base(name: str) -> int:
    first = name.partition(".")[0]
    return int(first) if first.isdigit() else -1
