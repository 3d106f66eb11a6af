"""What a `with` statement has entered, when the statement is executed again on the way back."""

from __future__ import annotations

import contextlib
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


class EnteredStack(Entered):
    """Stands for an `ExitStack` that has come back, with what is to be done at its end.

    What it has entered and concerns the process, as `torch.autocast`, is entered anew.
    """

    def __init__(self, value: contextlib.ExitStack, files: frozenset[str]) -> None:
        super().__init__(value)
        self._contexts: list[Any] = [
            context
            for _, leave in value._exit_callbacks  # type: ignore[attr-defined]
            if hasattr(context := getattr(leave, "__self__", None), "__enter__")
            and not isinstance(context, io.IOBase)
            and not is_own(context, files)
        ]

    def __enter__(self) -> Any:
        for context in self._contexts:
            context.__enter__()
        return super().__enter__()


class Held:
    """A context that a `with` statement of the program enters.

    One of the program's own is saved, and on the way back it is not entered again: what is done at
    its beginning has been done. Nor is it ended on the way to a place behind it. Every other one,
    as `torch.autocast` or a profiler, concerns the process; it is made and entered anew.

    Args:
        session: Of the program.
        context: What it enters.
        own: Whether the program's own text says what is done at its beginning and end.
        came_back: Whether it is in a context that was saved.
        value: What the context gave when it was entered.
    """

    def __init__(
        self,
        session: Session,
        context: Any,
        *,
        own: bool,
        came_back: bool = False,
        value: Any = None,
    ) -> None:
        self._session = session
        self._context = context
        self._own = own
        self._came_back = came_back
        self._value = value

    def __enter__(self) -> Any:
        if not self._came_back:
            self._value = self._context.__enter__()
        self._came_back = False
        return self._value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        if self._session.live or not self._own:
            return self._context.__exit__(kind, error, traceback)
        # Kept, since a generator that is let go of runs to its end.
        self._session.abandoned.append(self._context)
        return None

    def __reduce__(self) -> Any:
        if not self._own:
            return _nothing, ()
        return _came_back, (self._session, self._context, self._value)


def _nothing() -> None:
    """Stands for a context that is not saved."""


def _came_back(session: Session, context: Any, value: Any) -> Held:
    return Held(session, context, own=True, came_back=True, value=value)


def is_own(context: Any, files: frozenset[str]) -> bool:
    """Whether the program's own text says what a context does at its end."""
    generator = getattr(context, "gen", None)
    if isinstance(generator, types.GeneratorType):
        return generator.gi_code.co_filename in files
    module = sys.modules.get(type(context).__module__)
    return getattr(module, "__file__", None) in files


def entered(
    values: Mapping[str, Any], name: str, files: frozenset[str] = frozenset()
) -> Entered | None:
    """The value of `name`, if it came back as it was: a file, a bar, an object of `files`.

    Args:
        values: Local names of the frame.
        name: What the `with` statement binds.
        files: Files whose classes' objects are taken as they came back.
    """
    value = values.get(name)
    if value is None or not hasattr(value, "__exit__"):
        return None
    is_bar = type(value).__module__.split(".")[0] == "tqdm"
    if isinstance(value, io.IOBase) or is_bar or is_own(value, files):
        return Entered(value)
    return None


def stack(values: Mapping[str, Any], name: str, files: frozenset[str]) -> EnteredStack | None:
    """The value of `name`, if it is an `ExitStack` that came back.

    Args:
        values: Local names of the frame.
        name: What the `with` statement binds.
        files: Of the program.
    """
    value = values.get(name)
    return EnteredStack(value, files) if isinstance(value, contextlib.ExitStack) else None
