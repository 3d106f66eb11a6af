"""Forecast of a run beside its measured figures.

found = forecast_of(read_run("runs/quickstart"))    # None where nothing was predicted
found.compared()[0].ratio                           # 1.06: steps took 6 % longer than predicted
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from outlast.records.energy import energy_totals
from outlast.records.events import AttemptStarted, Event, StepsDone, TrainingStarted

if TYPE_CHECKING:
    from outlast.records.log import Run


_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Predicted(Event):
    """Predicted needs of the attempt; plain numbers, so that no planner is needed to read it.

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
        """Kind of memory meant by `memory_of`, and the figure of the process with the most of it.

        Args:
            memory_of: As in `Predicted`.

        Returns:
            None where it is not recorded of every process.
        """
        on_device = all("reserved_bytes" in rank for rank in self.ranks)
        name = memory_of or ("reserved" if on_device else "resident")
        found = [rank.get(f"{name}_bytes") for rank in self.ranks]
        known = [int(size) for size in found if isinstance(size, int | float)]
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


_WARM_UP_STEPS = 5
_WARM_UP_SHARE = 0.1
_MOST_WARM_UP = 0.5


@dataclass(frozen=True)
class Measured:
    """Measured figures of one attempt; None stands for a figure that is not recorded.

    Attributes:
        attempt: Its number.
        step_seconds: Median wall time of a step after the warm-up.
        steps: Steps that the median is of.
        tokens_per_s: Tokens of a step over `step_seconds`.
        memory: The last record of the peak of each process.
        joules_per_token: Of all windows of the attempt that hold steps, over their tokens; without
            start-up, with evaluations and checkpoints between steps.
        run_seconds: From the first step to the end, of a job that was done in one attempt.
    """

    attempt: int
    step_seconds: float | None
    steps: int
    tokens_per_s: float | None
    memory: MemoryMeasured | None
    joules_per_token: float | None
    run_seconds: float | None


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured.

    Attributes:
        name: What it is, e.g. "step time".
        unit: ``s``, ``B``, ``tokens/s`` or ``J/token``.
        predicted: Best guess.
        low: Lower end of the interval; None where only the best guess is known.
        high: Upper end.
        measured: What came true; None where it is not recorded.
        missing: Why it is not.
    """

    name: str
    unit: str
    predicted: float
    low: float | None
    high: float | None
    measured: float | None
    missing: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.measured is None or not self.predicted > 0:
            return None
        return self.measured / self.predicted

    @property
    def inside(self) -> bool | None:
        """True if the measured figure lies in the interval; None where one of them is missing."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    @property
    def verdict(self) -> str:
        """`inside` in words; empty where it is None."""
        if self.measured is None or self.low is None or self.high is None:
            return ""
        side = "above" if self.measured > self.high else "below"
        return f"{'inside' if self.inside else side} the interval"

    def words(self, value: float) -> str:
        """A value of this figure with its unit."""
        match self.unit:
            case "s":
                return seconds_words(value)
            case "B":
                return bytes_words(value)
            case "tokens/s":
                return f"{value:,.0f} tokens/s"
            case _:
                return f"{value:.3g} {self.unit}"

    def interval_words(self) -> str:
        """The interval with its unit; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return range_words(self.words(self.low), self.words(self.high))

    def sentence(self) -> str:
        """Both figures in words, e.g. ``predicted 0.31 s, measured 0.33 s (inside the interval)``.

        The comparison is by the figures themselves and not by their rounded words.
        """
        predicted = f"predicted {self.words(self.predicted)}"
        if self.measured is None:
            return f"{predicted}, measured unavailable: {self.missing}"
        verdict = f" ({self.verdict})" if self.verdict else ""
        return f"{predicted}, measured {self.words(self.measured)}{verdict}"


@dataclass(frozen=True)
class Forecast:
    """The last prediction of a run, and what the attempt took that it was made for."""

    prediction: Predicted
    measured: Measured

    def compared(self) -> tuple[Compared, ...]:
        """Every predicted figure beside the measured one: time first, then memory."""
        said, seen = self.prediction, self.measured
        no_step = "no step of the attempt is recorded"
        no_tokens = no_step if seen.step_seconds is None else "the tokens of a step are not known"
        no_memory = " ".join(
            filter(None, ("no", said.memory_of, "memory is recorded of the attempt"))
        )
        low, high = said.step_seconds_low, said.step_seconds_high
        # A step's tokens are known exactly, so that the interval is that of its time.
        tokens = said.tokens_per_s * said.step_seconds
        least = tokens / high if high > 0 else None
        most = tokens / low if low > 0 else None
        rate = said.tokens_per_s, least, most
        memory = said.memory_bytes_low, said.memory_bytes_high
        peak = None if seen.memory is None else seen.memory.most(said.memory_of)
        size = None if peak is None else peak[1]
        found = [
            Compared("step time", "s", said.step_seconds, low, high, seen.step_seconds, no_step),
            Compared("throughput", "tokens/s", *rate, seen.tokens_per_s, no_tokens),
            Compared("peak memory", "B", said.memory_bytes, *memory, size, no_memory),
        ]
        if said.joules_per_token is not None:
            joules = said.joules_per_token, said.joules_per_token_low, said.joules_per_token_high
            why = "no meter has a figure of the attempt"
            found.append(
                Compared("energy per token", "J/token", *joules, seen.joules_per_token, why)
            )
        if said.run_seconds is not None:
            run = said.run_seconds, said.run_seconds_low, said.run_seconds_high
            why = "the job was not done in one attempt"
            found.append(Compared("whole run", "s", *run, seen.run_seconds, why))
        return tuple(found)

    def sentence(self) -> str:
        """Time and memory in one line, as it is printed when the attempt has ended."""
        step, _, memory = self.compared()[:3]
        return f"time per step: {step.sentence()}; peak memory: {memory.sentence()}"


def forecast_of(run: Run) -> Forecast | None:
    """The last prediction in `run` beside its attempt's figures; None where there is none."""
    found = run.of(Predicted)
    if not found:
        return None
    record, prediction = found[-1]
    measured = measured_figures(run, record.attempt)
    assert measured is not None
    return Forecast(prediction, measured)


