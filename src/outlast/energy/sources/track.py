"""One source as a meter reads it: nothing that it raises gets through, no fall is forgotten."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outlast.energy.devices.protocol import DeviceState
from outlast.energy.sources.optional import (
    Flagged,
    Interruptible,
    Interval,
    WithInterval,
    WithPower,
    WithState,
)
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.sources.protocol import Source

Value = TypeVar("Value")


class Count(NamedTuple):
    """What a source's counter said.

    Attributes:
        interval: Joules since the source's beginning.
        breaks: How often it had lost count by then: counts of unequal `breaks` have no difference.
    """

    interval: Interval
    breaks: int


def asked(name: str, read: Callable[[], Value | Unavailable]) -> Value | Unavailable:
    """What `read` gives; whatever it raises becomes the reason, so that the program goes on."""
    try:
        return read()
    except Exception as error:  # a meter must never end what it measures
        return Unavailable(f"{name} cannot be read ({type(error).__name__}: {error})")


def state_of(source: Source) -> DeviceState | None:
    """The state of a source's device, with reasons where it fails; None where it shows none."""
    if not isinstance(source, WithState):
        return None
    state: DeviceState | Unavailable = asked(source.name, source.state)
    if not isinstance(state, Unavailable):
        return state
    return DeviceState(
        joules=state,
        watts=state,
        sm_clock_mhz=state,
        memory_clock_mhz=state,
        celsius=state,
        throttle_reasons=state,
    )


def shown_state(source: Source) -> DeviceState:
    """What an exporter shows of a source: its device's state, or of a bare counter its joules."""
    state = state_of(source)
    if state is not None:
        return state
    joules: float | Unavailable = asked(source.name, source.joules)
    none = Unavailable(f"{source.name} is a counter of joules only")
    return DeviceState(
        joules=joules,
        watts=none,
        sm_clock_mhz=none,
        memory_clock_mhz=none,
        celsius=none,
        throttle_reasons=none,
    )


class Track:
    """Reads one source, from any thread, and sees when its counter fell or lost count.

    Args:
        source: What is read.

    Attributes:
        source: What is read.
        why: The last break.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.why = Unavailable(f"the counter of {source.name} lost count")
        # Asked once: isinstance with a protocol takes longer than reading a counter.
        self._read = source.interval if isinstance(source, WithInterval) else self._exact
        self._flagged = source if isinstance(source, Flagged) else None
        self._interruptible = source if isinstance(source, Interruptible) else None
        self._power = source if isinstance(source, WithPower) else None
        self._state = source if isinstance(source, WithState) else None
        # Held over the read: two threads that note in another order than they read see a fall.
        self._lock = threading.Lock()
        self._last: float | None = None
        self._falls = 0
        self._lost = self._losses()

    def count(self) -> Count | Unavailable:
        """The counter now."""
        with self._lock:
            found = asked(self.source.name, self._checked)
            if isinstance(found, Unavailable) and self._losses() != self._lost:
                # It began anew: its next count is the first of those that can be compared.
                self.why, self._lost = found, self._losses()
                found = asked(self.source.name, self._checked)
            if isinstance(found, Unavailable):
                return found
            if self._last is not None and found.joules < self._last:
                self._falls += 1
                self.why = Unavailable(
                    f"the counter of {self.source.name} fell: it was reset", "measure again"
                )
            self._last = found.joules
            return Count(found, self._falls + self._losses())

    def flags(self) -> tuple[str, ...]:
        """What the source says that a reader must know."""
        if self._flagged is None:
            return ()
        source = self._flagged
        found = asked(self.source.name, lambda: tuple(source.flags))
        return (found.reason,) if isinstance(found, Unavailable) else found

    def watts(self) -> float | Unavailable:
        """Power now."""
        if self._power is None:
            return Unavailable(f"{self.source.name} shows no power")
        return asked(self.source.name, self._power.watts)

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        if self._state is None:
            return Unavailable(f"{self.source.name} shows no state")
        return asked(self.source.name, self._state.throttle_reasons)

    def _losses(self) -> int:
        return 0 if self._interruptible is None else self._interruptible.losses

    def _exact(self) -> Interval | Unavailable:
        joules = self.source.joules()
        return joules if isinstance(joules, Unavailable) else Interval(joules, joules, joules)

    def _checked(self) -> Interval | Unavailable:
        found = self._read()
        if isinstance(found, Unavailable) or all(math.isfinite(joules) for joules in found):
            return found
        return Unavailable(f"{self.source.name} says {found.joules} J")
