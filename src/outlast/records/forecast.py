"""What a run was predicted to need beside what it was measured to need.

found = forecast_of(read_run("runs/quickstart"))    # None where nothing was predicted
found.compared()[0].ratio                           # 1.06: steps took 6 % longer than predicted
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records.energy import energy_totals
from outlast.records.events import AttemptStarted, Ready, StepsDone
from outlast.records.predicted import (
    MemoryMeasured,
    Predicted,
    bytes_words,
    range_words,
    seconds_words,
)

if TYPE_CHECKING:
    from outlast.records.reader import Run

_WARM_UP_STEPS = 5
_WARM_UP_SHARE = 0.1
_MOST_WARM_UP = 0.5


@dataclass(frozen=True)
class Measured:
    """What one attempt took; None stands for what is not recorded.

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
        """Whether the measured figure lies in the interval; None where one of them is missing."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    @property
    def verdict(self) -> str:
        """`inside` in words; empty where it is None."""
        if self.inside is None or self.measured is None or self.high is None:
            return ""
        if self.inside:
            return "inside the interval"
        return f"{'above' if self.measured > self.high else 'below'} the interval"

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
        if self.measured is None:
            return f"predicted {self.words(self.predicted)}, measured unavailable: {self.missing}"
        verdict = f" ({self.verdict})" if self.verdict else ""
        return (
            f"predicted {self.words(self.predicted)}, measured {self.words(self.measured)}{verdict}"
        )


@dataclass(frozen=True)
class Forecast:
    """The last prediction of a run, and what the attempt took that it was made for."""

    prediction: Predicted
    measured: Measured

    def compared(self) -> tuple[Compared, ...]:
        """Every predicted figure beside the measured one: time first, then memory."""
        return (
            *self._within_steps(),
            self._memory(),
            *self._energy(),
            *self._whole_run(),
        )

    def sentence(self) -> str:
        """Time and memory in one line, as it is printed when the attempt has ended."""
        step, memory = self._within_steps()[0], self._memory()
        return f"time per step: {step.sentence()}; peak memory: {memory.sentence()}"

    def _within_steps(self) -> tuple[Compared, Compared]:
        said, seen = self.prediction, self.measured
        why = "no step of the attempt is recorded"
        no_tokens = why if seen.step_seconds is None else "the tokens of a step are not known"
        low, high = said.step_seconds_low, said.step_seconds_high
        step = Compared("step time", "s", said.step_seconds, low, high, seen.step_seconds, why)
        # A step's tokens are known exactly, so that the interval is that of its time.
        tokens = said.tokens_per_s * said.step_seconds
        least = tokens / high if high > 0 else None
        most = tokens / low if low > 0 else None
        return step, Compared(
            "throughput", "tokens/s", said.tokens_per_s, least, most, seen.tokens_per_s, no_tokens
        )

    def _memory(self) -> Compared:
        said, seen = self.prediction, self.measured.memory
        found = None if seen is None else seen.most(said.memory_of)
        why = " ".join(filter(None, ("no", said.memory_of, "memory is recorded of the attempt")))
        ends = said.memory_bytes_low, said.memory_bytes_high
        most = None if found is None else found[1]
        return Compared("peak memory", "B", said.memory_bytes, *ends, most, why)

    def _energy(self) -> tuple[Compared, ...]:
        said = self.prediction
        if said.joules_per_token is None:
            return ()
        ends = said.joules_per_token_low, said.joules_per_token_high
        seen = self.measured.joules_per_token
        why = "no meter has a figure of the attempt"
        return (Compared("energy per token", "J/token", said.joules_per_token, *ends, seen, why),)

    def _whole_run(self) -> tuple[Compared, ...]:
        said = self.prediction
        if said.run_seconds is None:
            return ()
        ends = said.run_seconds_low, said.run_seconds_high
        why = "the job was not done in one attempt"
        return (
            Compared("whole run", "s", said.run_seconds, *ends, self.measured.run_seconds, why),
        )


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
    """What `attempt` took (the last by default); None for an attempt that is not recorded.

    Steps that a later attempt did again count here: they took what they took.
    """
    numbers = [attempt.number for attempt in run.attempts]
    number = (numbers or [0])[-1] if attempt is None else attempt
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
    return Measured(
        attempt=number,
        step_seconds=median,
        steps=len(warm),
        tokens_per_s=tokens[-1] / median if median and any(tokens[-1:]) else None,
        memory=memory[-1] if memory else None,
        joules_per_token=_joules_per_token(run, number),
        run_seconds=_run_seconds(run, number),
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


def _run_seconds(run: Run, attempt: int) -> float | None:
    [found] = [item for item in run.attempts if item.number == attempt]
    if found.outcome != "completed" or found.first_step != 0:
        return None
    ready = next(record for record, _ in run.of(Ready) if record.attempt == attempt)
    return found.end_time - ready.time
