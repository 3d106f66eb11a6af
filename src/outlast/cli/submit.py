"""``outlast submit``: a long training as a chain of batch jobs."""

from __future__ import annotations

import ast
import dataclasses
import shlex
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.console import print_json
from outlast.cli.options import AsJson
from outlast.cli.train import JobFile, Overrides, job_arguments
from outlast.errors import RECORD_TELLS, ClusterError
from outlast.paths import read_text

if TYPE_CHECKING:
    from outlast.cluster.chain_files import ChainFiles, ChainPlan
    from outlast.cluster.choosing import Chosen
    from outlast.job import Job


_RUNS = ("outlast.Run", "outlast.integrations.Run", "outlast.integrations.run.Run")


def named_after(text: str, settings: list[str], job_file: Path | None = None) -> list[str]:
    """The settings, with the script's name for the run where neither they nor the file give one."""
    if any(setting.startswith("run.name=") for setting in settings) or _names_run(job_file):
        return settings
    words = _words(text)
    return [*settings, f"run.name={Path(words[0]).stem}"] if words else settings


def _names_run(job_file: Path | None) -> bool:
    """Return True if a job file names the run; its reader reports what is wrong with it."""
    if job_file is None:
        return False
    try:
        run = tomllib.loads(read_text(job_file)).get("run")
    except (OSError, ValueError):
        return False
    return isinstance(run, dict) and "name" in run


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ClusterError(
            f"--script {text} cannot be read as a shell would ({error}); close its quotes"
        ) from None


def job_of_script(job: Job, text: str, *, every: str | None = None, keep: int | None = None) -> Job:
    """The job whose links run a script in place of ``outlast train``.

    Args:
        job: Where and how long its links run.
        text: Path of the script and its arguments, as in a shell.
        every: How often to save, as ``outlast run --every``; None: as it does by itself.
        keep: Newest versions kept; None: as it does by itself.

    Raises:
        ClusterError: The job has a program already, or may be given other numbers of nodes.
        AutosaveError: The script cannot be resumed as it is, or `every` is no interval.
    """
    from outlast.autosave.libraries import read_and_rewrite
    from outlast.cluster.planning import run_path
    from outlast.job.sections import CHOSEN
    from outlast.runtime.cadence import every_of

    words = _words(text)
    if not words or not Path(words[0]).is_file():
        raise ClusterError(
            f'--script "{text}" does not begin with the path of a Python file; give the script and '
            'its arguments in quotes, e.g. --script "train.py --lr 3e-4"'
        )
    if job.slurm.command:
        raise ClusterError(
            f'slurm.command = "{job.slurm.command}" and --script both say what is to be run; '
            "leave one out"
        )
    if len(job.slurm.nodes) != 1:
        raise ClusterError(
            f"slurm.nodes = {list(job.slurm.nodes)} gives links other numbers of nodes, but a "
            "script continues with as many processes as it was saved by; give one number"
        )
    if job.slurm.wall_time == CHOSEN:
        raise ClusterError(
            'slurm.wall_time = "auto" is worked out from the records of outlast train, which a '
            "script does not write; give a time with --script, e.g. slurm.wall_time=8h"
        )
    script = Path(words[0]).resolve()
    python = job.slurm.python or sys.executable
    if _makes_run(script):
        return _with_command(job, _own_loop(job, [python, str(script), *words[1:]], every, keep))
    read_and_rewrite(script)
    folder = run_path(job) / "script"
    options = [f"--directory={folder}"]
    if every is not None:
        every_of(every)
        options.append(f"--every={every}")
    if keep is not None:
        options.append(f"--keep={keep}")
    run = [python, "-m", "outlast", "run", *options, str(script), *words[1:]]
    if job.slurm.nodes[0] * job.slurm.tasks_per_node > 1:
        # A rank that died must not leave the others waiting for it; those that stop end with 0,
        # one after the other.
        run = ["srun", "--kill-on-bad-exit=1", f"--export=ALL,{RECORD_TELLS}=1", *run]
    return _with_command(job, run)


def _with_command(job: Job, words: list[str]) -> Job:
    slurm = job.slurm.model_copy(update={"command": shlex.join(words)})
    return job.model_copy(update={"slurm": slurm})


