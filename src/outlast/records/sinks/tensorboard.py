"""TensorBoard event files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outlast.errors import OutlastError
from outlast.records.sinks.curves import Curves, notes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from outlast.records.events import Event


class TensorBoardSink:
    """Writes curves and notes as TensorBoard event files (extra ``tensorboard``)."""

    def __init__(self, directory: Path, counts: Mapping[str, int] | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise OutlastError(
                f"log.tensorboard = true needs a package that is missing ({error}); "
                "pip install 'outlast[tensorboard]', or set log.tensorboard = false"
            ) from None
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(directory))
        self._curves = Curves(counts)

    def write(self, event: Event) -> None:
        """Add one point to every curve of the event, and its words as text."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in self._curves.points(event).items()
        ]
        for name, words in notes(event).items():
            values += self._text(name, words).value
        if values:
            summary = self._summary(value=values)
            step = getattr(event, "step", 0)
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
