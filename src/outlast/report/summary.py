"""The key figures of a run, each with the word for how it was found, or why it is missing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from outlast.energy.account.report import Amount
from outlast.records import (
    CheckpointFailed,
    CheckpointSaved,
    StepsDone,
    Tensorized,
    coding_totals,
    energy_totals,
    guard_totals,
)
from outlast.report import text
from outlast.report.energy import account_of, energy_amount, gaps, metered, missing_energy
from outlast.report.overview import OUTCOME_WORDS, percentiles, smoothing_window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.report.overview import Overview

Kind = Literal["measured", "modelled", "predicted", "replayed", "simulated", "published"]


_NO_STEP = "no step is recorded"
_NO_START = "the start of the run is not recorded"
_NO_TOKENS = "the tokens of a step are not known"


@dataclass(frozen=True)
class Unavailable:
    """Stands in the place of a figure that is not known."""

    reason: str


@dataclass(frozen=True)
class KeyFigure:
    """One figure of a run.

    Attributes:
        value: The number as text.
        unit: Its unit, or nothing for a bare count.
        note: What else to know, in a few words.
        kind: How it was found.
    """

    label: str
    value: str | Unavailable
    unit: str = ""
    note: str = ""
    kind: Kind = "measured"


def outcome(overview: Overview) -> tuple[str, str]:
    """End of the run: one of ``good``, ``caution``, ``bad``, and the words for it."""
    attempts = overview.run.attempts
    if not attempts:
        return "caution", "not started"
    last = attempts[-1]
    if last.outcome == "died":
        return "caution", "no end recorded: killed, or still running"
    end = overview.ends.get(last.number)
    words = OUTCOME_WORDS.get(last.outcome, last.outcome)
    grade = {"completed": "good", "failed": "bad"}.get(last.outcome, "caution")
    return grade, f"{words}: {end.reason}" if end and end.reason else words


def key_figures(overview: Overview) -> list[KeyFigure]:
    """The run's key figures; what is not known says why, and is never 0."""
    return [
        *_quality(overview),
        *_speed(overview),
        *_size(overview),
        *_time(overview),
        *_guarded(overview),
        *_coded(overview),
        *_energy(overview),
    ]


def _quality(overview: Overview) -> Iterator[KeyFigure]:
    validation = overview.validation
    if not len(validation.loss):
        missing = Unavailable("no evaluation is recorded")
        yield KeyFigure("Validation loss", missing)
        yield KeyFigure("Bits per byte", missing)
    else:
        note = f"at step {validation.step[-1]:,}"
        if np.isfinite(validation.loss).any():
            best = int(
                np.nanargmin(np.where(np.isfinite(validation.loss), validation.loss, np.inf))
            )
            if best != len(validation.loss) - 1:
                lowest = text.number(validation.loss[best])
                note += f"; lowest {lowest} at step {validation.step[best]:,}"
        loss = text.number(validation.loss[-1])
        yield KeyFigure("Validation loss", loss, "nats/token", note)
        bits = float(validation.bits_per_byte[-1])
        unknown = Unavailable("the number of source bytes is not known")
        yield KeyFigure("Bits per byte", unknown if math.isnan(bits) else text.number(bits))
    training = overview.training
    if not len(training.loss):
        yield KeyFigure("Training loss", Unavailable(_NO_STEP))
        return
    if not np.isfinite(training.loss).any():
        yield KeyFigure("Training loss", Unavailable("no record holds a finite loss"))
        return
    window = smoothing_window(len(training.loss))
    tail = training.loss[-window:]
    tail = tail[np.isfinite(tail)]
    last = float(tail.mean()) if len(tail) else float("nan")
    note = f"mean of the last {text.plural(window, 'record')}"
    if bad := int((~np.isfinite(training.loss)).sum()):
        note += f"; {text.plural(bad, 'record')} not finite"
    yield KeyFigure("Training loss", text.number(last), "nats/token", note)


def _speed(overview: Overview) -> Iterator[KeyFigure]:
    training, wall_seconds = overview.training, overview.split.wall_seconds
    rates = training.tokens_per_second[np.isfinite(training.tokens_per_second)]
    if len(rates):
        note = "median over the step records"
        if wall_seconds > 0:
            end_to_end = text.number(float(training.tokens[-1]) / wall_seconds)
            note += f"; {end_to_end} over the whole wall time"
        yield KeyFigure("Throughput", text.number(float(np.median(rates))), "tokens/s", note)
    else:
        reason = (_NO_TOKENS if overview.starts else _NO_START) if len(training.step) else _NO_STEP
        yield KeyFigure("Throughput", Unavailable(reason))
    steps = percentiles(overview.step_seconds)
    if steps is None:
        yield KeyFigure("Step time", Unavailable(_NO_STEP))
    else:
        note = f"median; p90 {text.duration(steps.p90)}, p99 {text.duration(steps.p99)}"
        yield KeyFigure("Step time", text.duration(steps.median), note=note)
    share = utilization(overview)
    if share is not None:
        note = "measured tokens/s over the published peak"
        yield KeyFigure("Model FLOP utilization (MFU)", f"{100 * share:.1f}", "%", note)


def utilization(overview: Overview) -> float | None:
    """Model FLOPs done per FLOP that the devices could have done, or None when not known.

    Needs ``peak_flop_per_s``, the published peak of one process's device, in the machine
    description that every attempt wrote. MFU as in Chowdhery et al., "PaLM", appendix B.
    """
    starts = overview.starts
    done = possible = 0.0
    for record, event in overview.run.of(StepsDone):
        start = starts.get(record.attempt)
        peak = start.machine.get("peak_flop_per_s") if start else None
        if start is None or not isinstance(peak, int | float) or peak <= 0:
            return None
        done += event.steps * start.tokens_per_step * start.flops_per_token
        possible += sum(event.step_seconds) * start.world_size * peak
    return done / possible if possible > 0 and done > 0 else None


