"""Why a loop that is not ours is to stop at the next step boundary: a signal, or its time is up.

A signal only sets a flag; the state is saved between two steps. Before the first training step
there is nothing to save, and a signal ends the program as it would end any other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from outlast.errors import EXIT_TO_BE_CONTINUED

if TYPE_CHECKING:
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_FIRST_LEAD_SECONDS = 30.0
_FIRST_LEAD_PART = 0.1
"""How long before the limit a first save begins: 30 s, of short limits a tenth."""

_SAVES_WORTH = 1.5
_STEPS_REMEMBERED = 20


class Stop:
    """A context in which the stop signals ask for a stop; called once a step on rank 0.

    In a Slurm job it also knows that job's time limit, in a link of a chain the link's.

    Args:
        limit_seconds: How long the program may run, from when this is made; None: for ever.
    """

    def __init__(self, limit_seconds: float | None = None) -> None:
        self._limit_seconds = limit_seconds
        self._begun = time.monotonic()
        self._cluster = bool({"SLURM_JOB_ID", "OUTLAST_CHAIN"} & {*os.environ})
        self._process = os.getpid()
        self._training = False
        self._signal = ""
        self._interrupts = 0
        self._previous: dict[int, object] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._save_seconds: float | None = None

    def training_begins(self) -> None:
        """The first step boundary is reached: from now on there is something to save."""
        self._training = True

    def observe_step(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._steps.append(seconds)

    def observe_save(self, seconds: float) -> None:
        """A save took `seconds` until it was published."""
        self._save_seconds = max(seconds, self._save_seconds or 0.0)

    @property
    def signalled(self) -> str:
        """Name of the signal that came to this process; empty for none."""
        return self._signal

    @property
    def interrupted(self) -> bool:
        """Whether a second Ctrl-C has ended the program where it was."""
        return self._interrupts > 1

    def __call__(self) -> str:
        """Why to stop now, in a few words; empty to go on."""
        if self._signal:
            return self._signal
        if self._limit_seconds is not None:
            left = self._limit_seconds - (time.monotonic() - self._begun)
            if left < self._lead_seconds(self._limit_seconds):
                return "the time limit"
        if self._cluster:
            from outlast.cluster import should_stop

            if should_stop():
                return "the end of the job's time"
        return ""

    def _lead_seconds(self, limit_seconds: float) -> float:
        """How long before the limit the last save begins: one more step would end too late."""
        step = max(self._steps, default=0.0)
        if self._save_seconds is None:
            return step + min(_FIRST_LEAD_SECONDS, _FIRST_LEAD_PART * limit_seconds)
        return step + _SAVES_WORTH * self._save_seconds + 1.0

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_child(number)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1 or not self._training:
                raise KeyboardInterrupt
            if os.environ.get("RANK", "0") == "0":
                say_interrupted()
        name = signal.Signals(number).name
        if not self._training:
            print(
                f"outlast: {name} before the first training step: there is nothing to save",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        self._signal = name

    def _handle_in_child(self, number: int) -> None:
        """In processes that the program has forked: workers go on until the program ends them."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def say_interrupted() -> None:
    """What the first Ctrl-C does; written past Python's own buffers, which may be in use."""
    text = "outlast: saving at the next step, then it ends; Ctrl-C again ends it at once, unsaved\n"
    os.write(2, text.encode())
