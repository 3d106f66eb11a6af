"""Time and energy of operations at each clock: what a profiler measures and the planner needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.energy.reading import Kind


class Point(NamedTuple):
    """One operation at one clock.

    Attributes:
        clock_mhz: SM clock; 0 for an operation whose time no clock changes (a transfer).
        seconds: Duration.
        joules: Energy of one device while the operation runs, idle power included.
    """

    clock_mhz: int
    seconds: float
    joules: float


class Key(NamedTuple):
    """What an operation's time and energy depend on: its (virtual) stage and its phase."""

    stage: int
    phase: str


@dataclass(frozen=True)
class Curve:
    """An operation at all measured clocks.

    Attributes:
        points: By ascending clock; no clock twice.
    """

    points: tuple[Point, ...]

    @property
    def top(self) -> Point:
        """At the highest clock, which need not be the fastest point of a noisy profile."""
        return self.points[-1]

    def at(self, clock_mhz: int) -> Point:
        """The point of a clock.

        Raises:
            EnergyError: When it was not measured.
        """
        for point in self.points:
            if point.clock_mhz == clock_mhz:
                return point
        known = ", ".join(str(point.clock_mhz) for point in self.points)
        raise EnergyError(f"clock = {clock_mhz} MHz is not in the profile, which has {known}")

    def pareto(self, blocking_watts: float) -> tuple[Point, ...]:
        """The points that are worth running at, fastest first.

        Slower ones take less *effective* energy, joules - blocking_watts * seconds: a device that
        finishes early goes on to draw its blocking power (Perseus, SOSP'24, section 4.1).
        """
        best: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.seconds, p.joules)):
            if not best or effective(point, blocking_watts) < effective(best[-1], blocking_watts):
                best.append(point)
        return tuple(best)


@dataclass(frozen=True)
class Profile:
    """Curves of all operations of a training step on one kind of device.

    Attributes:
        curves: By stage and phase.
        blocking_watts: Power of a device that waits for another one.
        device: Name of the device, in words.
        kind: How the curves were found.
        flags: What a reader of plans made from it must know, one sentence each.
    """

    curves: Mapping[Key, Curve]
    blocking_watts: float
    device: str = "unknown device"
    kind: Kind = "measured"
    flags: tuple[str, ...] = ()

    def curve(self, key: Key) -> Curve:
        """The curve of an operation.

        Raises:
            EnergyError: When the profile has none, with those that it has.
        """
        if key not in self.curves:
            known = ", ".join(f"stage {k.stage} {k.phase}" for k in sorted(self.curves))
            raise EnergyError(
                f"the profile has no stage {key.stage} {key.phase}; it has {known}: measure it too"
            )
        return self.curves[key]


def effective(point: Point, blocking_watts: float) -> float:
    """Joules above those that the device would draw waiting for the same time.

    Not for operations on links, which keep no device from drawing them: see `curves_of`.
    """
    return point.joules - blocking_watts * point.seconds
