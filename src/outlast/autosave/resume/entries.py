"""How a program has come into the functions on the way: whether it could be brought there again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from outlast.autosave.resume.frames import Frames


class _Entry(NamedTuple):
    """How often a body was entered from one place.

    Attributes:
        by: The body, the calling frame, its statement, and the how manieth time that was executed.
        times: How often.
        wrapper: A function of the program that called the body after set-up and that is not on the
            way: what it does before and after the call is not seen.
    """

    by: tuple[int, int, int | None, int]
    times: int
    wrapper: CodeType | None


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
        wrapper = None if in_setup or not depth else self._between(frames[-2], frames[-1])
        self._entries = {place: each for place, each in self._entries.items() if place < depth}
        self._entries[depth] = _Entry(by, times, wrapper)

    def refuse_unseen(self, frames: list[FrameType]) -> None:
        """Refuse a way through calls that cannot be told from others.

        Raises:
            AutosaveError: For a function that was called more than once by one statement, or
                through one whose calls are not seen.
        """
        for depth, each in enumerate(frames):
            entry = self._entries.get(depth)
            if entry is None:
                continue
            code, wrapper = each.f_code, entry.wrapper
            if wrapper is not None:
                raise AutosaveError(
                    f"{wrapper.co_filename}, line {wrapper.co_firstlineno}: `{wrapper.co_name}` "
                    f"calls `{code.co_name}`, which trains, in a way that is not seen in the "
                    "program's text, so that it cannot be resumed; call it by its name there"
                )
            if entry.times > 1:
                raise AutosaveError(
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` trains, and "
                    "was called several times in a way that is not seen in the program's text (by "
                    "a library, through a list or a wrapper), so that it cannot be resumed in its "
                    f"call number {entry.times}; call it by its name, in a loop of its own"
                )

    def _between(self, outer: FrameType, inner: FrameType) -> CodeType | None:
        """What of the program stands between two frames of the way."""
        between = inner.f_back
        while between is not None and between is not outer:
            if between.f_code.co_filename in self._files:
                return between.f_code
            between = between.f_back
        return None
