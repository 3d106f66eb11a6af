"""``outlast watch``: a run while it trains, from any machine that sees its directory."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import facts_table, print_json, seconds_words, size_text
from outlast.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from outlast.records import (
        AttemptStarted,
        CheckpointRestored,
        CheckpointSaved,
        Event,
        Record,
        RunFollower,
        StepsDone,
    )

_EVENTS = 8
_LOSSES = 40
# Blocks of one to eight eighths.
_BARS = "".join(chr(0x2580 + eighths) for eighths in range(1, 9))
_ENDED = {
    "completed": "complete",
    "left": "left before its last step",
    "to_be_continued": "stopped, to be continued",
}


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/quickstart.")
    ],
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds from one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run while it trains: loss, speed, checkpoints, processes, events.

    It reads the run directory alone, so it works from a login node for a Slurm job, and disturbs
    nothing. It waits over the end of one start for the next one, and ends when the run is complete,
    or with Ctrl-C. Without a terminal it prints a line for each event. With --json it prints the
    state now, and ends.
    """
    from rich.console import Console
    from rich.live import Live

    from outlast.records import RunFollower

    state, console = RunState(RunFollower(run)), Console()
    state.update()
    if as_json:
        print_json(state.facts())
    elif once or state.is_complete:
        console.print(state.view(console))
    elif console.is_terminal:
        with Live(state.view(console), console=console, auto_refresh=False) as live:
            while not state.is_complete:
                time.sleep(every)
                state.update()
                live.update(state.view(console), refresh=True)
    else:
        print("\n".join(state.lines()), flush=True)
        while not state.is_complete:
            time.sleep(every)
            for line in state.update():
                print(line, flush=True)


