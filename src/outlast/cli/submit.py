"""``outlast submit``: a long training as a chain of batch jobs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.submit_script import job_of_script, named_after
from outlast.cli.train import JobFile, Overrides, jobs_arguments
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.chain.choosing import Chosen
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan
    from outlast.job import Job

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be submitted; submit nothing.")
]


def submit(
    job_file: JobFile = None,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Move an earlier run of this name aside and start anew."),
    ] = False,
    hours: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="What is left to train on the first number of nodes, for slurm.wall_time = "
            '"auto" before any step was measured.',
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar='"SCRIPT.PY ARGUMENTS"',
            help="Run a script of your own, as outlast run does, in place of outlast train.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="STEPS|TIME|auto", help="With --script: how often to save."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="With --script: newest versions kept.")
    ] = None,
) -> None:
    """Train on a Slurm cluster, as a chain of batch jobs within its time limits.

    Run it on a login node and walk away: each job saves before its time limit, the next one goes
    on. What it asks Slurm for is in the section slurm of the job. Nothing stays behind on the
    login node; all state is in files beside the checkpoints.
    """
    from outlast.cluster.chain.manage import (
        begin,
        choice_of,
        move_aside,
        next_number,
        refuse_second,
    )
    from outlast.cluster.chain.planning import files_of, plan_chain, site_now
    from outlast.cluster.transfers import transfers_for
    from outlast.job import load_job, to_toml

    job_file, settings = jobs_arguments(job_file, overrides)
    if script is not None:
        settings = named_after(script, settings, job_file)
    job = load_job(job_file, settings, unsure=frozenset({"model"}))
    if script is not None:
        job = job_of_script(job, script, every=every, keep=keep)
    elif every is not None or keep is not None:
        raise ClusterError(
            "--every and --keep are those of outlast run and go with --script; of outlast train, "
            "set checkpoint.every_steps and checkpoint.keep"
        )
    # A plan of another run is refused here, not on the nodes.
    transfers_for(job, processes=1, nodes=1)
    files = files_of(job)
    if not dry_run:
        refuse_second(files)
    if not fresh:
        check_run(job)
    if not job.slurm.command:
        # What `outlast train` would refuse on the nodes.
        load_job(job_file, settings)
    plan = plan_chain(job, site_now(job))
    number = 1 if fresh else next_number(files)
    if hours is not None and not plan.chooses:
        raise ClusterError(
            f"--hours = {hours:g} is only used where the time limit is chosen: set "
            'slurm.wall_time = "auto", or leave it out'
        )
    seconds = None if hours is None else 3600.0 * hours
    plan = dataclasses.replace(plan, work_seconds=seconds or 0.0)
    step = 0 if fresh else None
    chosen = choice_of(files, plan.from_link(number), number, seconds=seconds, step=step)
    if dry_run:
        print(script_text(files, plan, number, chosen), end="")
        return
    if fresh:
        move_aside(files)
    jobs = begin(files, plan, to_toml(job), chosen)
    print(f"submitted {', '.join(jobs)}: chain {plan.chain} of {files.run}")
    if chosen is not None:
        print(f"chosen: {chosen.reason}")
    print(f"how it goes: outlast cluster status {files.run}")


def script_text(
    files: ChainFiles, plan: ChainPlan, number: int, chosen: Chosen | None = None
) -> str:
    """The exact batch script of link `number` as it would be submitted next."""
    from outlast.cluster.chain.manage import first_lead_seconds
    from outlast.cluster.chain.submission import batch_of
    from outlast.cluster.slurm.script import batch_text

    plan = plan.from_link(number) if chosen is None else chosen.plan
    return batch_text(batch_of(files, plan, number, first_lead_seconds(files, plan)))


def check_run(job: Job) -> None:
    """Refuse the directory of another job.

    A run of `outlast.Run` has settings of its own, in its script: it is gone on with by the program
    that began it.

    Raises:
        RunError: With the settings that differ, or what to do instead.
    """
    from pathlib import Path

    from outlast.errors import RunError
    from outlast.job import Job, differences, settings_from_text
    from outlast.records import RunDirectory

    directory = RunDirectory(Path(job.run.directory) / job.run.name)
    if not directory.exists():
        return
    earlier = settings_from_text(
        directory.job_file.read_text(encoding="utf-8"), str(directory.job_file)
    )
    if not isinstance(earlier, Job):
        if not job.slurm.command:
            raise RunError(
                f"the run in {directory.path} was begun by outlast.Run, with which `outlast train` "
                "cannot go on: say how its script is started, e.g. "
                'slurm.command="srun python train.py"; or give this run another name '
                "(run.name=...)"
            )
        return
    if changed := differences(earlier, job):
        listed = "\n".join(f"  - {line}" for line in changed)
        raise RunError(
            f"the run directory {directory.path} belongs to another job; these settings differ:\n"
            f"{listed}\ngive this run another name (run.name=...), set them back, or start anew "
            "with --fresh, which moves the old directory aside"
        )
