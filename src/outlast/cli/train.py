"""``outlast train``: run a job, or continue with it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import facts_table, print_facts, print_json
from outlast.cli.options import AsJson
from outlast.errors import EXIT_DONE, MissingExtraError, OutlastError, RecoverError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outlast.job import Job, Section
    from outlast.records import GuardTotals, Run, RunDirectory, Tensorized
    from outlast.train.run import Start


JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.TOML", help="Job file; without one, the embedded default."),
]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that replace the file's."),
]


Processes = Annotated[int | None, typer.Option(min=1, help="Processes to start on this machine.")]


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the usual help, then every setting of a job by section."""
    if wanted:
        typer.echo(ctx.get_help())
        print_settings()
        raise typer.Exit


def train(
    job_file: JobFile = None,
    overrides: Overrides = None,
    *,
    nproc: Processes = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start anew.")
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="Show all settings of a job, by section, and exit.",
            callback=_help_all,
            is_eager=True,
        ),
    ] = False,
    process_fault: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a language model, or continue where the run was stopped or killed.

    The same command starts, resumes and finishes a run. It works alone, with --nproc, under
    torchrun and under srun. Exit codes: 0 done, 2 wrong input, 3 stopped and to be continued, 4
    wrong values that stay wrong.

    Examples: outlast train; outlast train train.steps=600; outlast train job.toml --nproc 2
    """
    del help_all
    from outlast.job import load_job

    job_file, settings = job_arguments(job_file, overrides)
    if nproc is not None:
        settings.append(f"launch.nproc={nproc}")
    job = load_job(job_file, settings)
    raise typer.Exit(run_job(job, fresh=fresh, process_faults=tuple(process_fault or ())))


def job_arguments(
    job_file: Path | None, overrides: list[str] | None
) -> tuple[Path | None, list[str]]:
    """Job file and overrides, where ``train.steps=100`` stands in the place of a file."""
    settings = list(overrides or [])
    if job_file is not None and "=" in str(job_file) and not job_file.exists():
        return None, [str(job_file), *settings]
    if job_file is not None and not job_file.exists() and _is_setting(str(job_file)):
        raise OutlastError(f"{job_file} is a setting without a value: write {job_file}=VALUE")
    return job_file, settings


def _is_setting(word: str) -> bool:
    """True if a word is the name of a setting, which has lost its value."""
    from outlast.job import Job

    section, _, key = word.partition(".")
    field = Job.model_fields.get(section)
    return field is not None and key in getattr(field.annotation, "model_fields", {})


def run_job(job: Job, *, fresh: bool, process_faults: tuple[str, ...] = ()) -> int:
    """Run `job` as the environment says: one process of several, a launcher, or alone."""
    from outlast.cluster.staging import stager_for
    from outlast.cluster.stopping import stop_when_of
    from outlast.cluster.storage import turns_for
    from outlast.cluster.transfers import transfers_for
    from outlast.distributed.ranks import launched_by, ranks_from
    from outlast.train.run import Start, check_directory, run_directory, work, work_alone

    ranks = ranks_from(os.environ) if launched_by(os.environ) != "alone" else None
    processes, nodes = (ranks.world_size, ranks.nodes) if ranks else (job.launch.nproc, 1)
    live = job.recover.mode == "live"
    # Of live groups, each a process, only the one that writes copies what it has saved.
    transfers = transfers_for(job, processes=1 if live else processes, nodes=nodes)
    start = Start(
        job,
        fresh=fresh,
        process_faults=process_faults,
        # A link of a chain has a clock of its own; see `outlast submit`.
        stop_when=stop_when_of(),
        stager=stager_for(job.staging, transfers.stage_bytes_per_s if transfers else 0.0),
        turns=turns_for(job.checkpoint),
        transfers=transfers,
    )
    directory, unpredicted = run_directory(job), ""
    if live and ranks is not None:
        raise RecoverError(
            'recover.mode = "live" starts its groups itself, on one machine; start the run without '
            'torchrun or srun, or choose recover.mode = "restart"'
        )
    if ranks is not None:
        if ranks.is_first:
            print("" if fresh else completion(directory, job), end="", flush=True)
            start, unpredicted = _predicted(start, ranks.world_size)
        code = work(start, ranks)
        if ranks.is_first:
            show_run(job, directory, unpredicted)
        return code
    from outlast.train.preflight import preflight

    if live:
        from outlast.train.live import group_count

        processes = group_count(job)
    else:
        preflight(job, processes)
    if not fresh:
        check_directory(job, directory)
        if complete := completion(directory, job):
            print(complete, end="")
            show_run(job, directory)
            return EXIT_DONE
    start, unpredicted = _predicted(start, processes)
    if live:
        from outlast.train.live import launch_live

        code = launch_live(start)
    elif processes > 1:
        from outlast.train.launch import launch_group

        code = launch_group(start)
    else:
        code = work_alone(start)
    show_run(job, directory, unpredicted)
    return code


def _predicted(start: Start, processes: int) -> tuple[Start, str]:
    """`start` with the job's prediction, or in a phrase why it has none."""
    from outlast.cli.plan_calibrate import prediction_of

    found = prediction_of(start.job, processes)
    return (start, found) if isinstance(found, str) else (replace(start, prediction=found), "")


