"""Commands for a chain from a login node: begin, resume, stop, adopt. No daemon."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import (
    entries,
    finished,
    is_filler,
    note,
    of_kind,
    read_plan,
    unfinished,
    write_plan,
)
from outlast.cluster.chain.filler import submit_filler
from outlast.cluster.chain.margin import first_lead_seconds
from outlast.cluster.chain.submission import cancel, live_jobs, submit_chain
from outlast.cluster.slurm.jobs import is_live, is_waiting, queued, state_now
from outlast.errors import ClusterError
from outlast.records.directory import RunDirectory, replace_file

if TYPE_CHECKING:
    from outlast.cluster.chain.choosing import Chosen
    from outlast.cluster.chain.files import ChainFiles, ChainPlan


def begin(
    files: ChainFiles, plan: ChainPlan, job_text: str, chosen: Chosen | None = None
) -> list[str]:
    """Write a chain down and submit its first link, or all that are submitted at once.

    A chain of this run that has ended is replaced; what its links have said stays in the journal.

    Args:
        files: Of the chain.
        plan: Of it.
        job_text: Of the job of its links.
        chosen: Nodes and limit of the first link; None: where the plan says so, chosen now.

    Returns:
        Numbers of the submitted jobs.

    Raises:
        ClusterError: A chain of this run is alive, or sbatch refuses.
    """
    journal = entries(files)
    refuse_second(files)
    number = next_number(files)
    plan = plan.from_link(number)
    chosen = chosen or choice_of(files, plan, number)
    write_plan(files, plan)
    replace_file(files.job, job_text.encode())
    _clear(files)
    note(files, "resumed" if journal else "created", chain=plan.chain)
    return _submitted(files, plan, number, chosen) + _filler(files)


def choice_of(
    files: ChainFiles,
    plan: ChainPlan,
    number: int,
    *,
    after: str = "",
    seconds: float | None = None,
    step: int | None = None,
) -> Chosen | None:
    """Nodes and time limit of link `number` as the queue is now; None where they are given.

    Args:
        files: Of the chain.
        plan: Of it.
        number: Of the link that is submitted first.
        after: The job for whose end it waits.
        seconds: Training that is left on the plan's first nodes; None: as measured.
        step: That is done; None: of the newest checkpoint.

    Raises:
        ClusterError: Nothing can be chosen.
    """
    if not plan.chooses:
        return None
    # Needs NumPy, which other chains do not wait for.
    from outlast.cluster.chain.choosing import choose_first

    return choose_first(files, plan, number, seconds=seconds, step=step, after=after)


def _submitted(
    files: ChainFiles, plan: ChainPlan, number: int, chosen: Chosen | None, after: str = ""
) -> list[str]:
    """Submit link `number` and what follows it; returns the jobs."""
    if chosen is None:
        lead = first_lead_seconds(files, plan)
        return submit_chain(files, plan, number, after=after, lead_seconds=lead)
    from outlast.cluster.chain.choosing import submit_chosen

    return [submit_chosen(files, chosen, number, after=after)]


def _filler(files: ChainFiles) -> list[str]:
    """Submit a filler for the first wait; none without a backfill window, or a known queue."""
    try:
        job = submit_filler(files)
    except ClusterError:
        return []
    return [] if job is None else [job]


def refuse_second(files: ChainFiles) -> None:
    """Refuse when a chain of this run has jobs in the queue.

    Raises:
        ClusterError: Names them.
    """
    journal = entries(files)
    if not journal:
        return
    if live := live_jobs(journal):
        shown = ", ".join(f"{job} ({state.lower()})" for job, state in live.items())
        raise ClusterError(
            f"a chain of {files.run} is in the queue: {shown}; `outlast cluster status` tells, "
            "`outlast cluster stop` ends it"
        )


def move_aside(files: ChainFiles) -> None:
    """Rename an earlier run and its chain, which has no jobs in the queue.

    Raises:
        RunError: A process writes the run.
    """
    directory = RunDirectory(files.run)
    # A program that is not ours leaves no job of the run's own.
    if directory.exists() or files.plan.exists():
        # Holding the lock for a moment makes sure that no live run is moved aside.
        lock = directory.lock()
        lock.acquire()
        lock.release()
        directory.move_aside()


def resume(files: ChainFiles, plan: ChainPlan | None = None, job_text: str = "") -> list[str]:
    """Go on with a chain that has ended or lost its next link.

    Args:
        files: Of the chain.
        plan: In place of the one that it had, e.g. with another time limit.
        job_text: Of the job with `plan`; empty: as before.

    Returns:
        Numbers of the submitted jobs.

    Raises:
        ClusterError: It is done, is alive, or sbatch refuses.
    """
    before = read_plan(files)
    ending = finished(entries(files))
    done = ending is not None and ending["outcome"] == "done"
    # Its own record counts for more than what an exit code was once taken for.
    if done and not unfinished(files, before):
        raise ClusterError(f"the chain of {files.run} is done; there is nothing to resume")
    refuse_second(files)
    used = before
    if plan is not None:
        used = dataclasses.replace(
            plan.from_link(before.first_number),
            chain=before.chain,
            work_seconds=before.work_seconds,
        )
    number = next_number(files)
    if used.links and number > used.links and used.kind != "dependent":
        # The links of an earlier submission are used up: as many again, on the nodes that follow.
        nodes = used.nodes[number - used.first_number :] or used.nodes[-1:]
        used = dataclasses.replace(used.from_link(number), nodes=nodes)
    elif used.links and number > used.links:
        raise ClusterError(
            f"slurm.links = {used.links - used.first_number + 1} links are used up: raise it, "
            "`outlast cluster resume RUN slurm.links=N`"
        )
    chosen = choice_of(files, used, number)
    write_plan(files, used)
    if job_text:
        # Before a link that may start at once reads it.
        replace_file(files.job, job_text.encode())
    _clear(files)
    note(files, "resumed", chain=used.chain)
    return _submitted(files, used, number, chosen) + _filler(files)


def stop(files: ChainFiles, *, after_checkpoint: bool) -> str:
    """End a chain: now, or when its running link has saved.

    Returns:
        What was done, in one sentence.

    Raises:
        ClusterError: There is no chain, or Slurm gives no answer.
    """
    read_plan(files)
    journal = entries(files)
    live = live_jobs(journal)
    running = [job for job, state in live.items() if is_live(state)]
    waiting = [job for job, state in live.items() if is_waiting(state)]
    if after_checkpoint and running:
        replace_file(files.stop, b"after checkpoint\n")
        return (
            f"job {running[0]} saves at its next step and ends, and no link follows; `outlast "
            "cluster resume` goes on"
        )
    if finished(journal) is None:
        outcome = "cancelled" if running else "stopped"
        note(files, "finished", outcome=outcome, reason="outlast cluster stop was given")
    problem = cancel([*waiting, *running])
    if problem is not None:
        raise ClusterError(
            f"the chain is marked as ended, so no link of it trains any more, but its jobs "
            f"{', '.join(live)} could not be cancelled: {problem}"
        )
    if not live:
        return "no job of the chain was in the queue; it is marked as ended"
    return f"cancelled {', '.join(live)}; `outlast cluster resume` goes on from the last checkpoint"


def adopt(files: ChainFiles, plan: ChainPlan, job_text: str, job: str) -> list[str]:
    """Make a job that was submitted by hand the first link of a chain.

    The next link waits for its end. It is not told to stop before its limit unless it was
    submitted with a warning of its own (``--signal``), which `outlast train` obeys.

    Returns:
        Numbers of the submitted jobs.

    Raises:
        ClusterError: The job has ended or is unknown, or a chain of this run is alive.
    """
    refuse_second(files)
    state = state_now(job)
    if state is None or not (is_live(state) or is_waiting(state)):
        raise ClusterError(
            f"job {job} is {'not known to Slurm' if state is None else state.lower()}: only one "
            "that waits or runs can be adopted; `outlast submit` goes on from its checkpoints"
        )
    journal = entries(files)
    number = next_number(files)
    plan = plan.from_link(number)
    chosen = choice_of(files, plan, number + 1, after=job)
    write_plan(files, plan)
    replace_file(files.job, job_text.encode())
    _clear(files)
    note(files, "resumed" if journal else "created", chain=plan.chain)
    found = queued([job])
    nodes = found[0].nodes if found else plan.nodes_of(number)
    note(files, "submitted", job=job, number=number, after="", nodes=nodes, adopted=True)
    return _submitted(files, plan, number + 1, chosen, job)


def _clear(files: ChainFiles) -> None:
    """Take back what a person or a link has asked of the jobs before."""
    for asked in (files.stop, files.handover):
        asked.unlink(missing_ok=True)


def next_number(files: ChainFiles) -> int:
    """Number of the link that would be submitted next, from 1.

    Those that were submitted and have never started are submitted again.
    """
    journal = entries(files)
    adopted = [entry for entry in of_kind(journal, "submitted") if entry.get("adopted")]
    started = [entry for entry in of_kind(journal, "started") if not is_filler(entry)]
    begun = [int(entry["number"]) for entry in [*started, *adopted]]
    return max(begun, default=0) + 1
