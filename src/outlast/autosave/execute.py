"""Running a rewritten script as plain Python would run it."""

from __future__ import annotations

import contextlib
import linecache
import sys
import types
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any, Protocol

from outlast.autosave.program.sites import RUNTIME
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.session import Keeper, Session
from outlast.errors import EXIT_CRASHED, OutlastError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from outlast.autosave.heap.capture import Captured
    from outlast.autosave.program.sites import Rewritten

_INTERRUPTED = 130
"""What a shell sees of a process that Ctrl-C has ended."""


class Resuming(Keeper, Protocol):
    """A keeper that brings back what it has saved, when set-up is done."""

    def saved(self) -> Captured | None:
        """What to go back to; None starts from the beginning."""


class _LateSession(Session):
    """A session that asks for what was saved when it is needed.

    By then the script has made its process group, so that all ranks choose the same version.
    """

    def __init__(self, files: list[Rewritten], keeper: Resuming) -> None:
        super().__init__(files, keeper)
        self._resuming = keeper

    def _begin(self, frame: FrameType) -> None:
        self._saved = self._resuming.saved()
        super()._begin(frame)


def execute(files: list[Rewritten], arguments: Sequence[str], keeper: Resuming) -> int:
    """Run a program to its end.

    The script finds what it finds under ``python script.py``: its own `__main__`, its arguments,
    its folder first on the path. Its traceback begins with its own first line. When it ends,
    `__main__` stays in place, for functions that it has registered to be called at the exit.

    Args:
        files: The program, the script first.
        arguments: Of the script.
        keeper: Saves its state, and brings it back.

    Returns:
        The exit code that the script would have had; 0 when it has come to its end.

    Raises:
        OutlastError: Raised on the way, or when the way back to where it was saved is not found.
    """
    script = files[0].source.path
    session = _LateSession(files, keeper)
    with resumable_loaders(), _surroundings(script, arguments, session) as module:
        code = compile(files[0].tree, str(script), "exec", dont_inherit=True)
        try:
            exec(code, module.__dict__)
        except SystemExit as ended:
            status = _status(ended)
            if status == 0:
                session.finish()
            return status
        except OutlastError:
            raise
        except BaseException as error:
            _show(error)
            return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_CRASHED
        session.finish()
    return 0


@contextlib.contextmanager
def _surroundings(
    script: Path, arguments: Sequence[str], session: Session
) -> Iterator[types.ModuleType]:
    """The process as the script expects it; what others may still ask for stays."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__loader__ = SourceFileLoader("__main__", str(script))
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__dict__[RUNTIME] = session
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        # Python has put the folder there of the program that runs the script.
        sys.path[0] = str(script.parent)
    linecache.checkcache(str(script))
    yield module


def _status(ended: SystemExit) -> int:
    """The exit code of ``sys.exit(code)``; a text is printed, as Python does."""
    code: Any = ended.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr, flush=True)
    return 1


def _show(error: BaseException) -> None:
    """Hand the script's error to `sys.excepthook`, without the frames that led to the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    _flush()
    sys.excepthook(type(error), error, trace)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
