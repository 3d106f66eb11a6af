"""Handing links to sbatch: one script each, never one link twice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import entries, note_or_print, submitted_jobs
from outlast.cluster.slurm.commands import (
    Patience,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnreachableError,
    ask,
)
from outlast.cluster.slurm.jobs import is_live, is_waiting, queued
from outlast.cluster.slurm.script import Batch, batch_text, log_pattern, overriding
from outlast.errors import ClusterError
from outlast.records.directory import replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.chain.files import ChainFiles, ChainPlan, Entry
    from outlast.cluster.slurm.jobs import QueuedJob

_SHORTEST_WARNING_SECONDS = 10
# sbatch takes no more: sig_time has 16 bits.
_LONGEST_WARNING_SECONDS = 65535


def batch_of(files: ChainFiles, plan: ChainPlan, number: int, lead_seconds: float) -> Batch:
    """The batch job of link `number`; of an array, of all links from `number` on."""
    links = plan.links - number + 1 if plan.kind == "array" else 0
    filler = plan.kind == "filler"
    shape: tuple[str, ...] = ()
    if filler or plan.chooses:
        # Both have a limit: a backfill window's length, or the one that was chosen.
        assert plan.limit_seconds is not None
        kind = "filler" if filler else "link"
        shape = (kind, str(plan.nodes[0]), f"{plan.limit_seconds:g}")
    which = f"Link {number}" if not links else f"Links {number} to {plan.links}"
    log = "link-%A_%a.log" if links else "link-%j.log"
    return Batch(
        name=plan.name,
        comment=comment_of(plan, number),
        nodes=plan.nodes_of(number),
        tasks_per_node=plan.tasks_per_node,
        limit_seconds=plan.limit_seconds,
        warn_seconds=warning_seconds(plan, lead_seconds),
        output=log_pattern(str(files.path), log),
        directory=plan.directory,
        program=(plan.python, "-m", "outlast.cluster.chain", str(files.path), str(number), *shape),
        cpus_per_task=plan.cpus_per_task,
        gpus_per_node=plan.gpus_per_node,
        partition=plan.partition,
        account=plan.account,
        qos=plan.qos,
        array_links=links,
        directives=plan.directives,
        setup=plan.setup,
        notes=(
            f"{which} of chain {plan.chain}, run {plan.name}; `outlast cluster status` tells.",
            *((f"Chosen: {' '.join(plan.reason.split())}.",) if plan.reason else ()),
        ),
    )


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
    lead_seconds: float,
    patience: Patience | None = None,
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
    script = files.path / f"filler-{number}.sbatch" if filler else files.script(number)
    try:
        text = batch_text(batch_of(files, plan, number, lead_seconds))
        replace_file(script, text.encode())
    except OSError as error:
        raise ClusterError(f"{script} cannot be written: {error.strerror}") from None
    command = ["sbatch", "--parsable"]
    # afterok would wait for ever behind a crash, afternotok behind a success.
    command += [f"--dependency=afterany:{after}"] if after else []
    try:
        answer = ask(
            [*command, str(script)],
            patience,
            before_retry=lambda: _found(files, plan, number),
            without=overriding(text),
        )
    except SlurmRefusedError as error:
        note_or_print(files, "refused", number=number, words=error.words)
        raise
    except (SlurmMissingError, SlurmUnreachableError) as error:
        note_or_print(files, "refused", number=number, words=str(error))
        raise
    job = answer.strip().splitlines()[-1].partition(";")[0]
    role = {"role": "filler"} if filler else {}
    nodes = plan.nodes_of(number)
    # The job is in the queue, whether or not that can be written down.
    note_or_print(files, "submitted", job=job, number=number, after=after, nodes=nodes, **role)
    return job


def submit_chain(
    files: ChainFiles, plan: ChainPlan, number: int, *, after: str = "", lead_seconds: float
) -> list[str]:
    """Submit what a chain of this kind needs from link `number` on; returns the jobs' numbers.

    Raises:
        ClusterError: As `submit_link`; of presubmitted links, those before are cancelled.
    """
    last = plan.links if plan.kind == "presubmitted" else number
    jobs: list[str] = []
    for index in range(number, max(last, number) + 1):
        try:
            after = submit_link(files, plan, index, after=after, lead_seconds=lead_seconds)
        except ClusterError as error:
            if not jobs:
                raise
            raise ClusterError(_taken_back(jobs, index, error)) from None
        jobs.append(after)
    return jobs


def _taken_back(jobs: Sequence[str], number: int, error: ClusterError) -> str:
    """Cancel the links before link `number`, which was not taken; what to say of it."""
    shown = ", ".join(jobs)
    problem = cancel(jobs)
    if problem is None:
        return f"{error}; that was link {number}, so those before it ({shown}) were cancelled"
    return (
        f"{error}; that was link {number}, and those before it ({shown}) could not be cancelled "
        f"({problem}): `scancel {' '.join(jobs)}`"
    )


def _found(files: ChainFiles, plan: ChainPlan, number: int) -> str | None:
    try:
        jobs = queued(ended_too=False)
        # A filler may look for its follower, whose comment is its own.
        known = submitted_jobs(entries(files))
    except ClusterError:
        return None
    comment = comment_of(plan, number)
    found = [job.number for job in jobs if job.comment == comment and job.number not in known]
    return found[0] if found else None


def live_jobs(journal: Sequence[Entry]) -> dict[str, str]:
    """State of each submitted job of a chain that waits or runs, by its number; see `jobs_now`."""
    return {number: job.state for number, job in jobs_now(journal).items()}


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
    if not jobs:
        return None
    try:
        ask(["scancel", *jobs])
    except ClusterError as error:
        return str(error)
    return None