class RunState:
    """The newest facts of a run, from its records and its lock.

    Args:
        follower: Reads the records.
    """

    def __init__(self, follower: RunFollower) -> None:
        self._follower = follower
        self._attempt = 0
        self._begin()
        self._events: deque[tuple[float, str]] = deque(maxlen=_EVENTS)
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._saved: CheckpointSaved | CheckpointRestored | None = None
        self._saved_time = self._last_time = 0.0
        self._step = 0

    def _begin(self) -> None:
        """Another attempt has begun."""
        from outlast.runtime.display import Rate

        self._started: AttemptStarted | None = None
        self._done: StepsDone | None = None
        self._rate = Rate(0)
        self._outcome = ""

    @property
    def is_complete(self) -> bool:
        """Return whether all steps are done."""
        return self._outcome == "completed"

    def update(self) -> list[str]:
        """Read what is new; returns a line for each event that a person wants to see."""
        lines = []
        for record in self._follower.new_records():
            if (line := self._take(record)) is not None:
                self._events.append((record.time, line))
                lines.append(f"{_clock(record.time)}  {line}")
        return lines

    def _take(self, record: Record) -> str | None:
        from outlast.records import (
            AttemptEnded,
            AttemptStarted,
            CheckpointRestored,
            CheckpointSaved,
            StepsDone,
        )
        from outlast.runtime.display import Rate, message_of

        self._last_time = max(self._last_time, record.time)
        if record.rank == 0 and record.attempt != self._attempt:
            self._attempt = record.attempt
            self._begin()
        event: Event = record.event
        match event:
            case AttemptStarted():
                self._started, self._rate = event, Rate(event.tokens_per_step)
            case StepsDone():
                self._done, self._step = event, event.step
                self._rate.add(event)
                if math.isfinite(event.loss):
                    self._losses.append(event.loss)
                return None
            case CheckpointSaved() | CheckpointRestored():
                self._saved, self._saved_time = event, record.time
                if isinstance(event, CheckpointRestored):
                    self._step = event.step
            case AttemptEnded():
                self._outcome, self._step = event.outcome, event.step
                if event.outcome == "completed":
                    return f"complete at step {event.step:,}"
        return message_of(event)

    def status(self) -> str:
        """The state of the run in a few words."""
        if self._outcome:
            return _ENDED.get(self._outcome, self._outcome)
        if not self._attempt:
            return "not started"
        if not self._follower.directory.lock().is_held():
            return "died: no live process holds the run"
        return "training" if self._done is not None else "being set up"

    def facts(self) -> dict[str, Any]:
        """All figures, for ``--json``."""
        started, done = self._started, self._done
        now = time.time()
        return {
            "run": str(self._follower.directory.path),
            "status": self.status(),
            "attempt": self._attempt,
            "processes": started.world_size if started else None,
            "host": started.machine.get("host_name") if started else None,
            "step": self._step,
            "steps": started.total_steps if started else None,
            "loss": done.loss if done else None,
            "gradient_norm": done.gradient_norm if done else None,
            "learning_rate": done.learning_rate if done else None,
            "metrics": done.metrics if done else {},
            "step_seconds": self._rate.step_seconds if done else None,
            "tokens_per_second": self._rate.tokens_per_second if done else None,
            "eta_seconds": self._eta_seconds(),
            "checkpoint_step": self._saved.step if self._saved else None,
            "checkpoint_age_seconds": now - self._saved_time if self._saved else None,
            "last_record_age_seconds": now - self._last_time if self._last_time else None,
            "events": [{"time": when, "text": text} for when, text in self._events],
        }

    def lines(self) -> list[str]:
        """All figures as lines of text, and the newest events."""
        named = [f"{name}: {value}" for name, value in self._figures()]
        return [*named, *(f"{_clock(when)}  {text}" for when, text in self._events)]

    def view(self, console: Console) -> RenderableType:
        """All figures as a terminal shows them."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        figures = self._figures(console.encoding.startswith("utf"))
        parts: list[RenderableType] = [facts_table(figures)]
        if not self._outcome and self._started is not None and self._started.total_steps:
            total = self._started.total_steps
            parts.append(ProgressBar(total, self._step, width=min(console.width, 72)))
        if self._events:
            rows = [(Text(_clock(when), "dim"), text) for when, text in self._events]
            parts += ["", facts_table(rows)]
        return Group(*parts)

    def _eta_seconds(self) -> float | None:
        if self._done is None or self._started is None or not self._started.total_steps:
            return None
        return max(self._started.total_steps - self._step, 0) * self._rate.step_seconds

    def _figures(self, blocks: bool = False) -> list[tuple[str, str]]:
        from outlast.records import CheckpointSaved

        started, done, now = self._started, self._done, time.time()
        found = [("run", f"{self._follower.directory.path}: {self.status()}")]
        if started is not None:
            where = started.machine.get("host_name", "an unknown host")
            processes = (
                "1 process" if started.world_size == 1 else f"{started.world_size:,} processes"
            )
            found.append(("start", f"number {self._attempt}, {processes}, rank 0 on {where}"))
        steps = f"{self._step:,}"
        if started is not None and started.total_steps:
            steps += f" of {started.total_steps:,} ({self._step / started.total_steps:.0%})"
            eta = self._eta_seconds()
            if eta and not self._outcome:
                steps += f", {seconds_words(eta)} left"
        found.append(("step", steps))
        if done is not None:
            curve = _sparkline(self._losses) if blocks else ""
            found.append(("loss", f"{done.loss:.4f}  {curve}".rstrip()))
            extra = {"learning rate": done.learning_rate, "gradient norm": done.gradient_norm}
            extra |= done.metrics
            known = [f"{name} {value:.4g}" for name, value in extra.items() if math.isfinite(value)]
            if known:
                found.append(("", ", ".join(known)))
            speed = f"{seconds_words(self._rate.step_seconds)} a step"
            if self._rate.tokens_per_second:
                speed += f", {self._rate.tokens_per_second:,.0f} tokens/s"
            found.append(("speed", speed))
        saved, age = self._saved, seconds_words(max(now - self._saved_time, 0.0))
        if saved is None:
            found.append(("checkpoint", "none yet"))
        else:
            size = f" ({size_text(saved.bytes)})" if isinstance(saved, CheckpointSaved) else ""
            verb = "saved" if isinstance(saved, CheckpointSaved) else "restored"
            found.append(("checkpoint", f"step {saved.step:,}, {verb} {age} ago{size}"))
        if self._last_time:
            last = seconds_words(max(now - self._last_time, 0.0))
            found.append(("last record", f"{last} ago"))
        return found


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _sparkline(values: deque[float]) -> str:
    """A line of bars of eight heights, from the smallest to the largest value."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high <= low:
        return ""
    return "".join(_BARS[round((value - low) / (high - low) * 7)] for value in values)
