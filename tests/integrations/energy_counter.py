"""A meter of joules in a file, which a training increases by itself."""

from __future__ import annotations

from pathlib import Path

from outlast.energy.sources import FileSource


class Counter:
    """Begins somewhere, as counters do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.joules = 12345.0
        self.add(0.0)

    def add(self, joules: float) -> None:
        self.joules += joules
        self.path.write_text(f"{self.joules}\n")

    @property
    def source(self) -> FileSource:
        return FileSource(str(self.path))
