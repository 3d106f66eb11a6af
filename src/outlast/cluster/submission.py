"""Handing links to sbatch: the exact text of their batch scripts, and never one link twice."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from outlast.cluster.chain_files import entries, note_or_print, submitted_jobs
from outlast.cluster.slurm import (
    NO_ANSWER,
    PATIENT,
    Patience,
    SlurmRefusedError,
    ask,
    is_live,
    is_waiting,
    queued,
)
from outlast.cluster.stopping import first_lead_seconds
from outlast.durations import limit_text
from outlast.errors import ClusterError
from outlast.records.directory import replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain_files import ChainFiles, ChainPlan, Entry
    from outlast.cluster.slurm import QueuedJob

BEGAN = "OUTLAST_LINK_BEGAN"
"""Environment variable with the moment when the script began, seconds since the epoch."""
_SHORTEST_WARNING_SECONDS = 10
# sbatch takes no more: sig_time has 16 bits.
_LONGEST_WARNING_SECONDS = 65535
# Those that are not called as the option.
_VARIABLES = {"time": "TIMELIMIT", "no-requeue": "REQUEUE"}
_PLAIN = re.compile(r"[\w@%+=:,./~-]*", re.ASCII)


def batch_script(
    files: ChainFiles, plan: ChainPlan, number: int, lead_seconds: float | None = None
) -> str:
    """The batch script of link `number`, or of an array of all links from `number` on.

    Own options come first, so that of two that say the same the site's line (`plan.directives`)
    counts, as Slurm takes the last.

    Args:
        files: Of the chain.
        plan: Of the chain, or of this link where that has nodes and a limit of its own.
        number: Of the link, from 1.
        lead_seconds: How long before its end its last save should begin; None: as is known now.

    Raises:
        ClusterError: A value holds a line end, the time limit is not above zero, or the chain's
            folder has a name with which Slurm cannot name a log.
    """
    if lead_seconds is None:
        lead_seconds = first_lead_seconds(files, plan)
    links = plan.links - number + 1 if plan.kind == "array" else 0
    filler = plan.kind == "filler"
    shape: tuple[str, ...] = ()
    if filler or plan.chooses:
        # Both have a limit: a backfill window's length, or the one that was chosen.
        assert plan.limit_seconds is not None
        kind = "filler" if filler else "link"
        shape = (kind, str(plan.nodes[0]), f"{plan.limit_seconds:g}")
    options = {
        "job-name": plan.name,
        "comment": comment_of(plan, number),
        "nodes": plan.nodes_of(number),
        "ntasks-per-node": plan.tasks_per_node,
        "cpus-per-task": plan.cpus_per_task,
        "gpus-per-node": plan.gpus_per_node,
        "time": None if plan.limit_seconds is None else limit_text(plan.limit_seconds),
        # Only the batch process is warned: what it tells the ranks is its own decision.
        "signal": f"B:USR1@{warning_seconds(plan, lead_seconds)}",
        "array": f"0-{links - 1}%1" if links else "",
        "partition": plan.partition,
        "account": plan.account,
        "qos": plan.qos,
        "output": log_pattern(str(files.path), "link-%A_%a.log" if links else "link-%j.log"),
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={_word(key, value)}" for key, value in options.items() if value]
    # A requeued job waits two minutes at least; the next link is in the queue already.
    lines.append("#SBATCH --no-requeue")
    given = (line for directive in plan.directives for line in directive.splitlines() if line)
    for line in map(str.strip, given):
        option = line if line.startswith("-") else f"--{line}"
        lines.append(line if line.startswith("#") else f"#SBATCH {option}")
    which = f"Link {number}" if not links else f"Links {number} to {plan.links}"
    lines.append(
        f"# {which} of chain {plan.chain}, run {plan.name}; `outlast cluster status` tells."
    )
    runs = " ".join(plan.command.split()) or f"srun outlast train {shlex.quote(str(files.job))}"
    lines.append(f"# Each link runs: {runs}")
    if plan.reason:
        lines.append(f"# Chosen: {' '.join(plan.reason.split())}.")
    # Elsewhere, relative paths of the job would name another run.
    body = [f"export {BEGAN}=$(date +%s.%N)", f"cd {shlex.quote(plan.directory)} || exit 1"]
    if plan.cpus_per_task:
        body.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    program = (plan.python, "-m", "outlast.cluster.chain", str(files.path), str(number), *shape)
    return "\n".join(
        ["#!/bin/bash", *lines, "", *body, *plan.setup, f"exec {shlex.join(program)}", ""]
    )


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
    options = re.findall(r"^#SBATCH\s+--([a-z-]+)", text, re.MULTILINE)
    names = (_VARIABLES.get(option, option.upper().replace("-", "_")) for option in options)
    return {"SBATCH_ARRAY_INX", "SBATCH_WAIT", *(f"SBATCH_{name}" for name in names)}


def warning_seconds(plan: ChainPlan, lead_seconds: float) -> int:
    """Time of Slurm's signal: about when the link's own clock acts, and never at once."""
    longest = plan.limit_seconds / 3.0 if plan.limit_seconds else 300.0
    latest = min(round(min(lead_seconds, longest)), _LONGEST_WARNING_SECONDS)
    return max(latest, _SHORTEST_WARNING_SECONDS)


def comment_of(plan: ChainPlan, number: int) -> str:
    """By which a link is found again in the queue."""
    kind = "filler-" if plan.kind == "filler" else ""
    return f"outlast:{plan.chain}:{kind}{number}"


def submit_link(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    after: str = "",
    lead_seconds: float | None = None,
    patience: Patience = PATIENT,
) -> str:
    """Submit link `number`, to start when job `after` has ended in whatever way.

    A submission whose answer was lost is looked for in the queue before it is made again.

    Returns:
        The job's number.

    Raises:
        SlurmMissingError: There is no sbatch.
        SlurmRefusedError: In sbatch's own words.
        SlurmUnreachableError: The controller did not answer.
        ClusterError: A file cannot be written.
    """
    filler = plan.kind == "filler"
    script = files.script(number, filler=filler)
    try:
        text = batch_script(files, plan, number, lead_seconds)
        replace_file(script, text.encode())
    except OSError as error:
        raise ClusterError(f"{script} cannot be written: {error.strerror}") from None

    def found() -> str | None:
        """Return the job that a submission without an answer has made."""
        try:
            jobs = queued(ended_too=False)
            # A filler may look for its follower, whose comment is its own.
            known = submitted_jobs(entries(files))
        except ClusterError:
            return None
        comment = comment_of(plan, number)
        new = (job for job in jobs if job.comment == comment and job.number not in known)
        return next((job.number for job in new), None)

    command = ["sbatch", "--parsable"]
    # afterok would wait for ever behind a crash, afternotok behind a success.
    command += [f"--dependency=afterany:{after}"] if after else []
    try:
        answer = ask(
            [*command, str(script)], patience, before_retry=found, without=overriding(text)
        )
    except NO_ANSWER as error:
        words = error.words if isinstance(error, SlurmRefusedError) else str(error)
        note_or_print(files, "refused", number=number, words=words)
        raise
    job = answer.strip().splitlines()[-1].partition(";")[0]
    role = {"role": "filler"} if filler else {}
    nodes = plan.nodes_of(number)
    # The job is in the queue, whether or not that can be written down.
    note_or_print(files, "submitted", job=job, number=number, after=after, nodes=nodes, **role)
    return job


def submit_chain(files: ChainFiles, plan: ChainPlan, number: int, *, after: str = "") -> list[str]:
    """Submit what a chain of this kind needs from link `number` on; returns the jobs' numbers.

    Raises:
        ClusterError: As `submit_link`; of presubmitted links, those before are cancelled.
    """
    last = plan.links if plan.kind == "presubmitted" else number
    jobs: list[str] = []
    for index in range(number, max(last, number) + 1):
        try:
            after = submit_link(files, plan, index, after=after)
        except ClusterError as error:
            if not jobs:
                raise
            shown, problem = ", ".join(jobs), cancel(jobs)
            done = f"so those before it ({shown}) were cancelled"
            if problem is not None:
                done = (
                    f"and those before it ({shown}) could not be cancelled ({problem}): `scancel "
                    f"{' '.join(jobs)}`"
                )
            raise ClusterError(f"{error}; that was link {index}, {done}") from None
        jobs.append(after)
    return jobs


def jobs_now(journal: Sequence[Entry]) -> dict[str, QueuedJob]:
    """The submitted jobs of a chain that wait or run, by their numbers.

    Raises:
        ClusterError: squeue is missing or gives no answer.
    """
    known = submitted_jobs(journal)
    if not known:
        return {}
    # One forgotten number among several is passed over by squeue; it fails where all are.
    return {
        # Places of an array that wait are shown with the number that may run, "7_[2-5%1]".
        re.sub(r"%\d+", "", job.identity): job
        for job in queued(known)
        if is_waiting(job.state) or is_live(job.state)
    }


def cancel(jobs: Sequence[str]) -> str | None:
    """Cancel jobs; returns why that was not possible, or None."""
    try:
        if jobs:
            ask(["scancel", *jobs])
    except ClusterError as error:
        return str(error)
    return None
