"""``outlast train``: run a job, or go on with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.errors import EXIT_DONE, RecoverError

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.records import RunDirectory


JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.TOML", help="Job file; without one, the embedded default."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that replace the file's."),
]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to start on this machine.")]


class TrainCommand(typer.core.TyperCommand):
    """Adds every setting of a job, by section, below the usual help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the settings."""
        super().format_help(ctx, formatter)
        from outlast.cli.settings import print_settings

        print_settings()


def train(
    job_file: JobFile = None,
    overrides: Overrides = None,
    nproc: Processes = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Move an earlier run of this name aside and start anew."),
    ] = False,
    process_fault: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a language model, or go on where the run was stopped or killed.

    The same command starts, resumes and finishes a run. It works alone, with --nproc, under
    torchrun and under srun. Exit codes: 0 done, 2 wrong input, 3 stopped and to be continued, 4
    wrong numbers that stay wrong.
    """
    from outlast.job import load_job

    job_file, settings = jobs_arguments(job_file, overrides)
    if nproc is not None:
        settings.append(f"launch.nproc={nproc}")
    job = load_job(job_file, settings)
    raise typer.Exit(run_job(job, fresh=fresh, process_faults=tuple(process_fault or ())))


def jobs_arguments(
    job_file: Path | None, overrides: list[str] | None
) -> tuple[Path | None, list[str]]:
    """Job file and overrides, where ``train.steps=100`` stands in the place of a file."""
    settings = list(overrides or [])
    if job_file is not None and "=" in str(job_file) and not job_file.exists():
        return None, [str(job_file), *settings]
    return job_file, settings


def run_job(job: Job, *, fresh: bool, process_faults: tuple[str, ...] = ()) -> int:
    """Run `job` as the environment says: one process of several, a launcher, or alone."""
    from outlast.cli.forecast import prediction_for
    from outlast.cluster.chain.stopping import stop_when_of
    from outlast.cluster.staging import stager_for
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
        stop_when=stop_when_of(os.environ),
        stager=stager_for(job.staging, transfers.stage_bytes_per_s if transfers else 0.0),
        turns=turns_for(job.checkpoint),
        transfers=transfers,
    )
    directory = run_directory(job)
    if live and ranks is not None:
        raise RecoverError(
            'recover.mode = "live" starts its groups itself, on one machine; start the run without '
            'torchrun or srun, or choose recover.mode = "restart"'
        )
    if ranks is not None:
        if ranks.is_first:
            print("" if fresh else completion(directory), end="", flush=True)
            start = replace(start, prediction=prediction_for(job, ranks.world_size))
        code = work(start, ranks)
        if ranks.is_first:
            show(job, directory)
        return code
    from outlast.train.preflight import preflight

    if live:
        from outlast.train.live_launch import group_count

        processes = group_count(job)
    else:
        preflight(job, processes)
    if not fresh:
        check_directory(job, directory)
        if complete := completion(directory):
            print(complete, end="")
            show(job, directory)
            return EXIT_DONE
    start = replace(start, prediction=prediction_for(job, processes))
    if live:
        from outlast.train.live_launch import launch_live

        code = launch_live(start)
    elif processes > 1:
        from outlast.train.launch import launch_group

        code = launch_group(start)
    else:
        code = work_alone(start)
    show(job, directory)
    return code


def completion(directory: RunDirectory) -> str:
    """What there is to say where the run has done all its steps; else empty."""
    from outlast.records import read_run

    found = read_run(directory.path).completion() if directory.exists() else ""
    if not found:
        return ""
    return (
        f"{found}; nothing is left to train.\n"
        "  anew: --fresh, which moves it aside, or another run.name\n"
        "  longer: not this run, since train.steps shapes its schedule; `outlast export "
        f"{directory.path} --output DIR`, and a job with model.directory = DIR goes on from its "
        "weights\n"
    )


def show(job: Job, directory: RunDirectory) -> None:
    """Write the report and print the summary of a run."""
    from outlast.cli.summary import print_summary
    from outlast.report import write_report

    print_summary(job, directory, write_report([directory.path]))
