"""What the joules of a run were for.

A meter gives joules of windows; the run's records give the seconds that its parts took. Where the
power of waiting is known, those seconds are priced by it and the rest of a window is shared among
its working purposes by time. The shares always sum to the total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from outlast.energy.reading import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.reading import Kind, Reading

Purpose: TypeAlias = Literal[
    "useful",
    "idle",
    "blocked",
    "straggler",
    "guard",
    "checkpoint",
    "redone",
    "evaluation",
    "setup",
    "unattributed",
]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""blocked: waiting for devices of the same step; straggler: waiting for one that is slow."""

WAITING: tuple[Purpose, ...] = ("blocked", "straggler")
SHARING_ERROR = 0.15
"""Half-width of the interval of a share that comes from time alone: power differs among parts."""
WAITING_ERROR = 0.1
"""The same where a known waiting power prices it."""
_CERTAINTY: tuple[Kind, ...] = ("measured", "replayed", "modelled", "simulated")


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a run that one reading covers.

    Attributes:
        joules: Of all devices of the window, or why there is none.
        seconds: Its length, in device-seconds: two devices for a second are 2.
        spent_seconds: Device-seconds per purpose; what they leave of `seconds` is unattributed.
    """

    joules: Reading
    seconds: float
    spent_seconds: Mapping[Purpose, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0.0):
            raise EnergyError(f"seconds = {self.seconds} of a window is not above 0")
        for purpose, seconds in self.spent_seconds.items():
            if purpose not in PURPOSES:
                known = ", ".join(PURPOSES)
                raise EnergyError(f"purpose = {purpose} is none of {known}")
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise EnergyError(f"{purpose} took {seconds} s: seconds must be at least 0")
        spent = math.fsum(self.spent_seconds.values())
        if spent > self.seconds * (1.0 + 1e-6):
            raise EnergyError(
                f"the purposes of a window took {spent:g} s, more than its {self.seconds:g} s: "
                "count every second once, in device-seconds"
            )


@dataclass(frozen=True, slots=True)
class Split:
    """Joules by purpose.

    Attributes:
        total: Of all windows that were metered.
        by_purpose: Only purposes that took any; they sum to `total.joules` exactly.
        unmetered_seconds: Device-seconds of windows without a reading; their joules are unknown.
        reasons: Why they have none.
    """

    total: Reading
    by_purpose: Mapping[Purpose, Energy]
    unmetered_seconds: float
    reasons: tuple[str, ...]

    def share(self, purpose: Purpose) -> float | Unavailable:
        """Of the total."""
        if isinstance(self.total, Unavailable):
            return self.total
        part = self.by_purpose.get(purpose)
        if part is None or self.total.joules == 0.0:
            return 0.0
        return part.joules / self.total.joules


def split(
    windows: Sequence[Window],
    *,
    idle_watts: float | None = None,
    blocking_watts: float | None = None,
) -> Split:
    """Splits the joules of windows by purpose.

    Intervals of the windows add up, as errors of one meter go the same way; to these every part
    adds the error of sharing by time, which moves joules between purposes but not the total.

    Args:
        windows: That do not overlap.
        idle_watts: Of an idle device, if known.
        blocking_watts: Of a waiting device, if known.

    Raises:
        EnergyError: For no windows, or powers below 0.
    """
    if not windows:
        raise EnergyError("there is no window to split: meter at least one")
    known: dict[Purpose, float] = {}
    if idle_watts is not None:
        known["idle"] = _checked("idle_watts", idle_watts)
    if blocking_watts is not None:
        known |= dict.fromkeys(WAITING, _checked("blocking_watts", blocking_watts))
    metered = [(window, window.joules) for window in windows]
    readings = [(window, joules) for window, joules in metered if isinstance(joules, Energy)]
    missing = [(window, joules) for window, joules in metered if isinstance(joules, Unavailable)]
    unmetered = math.fsum(window.seconds for window, _ in missing)
    reasons = tuple(dict.fromkeys(joules.reason for _, joules in missing))
    if not readings:
        reason = f"no window was metered: {reasons[0]}"
        return Split(Unavailable(reason), {}, unmetered, reasons)
    sums: dict[Purpose, list[tuple[float, float, float]]] = {}
    for window, energy in readings:
        parts = _shares(window, energy.joules, known)
        alone = len(parts) == 1
        for purpose, joules in parts.items():
            error = 0.0 if alone else WAITING_ERROR if purpose in known else SHARING_ERROR
            low, high = _bounds(energy)
            bounds = (joules * low * (1.0 - error), joules * high * (1.0 + error))
            sums.setdefault(purpose, []).append((joules, *bounds))
    total = _total([energy for _, energy in readings])
    amounts = {purpose: math.fsum(row[0] for row in rows) for purpose, rows in sums.items()}
    _close(amounts, total.joules)
    by_purpose = {}
    for purpose in PURPOSES:
        if purpose in sums:
            low = math.fsum(row[1] for row in sums[purpose])
            high = math.fsum(row[2] for row in sums[purpose])
            amount = amounts[purpose]
            by_purpose[purpose] = Energy(
                joules=amount,
                low_joules=min(low, amount),
                high_joules=max(amount, min(high, max(total.high_joules, amount))),
                kind=total.kind if amount == total.joules else "modelled",
                source=f"{total.source}, split by time",
            )
    return Split(total, by_purpose, unmetered, reasons)


def _shares(window: Window, joules: float, known: Mapping[Purpose, float]) -> dict[Purpose, float]:
    """Joules of a window per purpose."""
    spent = {purpose: s for purpose, s in window.spent_seconds.items() if s > 0.0}
    rest = window.seconds - math.fsum(spent.values())
    if rest > 1e-9 * window.seconds:
        spent["unattributed"] = spent.get("unattributed", 0.0) + rest
    priced = {purpose: known[purpose] * s for purpose, s in spent.items() if purpose in known}
    working = math.fsum(s for purpose, s in spent.items() if purpose not in known)
    waiting = math.fsum(priced.values())
    # A meter that saw less than the known powers, or a window of waiting only: the meter is right.
    if waiting > joules or working == 0.0:
        factor = joules / waiting if waiting > 0.0 else 0.0
        if factor == 0.0:
            return {purpose: joules * s / window.seconds for purpose, s in spent.items()}
        shared = {purpose: amount * factor for purpose, amount in priced.items()}
        return shared | {purpose: 0.0 for purpose in spent if purpose not in priced}
    rate = (joules - waiting) / working
    return {purpose: priced.get(purpose, rate * s) for purpose, s in spent.items()}


def _bounds(energy: Energy) -> tuple[float, float]:
    """The interval relative to the estimate."""
    if energy.joules <= 0.0:
        return 1.0, 1.0
    return energy.low_joules / energy.joules, energy.high_joules / energy.joules


def _total(readings: Sequence[Energy]) -> Energy:
    return Energy(
        joules=math.fsum(energy.joules for energy in readings),
        low_joules=math.fsum(energy.low_joules for energy in readings),
        high_joules=math.fsum(energy.high_joules for energy in readings),
        kind=max((energy.kind for energy in readings), key=_CERTAINTY.index),
        source=", ".join(dict.fromkeys(energy.source for energy in readings)),
        flags=tuple(dict.fromkeys(flag for energy in readings for flag in energy.flags)),
    )


def _close(amounts: dict[Purpose, float], total: float) -> None:
    """Moves the rounding error to the largest amount, so that the exact sum rounds to the total."""
    largest = max(amounts, key=lambda purpose: amounts[purpose])
    others = [amount for purpose, amount in amounts.items() if purpose != largest]
    amounts[largest] = math.fsum([total, *(-amount for amount in others)])


def _checked(name: str, watts: float) -> float:
    if not (math.isfinite(watts) and watts >= 0.0):
        raise EnergyError(f"{name} = {watts} is not a power of at least 0")
    return watts
