"""Progress while training: a live display on a terminal, plain lines elsewhere.

Both are sinks of the run's records, so they show what is written down and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

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
    DataStaged,
    Evaluated,
    Event,
    GradientsCoded,
    MemberLost,
    MembershipChanged,
    Predicted,
    Sink,
    StateRecovered,
    StepsDone,
    StopRequested,
    TrainingStarted,
    Warned,
    predicted_words,
    recovery_words,
)

if TYPE_CHECKING:
    from outlast.job import Job

_LINE_SECONDS = 5.0
_RATE_WINDOW = 50


def progress_sink(job: Job) -> Sink:
    """The display that fits where standard output goes."""
    if sys.stdout.isatty():
        return TerminalDisplay(job)
    return LineDisplay(job)


class Rate:
    """Tokens per second over the last steps."""

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
        case DataStaged():
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
        case Warned():
            return f"warning: {event.message}"
        case StateRecovered() | MemberLost() | MembershipChanged():
            return recovery_words(event)
        case AttemptEnded(outcome="to_be_continued"):
            return f"saved at step {event.step}; the same command goes on from there"
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
            return f"warning: {event.reason}; training goes on"
        case CheckpointRestored():
            return f"restored the checkpoint of step {event.step} in {event.seconds:.2f} s"
        case CheckpointInterval():
            return f"checkpoints: {event.reason}"


def _about_numbers(event: CorruptionDetected | GradientsCoded) -> str | None:
    if isinstance(event, CorruptionDetected):
        return (
            f"step {event.step + 1}: wrong numbers in {event.operation} of {event.module} on "
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

    def __init__(self, job: Job) -> None:
        self._steps = job.train.steps
        self._rate = Rate(job.train.batch_size * job.data.sequence_length)
        self._last = float("-inf")

    def write(self, event: Event) -> None:
        """Print the event if it is time for it."""
        if isinstance(event, StepsDone):
            self._rate.add(event)
            now = time.monotonic()
            if now - self._last >= _LINE_SECONDS or event.step == self._steps:
                self._last = now
                print(self._line(event), flush=True)
        elif (message := message_of(event)) is not None:
            print(message, flush=True)

    def _line(self, event: StepsDone) -> str:
        left_seconds = (self._steps - event.step) * self._rate.step_seconds
        return (
            f"step {event.step}/{self._steps}  loss {event.loss:.4f}  "
            f"{self._rate.tokens_per_second:,.0f} tokens/s  "
            f"{self._rate.step_seconds * 1e3:.1f} ms/step  eta {left_seconds:.0f} s"
        )

    def close(self) -> None:
        """Nothing is held back."""


class TerminalDisplay:
    """A progress bar with loss, throughput, step time, ETA and checkpoint activity."""

    def __init__(self, job: Job) -> None:
        self._rate = Rate(job.train.batch_size * job.data.sequence_length)
        self._console = Console()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._steps = job.train.steps
        self._name = job.run.name
        self._saved = "no checkpoint yet"
        self._last: StepsDone | None = None

    def write(self, event: Event) -> None:
        """Move the bar, or print the event's line above it."""
        if isinstance(event, TrainingStarted):
            self._start(event.step)
        if isinstance(event, (CheckpointSaved, CheckpointRestored)):
            self._saved = f"saved at {event.step}"
            if self._task is not None and self._last is not None:
                # After the last step, no other event brings the line up to date.
                self._progress.update(self._task, status=self._status(self._last))
        if isinstance(event, StepsDone) and self._task is not None:
            self._rate.add(event)
            self._last = event
            self._progress.update(self._task, completed=event.step, status=self._status(event))
        elif (message := message_of(event)) is not None:
            self._progress.console.print(escape(message), style="dim", highlight=False)

    def _start(self, step: int) -> None:
        self._task = self._progress.add_task(
            self._name, total=self._steps, completed=step, status="starting"
        )
        self._progress.start()

    def _status(self, event: StepsDone) -> str:
        return (
            f"loss [bold]{event.loss:.3f}[/bold]  {self._rate.tokens_per_second / 1e3:,.1f}k "
            f"tokens/s  {self._rate.step_seconds * 1e3:.1f} ms/step  {self._saved}"
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()
