"""What a `with` statement has entered, when the statement is executed again on the way back."""

from __future__ import annotations

import io
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from outlast.autosave.resume.session import Session


class Entered:
    """Stands for the expression of a `with` whose value has come back with the local names.

    It is not entered a second time, which would begin a file again; it is left as usual.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        return self._value.__exit__(kind, error, traceback)


class Held:
    """A context of the program's own that set-up has entered.

    What is done at its end has been done when the program comes back to a place behind it: it is
    not done again to what has been restored.
    """

    def __init__(self, session: Session, context: Any) -> None:
        self._session = session
        self._context = context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        if self._session.live:
            return self._context.__exit__(kind, error, traceback)
        # Kept, since a generator that is let go of runs to its end.
        self._session.abandoned.append(self._context)
        return None


def is_own(context: Any, files: frozenset[str]) -> bool:
    """Whether the program's own text says what a context does at its end."""
    generator = getattr(context, "gen", None)
    if isinstance(generator, types.GeneratorType):
        return generator.gi_code.co_filename in files
    module = sys.modules.get(type(context).__module__)
    return getattr(module, "__file__", None) in files


def entered(values: Mapping[str, Any], name: str, files: frozenset[str]) -> Entered | None:
    """The value of `name`, if it came back as it was: a file, a bar, an object of the program.

    Every other context, as `torch.autocast`, a profiler, or a generator function of the program
    under `contextmanager`, is made and entered anew: its beginning is executed again.

    Args:
        values: Local names of the frame.
        name: What the `with` statement binds.
        files: Files of the program, whose classes' objects are its own.
    """
    value = values.get(name)
    if value is None or not hasattr(value, "__exit__"):
        return None
    is_bar = type(value).__module__.split(".")[0] == "tqdm"
    if isinstance(value, io.IOBase) or is_bar or is_own(value, files):
        return Entered(value)
    return None
