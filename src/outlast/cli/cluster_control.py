"""``outlast cluster resume, stop, adopt``: steering a chain from a login node."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.cluster_status import Run, chain_of
from outlast.cli.submit import check_run
from outlast.cli.train import Overrides
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan


def resume(run: Run, overrides: Overrides = None) -> None:
    """Go on with a chain that was stopped, cancelled, gave up or lost its next link.

    Settings such as slurm.wall_time=4h replace those that the chain was submitted with.
    """
    from outlast.cluster.chain.manage import resume as resumed
    from outlast.cluster.chain.plan import read_plan

    files = chain_of(run)
    before = read_plan(files)
    jobs = resumed(files, *(_changed(files, before, list(overrides)) if overrides else ()))
    print(f"submitted {', '.join(jobs)}: chain {before.chain} of {files.run} goes on")
    _print_choice(files)


def _print_choice(files: ChainFiles) -> None:
    """Say why the link that was submitted is as it is, where that was chosen."""
    from outlast.cluster.chain.journal import choice_words, entries

    if words := choice_words(entries(files)):
        print(f"chosen: {words}")


def _changed(files: ChainFiles, before: ChainPlan, overrides: list[str]) -> tuple[ChainPlan, str]:
    """The plan of a chain with other settings, and the text of its job."""
    from outlast.cluster.chain.planning import files_of, plan_chain, site_now
    from outlast.job import load_job, to_toml

    with contextlib.ExitStack() as there:
        try:
            # Paths of a job are meant from where its links run.
            there.enter_context(contextlib.chdir(before.directory))
        except OSError as error:
            raise ClusterError(
                f"{before.directory}, where the links run, cannot be entered: {error.strerror}"
            ) from None
        job = load_job(files.job, overrides)
        if files_of(job) != files:
            raise ClusterError(
                f"run.directory and run.name are now those of {files_of(job).run}, not of "
                f"{files.run}: set them back, or submit it as a run of its own"
            )
        check_run(job)
        plan = plan_chain(job, site_now(job))
    python = job.slurm.python or before.python
    return dataclasses.replace(plan, python=python), to_toml(job)


def stop(
    run: Run,
    after_checkpoint: Annotated[
        bool,
        typer.Option(
            "--after-checkpoint", help="Let the running link save at its next step first."
        ),
    ] = False,
) -> None:
    """End a chain: cancel its jobs, or let the running one save and end."""
    from outlast.cluster.chain.manage import stop as stopped

    print(stopped(chain_of(run), after_checkpoint=after_checkpoint))


def adopt(
    job_number: Annotated[str, typer.Argument(metavar="JOBID", help="A job that trains this run.")],
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.TOML|RUN", help="The job file or directory of the run.")
    ],
    overrides: Overrides = None,
) -> None:
    """Make a job that was submitted by hand the first link of a chain."""
    from outlast.cluster.chain.manage import adopt as adopted
    from outlast.cluster.chain.planning import files_of, plan_chain, site_now
    from outlast.job import load_job, to_toml
    from outlast.job.template import toml_value
    from outlast.records import RunDirectory

    if job_file.is_dir():
        # Wherever it lies now.
        place = [f"run.directory={toml_value(str(job_file.resolve().parent))}"]
        place.append(f"run.name={toml_value(job_file.resolve().name)}")
        job_file = RunDirectory(job_file).job_file
    else:
        place = []
    settings = [*place, *(overrides or [])]
    job = load_job(job_file, settings, unsure=frozenset({"model"}))
    check_run(job)
    if not job.slurm.command:
        load_job(job_file, settings)
    plan = plan_chain(job, site_now(job))
    files = files_of(job)
    jobs = adopted(files, plan, to_toml(job), job_number)
    print(f"submitted {', '.join(jobs)} to follow job {job_number}: chain {plan.chain}")
    _print_choice(files)
