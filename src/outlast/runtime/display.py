"""Progress of a run while it trains: a live display on a terminal, plain lines elsewhere.

Both are sinks of the run's records, so they show what is written down and nothing else.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    CoverageWarned,
    DataStaged,
    Evaluated,
    Event,
    GradientsCoded,
    MemberLost,
    MembershipChanged,
    Predicted,
    RanksChanged,
    SettingsChanged,
    Sink,
    StateRecovered,
    StepsDone,
    StopRequested,
    TrainingStarted,
    Warned,
    predicted_words,
    recovery_words,
)

_LINE_SECONDS = 5.0
"""Between two lines of progress where no terminal is."""
_RATE_WINDOW = 50


@dataclass(frozen=True)
class Shown:
    """Facts about a run that its display needs before the first step.

    Attributes:
        name: Of the run.
        steps: Of the whole run; 0: not known.
        tokens_per_step: Over all processes; 0: not known.
        brief: Say in the line of progress what is saved, and leave out what `outlast.Run` says
            itself as it starts and ends.
    """

    name: str
    steps: int = 0
    tokens_per_step: int = 0
    brief: bool = False

    def message_of(self, event: Event) -> str | None:
        """One line for an event that a person wants to see when it happens, or None."""
        if self.brief and isinstance(event, _SAID_ELSEWHERE):
            return None
        return message_of(event)


_SAID_ELSEWHERE = (
    *(AttemptStarted, TrainingStarted, CheckpointRestored, StateRecovered),
    *(CheckpointSaved, AttemptEnded),
)


def progress_sink(shown: Shown) -> Sink:
    """The display that fits where standard output goes."""
    return TerminalDisplay(shown) if sys.stdout.isatty() else LineDisplay(shown)


class Rate:
    """Speed over the last steps."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._seconds: deque[float] = deque(maxlen=_RATE_WINDOW)

    def add(self, event: StepsDone) -> None:
        """Take the event's steps in."""
        self._seconds.extend(event.step_seconds)

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return sum(self._seconds) / max(len(self._seconds), 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second within steps."""
        return self._tokens_per_step / self.step_seconds if self._seconds else 0.0


def message_of(event: Event) -> str | None:
    """One line for an event that a person wants to see when it happens, or None."""
    match event:
        case AttemptStarted():
            degrees = [f"{axis} {size}" for axis, size in event.parallel.items() if size > 1]
            on = f"{event.world_size} process{'es' if event.world_size > 1 else ''}"
            layout = f" ({', '.join(degrees)})" if degrees else ""
            return f"model: {event.parameters:,} parameters on {on}{layout}"
        case Predicted():
            return predicted_words(event)
        case TrainingStarted():
            slowest = sorted(event.parts.items(), key=lambda part: -part[1])[:3]
            where = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest)
            return f"ready at step {event.step} after {event.seconds:.1f} s ({where})"
        case DataStaged() | RanksChanged() | SettingsChanged():
            return event.words()
        case Evaluated():
            bits = "" if event.bits_per_byte is None else f", {event.bits_per_byte:.3f} bits/byte"
            return f"step {event.step}: validation loss {event.loss:.4f} nats{bits}"
        case (
            CheckpointSaved()
            | CheckpointCopied()
            | CheckpointFailed()
            | CheckpointRestored()
            | CheckpointInterval()
        ):
            return _about_checkpoints(event)
        case CorruptionDetected() | GradientsCoded():
            return _about_numbers(event)
        case StopRequested():
            return f"step {event.step}: stopping ({event.reason})"
        case Warned() | CoverageWarned():
            return f"warning: {event.message}"
        case StateRecovered() | MemberLost() | MembershipChanged():
            return recovery_words(event)
        case AttemptEnded(outcome="to_be_continued"):
            return f"saved at step {event.step}; the same command continues from there"
        case _:
            return None


def _about_checkpoints(
    event: CheckpointSaved
    | CheckpointCopied
    | CheckpointFailed
    | CheckpointRestored
    | CheckpointInterval,
) -> str:
    match event:
        case CheckpointSaved():
            return (
                f"step {event.step}: checkpoint saved, {event.bytes / 1e6:.1f} MB in "
                f"{event.seconds:.2f} s (training waited {event.blocked_seconds * 1e3:.0f} ms)"
            )
        case CheckpointCopied():
            size = f"{event.bytes / 1e6:.1f} MB in {event.seconds:.2f} s"
            return f"step {event.step}: checkpoint copied on to {event.place}, {size}"
        case CheckpointFailed():
            return f"warning: {event.reason}; training continues"
        case CheckpointRestored():
            return (
                f"restored the checkpoint of step {event.step} in {event.seconds:.2f} s"
                f"{event.words()}"
            )
        case CheckpointInterval():
            return f"checkpoints: {event.reason}"


def _about_numbers(event: CorruptionDetected | GradientsCoded) -> str | None:
    if isinstance(event, CorruptionDetected):
        return (
            f"step {event.step + 1}: wrong values in {event.operation} of {event.module} on "
            f"rank {event.found_on} ({event.device}): {event.outcome.replace('_', ' ')}"
        )
    inexact = sum(error > 0 for error in event.errors)
    if not inexact:
        return None
    return (
        f"step {event.step}: {inexact} of the last {len(event.errors)} gradients inexact, "
        f"certified error up to {max(event.errors):.3g}"
    )


class LineDisplay:
    """One plain line per interval; fit for a Slurm log."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._rate = Rate(shown.tokens_per_step)
        self._last = float("-inf")
        self._saved = ""

    def write(self, event: Event) -> None:
        """Print the event if it is time for it."""
        if isinstance(event, CheckpointSaved) and self._shown.brief:
            self._saved = f"saved at {event.step}"
        if isinstance(event, StepsDone):
            self._rate.add(event)
            now = time.monotonic()
            if now - self._last >= _LINE_SECONDS or event.step == self._shown.steps:
                self._last = now
                print(self._line(event), flush=True)
        elif (message := self._shown.message_of(event)) is not None:
            print(message, flush=True)

    def _line(self, event: StepsDone) -> str:
        rate, total = self._rate, self._shown.steps
        parts = [f"step {event.step}/{total}" if total else f"step {event.step}"]
        parts += [] if math.isnan(event.loss) else [f"loss {event.loss:.4f}"]
        if self._shown.tokens_per_step:
            parts.append(f"{rate.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{rate.step_seconds * 1e3:.1f} ms/step")
        parts += [f"eta {(total - event.step) * rate.step_seconds:.0f} s"] if total else []
        parts += [self._saved] if self._saved else []
        return "  ".join(parts)

    def close(self) -> None:
        """Nothing is held back."""


class TerminalDisplay:
    """A progress bar with loss, throughput, step time, ETA and checkpoint activity."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._rate = Rate(shown.tokens_per_step)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self._task: TaskID | None = None
        self._saved = "no checkpoint yet"
        self._last: StepsDone | None = None

    def write(self, event: Event) -> None:
        """Move the bar, or print the event's line above it."""
        if isinstance(event, TrainingStarted):
            self._task = self._progress.add_task(
                escape(self._shown.name),
                total=self._shown.steps or None,
                completed=event.step,
                status="starting",
            )
            self._progress.start()
        if isinstance(event, (CheckpointSaved, CheckpointRestored)):
            self._saved = f"saved at {event.step}"
            if self._task is not None and self._last is not None:
                # After the last step, no other event brings the line up to date.
                self._progress.update(self._task, status=self._status(self._last))
        if isinstance(event, StepsDone) and self._task is not None:
            self._rate.add(event)
            self._last = event
            self._progress.update(self._task, completed=event.step, status=self._status(event))
        elif (message := self._shown.message_of(event)) is not None:
            self._progress.console.print(escape(message), style="dim", highlight=False)

    def _status(self, event: StepsDone) -> str:
        parts = [] if math.isnan(event.loss) else [f"loss [bold]{event.loss:.3f}[/bold]"]
        if self._shown.tokens_per_step:
            parts.append(f"{self._rate.tokens_per_second / 1e3:,.1f}k tokens/s")
        parts += [f"{self._rate.step_seconds * 1e3:.1f} ms/step", self._saved]
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()
