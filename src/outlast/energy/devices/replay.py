"""A device that repeats a measured profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.energy.devices.protocol import DeviceState
from outlast.energy.devices.virtual import Ran, Timeline, checked_seconds
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.profile import Key, Point, Profile
    from outlast.energy.reading import Kind

_NOT_PROFILED = Unavailable("a replayed profile holds only clocks, times and energies")


class ReplayDevice:
    """Runs operations in virtual time with the seconds and joules that a profile measured.

    It begins at the profile's highest clock. While a newly asked clock is not in force, an
    operation goes on at the old one: its work is shared in proportion to time.

    Args:
        profile: Time and energy of operations; also the power while the device waits.
        uuid: Identifier.
        switch_seconds: How long a newly asked clock takes to come into force.
        counter_seconds: How often the energy counter changes.

    Attributes:
        name: The profile's device.
        kind: "replayed".
    """

    kind: Kind = "replayed"

    def __init__(
        self,
        profile: Profile,
        *,
        uuid: str = "replay-0",
        switch_seconds: float = 0.0,
        counter_seconds: float = 0.1,
    ) -> None:
        clocks = {point.clock_mhz for curve in profile.curves.values() for point in curve.points}
        self._clocks_mhz = tuple(sorted(clocks - {0}))
        if not self._clocks_mhz:
            raise EnergyError("the profile has no operation with a clock: there is none to replay")
        self._profile = profile
        self.name = f"{profile.device} (replayed profile)"
        self.uuid = uuid
        self.counter_seconds = counter_seconds
        self._timeline = Timeline(self._clocks_mhz[-1], switch_seconds, counter_seconds)
        self._timeline.watts = profile.blocking_watts

    @property
    def now_seconds(self) -> float:
        """Virtual time since the device was made."""
        return self._timeline.now_seconds

    @property
    def spent_joules(self) -> float:
        """Energy since the device was made, not quantised as its counter is."""
        return self._timeline.spent_joules

    @property
    def target_clock_mhz(self) -> int:
        """The clock last asked for, whether or not it has come into force."""
        return self._timeline.target_clock_mhz

    def read(self) -> DeviceState:
        """Counter, power and clock; a profile knows nothing else."""
        return DeviceState(
            joules=self._timeline.counter_joules,
            watts=self._timeline.watts,
            sm_clock_mhz=self._timeline.clock_mhz,
            memory_clock_mhz=_NOT_PROFILED,
            celsius=_NOT_PROFILED,
            throttle_reasons=_NOT_PROFILED,
        )

    def clocks_mhz(self) -> tuple[int, ...]:
        """Clocks at which an operation was measured, ascending."""
        return self._clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this clock after the switch latency.

        Raises:
            EnergyError: When the profile has no such clock; names the range that it has.
        """
        if clock_mhz not in self._clocks_mhz:
            raise EnergyError(
                f"clock = {clock_mhz} MHz is not in the profile of {self.name}, which has "
                f"{len(self._clocks_mhz)} clocks from {self._clocks_mhz[0]} to "
                f"{self._clocks_mhz[-1]} MHz"
            )
        self._timeline.lock(clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Not possible.

        Raises:
            EnergyError: Always: a profile was measured under one power limit.
        """
        raise EnergyError(
            f"power limit = {watts:g} W cannot be replayed: the profile was measured under one "
            "limit; use an AnalyticDevice to try others"
        )

    def unlock(self) -> None:
        """Go back to the highest clock."""
        self._timeline.lock(self._clocks_mhz[-1])

    def run(self, key: Key) -> Ran:
        """Run one operation to its end.

        Raises:
            EnergyError: When the profile lacks it, or lacks it at the clock in force.
        """
        return self._work(key, operations=1.0, seconds=float("inf"))

    def advance(self, seconds: float, key: Key | None = None) -> Ran:
        """Let time pass: waiting at the blocking power, or repeating an operation.

        Raises:
            EnergyError: For a negative time, or an operation that the profile lacks.
        """
        seconds = checked_seconds(seconds)
        if key is not None:
            return self._work(key, operations=float("inf"), seconds=seconds)
        self._timeline.pass_time(seconds, self._profile.blocking_watts)
        return Ran(seconds, seconds * self._profile.blocking_watts)

    def _work(self, key: Key, *, operations: float, seconds: float) -> Ran:
        """Until so many operations are done, or so much time has passed."""
        begun_seconds, begun_joules = self.now_seconds, self.spent_joules
        while operations > 0.0 and seconds > 0.0:
            point = self._point(key)
            left = operations * point.seconds
            span = min(left, seconds, self._timeline.until_switch_seconds)
            self._timeline.pass_time(span, point.joules / point.seconds)
            operations = 0.0 if span == left else operations - span / point.seconds
            seconds -= span
        return Ran(self.now_seconds - begun_seconds, self.spent_joules - begun_joules)

    def _point(self, key: Key) -> Point:
        curve = self._profile.curve(key)
        point = curve.top if curve.top.clock_mhz == 0 else curve.at(self._timeline.clock_mhz)
        if not point.seconds > 0.0:
            raise EnergyError(
                f"stage {key.stage} {key.phase} takes {point.seconds} s at {point.clock_mhz} MHz "
                "in the profile: an operation that is replayed must take time"
            )
        return point
