"""Protocols of a source of `EnergyMeter`: a counter of joules, and optional extras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from outlast.energy.replay import DeviceState
    from outlast.energy.window import Kind
    from outlast.hardware.figure import Unavailable


Part: TypeAlias = Literal["gpu", "cpu", "memory", "node"]


class Source(Protocol):
    """A counter of joules. Users may pass their own, e.g. of a node's power supply.

    Attributes:
        name: Unique in a meter, e.g. "gpu 0 (GPU-8f6e...)" or "cpu package 0".
        part: What it measures. A node contains its CPUs and GPUs; their figures are never added.
        kind: "measured" for a meter; a source that computes says "modelled".
        update_seconds: How often the counter changes: shorter windows are flagged.
    """

    name: str
    part: Part
    kind: Kind
    update_seconds: float

    def joules(self) -> float | Unavailable:
        """Joules since an arbitrary beginning, never falling: a source sees to wrap-around."""


class Interval(NamedTuple):
    """Joules since a source's beginning, with the interval in which the truth lies."""

    low_joules: float
    joules: float
    high_joules: float


@runtime_checkable
class WithInterval(Protocol):
    """A source that knows its error, e.g. one that computes."""

    def interval(self) -> Interval | Unavailable:
        """As `joules`, with both ends of the interval."""


@runtime_checkable
class Polled(Protocol):
    """A source that must be read often, or it loses count. An open meter's thread does so.

    Attributes:
        poll_seconds: The longest time between two reads.
    """

    poll_seconds: float

    def joules(self) -> float | Unavailable:
        """Joules since the beginning."""


@runtime_checkable
class Interruptible(Protocol):
    """A source that may lose count and then count on: a window over the loss is Unavailable.

    Attributes:
        losses: How often it lost count. A read that finds a loss is Unavailable with its reason.
    """

    losses: int


@runtime_checkable
class Flagged(Protocol):
    """A source with something to know before trusting it.

    Attributes:
        flags: One sentence each.
    """

    @property
    def flags(self) -> tuple[str, ...]:
        """They may change while the source is read."""


@runtime_checkable
class Described(Protocol):
    """A source that says what it reads.

    Attributes:
        description: E.g. "NVML's total-energy counter".
    """

    description: str


@runtime_checkable
class WithPower(Protocol):
    """A counter whose device also shows its power, against which the counter is checked."""

    def watts(self) -> float | Unavailable:
        """Power now."""


@runtime_checkable
class WithState(Protocol):
    """A source whose device shows temperature, clocks and throttle reasons."""

    def state(self) -> DeviceState:
        """The state now."""

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """The cheap part of the state, asked for more often."""


class UnreadableSource:
    """A device that stands but cannot be read: sums over its part are Unavailable with its reason.

    Args:
        name: As of any source.
        part: As of any source.
        why: What `joules` always gives.
    """

    kind: Kind = "measured"
    update_seconds = 0.0

    def __init__(self, name: str, part: Part, why: Unavailable) -> None:
        self.name = name
        self.part: Part = part
        self._why = why

    def joules(self) -> float | Unavailable:
        """Why it cannot be read."""
        return self._why
