"""Append-only event logs, one file per rank.

Rank 0 writes ``events.jsonl`` (step metrics and everything else), other ranks write
``events.rank<N>.jsonl``. A line is one ``write`` to a file opened with O_APPEND: a killed process
or a full disk leaves at most one torn line, which the next line that can be written closes first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

from outlast.errors import RunError
from outlast.records.events import FORMAT_VERSION, Event, Warned, finite

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
        sinks: Other places that want the events, e.g. TensorBoard. One that fails is left out
            from then on, and a `Warned` event says so.

    Raises:
        RunError: When the event log cannot be opened.
    """

    def __init__(
        self, directory: Path, rank: int = 0, attempt: int = 1, sinks: Sequence[Sink] = ()
    ) -> None:
        self.path = event_file(directory, rank)
        self.rank = rank
        self.attempt = attempt
        self._sinks = list(sinks)
        self._lost = 0
        self._closed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._torn = _ends_torn(self.path)
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from None

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
        self._append((json.dumps(line, allow_nan=False) + "\n").encode())
        for sink in [*self._sinks]:
            if sink not in self._sinks:  # it failed meanwhile, with the warning about another
                continue
            try:
                sink.write(event)
            except Exception as error:  # a display must not end the training that it shows
                self._drop(sink, error)

    def _append(self, line: bytes) -> None:
        content = b"\n" + line if self._torn else line
        try:
            written = os.write(self._descriptor, content)
        except OSError:
            written = 0
        if written == len(content):
            self._torn = False
            return
        self._lost += 1
        # A disk that fills up takes the beginning of a line without an error.
        self._torn = self._torn or written > 0

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        name = type(sink).__name__
        self.write(Warned(f"{name} failed and gets no more events: {error}"))

    def flush(self) -> None:
        """Force what was written to the disk, as far as the disk can."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close the file and the sinks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        while self._sinks:
            sink = self._sinks[0]
            try:
                sink.close()
                self._sinks.remove(sink)
            except Exception as error:  # the other sinks and the file still want to be closed
                self._drop(sink, error)
        self.flush()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _fields(event: Event) -> dict[str, Any]:
    return {field.name: finite(getattr(event, field.name)) for field in dataclasses.fields(event)}


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
