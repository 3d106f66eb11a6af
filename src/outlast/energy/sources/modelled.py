"""Joules from a power that the user states. Never used unless asked for by name."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from outlast.energy.sources.optional import Interval
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part


class ModelledSource:
    """A device that draws a power somewhere in a stated interval, in the middle as best guess.

    Args:
        name: Unique in a meter.
        part: What it stands for.
        low_watts: The least that it draws.
        high_watts: The most that it draws.
        clock: Monotonic seconds.

    Raises:
        EnergyError: The interval is not 0 <= low <= high, or its middle is 0.
    """

    kind: Kind = "modelled"
    update_seconds = 0.0

    def __init__(
        self,
        name: str,
        part: Part,
        *,
        low_watts: float,
        high_watts: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (0 <= low_watts <= high_watts < math.inf and high_watts > 0):
            raise EnergyError(
                f'the power of "{name}" from low_watts = {low_watts} to high_watts = {high_watts} '
                "is no interval: state 0 <= low_watts <= high_watts"
            )
        self.name = name
        self.part: Part = part
        self.flags = (f"not measured: {low_watts:g} to {high_watts:g} W were stated",)
        self._watts = (low_watts, high_watts)
        self._clock = clock
        self._began = clock()

    def joules(self) -> float:
        """Stated power times the time since this source was made."""
        return self.interval().joules

    def interval(self) -> Interval:
        """As `joules`, with the stated interval."""
        low, high = self._watts
        seconds = self._clock() - self._began
        return Interval(low * seconds, (low + high) / 2 * seconds, high * seconds)