def _makes_run(script: Path) -> bool:
    """Return True if a script saves by itself, with `outlast.Run`."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # Said by whoever rewrites it.
        return False
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) in _RUNS)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module in ("outlast", "outlast.integrations", "outlast.integrations.run")
            and any(name.name == "Run" for name in node.names)
        )
        for node in ast.walk(tree)
    )


def _own_loop(job: Job, program: list[str], every: str | None, keep: int | None) -> list[str]:
    """Command that starts a script that makes an `outlast.Run`.

    Raises:
        ClusterError: It is given what its own settings say, or several processes, which it has to
            be started as.
    """
    if every is not None or keep is not None:
        raise ClusterError(
            f"{program[1]} saves by itself, with outlast.Run: give it checkpoint.every_steps and "
            "checkpoint.keep there, and leave out --every and --keep"
        )
    if job.slurm.nodes[0] * job.slurm.tasks_per_node > 1:
        raise ClusterError(
            f"{program[1]} makes its processes' group itself, so say how they are started, in "
            'place of --script: slurm.command="srun torchrun ... train.py"'
        )
    return program


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be submitted; submit nothing.")
]


def submit(
    job_file: JobFile = None,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start anew.")
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
    json: AsJson = False,
) -> None:
    """Train on a Slurm cluster, as a chain of batch jobs within its time limits.

    Run it on a login node and walk away: each job saves before its time limit, the next one goes
    on. What it asks Slurm for is in the section slurm of the job. Nothing stays behind on the
    login node; all state is in files beside the checkpoints.

    --json: {"jobs", "chain", "run", "reason", "plan", "script"}; the script is that of --dry-run,
    which has no jobs.
    """
    from outlast.cluster.chain import begin, move_aside, next_number, refuse_second
    from outlast.cluster.choosing import choose_first
    from outlast.cluster.planning import files_of, plan_chain, site_now
    from outlast.cluster.transfers import transfers_for
    from outlast.job import load_job, to_toml

    job_file, settings = job_arguments(job_file, overrides)
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
            'slurm.wall_time = "auto", or leave it out; `outlast cluster plan '
            f"--hours {hours:g}` says how many links a fixed limit takes"
        )
    seconds = None if hours is None else 3600.0 * hours
    plan = dataclasses.replace(plan, work_seconds=seconds or 0.0)
    step = 0 if fresh else None
    chosen = choose_first(files, plan.from_link(number), number, seconds=seconds, step=step)
    script_of_link = script_text(files, plan, number, chosen) if dry_run else None
    if script_of_link is not None and not json:
        print(script_of_link, end="")
        return
    jobs: list[str] = []
    if script_of_link is None:
        if fresh:
            move_aside(files)
        jobs = begin(files, plan, to_toml(job), chosen)
    if json:
        used = plan.from_link(number) if chosen is None else chosen.plan
        submitted = {"jobs": jobs, "chain": plan.chain, "run": files.run, "reason": used.reason}
        print_json({**submitted, "plan": used, "script": script_of_link})
        return
    print(f"submitted {', '.join(jobs)}: chain {plan.chain} of {files.run}")
    if chosen is not None:
        print(f"chosen: {chosen.plan.reason}")
    print(f"how it goes: outlast cluster status {files.run}")


def script_text(
    files: ChainFiles, plan: ChainPlan, number: int, chosen: Chosen | None = None
) -> str:
    """The exact batch script of link `number` as it would be submitted next."""
    from outlast.cluster.submission import batch_script

    plan = plan.from_link(number) if chosen is None else chosen.plan
    return batch_script(files, plan, number)


def check_run(job: Job) -> None:
    """Refuse the directory of another job.

    A run of `outlast.Run` has settings of its own, in its script: it is continued with by the
    program that began it.

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
                "cannot continue: say how its script is started, e.g. "
                'slurm.command="srun python train.py"; or give this run another name '
                "(run.name=...)"
            )
        return
    if changed := differences(earlier, job):
        from outlast.train.run import another_job

        raise RunError(another_job(directory.path, changed))