def completion(directory: RunDirectory, job: Job) -> str:
    """Message for a run that has done all the job's steps; else empty."""
    from outlast.records import read_run

    found = read_run(directory.path).completion(job.train.steps) if directory.exists() else ""
    if not found:
        return ""
    return (
        f"{found}; nothing is left to train.\n"
        f"  longer: train.steps={2 * job.train.steps}, or any number above {job.train.steps}\n"
        "  anew: --fresh, which moves it aside, or another run.name\n"
    )


def show_run(job: Job, directory: RunDirectory, unpredicted: str = "") -> None:
    """Write the report and print the summary of a run; see `print_summary`."""
    from outlast.report import write_report

    try:
        report: Path | str = write_report([directory.path])
    except MissingExtraError as error:
        report = f"not written: {error}"
    except OutlastError:
        raise
    except Exception as error:
        # The run is saved, and must not be told to have failed by a page about it.
        report = f"not written, by a defect: {type(error).__name__}: {error}"
    print_summary(job, directory, report, unpredicted)


def print_settings() -> None:
    """Print all sections with their keys, defaults and descriptions."""
    from rich.console import Console

    from outlast.job import Job, Section

    console = Console()
    console.print("Settings, in the job file or as [bold]section.key=value[/bold]:\n")
    for name, field in Job.model_fields.items():
        section = field.default
        assert isinstance(section, Section)
        _print_section(console, name, section)


def _print_section(console: Console, name: str, section: Section) -> None:
    from rich.padding import Padding

    headline = (type(section).__doc__ or "").strip().splitlines()[0]
    console.print(f"[{name}] {headline}", style="bold", markup=False, highlight=False)
    rows = [
        (key, _shown(field.default), " ".join((field.description or "").split()))
        for key, field in type(section).model_fields.items()
    ]
    console.print(Padding(facts_table(rows), (0, 0, 1, 2)))


def _shown(default: Any) -> str:
    if default is None or default in ({}, []):
        return "-"
    return str(default).lower() if isinstance(default, bool) else str(default)


