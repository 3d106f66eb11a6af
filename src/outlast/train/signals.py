"""Stopping at a step boundary: a signal only sets a flag.

SIGTERM and SIGUSR1 (Slurm's usual warnings before a time limit) and SIGINT (Ctrl-C) ask for a stop.
Nothing is saved inside the handler; the training loop reads the flag at the next step boundary,
agrees on it with all ranks, saves and ends with the exit code for "to be continued". A second
SIGINT ends the process at once, as a person who presses Ctrl-C twice expects.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """A context that turns the stop signals into a flag while it is open.

    Attributes:
        reason: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
