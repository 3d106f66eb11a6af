"""``outlast submit --script``: a script under ``outlast run`` as the program of a chain."""

from __future__ import annotations

import ast
import shlex
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.job import Job


_RUNS = ("outlast.Run", "outlast.integrations.Run", "outlast.integrations.run.Run")


def named_after(text: str, settings: list[str], job_file: Path | None = None) -> list[str]:
    """The settings, with the script's name for the run where neither they nor the file give one."""
    if any(setting.startswith("run.name=") for setting in settings) or _names_run(job_file):
        return settings
    words = _words(text)
    return [*settings, f"run.name={Path(words[0]).stem}"] if words else settings


def _names_run(job_file: Path | None) -> bool:
    """Whether a job file has a name for the run; what is wrong with the file is said elsewhere."""
    if job_file is None:
        return False
    try:
        run = tomllib.loads(job_file.read_text(encoding="utf-8")).get("run")
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
    from outlast.cli.run_program import read_and_rewrite
    from outlast.cluster.chain.planning import run_path
    from outlast.cluster.chain.stopping import RECORD_TELLS
    from outlast.integrations.pace import every_of
    from outlast.job.slurm import CHOSEN

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
            "script goes on with as many processes as it was saved by; give one number"
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
    """Whether a script saves by itself, with `outlast.Run`."""
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
    """What starts a script that makes an `outlast.Run`.

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
