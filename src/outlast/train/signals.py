"""Stopping at a step boundary: a signal only sets a flag.

SIGTERM and SIGUSR1 (Slurm's usual warnings before a time limit) and SIGINT (Ctrl-C) ask for a stop.
Nothing is saved inside the handler; the training loop reads the flag at the next step boundary,
agrees on it with all ranks, saves and ends with the exit code for "to be continued". A second
SIGINT ends the process at once, as a person who presses Ctrl-C twice expects.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from outlast.errors import EXIT_CRASHED

if TYPE_CHECKING:
    from types import FrameType, TracebackType

TOLD_TO_STOP = "OUTLAST_TOLD_TO_STOP"
"""Set by a launcher that was told to stop, for processes that it has yet to start."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """A context that turns the stop signals into a flag while it is open.

    Args:
        launcher: Process that started this one and ends it when it dies itself, or None.

    Attributes:
        reason: Name of the signal that came, or None.
    """

    def __init__(self, launcher: int | None = None) -> None:
        self.reason: str | None = None
        self._launcher = launcher
        self._interrupts = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        if self._launcher is not None:
            # While its processes are started anew, the launcher has nobody to pass a signal to.
            self.reason = self.reason or os.environ.get(TOLD_TO_STOP)
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
        if number == signal.SIGINT:
            if self._launcher is not None and os.getppid() != self._launcher:
                # The launcher was killed and this is its parting signal: end like it, so that the
                # same command can start at once.
                os._exit(EXIT_CRASHED)
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
