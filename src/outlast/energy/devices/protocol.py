"""What the parts above need of a device, real or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outlast.energy.reading import Kind
    from outlast.hardware.figure import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A device at one moment.

    Attributes:
        joules: Total-energy counter since an arbitrary beginning.
        watts: Power now.
        sm_clock_mhz: Clock of the compute units.
        memory_clock_mhz: Clock of the memory.
        celsius: Temperature of the chip.
        throttle_reasons: Why the clock is below the one asked for, in NVML's words; empty if not.
    """

    joules: float | Unavailable
    watts: float | Unavailable
    sm_clock_mhz: int | Unavailable
    memory_clock_mhz: int | Unavailable
    celsius: float | Unavailable
    throttle_reasons: tuple[str, ...] | Unavailable


class Device(Protocol):
    """A device that can be read: a real, a replayed or an analytic one.

    Attributes:
        name: Model, in words.
        uuid: Identifier that survives reordering.
        kind: How its energies come about: "measured", "replayed" or "simulated".
        counter_seconds: How often the energy counter changes.
    """

    name: str
    uuid: str
    kind: Kind
    counter_seconds: float

    def read(self) -> DeviceState:
        """The state now. Never waits, never sets anything."""


class ClockedDevice(Device, Protocol):
    """A device whose clocks can be set. Only `outlast.energy.control` calls these."""

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """Clocks that it supports, ascending."""

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this clock from now on (after the device's switch latency)."""

    def limit_power(self, watts: float) -> None:
        """Do not draw more than this from now on."""

    def unlock(self) -> None:
        """Give clock and power limit back to the driver's defaults."""
