"""Joules of one span of time: per device, sums, states, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from outlast.hardware.figure import Unavailable, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.sources import Part


Kind: TypeAlias = Literal["measured", "modelled", "replayed", "simulated"]


KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules, with the interval in which the truth lies and what made them.

    Attributes:
        joules: Best estimate.
        low_joules: Lower end of the 95 % interval; `joules` where the error is not known.
        high_joules: Upper end of it.
        kind: "measured" (a meter), "modelled" (computed from other measurements), "replayed" (from
            a measured table) or "simulated".
        source: The meter or model, in words that let a reader find it.
        flags: What a reader must know before trusting the figure, one sentence each.
    """

    joules: float
    low_joules: float
    high_joules: float
    kind: Kind
    source: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.joules:,.4g} J ({self.kind}: {self.source})"


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

    @classmethod
    def unknown(cls, why: Unavailable, joules: float | Unavailable | None = None) -> DeviceState:
        """A state of which at most the joules are known."""
        return cls(
            joules=why if joules is None else joules,
            watts=why,
            sm_clock_mhz=why,
            memory_clock_mhz=why,
            celsius=why,
            throttle_reasons=why,
        )


@dataclass(frozen=True, slots=True)
class Still(Unavailable):
    """A counter did not move in the window: its joules are in the next figure, if one comes."""


Reading: TypeAlias = Energy | Unavailable


NO_METER = "energy"
"""Key of the one reading of a window on a machine without any meter."""


_ADDED_PARTS: tuple[Part, ...] = ("gpu", "cpu", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A device at both ends of a window.

    Attributes:
        start: When it began.
        end: When it ended.
        throttle_reasons: Every reason seen at the ends and by samples in between.
    """

    start: DeviceState
    end: DeviceState
    throttle_reasons: tuple[str, ...] | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Energy of one span of time.

    Attributes:
        name: Of the meter, or of the lap.
        seconds: Its length by a monotonic clock.
        joules: Reading of each source; one Unavailable under `NO_METER` where there is no source.
        parts: What each source measures.
        states: Of the sources whose device shows its state; empty for a lap.
        missing: Why other kinds of meter are not there.
    """

    name: str
    seconds: float
    joules: Mapping[str, Reading]
    parts: Mapping[str, Part]
    states: Mapping[str, States]
    missing: tuple[Unavailable, ...]

    def total(self, part: Part | None = None) -> Reading:
        """The sum over the devices of a part.

        Args:
            part: "gpu", "cpu", "memory" or "node"; None for GPUs, CPUs and memory together, as far
                as each has a meter (flags say which have none). Node meters are never added, since
                a node contains the others.

        Returns:
            The sum, its interval as wide as those of all devices together; Unavailable where one
            device is, or where no device has a meter.
        """
        wanted = _ADDED_PARTS if part is None else (part,)
        names = [name for name, of in self.parts.items() if of in wanted]
        if not names:
            what = f"{', '.join(wanted[:-1])} or {wanted[-1]}" if len(wanted) > 1 else wanted[0]
            return no_meter(f"no {what} meter", self.missing)
        present = {self.parts[name] for name in names}
        absent = [other for other in wanted if other not in present]
        flags = (f"without {' and '.join(absent)}: no meter",) if absent else ()
        readings = {name: self.joules[name] for name in names}
        found = [reading for reading in readings.values() if isinstance(reading, Energy)]
        missing = [item for item in readings.items() if isinstance(item[1], Unavailable)]
        if missing:
            # Only where every absence ends with a longer window does the sum's: `Still` comes last.
            name, why = min(missing, key=lambda item: isinstance(item[1], Still))
            assert isinstance(why, Unavailable)
            if len(readings) == 1:
                return why
            return type(why)(f"{name} cannot be added: {why.reason}", why.remedy)
        kinds = {energy.kind for energy in found}
        every = dict.fromkeys([*flags, *(flag for energy in found for flag in energy.flags)])
        return Energy(
            joules=sum(energy.joules for energy in found),
            low_joules=sum(energy.low_joules for energy in found),
            high_joules=sum(energy.high_joules for energy in found),
            kind=kinds.pop() if len(kinds) == 1 else "modelled",
            source=" + ".join(energy.source for energy in found),
            flags=tuple(every),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain lists, dictionaries, numbers and text."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "joules": {name: plain(reading) for name, reading in self.joules.items()},
            "parts": dict(self.parts),
            "states": {name: plain(states) for name, states in self.states.items()},
            "missing": [plain(why) for why in self.missing],
        }


def no_meter(what: str, missing: Sequence[Unavailable]) -> Unavailable:
    """One absence that gives all the reasons and remedies."""
    reasons = "; ".join(why.reason for why in missing)
    remedies = "; ".join(why.remedy for why in missing if why.remedy)
    return Unavailable(f"{what}: {reasons}" if reasons else what, remedies)
