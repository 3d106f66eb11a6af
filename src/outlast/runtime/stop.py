"""Requests to stop a run at the next step boundary: a signal, its time limit, its job's end.

A signal only sets a flag; the state is saved between two steps, when all ranks have agreed on it.
SIGTERM and SIGUSR1 (Slurm's usual warnings before a time limit) and SIGINT (Ctrl-C) ask for a stop;
a second SIGINT ends the process at once, as a person who presses Ctrl-C twice expects.

`StopFlag` is for `outlast train`, whose launcher is ours; `Stop` for a loop that is not ours, of
which nothing can be saved before its first training step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, Protocol

from outlast.errors import EXIT_CRASHED, EXIT_TO_BE_CONTINUED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

TOLD_TO_STOP = "OUTLAST_TOLD_TO_STOP"
"""Set by a launcher that was told to stop, for processes that it has yet to start."""

_FIRST_LEAD_SECONDS = 30.0
_FIRST_LEAD_PART = 0.1
"""Time before the limit at which a first save begins: 30 s, of short limits a tenth."""

_SAVES_WORTH = 1.5
_STEPS_REMEMBERED = 20


@contextlib.contextmanager
def signals_taken(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which the stop signals call `handler`.

    Python takes signals in the main thread alone: elsewhere a warning says so.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    else:
        warnings.warn(
            "this training runs outside of the main thread, where no signal can be taken: SIGTERM, "
            "SIGUSR1 and Ctrl-C do not save it; start it in the main thread if they shall",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class JobChain(Protocol):
    """The Slurm job or the chain of jobs that a run is in; `outlast.cluster` is one."""

    def should_stop(self, lead_seconds: float | None = None) -> bool:
        """Return whether to save and end now."""

    def report_progress(
        self, step: int, *, steps: int = 0, save_seconds: float | None = None
    ) -> None:
        """Tell that everything up to `step` is saved and durable."""

    def report_outcome(self, outcome: str, *, steps: int = 0) -> None:
        """Tell how the program stands."""


class Stop:
    """A context in which the stop signals ask for a stop; called once a step on rank 0.

    In a Slurm job it also knows that job's time limit, in a link of a chain the link's.

    Args:
        limit_seconds: How long the program may run, from when this is made; None: for ever.
        chain: Knows when the job ends; None: nobody does.
    """

    def __init__(
        self, limit_seconds: float | None = None, *, chain: JobChain | None = None
    ) -> None:
        self._limit_seconds = limit_seconds
        self._chain = chain
        self._begun = time.monotonic()
        self._in_job = bool({"SLURM_JOB_ID", "OUTLAST_CHAIN"} & {*os.environ})
        self._process = os.getpid()
        self._training = False
        self._signal = ""
        self._interrupts = 0
        self._signals = contextlib.ExitStack()
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._save_seconds: float | None = None

    def training_begins(self) -> None:
        """Note that the first step boundary is reached: there is something to save from now on."""
        self._training = True

    def observe_step(self, seconds: float) -> None:
        """Take in a step of `seconds`."""
        self._steps.append(seconds)

    def observe_save(self, seconds: float) -> None:
        """Take in a save that took `seconds` until it was published."""
        self._save_seconds = max(seconds, self._save_seconds or 0.0)

    @property
    def signalled(self) -> str:
        """Name of the signal that came to this process; empty for none."""
        return self._signal

    @property
    def interrupted(self) -> bool:
        """Return whether a second Ctrl-C has ended the program where it was."""
        return self._interrupts > 1

    def __call__(self) -> str:
        """Return the reason to stop now, in a few words; empty: continue."""
        if self._signal:
            return self._signal
        if self._limit_seconds is not None:
            left = self._limit_seconds - (time.monotonic() - self._begun)
            # One more step would end too late for the last save.
            lead = max(self._steps, default=0.0)
            if self._save_seconds is None:
                lead += min(_FIRST_LEAD_SECONDS, _FIRST_LEAD_PART * self._limit_seconds)
            else:
                lead += _SAVES_WORTH * self._save_seconds + 1.0
            if left < lead:
                return "the time limit"
        if self._in_job and self._chain is not None and self._chain.should_stop():
            return "the end of the job's time"
        return ""

    def __enter__(self) -> Stop:
        self._signals.enter_context(signals_taken(self._handle))
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # In processes that the program has forked: workers continue until the program ends
            # them.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
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


def say_interrupted() -> None:
    """Say what the first Ctrl-C does; written past Python's own buffers, which may be in use."""
    text = "outlast: saving at the next step, then it ends; Ctrl-C again ends it at once, unsaved\n"
    os.write(2, text.encode())


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
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> StopFlag:
        self._signals.enter_context(signals_taken(self._handle))
        if self._launcher is not None:
            # While its processes are started anew, the launcher has nobody to pass a signal to.
            self.reason = self.reason or os.environ.get(TOLD_TO_STOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

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
