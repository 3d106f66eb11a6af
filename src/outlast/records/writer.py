"""Append-only event logs, one file per rank.

Rank 0 writes ``events.jsonl`` (step metrics and everything else), other ranks write
``events.rank<N>.jsonl``. A line is one ``write`` to a file opened with O_APPEND: a killed process
leaves at most one torn last line, which the next writer closes with a newline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from outlast.records.events import FORMAT_VERSION, Event

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outlast.records.sinks import Sink


def event_file(directory: Path, rank: int) -> Path:
    """The event log of `rank` in the run directory."""
    return directory / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")


class RecordWriter:
    """Writes one rank's events and hands each to the sinks.

    Args:
        directory: The run directory, which exists.
        rank: This process's rank.
        attempt: Which start of the run this is, from 1.
        sinks: Other places that want the events, e.g. TensorBoard.
    """

    def __init__(
        self, directory: Path, rank: int = 0, attempt: int = 1, sinks: Sequence[Sink] = ()
    ) -> None:
        self.path = event_file(directory, rank)
        self.rank = rank
        self.attempt = attempt
        self._sinks = list(sinks)
        self._lost = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        torn = _ends_torn(self.path)
        self._descriptor = os.open(self.path, flags, 0o644)
        if torn:
            os.write(self._descriptor, b"\n")

    @property
    def lost_events(self) -> int:
        """Events that could not be written, because the disk was full for example."""
        return self._lost

    def write(self, event: Event) -> None:
        """Append `event`. A full disk never stops training: the loss is counted instead."""
        line = {
            "v": FORMAT_VERSION,
            "kind": event.kind,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "rank": self.rank,
            "attempt": self.attempt,
            **_fields(event),
        }
        try:
            os.write(self._descriptor, (json.dumps(line) + "\n").encode())
        except OSError:
            self._lost += 1
        for sink in self._sinks:
            sink.write(event)

    def flush(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close the file and the sinks."""
        self.flush()
        os.close(self._descriptor)
        for sink in self._sinks:
            sink.close()


def _fields(event: Event) -> dict[str, Any]:
    return {each.name: _finite(getattr(event, each.name)) for each in dataclasses.fields(event)}


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as strings, which ``float`` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
