"""Joules of a device that shows its power but has no counter: power integrated over time."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from outlast.energy.sources.optional import Interval
from outlast.energy.sources.track import asked
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part

SHORTEST_PERIOD_SECONDS = 0.1
"""NVML renews its power reading no faster; asking more often costs and tells nothing."""

# nvml.h, nvmlDeviceGetPowerUsage: +-5 % on older GPUs; it states none for newer ones.
_SENSOR_ERROR = 0.05


class Snapshot(NamedTuple):
    """What an integral has taken in so far.

    Attributes:
        joules: Without those of the gaps around failed samples.
        seconds: Likewise.
        samples: Those that gave a power.
        failures: Those that gave none.
    """

    joules: float
    seconds: float
    samples: int
    failures: int


class PowerIntegral:
    """The trapezoid rule over power samples; one sample at each read.

    Its interval takes the lower and the higher of two neighbouring samples over each gap, and the
    sensor's error. What the power does between two samples is not seen. A failed sample leaves a
    gap that is not counted; `losses` says how many gaps there are.

    Args:
        name: Unique in a meter.
        part: What it measures.
        watts: Gives the power now.
        period_seconds: How often it wants to be read.
        clock: Monotonic seconds.

    Raises:
        EnergyError: The period is shorter than power readings are renewed.
    """

    kind: Kind = "modelled"

    def __init__(
        self,
        name: str,
        part: Part,
        watts: Callable[[], float | Unavailable],
        *,
        period_seconds: float = SHORTEST_PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not period_seconds >= SHORTEST_PERIOD_SECONDS:
            raise EnergyError(
                f"a power sampling period of {period_seconds} s is too short: take at least "
                f"{SHORTEST_PERIOD_SECONDS} s"
            )
        self.name = name
        self.part: Part = part
        self.update_seconds = self.poll_seconds = period_seconds
        self._watts = watts
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None
        self._sum = Interval(0.0, 0.0, 0.0)
        self._longest_gap_seconds = 0.0
        self.sampled_seconds = 0.0
        self.samples = 0
        self.losses = 0
        self.failures = 0
        self.failure: Unavailable | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """How the figure came about, and gaps between samples."""
        made: tuple[str, ...] = ("power integrated over time: no energy counter",)
        if self.failures:
            made = (*made, f"{self.failures} power samples failed")
        if self._longest_gap_seconds <= 10 * self.poll_seconds:
            return made
        return (*made, f"no power sample for up to {self._longest_gap_seconds:.1f} s")

    def joules(self) -> float | Unavailable:
        """Takes a sample; joules since the first one."""
        interval = self.interval()
        return interval if isinstance(interval, Unavailable) else interval.joules

    def interval(self) -> Interval | Unavailable:
        """Takes a sample; joules since the first one with their interval.

        A failed sample is Unavailable: the power around it is not known, and counting goes on with
        the next one that succeeds.
        """
        # Outside the lock, so that nobody waits for the driver in `snapshot`.
        watts = asked(self.name, self._checked_watts)
        with self._lock:
            now = self._clock()
            if isinstance(watts, Unavailable):
                if self._last is not None:
                    self.losses += 1
                self._last, self.failure = None, watts
                self.failures += 1
                return watts
            if self._last is not None:
                self._add(*self._last, now, watts)
            self._last = (now, watts)
            self.samples += 1
            return self._sum

    def _checked_watts(self) -> float | Unavailable:
        watts = self._watts()
        if isinstance(watts, Unavailable) or 0 <= watts < math.inf:
            return watts
        return Unavailable(f"the power of {self.name} reads {watts} W")

    def _add(self, before: float, before_watts: float, now: float, now_watts: float) -> None:
        gap = now - before
        low, high = min(before_watts, now_watts), max(before_watts, now_watts)
        self._sum = Interval(
            self._sum.low_joules + low * (1 - _SENSOR_ERROR) * gap,
            self._sum.joules + (before_watts + now_watts) / 2 * gap,
            self._sum.high_joules + high * (1 + _SENSOR_ERROR) * gap,
        )
        self.sampled_seconds += gap
        self._longest_gap_seconds = max(self._longest_gap_seconds, gap)

    def snapshot(self) -> Snapshot:
        """What was taken in so far, without a new sample."""
        with self._lock:
            return Snapshot(self._sum.joules, self.sampled_seconds, self.samples, self.failures)
