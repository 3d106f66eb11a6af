"""Devices without hardware: their time passes only when they are told so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outlast.energy.devices.protocol import ClockedDevice
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.profile import Key

# A boundary that rounding puts a hair into the future has been reached.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Ran:
    """What a stretch of virtual time took.

    Attributes:
        seconds: Virtual time that passed.
        joules: Energy that the device drew in it.
    """

    seconds: float
    joules: float


class VirtualDevice(ClockedDevice, Protocol):
    """A clocked device with a virtual clock of its own.

    Attributes:
        now_seconds: Virtual time since the device was made.
        spent_joules: Energy since then, exact: not what its counter shows.
    """

    @property
    def now_seconds(self) -> float:
        """Virtual time since the device was made."""

    @property
    def spent_joules(self) -> float:
        """Energy since the device was made, not quantised as its counter is."""

    @property
    def target_clock_mhz(self) -> int:
        """The clock last asked for, whether or not it has come into force."""

    def run(self, key: Key) -> Ran:
        """Run one operation to its end."""

    def advance(self, seconds: float, key: Key | None = None) -> Ran:
        """Let time pass: waiting, or repeating an operation."""


class Timeline:
    """Virtual time, the energy spent in it, and a clock that changes with latency.

    Args:
        clock_mhz: In force at the beginning.
        switch_seconds: How long a newly asked clock takes to come into force.
        counter_seconds: How often the energy counter changes.

    Raises:
        EnergyError: For a negative latency or a counter that never changes.
    """

    def __init__(self, clock_mhz: int, switch_seconds: float, counter_seconds: float) -> None:
        if not switch_seconds >= 0.0:
            raise EnergyError(f"switch_seconds = {switch_seconds} is negative")
        if not counter_seconds > 0.0:
            raise EnergyError(f"counter_seconds = {counter_seconds} must be above 0")
        self.now_seconds = 0.0
        self.spent_joules = 0.0
        self.counter_joules = 0.0
        self.watts = 0.0
        self.target_clock_mhz = clock_mhz
        self._clock_mhz = clock_mhz
        self._switch_at_seconds = 0.0
        self._switch_seconds = switch_seconds
        self._counter_seconds = counter_seconds

    @property
    def clock_mhz(self) -> int:
        """The clock in force now."""
        changing = self.until_switch_seconds < math.inf
        return self._clock_mhz if changing else self.target_clock_mhz

    @property
    def until_switch_seconds(self) -> float:
        """How long the clock in force stays so; infinite when no change is under way."""
        left = self._switch_at_seconds - self.now_seconds
        return left if left > _ROUNDING * max(1.0, self.now_seconds) else math.inf

    def lock(self, clock_mhz: int) -> None:
        """Ask for a clock. A later request replaces one that is not in force yet."""
        if clock_mhz == self.target_clock_mhz:
            return
        self._clock_mhz = self.clock_mhz
        self.target_clock_mhz = clock_mhz
        self._switch_at_seconds = self.now_seconds + self._switch_seconds

    def pass_time(self, seconds: float, watts: float) -> None:
        """Spend time at constant power.

        The counter shows the energy at its last update, as NVML's does: a device of today updates
        it about every 100 ms.
        """
        self.now_seconds += seconds
        self.spent_joules += seconds * watts
        if seconds > 0.0:
            self.watts = watts
        updates = math.floor(self.now_seconds / self._counter_seconds * (1.0 + _ROUNDING))
        since_seconds = max(0.0, self.now_seconds - updates * self._counter_seconds)
        if since_seconds <= seconds:
            self.counter_joules = self.spent_joules - since_seconds * watts


def checked_seconds(seconds: float) -> float:
    """A stretch of time that can pass.

    Raises:
        EnergyError: When it is negative or no finite number.
    """
    if not 0.0 <= seconds < math.inf:
        raise EnergyError(f"seconds = {seconds} cannot pass on a device; give 0 or more")
    return seconds
