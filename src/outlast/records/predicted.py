"""What was predicted of a run before its first step, and the memory that it was seen to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlast.records.events import Event

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Predicted(Event):
    """What the attempt is expected to need; plain numbers, so that no planner is needed to read it.

    Attributes:
        step_seconds: Median wall time of a step, and the ends of its interval.
        step_seconds_low: See `step_seconds`.
        step_seconds_high: See `step_seconds`.
        memory_bytes: Peak of the process that needs most, and the ends of its interval.
        memory_bytes_low: See `memory_bytes`.
        memory_bytes_high: See `memory_bytes`.
        tokens_per_s: Of all processes together, within steps.
        joules_per_token: Of all devices, within the windows that hold steps; None where nothing
            is predicted.
        joules_per_token_low: See `joules_per_token`.
        joules_per_token_high: See `joules_per_token`.
        run_seconds: From the first step to the end of the whole job in one attempt, with
            evaluations, checkpoints and export; None where nothing is predicted.
        run_seconds_low: See `run_seconds`.
        run_seconds_high: See `run_seconds`.
        terms: What a step's seconds are made of, by term; they add up to `step_seconds`.
        coverage: Share of cases in which the truth should lie inside an interval.
        extrapolated: Why the figures are beyond what was calibrated, a phrase each.
        calibration: What the constants are from, e.g. the name of a calibration.
        memory_of: Which memory is meant: ``allocated``, ``reserved`` (both on the device) or
            ``resident`` (of the process, on the host); empty for reserved on a device and
            resident on a CPU.
    """

    kind: ClassVar[str] = "predicted"
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    memory_bytes: float
    memory_bytes_low: float
    memory_bytes_high: float
    tokens_per_s: float
    joules_per_token: float | None = None
    joules_per_token_low: float | None = None
    joules_per_token_high: float | None = None
    run_seconds: float | None = None
    run_seconds_low: float | None = None
    run_seconds_high: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    coverage: float = 0.9
    extrapolated: list[str] = field(default_factory=list)
    calibration: str = ""
    memory_of: str = ""


@dataclass(frozen=True)
class MemoryMeasured(Event):
    """Peak memory of every process since it began.

    Attributes:
        step: Steps done so far.
        ranks: Of each process: ``rank``, ``host``, ``resident_bytes`` (all of its memory on the
            host, with what it shares with others), and on a GPU ``allocated_bytes`` (in tensors)
            and ``reserved_bytes`` (taken from the device by torch).
        what: Where the figures are read, in words.
    """

    kind: ClassVar[str] = "memory_measured"
    step: int
    ranks: list[dict[str, Any]]
    what: str

    def most(self, memory_of: str = "") -> tuple[str, int] | None:
        """Which memory is meant by `memory_of`, and that of the process with the most of it.

        Args:
            memory_of: As in `Predicted`.

        Returns:
            None where it is not recorded of every process.
        """
        on_device = all("reserved_bytes" in rank for rank in self.ranks)
        name = memory_of or ("reserved" if on_device else "resident")
        found = [rank.get(f"{name}_bytes") for rank in self.ranks]
        known = [int(tensor) for tensor in found if isinstance(tensor, int | float)]
        return (name, max(known)) if known and len(known) == len(found) else None


def predicted_words(event: Predicted) -> str:
    """The prediction in one line, as it is printed before the first step."""
    low, high = seconds_words(event.step_seconds_low), seconds_words(event.step_seconds_high)
    said = [
        f"{seconds_words(event.step_seconds)} per step ({range_words(low, high)})",
        bytes_words(event.memory_bytes),
    ]
    if event.joules_per_token is not None:
        said.append(f"{event.joules_per_token:.3g} J per token")
    if event.run_seconds is not None:
        said.append(f"the whole run in {seconds_words(event.run_seconds)}")
    beyond = f"; extrapolated: {', '.join(event.extrapolated)}" if event.extrapolated else ""
    return f"predicted: {', '.join(said)}{beyond}"


def seconds_words(seconds: float) -> str:
    """A span of time, e.g. ``0.31 s`` or ``2 min 20 s``."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def range_words(low: str, high: str) -> str:
    """Both ends, with a unit that they share said once, e.g. ``0.28 to 0.35 s``."""
    (number, _, unit), (_, _, other) = low.partition(" "), high.partition(" ")
    return f"{number if unit == other else low} to {high}"


def bytes_words(size_bytes: float) -> str:
    """An amount of memory with a binary prefix, e.g. ``1.9 GiB``."""
    if size_bytes >= 0.9995 * _GIB:
        return f"{size_bytes / _GIB:,.1f} GiB"
    return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes / 1024:.3g} KiB"
