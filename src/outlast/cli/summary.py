"""What a person sees when a run ends: one table and the model's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from outlast.records import (
    AttemptStarted,
    Evaluated,
    Run,
    Sampled,
    Tensorized,
    coding_totals,
    guard_totals,
    read_run,
    recovery_totals,
)
from outlast.report.energy import energy_sentence, energy_to_loss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outlast.job import Job
    from outlast.records import GuardTotals, RunDirectory


def print_summary(job: Job, directory: RunDirectory, report: Path) -> None:
    """Print the run's key figures, all of them measured, and where everything is."""
    console = Console()
    run = read_run(directory.path)
    table = Table(
        title=f"{run.name}: {_outcome(run)}", title_justify="left", title_style="bold", box=None
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")  # a path cut short is of no use
    for name, value in _rows(job, run):
        table.add_row(name, escape(value))
    table.add_row("run directory", escape(str(directory.path)))
    if directory.model.exists():
        table.add_row("model", escape(str(directory.model)))
    table.add_row("report", escape(str(report)))
    console.print()
    if sampled := run.of(Sampled):
        _, event = sampled[-1]
        text = f"[bold]{escape(event.prompt)}[/bold]{escape(event.text)}"
        console.print(Panel(text, title="a sampled continuation", title_align="left"))
    console.print(table)


def _outcome(run: Run) -> str:
    if not run.attempts:
        return "not started"
    outcome = run.attempts[-1].outcome
    return {
        "completed": "completed",
        "to_be_continued": "stopped, to be continued: the same command goes on",
    }.get(outcome, outcome)


def _rows(job: Job, run: Run) -> Iterator[tuple[str, str]]:
    if evaluations := run.of(Evaluated):
        _, last = evaluations[-1]
        bits = (
            "bits per byte unavailable: the number of source bytes is not known"
            if last.bits_per_byte is None
            else f"{last.bits_per_byte:.4f} bits per byte"
        )
        yield "validation loss", f"{last.loss:.4f} nats per token, {bits} (step {last.step})"
    else:
        yield "validation loss", "unavailable: nothing was evaluated yet"
    steps = run.steps()
    if steps:
        last_step = steps[-1][1]
        yield "training loss", f"{last_step.loss:.4f} nats per token (step {last_step.step})"
        yield "steps", f"{last_step.step:,} of {job.train.steps:,}"
        yield "tokens", f"{last_step.tokens:,}"
        step_seconds = sum(sum(event.step_seconds) for _, event in steps)
        counted = sum(event.steps for _, event in steps)
        tokens = counted * job.train.batch_size * job.data.sequence_length
        if step_seconds:
            yield "throughput", f"{tokens / step_seconds:,.0f} tokens/s within steps"
    if started := run.of(AttemptStarted):
        yield "parameters", f"{started[-1][1].parameters:,}"
    if tensorized := run.of(Tensorized):
        yield "tensorized", _tensorized(tensorized[-1][1])
    seconds = run.seconds()
    if (guarded := _guarded(run, seconds.get("compute", 0.0))) is not None:
        yield "guard", guarded
    if (coded := _coded(run)) is not None:
        yield "gradient coding", coded
    if (recovered := recovery_totals(run)) is not None:
        yield "recovery", recovered.sentence()
    yield "energy", energy_sentence(run)
    if (to_loss := energy_to_loss(run)) is not None:
        yield "energy to loss", to_loss
    wall = sum(seconds.values())
    if wall:
        spent = [(name, value) for name, value in seconds.items() if value / wall >= 0.0005]
        spent.sort(key=lambda part: -part[1])
        parts = ", ".join(f"{name} {value:.1f} s ({value / wall:.1%})" for name, value in spent)
        attempts = f"{len(run.attempts)} attempt{'s' if len(run.attempts) > 1 else ''}"
        yield "wall time", f"{wall:.1f} s in {attempts}: {parts}"


def _tensorized(event: Tensorized) -> str:
    """What was replaced, and what is left of the dense model's parameters and operations."""
    layers = f"{len(event.modules):,} layers"
    if event.kept:
        layers += f", {len(event.kept):,} kept dense"
    return (
        f"{event.form}, rank {event.wanted_rank}: {layers}; {event.parameters:,} of "
        f"{event.dense_parameters:,} parameters ({event.parameter_share:.2f}x), "
        f"{event.flops_share:.2f}x FLOPs per token"
    )


def _guarded(run: Run, compute_seconds: float) -> str | None:
    """What was checked and found, and the share of the compute time that this took."""
    totals = guard_totals(run)
    if totals is None:
        return None
    ended = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in sorted(totals.outcomes().items())
    )
    covered = totals.modules - sum(totals.uncovered.values())
    cost = (
        "time unavailable: the device runs behind the host"
        if totals.seconds is None or not compute_seconds
        else f"{totals.seconds:.2f} s ({totals.seconds / compute_seconds:.2%} of compute)"
    )
    return (
        f"{totals.policy}: {totals.checks:,} checks of {covered} of {totals.modules} modules, "
        f"{ended or 'nothing wrong'}{_unwatched(totals)}; {cost}"
    )


def _unwatched(totals: GuardTotals) -> str:
    """How much of what was trained no check has watched, where that is known."""
    share, last = totals.watched_share, totals.last
    if share is None:
        return ""
    said = f"; checks watched {share:.1%} of the gradient"
    if last.flops is not None:
        said += f" and {1.0 - last.flops:.1%} of the products' FLOPs"
    if last.gaps:
        others = f" and {len(last.gaps) - 3} others" if len(last.gaps) > 3 else ""
        said += f", not {', '.join([*last.gaps][:3])}{others}"
    return f"{said}; at rest {last.at_rest / max(last.parameters, 1):.1%} of the weights"


def _coded(run: Run) -> str | None:
    """Who was slow, what was done about it and what it was worth, with advice if there is any."""
    totals = coding_totals(run)
    if totals is None:
        return None
    inexact = (
        "all exact"
        if not totals.inexact
        else f"{len(totals.inexact):,} not exact (certified error up to {totals.worst_error:.3g})"
    )
    advice = f"; {totals.advice}" if totals.advice else ""
    return (
        f"{totals.scheme}: {len(totals.slow_steps):,} of {len(totals.steps):,} steps had a "
        f"straggler, {totals.claims:,} micro-batches taken over, {inexact}; saved at least "
        f"{totals.saved_seconds:.1f} s{advice}".removesuffix(".")
    )