def _size(overview: Overview) -> Iterator[KeyFigure]:
    training, starts = overview.training, overview.starts
    start = starts[max(starts)] if starts else None
    if len(training.step):
        note = f"of {start.total_steps:,}" if start and start.total_steps else ""
        yield KeyFigure("Steps", text.count(int(training.step[-1])), note=note)
        tokens = int(training.tokens[-1])
        yield KeyFigure("Tokens", text.count(tokens) if tokens else Unavailable(_NO_TOKENS))
    else:
        yield KeyFigure("Steps", Unavailable(_NO_STEP))
        yield KeyFigure("Tokens", Unavailable(_NO_STEP))
    known = start is not None and start.parameters > 0
    parameters = text.count(start.parameters) if start and known else Unavailable(_NO_START)
    tensorized = overview.run.of(Tensorized)
    note = ""
    if tensorized:
        event = tensorized[-1][1]
        note = f"{event.form}: {event.parameter_share:.2f}x those of the dense model"
    yield KeyFigure("Parameters", parameters, note=note)
    if start is not None and start.flops_per_token > 0:
        note = "forward and backward"
        if tensorized:
            note += f"; {event.flops_share:.2f}x those of the dense model"
        flops = text.count(round(start.flops_per_token))
        yield KeyFigure("FLOPs per token", flops, note=note, kind="predicted")
    sizes = " → ".join(str(size) for size in overview.world_sizes)
    yield KeyFigure("Processes", sizes if starts else Unavailable(_NO_START))


def _time(overview: Overview) -> Iterator[KeyFigure]:
    run, split = overview.run, overview.split
    if not run.attempts:
        for label in ("Wall time", "Time in compute", "Checkpoints", "Attempts"):
            yield KeyFigure(label, Unavailable("the run was not started"))
        return
    gaps_seconds = overview.elapsed_seconds - split.wall_seconds
    note = "all attempts"
    if gaps_seconds > 0.1:
        note += f"; {text.duration(overview.elapsed_seconds)} with the gaps between them"
    yield KeyFigure("Wall time", text.duration(split.wall_seconds), note=note)
    if split.seconds["compute"] > 0 and split.wall_seconds > 0:
        share = 100 * split.seconds["compute"] / split.wall_seconds
        yield KeyFigure("Time in compute", f"{share:.1f}", "%", "of the wall time")
    else:
        yield KeyFigure("Time in compute", Unavailable(_NO_STEP))
    saved, failed = run.of(CheckpointSaved), run.of(CheckpointFailed)
    waited_seconds = sum(event.blocked_seconds for _, event in saved)
    note = f"training waited {text.duration(waited_seconds)} for them" if saved else ""
    if saved:
        note += f"; the last holds {text.data_size(saved[-1][1].bytes)}"
    if failed:
        note += f"; {len(failed)} failed".removeprefix("" if note else "; ")
    yield KeyFigure("Checkpoints", f"{len(saved):,}", "saved", note)
    ended = Counter(
        OUTCOME_WORDS.get(attempt.outcome, attempt.outcome) for attempt in run.attempts[:-1]
    )
    note = ", ".join(f"{number} {words}" for words, number in ended.items())
    yield KeyFigure("Attempts", f"{len(run.attempts):,}", note=note and f"before the last: {note}")


def _guarded(overview: Overview) -> Iterator[KeyFigure]:
    totals = guard_totals(overview.run)
    if totals is None:
        return
    note = f"in {text.count(totals.checks)} checks; policy {totals.policy}"
    compute_seconds = overview.split.seconds["compute"]
    if totals.seconds is not None and compute_seconds > 0:
        note += f"; {100 * totals.seconds / compute_seconds:.2f} % of the compute time"
    yield KeyFigure("Wrong numbers", text.count(len(totals.findings)), "found", note)


def _coded(overview: Overview) -> Iterator[KeyFigure]:
    totals = coding_totals(overview.run)
    if totals is None:
        return
    inexact = len(totals.inexact)
    exact = "all exact" if not inexact else f"{inexact:,} inexact"
    note = f"{totals.scheme}; {exact}; saved at least {text.duration(totals.saved_seconds)}"
    slow = f"{len(totals.slow_steps):,} of {len(totals.steps):,}"
    yield KeyFigure("Steps with a straggler", slow, "steps", note)


def _energy(overview: Overview) -> Iterator[KeyFigure]:
    totals = energy_totals(overview.run)
    missing = missing_energy(overview.run)
    if missing is not None or totals is None or totals.joules is None:
        reason = (missing or "").removeprefix("unavailable: ")
        yield KeyFigure("Energy", Unavailable(reason))
        return
    value, _, unit = energy_amount(totals.joules).rpartition(" ")
    note = metered(totals)
    if redone := totals.purposes.get("redone", 0.0):
        note += f"; {energy_amount(redone)} of it redone work"
    note = "; ".join([note, *gaps(totals)])
    yield KeyFigure("Energy", value, unit, note, cast("Kind", totals.kind))
    if totals.joules_per_token is not None:
        note = "all energy over the tokens that count"
        per_token = text.number(totals.joules_per_token)
        yield KeyFigure("Energy per token", per_token, "J/token", note, cast("Kind", totals.kind))
    found = account_of(overview.run)
    to_loss = getattr(found, "joules_to_loss", None)
    if isinstance(to_loss, Amount):
        value, _, unit = energy_amount(to_loss.value).rpartition(" ")
        kind = cast("Kind", to_loss.kind)
        yield KeyFigure("Energy to the loss", value, unit, to_loss.source, kind)
