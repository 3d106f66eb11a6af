"""The exact text of a batch script, as a pure function of the request."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from outlast.durations import limit_text
from outlast.errors import ClusterError

BEGAN = "OUTLAST_LINK_BEGAN"
"""Environment variable with the moment when the script began, seconds since the epoch."""
# Those that are not called as the option.
_VARIABLES = {"time": "TIMELIMIT", "no-requeue": "REQUEUE"}
_PLAIN = re.compile(r"[\w@%+=:,./~-]*", re.ASCII)


@dataclass(frozen=True)
class Batch:
    """Request and content of one batch job.

    Attributes:
        name: Of the job, as squeue shows it.
        comment: By which a chain finds its jobs again.
        nodes: How many.
        tasks_per_node: Processes on each.
        limit_seconds: Time limit; rounded up to minutes. None: the partition's default.
        warn_seconds: How long before the limit the batch process gets SIGUSR1.
        output: Log file; ``%j`` is the job number.
        directory: Where the script runs.
        program: What it runs in its own place: name and arguments.
        cpus_per_task: 0: the site's default, as with `gpus_per_node`.
        gpus_per_node: See `cpus_per_task`.
        partition: One or several separated by commas; empty: the site's default.
        account: Empty: the user's default.
        qos: Empty: the user's default.
        array_links: Places of an array that run one after the other; 0: no array.
        directives: The site's own lines: options such as ``--constraint=a100``, or whole lines
            such as ``#BB create_persistent ...``.
        setup: Shell lines before the program, e.g. ``module load cuda``.
        notes: Comments for a person who reads the script.
    """

    name: str
    comment: str
    nodes: int
    tasks_per_node: int
    limit_seconds: float | None
    warn_seconds: int
    output: str
    directory: str
    program: tuple[str, ...]
    cpus_per_task: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    array_links: int = 0
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def batch_text(batch: Batch) -> str:
    """The script, ending in a line end.

    Own options come first, so that of two that say the same the site's line counts, as Slurm takes
    the last.

    Raises:
        ClusterError: A value holds a line end, or the time limit is not above zero.
    """
    limit = None if batch.limit_seconds is None else limit_text(batch.limit_seconds)
    options = {
        "job-name": batch.name,
        "comment": batch.comment,
        "nodes": batch.nodes,
        "ntasks-per-node": batch.tasks_per_node,
        "cpus-per-task": batch.cpus_per_task,
        "gpus-per-node": batch.gpus_per_node,
        "time": limit,
        # Only the batch process is warned: what it tells the ranks is its own decision.
        "signal": f"B:USR1@{batch.warn_seconds}",
        "array": f"0-{batch.array_links - 1}%1" if batch.array_links else "",
        "partition": batch.partition,
        "account": batch.account,
        "qos": batch.qos,
        "output": batch.output,
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={_word(key, value)}" for key, value in options.items() if value]
    # A requeued job waits two minutes at least; the next link is in the queue already.
    lines.append("#SBATCH --no-requeue")
    lines += [
        _directive(line)
        for directive in batch.directives
        for line in directive.splitlines()
        if line
    ]
    lines += [f"# {note}" for note in batch.notes]
    # Elsewhere, relative paths of the job would name another run.
    body = [f"export {BEGAN}=$(date +%s.%N)", f"cd {shlex.quote(batch.directory)} || exit 1"]
    if batch.cpus_per_task:
        body.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    body += batch.setup
    body.append(f"exec {shlex.join(batch.program)}")
    return "\n".join(["#!/bin/bash", *lines, "", *body, ""])


def _word(key: str, value: object) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ClusterError(f"--{key} = {text!r} holds a line end, which no batch script can say")
    if _PLAIN.fullmatch(text):
        return text
    # sbatch splits a line at spaces, ends it at #, and knows quotes and backslashes.
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'


def log_pattern(folder: str, name: str) -> str:
    """`name`, such as ``link-%j.log``, in `folder`, whose own ``%`` stand for themselves.

    Raises:
        ClusterError: `folder` holds a backslash, which makes Slurm take ``%j`` as it is.
    """
    if "\\" in folder:
        raise ClusterError(
            f"{folder} holds a backslash, with which Slurm names no log by its job: give the run "
            "another directory (run.directory=...)"
        )
    return f"{folder.replace('%', '%%')}/{name}"


def overriding(text: str) -> set[str]:
    """Names of the environment variables that sbatch would believe more than the script `text`.

    Also those that would make an array of it, or have sbatch wait for its end.
    """
    found = {"SBATCH_ARRAY_INX", "SBATCH_WAIT"}
    for option in re.findall(r"^#SBATCH\s+--([a-z-]+)", text, re.MULTILINE):
        name = _VARIABLES.get(option, option.upper().replace("-", "_"))
        found.add(f"SBATCH_{name}")
    return found


def _directive(line: str) -> str:
    text = line.strip()
    if text.startswith("#"):
        return text
    return f"#SBATCH {text if text.startswith('-') else f'--{text}'}"
