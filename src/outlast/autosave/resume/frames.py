"""The frames of a running program that lead to its step, and where each of them stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.program.sites import Rewritten, Site, body_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType


class Place(NamedTuple):
    """Where a frame stands.

    Attributes:
        body: Name of its body.
        site: Number of the innermost site there; None for a frame that was never entered again.
        names: Its live local names and their values; none of a module, whose names are global.
    """

    body: str
    site: int | None
    names: dict[str, Any]


class Frames:
    """Looks at frames by the sites of a rewritten program."""

    def __init__(self, files: Iterable[Rewritten]) -> None:
        self.sites: dict[int, Site] = {}
        self._calls: dict[str, list[Site]] = {}
        for each in files:
            for site in each.sites:
                self.sites[site.number] = site
                if site.kind == "call":
                    self._calls.setdefault(site.body, []).append(site)
            for body in each.bodies:
                self._calls.setdefault(body, [])

    def of(self, frame: FrameType | None) -> list[FrameType]:
        """The frames of rewritten bodies, outermost first, up to `frame`."""
        found = []
        while frame is not None:
            if self.body_of(frame) in self._calls:
                found.append(frame)
            frame = frame.f_back
        return found[::-1]

    def body_of(self, frame: FrameType) -> str:
        """Name of the body that a frame executes."""
        code = frame.f_code
        return body_name(code.co_filename, code.co_qualname, code.co_firstlineno)

    def places(self, frame: FrameType, number: int) -> list[Place]:
        """Where all frames up to `frame` stand, which is at site `number`."""
        frames = self.of(frame)
        return [
            self._place(each, self.sites[number] if each is frame else self._call(each))
            for each in frames
        ]

    def matches(self, frame: FrameType, number: int, target: list[Place]) -> int | None:
        """The depth of `frame`, if the way to `target` leads through site `number` there."""
        depth = len(self.of(frame)) - 1
        if depth >= len(target) or target[depth].body != self.body_of(frame):
            return None
        aim = target[depth].site
        if aim is None or (number != aim and number not in self.sites[aim].around):
            return None
        return depth

    def _call(self, frame: FrameType) -> Site | None:
        """The call that a frame is in."""
        line = frame.f_lineno
        over = [
            site for site in self._calls[self.body_of(frame)] if site.line <= line <= site.last_line
        ]
        return min(over, key=lambda site: site.last_line - site.line, default=None)

    def _place(self, frame: FrameType, site: Site | None) -> Place:
        wanted = () if site is None or frame.f_code.co_name == "<module>" else site.names
        names = {name: frame.f_locals[name] for name in wanted if name in frame.f_locals}
        return Place(self.body_of(frame), None if site is None else site.number, names)
