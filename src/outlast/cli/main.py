"""Entry point of ``outlast`` and ``python -m outlast``: the command line, its errors, Ctrl-C.

An `OutlastError` ends a command with its sentence and exit code 2 (4 for wrong values that stay
wrong, 1 where another process has taken over the run), without a traceback. The commands are
imported within `main`, so that Ctrl-C ends also that in one line.
"""

from __future__ import annotations

import os
import signal
import sys

from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_DATA_CORRUPTION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TO_BE_CONTINUED,
    RECORD_TELLS,
    DataCorruptionError,
    LeaseLostError,
    OutlastError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Until `main` is called, Ctrl-C is answered by Python: nothing is imported that can wait.
    from types import FrameType


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from outlast.cli.app import app

        # Of this process alone: what a script starts is no rank of the link.
        record_tells = os.environ.pop(RECORD_TELLS, "")
        try:
            app(prog_name="outlast")
        except SystemExit as end:
            if record_tells and end.code == EXIT_TO_BE_CONTINUED:
                sys.exit(EXIT_DONE)
            raise
    except OutlastError as error:
        from outlast.cli.console import visible

        print(f"outlast: {visible(str(error))}", file=sys.stderr, flush=True)
        match error:
            case DataCorruptionError():
                sys.exit(EXIT_DATA_CORRUPTION)
            case LeaseLostError():
                # Nothing is wrong with the input: another process continues with the run.
                sys.exit(EXIT_CRASHED)
            case _:
                sys.exit(EXIT_BAD_INPUT)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            # What is left is Python's own end, which another Ctrl-C may cut short.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before a command has a handler of its own, or after.

    Raises:
        KeyboardInterrupt: Within a command, which may clean up. But not within an import: packages
            turn such an error into others, or pass over it and continue half imported.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    within_command = within_import = False
    while frame is not None:
        within_import |= frame.f_code.co_filename.startswith("<frozen importlib")
        within_command |= frame.f_globals.get("__name__") == "outlast.cli.app"
        frame = frame.f_back
    if within_command and not within_import:
        raise KeyboardInterrupt
    print("outlast: interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
