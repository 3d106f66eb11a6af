"""How a program has come into the functions on the way: whether it could be brought there again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from outlast.autosave.resume.entered import is_own
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from types import FrameType

    from outlast.autosave.resume.frames import Frames


class _Entry(NamedTuple):
    """How often a body was entered from one place.

    Attributes:
        by: The body, the calling frame, its statement, and the how manieth time that was executed.
        times: How often.
        wrapped: Why it cannot be entered again: after set-up, something of the program called it
            that is not on the way, and would be done twice. None where nothing did.
        unseen: Whether it was called after set-up by a statement that is not on the way.
    """

    by: tuple[int, int, int | None, int]
    times: int
    wrapped: str | None
    unseen: bool


class Entries:
    """Remembers for each function on the way how it was called.

    Args:
        frames: Looks at the frames of the program.
        files: Of the program.
    """

    def __init__(self, frames: Frames, files: frozenset[str]) -> None:
        self._frames = frames
        self._files = files
        self._entries: dict[int, _Entry] = {}

    def entered(self, frames: list[FrameType], visit: int, *, in_setup: bool) -> None:
        """The innermost of the frames on the way begins.

        Args:
            frames: The frames on the way, outermost first.
            visit: The how manieth time the statement is executed that called it.
            in_setup: Whether the next process does the same in its set-up.
        """
        depth, body = len(frames) - 1, self._frames.body_of(frames[-1])
        caller, site = 0, None
        if depth:
            caller, site = id(frames[-2]), self._frames.number_of(self._frames.leading(frames[-2]))
        by = (body, caller, site, visit)
        before = self._entries.get(depth)
        times = before.times + 1 if before is not None and before.by == by else 1
        wrapped = None if in_setup or not depth else self._between(frames[-2], frames[-1])
        self._entries = {place: entry for place, entry in self._entries.items() if place < depth}
        unseen = depth > 0 and site is None and not in_setup
        self._entries[depth] = _Entry(by, times, wrapped, unseen)

    def refuse_unseen(self, frames: list[FrameType]) -> None:
        """Refuse a way through calls that cannot be told from others.

        Raises:
            AutosaveError: For a function that was called more than once by one statement, or
                after set-up in a way that is not seen.
        """
        for depth, frame in enumerate(frames):
            entry = self._entries.get(depth)
            if entry is None:
                continue
            code = frame.f_code
            if entry.wrapped is not None:
                raise AutosaveError(entry.wrapped)
            if entry.times > 1 or entry.unseen:
                raise AutosaveError(
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` trains, and "
                    "was called several times, or after other training, in a way that is not seen "
                    "in the program's text (by a library, through a list or a wrapper), so that it "
                    "cannot be resumed in this call; call it by its name, in a loop of its own"
                )

    def _between(self, outer: FrameType, inner: FrameType) -> str | None:
        """What is wrong with what stands between two frames of the way; None for nothing."""
        name, line = inner.f_code.co_name, inner.f_code.co_firstlineno
        between = inner.f_back
        while between is not None and between is not outer:
            code = between.f_code
            if code.co_filename in self._files:
                return (
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` calls "
                    f"`{name}`, which trains, in a way that is not seen in the program's text, so "
                    "that it cannot be resumed; call it by its name there"
                )
            if code in _DECORATED and is_own(between.f_locals["self"], self._files):
                return (
                    f"{inner.f_code.co_filename}, line {line}: `{name}`, which trains, is "
                    "decorated with a context of the program, whose beginning would be done "
                    "twice; enter it by a `with` statement in the function"
                )
            between = between.f_back
        return None


def _nothing() -> None:
    """Stands for a decorated function."""


_DECORATED = frozenset({contextlib.ContextDecorator()(_nothing).__code__})
"""What calls functions that are decorated with a context."""