def print_summary(
    job: Job, directory: RunDirectory, report: Path | str, unpredicted: str = ""
) -> None:
    """Print the run's key figures, all of them measured, and where everything is.

    Args:
        job: Of the run.
        directory: Of the run.
        report: Its page, or why there is none.
        unpredicted: Why there is no prediction; empty: there is one, or nobody asked.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel

    from outlast.records import Sampled, read_run

    console = Console()
    run = read_run(directory.path)
    facts = list(_rows(job, run))
    if unpredicted:
        facts.append(("prediction", f"none: {unpredicted}"))
    facts.append(("run directory", str(directory.path)))
    if directory.model.exists():
        facts.append(("model", str(directory.model)))
    facts.append(("report", str(report)))
    console.print()
    if sampled := run.of(Sampled):
        _, event = sampled[-1]
        text = f"[bold]{escape(event.prompt)}[/bold]{escape(event.text)}"
        console.print(Panel(text, title="a sampled continuation", title_align="left"))
    print_facts(console, f"{run.name}: {_outcome(run)}", facts)


def _outcome(run: Run) -> str:
    if not run.attempts:
        return "not started"
    outcome = run.attempts[-1].outcome
    return {
        "completed": "completed",
        "to_be_continued": "stopped, to be continued: the same command continues",
    }.get(outcome, outcome)


def _rows(job: Job, run: Run) -> Iterator[tuple[str, str]]:
    from outlast.records import AttemptStarted, Evaluated, recovery_totals
    from outlast.report.energy import energy_sentence, energy_to_loss

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
        tokens_per_step = {r.attempt: e.tokens_per_step for r, e in run.of(AttemptStarted)}
        tokens = sum(event.steps * tokens_per_step[record.attempt] for record, event in steps)
        if step_seconds:
            yield "throughput", f"{tokens / step_seconds:,.0f} tokens/s within steps"
    tensorized, ranks = run.tensorized, run.ranks
    if started := run.of(AttemptStarted):
        yield "parameters", f"{(ranks or started[-1][1]).parameters:,}"
    if tensorized is not None:
        adapted = f"; ranks last changed after step {ranks.step:,}" if ranks is not None else ""
        yield "tensorized", _tensorized(tensorized) + adapted
    seconds = run.seconds()
    if (guarded := _guarded(run, seconds.get("compute", 0.0))) is not None:
        yield "guard", guarded
    if audits := _audits(run):
        yield "audits", audits
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
    """Rows on replaced layers, and the share of parameters and operations that is left."""
    layers = f"{len(event.modules):,} layers"
    if event.kept:
        layers += f", {len(event.kept):,} kept dense"
    return (
        f"{event.form}, rank {event.wanted_rank}: {layers}; {event.parameters:,} of "
        f"{event.dense_parameters:,} parameters ({event.parameter_share:.2f}x), "
        f"{event.flops_share:.2f}x FLOPs per token"
    )


def _guarded(run: Run, compute_seconds: float) -> str | None:
    """Rows on checks and findings, and the share of the compute time that checks took."""
    from outlast.records import guard_totals

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
    found = ended or "nothing wrong"
    if not covered:
        return (
            f"{totals.policy}: {totals.checks:,} checks of weights and optimizer state at rest, "
            f'{found}; arithmetic is not checked, which guard.policy = "linear" does; {cost}'
        )
    return (
        f"{totals.policy}: {totals.checks:,} checks of {covered} of {totals.modules} modules, "
        f"{found}{_unwatched(totals)}; {cost}"
    )


def _audits(run: Run) -> str:
    """Say how many audits the guard has made, of what, and what they took."""
    from outlast.records import guard_totals

    totals = guard_totals(run)
    return "" if totals is None else totals.audits


def _unwatched(totals: GuardTotals) -> str:
    """Share of the training that no check has watched, where that is known."""
    share, last = totals.watched_share, totals.last
    if share is None:
        return ""
    said = f"; checks watched {share:.1%} of the gradient"
    if last.flops is not None:
        said += f" and {1.0 - last.flops:.1%} of the products' FLOPs"
    if last.gaps:
        others = f" and {len(last.gaps) - 3} others" if len(last.gaps) > 3 else ""
        said += f", not {', '.join([*last.gaps][:3])}{others}"
    if last.coverage:
        said += f"; {last.coverage}"
    return f"{said}; at rest {last.at_rest / max(last.parameters, 1):.1%} of the weights"


def _coded(run: Run) -> str | None:
    """Rows on slow ranks, the code's answer to them and its worth, with advice if there is any."""
    from outlast.records import coding_totals

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
        f"{totals.description}: {len(totals.slow_steps):,} of {len(totals.steps):,} steps had a "
        f"straggler, {totals.claims:,} micro-batches taken over, {inexact}; saved at least "
        f"{totals.saved_seconds:.1f} s{advice}".removesuffix(".")
    )


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    loop: Annotated[
        bool, typer.Option("--loop", help="For outlast.Run and the adapters: what they follow.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented job file with every setting: the embedded default, ready to change.

    With --loop it has the settings that outlast.Run and the adapters of other frameworks follow.

    --json: {"file", "name", "loop", "bytes"}.
    """
    from outlast.job import load_job, load_loop_job, loop_template, to_toml
    from outlast.records import replace_file

    if path.is_dir():
        raise OutlastError(f"{path} is a folder; give the name of a file, e.g. {path / 'job.toml'}")
    if (path.exists() or path.is_symlink()) and not force:
        raise OutlastError(f"{path} exists; give another name or --force to replace it")
    if not path.parent.is_dir():
        raise OutlastError(f"the folder {path.parent} does not exist; make it first")
    # A run's name allows fewer characters than a file's.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    override = [f"run.name={json.dumps(name)}"]
    text = (
        loop_template(load_loop_job(None, override)) if loop else to_toml(load_job(None, override))
    )
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise OutlastError(f"{path} cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"file": path, "name": name, "loop": loop, "bytes": len(text.encode())})
        return
    use = f'outlast.Run("{path}", ...) in your loop' if loop else f"outlast train {path}"
    typer.echo(f"wrote {path}; train with: {use}")
