"""The frames of a running program that lead to its step, and where each of them stands."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.program.sites import Rewritten, Site, body_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

MODULE = "<module>"


class Place(NamedTuple):
    """Where a frame stands.

    Attributes:
        body: Number of its body in the program.
        site: Number of the innermost site there; None for a frame that was never entered again.
        names: Its live local names and their values; none of a module, whose names are global.
    """

    body: int
    site: int | None
    names: dict[str, Any]


class Frames:
    """Looks at frames by the sites of a rewritten program.

    Args:
        files: The program.

    Attributes:
        sites: Number to site.
    """

    def __init__(self, files: Iterable[Rewritten]) -> None:
        files = list(files)
        self.sites: dict[int, Site] = {site.number: site for file in files for site in file.sites}
        self._leading: dict[str, list[Site]] = {}
        for site in self.sites.values():
            if site.kind in ("call", "yield"):
                self._leading.setdefault(site.body, []).append(site)
        self._numbers: dict[str, int] = {}
        for file in files:
            for body in _in_order(file):
                self._numbers[body] = len(self._numbers)

    def of(self, frame: FrameType | None) -> list[FrameType]:
        """The frames of bodies on the way to training, outermost first, up to `frame`."""
        found = []
        while frame is not None:
            if name_of(frame.f_code) in self._numbers:
                found.append(frame)
            frame = frame.f_back
        return found[::-1]

    def places(
        self, frame: FrameType, number: int, kept: Callable[[Site, str, Any], Any]
    ) -> list[Place]:
        """Where all frames up to `frame` stand, which is at site `number`.

        Args:
            frame: The innermost.
            number: Of its site.
            kept: Gives what is kept of a local name at a site, for its value.
        """
        found = []
        for type_ in self.of(frame):
            site = self.sites[number] if type_ is frame else self.leading(type_)
            names = {} if type_.f_code.co_name == MODULE else self.names_at(type_, site, kept)
            where = None if site is None else site.number
            found.append(Place(self._numbers[name_of(type_.f_code)], where, names))
        return found

    def names_at(
        self, frame: FrameType, site: Site | None, kept: Callable[[Site, str, Any], Any]
    ) -> dict[str, Any]:
        """The live local names of a frame at a site."""
        if site is None:
            return {}
        values = {_as_written(name): f_name for name, f_name in frame.f_locals.items()}
        return {
            name: kept(site, name, values[name]) for name in sorted(site.names) if name in values
        }

    def matches(self, frame: FrameType, number: int, target: list[Place]) -> int | None:
        """The depth of `frame`, if the way to `target` leads through site `number` there."""
        frames = self.of(frame)
        if not self._on_way(frames, target):
            return None
        aim = target[len(frames) - 1].site
        if aim is None or (number != aim and number not in self.sites[aim].around):
            return None
        return len(frames) - 1

    def is_left(self, frame: FrameType, target: list[Place]) -> bool:
        """Whether `frame` is in a call that is to be left, since the way leads elsewhere."""
        frames = self.of(frame)
        return (
            not self._on_way(frames, target)
            and len(frames) > 1
            and self.leading(frames[-2]) is not None
        )

    def _on_way(self, frames: list[FrameType], target: list[Place]) -> bool:
        """Whether the way to `target` leads through these frames."""
        return len(frames) <= len(target) and all(
            self._numbers[name_of(frame.f_code)] == place.body
            and (frame is frames[-1] or self.number_of(self.leading(frame)) == place.site)
            for frame, place in zip(frames, target, strict=False)
        )

    def body_of(self, frame: FrameType) -> int:
        """Number of the body that a frame of the way executes."""
        return self._numbers[name_of(frame.f_code)]

    def leading(self, frame: FrameType) -> Site | None:
        """The call, or the `yield`, that a frame is in."""
        line, column = _position(frame)
        sites = self._leading.get(name_of(frame.f_code), ())
        return next((site for site in sites if site.covers(line, column)), None)

    @staticmethod
    def number_of(site: Site | None) -> int | None:
        """Number of a site, if there is one."""
        return None if site is None else site.number


def _in_order(file: Rewritten) -> list[str]:
    """Bodies of a file in the order of their lines, which a change above them leaves as it is."""
    place = f"{file.source.path}:"
    return sorted(file.bodies, key=lambda body: int(body.removeprefix(place).partition(":")[0]))


def name_of(code: CodeType) -> str:
    """Name of the body that code was made from, as its sites have it."""
    return body_name(code.co_filename, code.co_qualname, code.co_firstlineno)


def _as_written(name: str) -> str:
    """A local name as the program has it: in methods, Python puts the class before ``__name``."""
    end = name.find("__", 2)
    private = name[:1] == "_" and name[1:2] != "_" and end > 0 and not name.endswith("__")
    return name[end:] if private else name


def _position(frame: FrameType) -> tuple[int | None, int | None]:
    """Line and column where the expression ends that a frame is computing."""
    positions = frame.f_code.co_positions()
    _, line, _, column = next(
        itertools.islice(positions, frame.f_lasti // 2, None), (None, None, None, None)
    )
    # Python can be told not to keep columns.
    return (frame.f_lineno, None) if line is None or column is None else (line, column)
