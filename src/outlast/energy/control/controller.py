"""What sets clocks: a small protocol, and a controller that only says what it would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Controller(Protocol):
    """Sets the clock and the power limit of one device.

    Attributes:
        uuid: Of the device.
    """

    @property
    def uuid(self) -> str:
        """Of the device."""

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """Clocks that can be locked, ascending."""

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force, to be put back later."""

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this SM clock from now on.

        Raises:
            EnergyError: When it cannot be set; says why and what helps.
        """

    def limit_power(self, watts: float) -> None:
        """Do not draw more than this from now on.

        Raises:
            EnergyError: When it cannot be set; says why and what helps.
        """

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Give the clock back to the driver, and put the power limit back where one is given.

        Args:
            power_watts: The power limit to put back; None leaves it alone.
            clock: Whether the clock is given back; False leaves it alone.

        Raises:
            EnergyError: When one of both cannot be done; the other is done nevertheless.
        """

    def description(self) -> Mapping[str, str]:
        """How another process can make this controller again, for the lease file."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that would be set.

    Attributes:
        words: In plain English.
        command: The equivalent command line.
    """

    words: str
    command: str

    def __str__(self) -> str:
        return f"would {self.words}: {self.command}"


class DryRun:
    """Takes settings like a controller, sets nothing, and says exactly what would be set.

    Args:
        uuid: Of the device; ``nvidia-smi --id`` takes UUIDs as well as indices.
        clocks_mhz: Clocks that the device supports, where known: others are refused as they would
            be by the device.
        power_limit_watts: The limit in force, where known.
        write: Gets every action as a line; `print` by default.

    Attributes:
        actions: What would have been set, in order.
    """

    def __init__(
        self,
        uuid: str,
        *,
        clocks_mhz: tuple[int, ...] | Unavailable | None = None,
        power_limit_watts: float | None = None,
        write: Callable[[str], object] = print,
    ) -> None:
        self.uuid = uuid
        self.actions: list[Action] = []
        unknown = Unavailable("a dry run asks no device for its clocks")
        self._clocks_mhz = unknown if clocks_mhz is None else clocks_mhz
        self._power_limit_watts = power_limit_watts
        self._write = write

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """Those that it was given."""
        return self._clocks_mhz

    def power_limit_watts(self) -> float | Unavailable:
        """The one that it was given."""
        if self._power_limit_watts is None:
            return Unavailable("a dry run asks no device for its power limit")
        return self._power_limit_watts

    def lock_clock(self, clock_mhz: int) -> None:
        """Say that the clock would be locked.

        Raises:
            EnergyError: When the device is known not to support it.
        """
        check_clock(clock_mhz, self._clocks_mhz, self.uuid)
        self._say(
            f"lock the SM clock of {self.uuid} to {clock_mhz} MHz",
            f"nvidia-smi --id={self.uuid} --lock-gpu-clocks={clock_mhz},{clock_mhz}",
        )

    def limit_power(self, watts: float) -> None:
        """Say that the power would be limited."""
        self._say(
            f"limit the power of {self.uuid} to {watts:g} W",
            f"nvidia-smi --id={self.uuid} --power-limit={watts:g}",
        )

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Say that the clock would be given back, and the power limit put back."""
        if clock:
            self._say(
                f"give the SM clock of {self.uuid} back to the driver",
                f"nvidia-smi --id={self.uuid} --reset-gpu-clocks",
            )
        if power_watts is not None:
            self.limit_power(power_watts)

    def description(self) -> Mapping[str, str]:
        """It needs none: it writes no lease."""
        return {"kind": "dry-run", "uuid": self.uuid}

    def _say(self, words: str, command: str) -> None:
        action = Action(words, command)
        self.actions.append(action)
        self._write(str(action))


def try_all(*steps: Callable[[], None]) -> None:
    """Do every step, also when one before it failed.

    Raises:
        EnergyError: With the sentences of all that failed.
    """
    failures = []
    for step in steps:
        try:
            step()
        except EnergyError as error:
            failures.append(str(error))
    if failures:
        raise EnergyError("; ".join(failures))


def check_clock(clock_mhz: int, known: tuple[int, ...] | Unavailable, device: str) -> None:
    """Refuse a clock that a device is known not to support.

    Raises:
        EnergyError: With the nearest supported clock.
    """
    if clock_mhz <= 0:
        raise EnergyError(
            f"clock = {clock_mhz} MHz cannot be locked on {device}: it must be above 0"
        )
    if isinstance(known, Unavailable) or clock_mhz in known:
        return
    nearest = min(known, key=lambda clock: abs(clock - clock_mhz))
    raise EnergyError(
        f"clock = {clock_mhz} MHz is not supported by {device}; the nearest is {nearest} MHz"
    )
