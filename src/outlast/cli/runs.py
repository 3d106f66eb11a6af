"""``outlast export``: a run's newest checkpoint as a Hugging Face directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import RecoverError

if TYPE_CHECKING:
    from outlast.records import Run, RunDirectory


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/quickstart.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/model.")
    ] = None,
) -> None:
    """Write the newest checkpoint as a Hugging Face directory for from_pretrained.

    Works on any checkpoint, whatever number of processes wrote it.
    """
    from outlast.job import job_from_text
    from outlast.records import RunDirectory, read_run
    from outlast.train.export import export_model

    found = read_run(run)
    target = output or RunDirectory(run).model
    job = job_from_text(found.job_text, str(run / "job.toml"))
    step = export_model(job, RunDirectory(run), target)
    typer.echo(f"wrote the model of step {step} to {target}")


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="run directories; several are laid side by side")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write; default: RUN/report.html, or ./report.html for several runs",
        ),
    ] = None,
) -> None:
    """Show runs as pictures: one HTML file that needs no network.

    Loss, throughput, step times, where the time went, events, attempts, warnings, the model's
    sample and the job. Works while the run goes on and after it was killed.
    """
    from outlast.report import write_report

    typer.echo(write_report(runs, output))


_LOOK_SECONDS = 0.2


_RESTART_SECONDS = 5.0


def resize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run that is going on.")
    ],
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="How many go on.")],
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, help="Seconds to wait until they do; 0: do not wait."),
    ] = 120.0,
) -> None:
    """Let a run on this machine go on with another number of processes, without losing a step.

    All processes stop at the next step boundary; so many as wished for start, take the state from
    memory (or from a checkpoint made for it), and do the next step with the same global batch. The
    run must have been started by ``outlast train --nproc``.
    """
    from outlast.records import RunDirectory, read_run
    from outlast.recover.resize import ask, is_wanted

    directory = RunDirectory(run)
    _check(directory, processes)
    before = read_run(run).attempts[-1]
    if before.world_size == processes:
        print(f"{run} has {processes} processes already")
        return
    ask(run, processes)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        found = read_run(run)
        if (step := _resized_at(found, before.number, processes)) is not None:
            print(f"{run} goes on from step {step} with {processes} processes")
            return
        _refuse_ended(run, found)
        time.sleep(_LOOK_SECONDS)
    if not wait:
        print(f"{run} goes on with {processes} processes after its present step")
    elif is_wanted(run):
        raise RecoverError(
            f"{run} has not stopped within {wait:g} s (--wait); it will at its next step boundary"
        )
    else:
        raise RecoverError(f"{run} has stopped, but was not ready within {wait:g} s (--wait)")


def _check(directory: RunDirectory, processes: int) -> None:
    """Refuse what the run could not do.

    Raises:
        OutlastError: With the reason.
    """
    import torch

    from outlast.job import job_from_text
    from outlast.records import AttemptStarted, read_run
    from outlast.train.preflight import preflight

    if not directory.exists():
        raise RecoverError(f"{directory.path} is no run directory; give that of a run")
    found = read_run(directory.path)
    _refuse_ended(directory.path, found)
    # A run that is just being restarted is unlocked for a moment.
    deadline = time.monotonic() + _RESTART_SECONDS
    while not directory.lock().is_held():
        if time.monotonic() > deadline:
            raise RecoverError(
                f"{directory.path} is not running; `outlast train --nproc N` starts it with N "
                "processes"
            )
        time.sleep(_LOOK_SECONDS)
    started = found.of(AttemptStarted)
    if not started:
        raise RecoverError(f"{directory.path} is being set up; try again when it trains")
    launch = started[-1][1].launch
    if launch != "nproc":
        if launch == "live":
            raise RecoverError(
                f"{directory.path} trains by live groups; stop it, and start it again with "
                f"recover.groups={processes} (SIGTERM stops it without losing a step)"
            )
        how = {"alone": "by outlast train without --nproc"}.get(launch, f"by {launch}")
        raise RecoverError(
            f"{directory.path} was started {how}, where nobody can start more processes; stop it "
            f"and start it again with `outlast train --nproc {processes}` "
            "(SIGTERM stops it without losing a step)"
        )
    devices = torch.cuda.device_count()
    if devices and processes > devices:
        raise RecoverError(
            f"--processes {processes} exceeds the {devices} GPUs that this machine shows"
        )
    preflight(job_from_text(directory.job_file.read_text(encoding="utf-8")), processes)


def _refuse_ended(run: Path, found: Run) -> None:
    """Raise where nothing goes on any more, so that nobody would see the wish."""
    from outlast.records import AttemptEnded
    from outlast.recover.resize import RESIZE

    newest = found.attempts[-1].number if found.attempts else 0
    for record, ended in found.of(AttemptEnded):
        if record.attempt == newest and ended.reason != RESIZE:
            raise RecoverError(
                f"{run} has ended ({ended.outcome}); there is nothing to resize. "
                "`outlast train --nproc N` starts a run with N processes"
            )


def _resized_at(found: Run, before: int, processes: int) -> int | None:
    """The step from which `processes` go on in an attempt after `before`."""
    for attempt in found.attempts:
        ready = attempt.first_step is not None and attempt.world_size == processes
        if attempt.number > before and ready:
            return attempt.first_step
    return None