def measured_figures(run: Run, attempt: int | None = None) -> Measured | None:
    """Measured figures of `attempt` (the last by default); None where it is not recorded.

    Steps that a later attempt did again count here: they took what they took.
    """
    numbers = [attempt.number for attempt in run.attempts]
    number = max(numbers, default=0) if attempt is None else attempt
    if number not in numbers:
        return None
    seconds = [
        value
        for record, event in run.of(StepsDone)
        if record.attempt == number
        for value in event.step_seconds
    ]
    warm = after_warm_up(seconds)
    median = statistics.median(warm) if warm else None
    tokens = [e.tokens_per_step for record, e in run.of(AttemptStarted) if record.attempt == number]
    memory = [event for record, event in run.of(MemoryMeasured) if record.attempt == number]
    run_seconds = None
    [found] = [attempt for attempt in run.attempts if attempt.number == number]
    if found.outcome == "completed" and found.first_step == 0:
        ready = (record for record, _ in run.of(TrainingStarted) if record.attempt == number)
        run_seconds = found.end_time - next(ready).time
    return Measured(
        attempt=number,
        step_seconds=median,
        steps=len(warm),
        tokens_per_s=tokens[-1] / median if median and any(tokens[-1:]) else None,
        memory=memory[-1] if memory else None,
        joules_per_token=_joules_per_token(run, number),
        run_seconds=run_seconds,
    )


def after_warm_up(step_seconds: list[float]) -> list[float]:
    """The steps without the first five or the first tenth, whichever is more; at least half stay.

    Caches, allocators and clocks settle in these steps.
    """
    count = len(step_seconds)
    skipped = max(_WARM_UP_STEPS, math.ceil(_WARM_UP_SHARE * count))
    return step_seconds[min(skipped, int(_MOST_WARM_UP * count)) :]


def _joules_per_token(run: Run, attempt: int) -> float | None:
    totals = energy_totals(run)
    if totals is None:
        return None
    covered = {id(window) for window in totals.covered}
    joules, tokens, waiting = 0.0, 0, 0
    for window in totals.windows:
        if window.record.attempt != attempt or id(window) not in covered:
            continue
        waiting += window.event.tokens
        # What a counter that stood has not told is in its next figure.
        if window.counted and waiting:
            joules, tokens, waiting = joules + window.joules, tokens + waiting, 0
    return joules / tokens if tokens else None
