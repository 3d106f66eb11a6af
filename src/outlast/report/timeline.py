"""A run on the wall clock: attempts as spans, everything else as marks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    Evaluated,
    MemberLost,
    MembershipChanged,
    StateRecovered,
    StepsDone,
    StopRequested,
    Warned,
    recovery_words,
)
from outlast.report import text
from outlast.report.summary import OUTCOME_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.records import Record
    from outlast.report.overview import Overview

LANES = (
    "checkpoint",
    "restore",
    "membership",
    "evaluation",
    "stop request",
    "warning",
    "failure",
)

_SHORTEST_GAP_SECONDS = 0.05


@dataclass(frozen=True)
class Span:
    """A stretch of wall clock.

    Attributes:
        start_time: Seconds since the epoch.
        end_time: Seconds since the epoch.
        world_size: Processes at work; 0 in a gap.
        outcome: As in `Attempt`; empty for a gap.
        words: What the reader sees when pointing at it.
    """

    start_time: float
    end_time: float
    world_size: int
    outcome: str
    words: str


@dataclass(frozen=True)
class Mark:
    """One event at one moment.

    Attributes:
        lane: One of `LANES`.
        time: Seconds since the epoch.
        words: What the reader sees when pointing at it.
    """

    lane: str
    time: float
    words: str


def attempt_spans(overview: Overview) -> list[Span]:
    """One span per attempt, oldest first."""
    return [
        Span(
            attempt.start_time,
            max(attempt.end_time, attempt.start_time),
            attempt.world_size,
            attempt.outcome,
            f"attempt {attempt.number}: world size {attempt.world_size}, "
            f"{text.duration(attempt.end_time - attempt.start_time)}, "
            f"{OUTCOME_WORDS.get(attempt.outcome, attempt.outcome)}",
        )
        for attempt in overview.run.attempts
    ]


def gaps(overview: Overview) -> list[Span]:
    """The stretches between attempts in which nothing ran."""
    attempts = overview.run.attempts
    return [
        Span(
            before.end_time,
            after.start_time,
            0,
            "",
            f"gap of {text.duration(after.start_time - before.end_time)} "
            f"before attempt {after.number}",
        )
        for before, after in itertools.pairwise(attempts)
        if after.start_time - before.end_time > _SHORTEST_GAP_SECONDS
    ]


def marks(overview: Overview) -> list[Mark]:
    """Every event that is worth a mark, in the order of the log."""
    found = [mark for record in overview.run.records for mark in _of_record(record)]
    return sorted([*found, *_not_finite(overview), *_ends(overview)], key=lambda mark: mark.time)


def _of_record(record: Record) -> Iterator[Mark]:
    match record.event:
        case Warned(message=message):
            origin = f"rank {record.rank}: " if record.rank else ""
            yield Mark("warning", record.time, origin + message)
        case MemberLost() as lost:
            # Whoever notices writes it.
            yield Mark("failure", record.time, recovery_words(lost))
        case _ if record.rank:
            return
        case StateRecovered() | MembershipChanged() as event:
            lane = "restore" if isinstance(event, StateRecovered) else "membership"
            yield Mark(lane, record.time, recovery_words(event))
        case CheckpointSaved() as saved:
            words = (
                f"checkpoint of step {saved.step:,} on disk after {text.duration(saved.seconds)} "
                f"({text.data_size(saved.bytes)}; training waited "
                f"{text.duration(saved.blocked_seconds)})"
            )
            yield Mark("checkpoint", record.time, words)
        case CheckpointCopied(step=step, place=place) as copied:
            words = (
                f"checkpoint of step {step:,} copied on to {place} in "
                f"{text.duration(copied.seconds)} ({text.data_size(copied.bytes)})"
            )
            yield Mark("checkpoint", record.time, words)
        case CheckpointFailed(step=step, reason=reason):
            yield Mark("failure", record.time, f"checkpoint of step {step:,} failed: {reason}")
        case CheckpointRestored() as restored:
            words = f"restored step {restored.step:,} in {text.duration(restored.seconds)}"
            if restored.skipped:
                words += f"; passed over {', '.join(map(str, restored.skipped))}"
            yield Mark("restore", record.time, words)
        case Evaluated(step=step, loss=loss):
            words = f"validation loss {text.number(loss)} nats per token at step {step:,}"
            yield Mark("evaluation", record.time, words)
        case StopRequested(step=step, reason=reason):
            yield Mark("stop request", record.time, f"stop at step {step:,}: {reason}")
        case _:
            return


def _not_finite(overview: Overview) -> Iterator[Mark]:
    """The first step record of every stretch whose loss is NaN or infinite, where any is finite."""
    was_finite = any(math.isfinite(item) for item in overview.training.loss)
    for record, event in overview.run.of(StepsDone):
        finite = math.isfinite(float(event.loss))
        if was_finite and not finite:
            yield Mark(
                "failure", record.time, f"training loss is {event.loss} at step {event.step:,}"
            )
        was_finite = finite


def _ends(overview: Overview) -> Iterator[Mark]:
    last = overview.run.attempts[-1].number if overview.run.attempts else 0
    ends = overview.ends
    for attempt in overview.run.attempts:
        if attempt.outcome == "failed":
            reason = ends[attempt.number].reason
            yield Mark("failure", attempt.end_time, f"attempt {attempt.number} failed: {reason}")
        elif attempt.outcome == "died" and attempt.number != last:
            words = f"attempt {attempt.number} died: no end is recorded"
            yield Mark("failure", attempt.end_time, words)
