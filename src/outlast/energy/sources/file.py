"""A node's meter whose figure another program writes to a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part


class FileSource:
    """A meter whose joules since any beginning stand in a file, as the first word of its text.

    HPE Cray nodes have such files, e.g. ``/sys/cray/pm_counters/energy``.

    Args:
        path: The file; something outside keeps it up to date.
        update_seconds: How often it changes, where that is known.
        joules_per_unit: 1e-6 for a file in microjoules.
        part: What it measures; a node's joules are never added to those of its CPUs and GPUs.
    """

    kind: Kind = "measured"

    def __init__(
        self,
        path: str | Path,
        *,
        update_seconds: float = 0.0,
        joules_per_unit: float = 1.0,
        part: Part = "node",
    ) -> None:
        self.name = f"file {path}"
        self.part: Part = part
        self.update_seconds = update_seconds
        self._joules_per_unit = joules_per_unit
        self._path = Path(path)

    def joules(self) -> float | Unavailable:
        """What the file says now."""
        try:
            joules = float(self._path.read_text(encoding="ascii").split()[0])
        except OSError as error:
            return Unavailable(f"{self._path} cannot be read: {error.strerror}")
        except (ValueError, IndexError):
            return Unavailable(f"{self._path} holds no number of joules")
        if not 0 <= joules < math.inf:
            return Unavailable(f"{self._path} says {joules} J")
        return joules * self._joules_per_unit
