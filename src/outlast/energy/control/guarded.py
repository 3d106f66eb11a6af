"""What gives clocks back when no end of a ``with`` block is reached: signals, the process's end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from outlast.energy.control.apply import Applied

# What ends a job: the scheduler's request, and the end of the terminal.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_NO_HANDLERS = (
    "clocks are applied outside the main thread, where Python sets no signal handlers: after "
    "SIGTERM or SIGHUP they stay locked until outlast energy restore; apply them in the main thread"
)


@contextmanager
def guarded(handle: Applied, lasts_seconds: float) -> Iterator[None]:
    """Give back also when a signal, the end of the process or the lease's time ends the block.

    Warns with a RuntimeWarning outside the main thread, where no signal can be handled.
    """
    timer = threading.Timer(min(lasts_seconds, threading.TIMEOUT_MAX), handle.give_back)
    timer.daemon = True
    timer.start()
    # It keeps the handle until it is detached, and is called when the process ends before that.
    at_exit = weakref.finalize(handle, handle.give_back)
    with contextlib.ExitStack() as handlers:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handlers.enter_context(_handled(number, handle))
        else:
            warnings.warn(_NO_HANDLERS, RuntimeWarning, stacklevel=2)
        try:
            yield
        finally:
            timer.cancel()
            at_exit.detach()


@contextmanager
def _handled(number: signal.Signals, handle: Applied) -> Iterator[None]:
    earlier = signal.getsignal(number)

    def on_signal(received: int, frame: FrameType | None) -> None:
        try:
            handle.give_back()
        finally:
            _pass_on(earlier, received, frame)

    signal.signal(number, on_signal)
    try:
        yield
    finally:
        # A handler that somebody put before this one calls it: leave both then.
        if signal.getsignal(number) is on_signal:
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _pass_on(earlier: Any, received: int, frame: FrameType | None) -> None:
    """Do what would have happened without our handler."""
    if callable(earlier):
        earlier(received, frame)
    elif earlier != signal.SIG_IGN:
        signal.signal(received, signal.SIG_DFL)
        os.kill(os.getpid(), received)
