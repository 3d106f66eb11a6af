"""Job chains: a run as short jobs, the links, that follow each other on a queue with a time limit.

Commands for a chain from a login node: begin, resume, stop, adopt, status. No daemon. As a program,
``python -m outlast.cluster.chain FOLDER NUMBER``, this is what the batch script of a link runs. A
filler, and a link whose time limit was chosen, is told its nodes and its limit as well: ``filler
NODES SECONDS`` or ``link NODES SECONDS``. Those of other links are in the plan.

All figures of a status are measured, from the journal and the run's records, but the time that is
left, which is predicted from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.chain_files import (
    ChainFiles,
    by_job,
    choice_words,
    entries,
    finished,
    is_filler,
    note,
    of_kind,
    read_plan,
    run_log,
    unfinished,
    write_plan,
)
from outlast.cluster.choosing import choose_first, submit_chosen, submit_filler
from outlast.cluster.fence import read_holder
from outlast.cluster.slurm import history_of, is_live, is_waiting, queued, state_now, waiting_words
from outlast.cluster.submission import cancel, jobs_now, submit_chain
from outlast.errors import EXIT_BAD_INPUT, ClusterError, OutlastError
from outlast.records.directory import RunDirectory, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.cluster.chain_files import ChainPlan, Entry
    from outlast.cluster.choosing import Chosen


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
    chosen = chosen or choose_first(files, plan, number)
    _write(files, plan, job_text, "resumed" if journal else "created")
    return _submitted(files, plan, number, chosen)


def _write(files: ChainFiles, plan: ChainPlan, job_text: str, kind: str) -> None:
    """Write a chain down, and take back what a person or a link has asked of the jobs before."""
    write_plan(files, plan)
    if job_text:
        # Before a link that may start at once reads it.
        replace_file(files.job, job_text.encode())
    for asked in (files.stop, files.handover):
        asked.unlink(missing_ok=True)
    note(files, kind, chain=plan.chain)


def _submitted(
    files: ChainFiles, plan: ChainPlan, number: int, chosen: Chosen | None, after: str = ""
) -> list[str]:
    """Submit link `number` and what follows it, and a filler for the wait; returns the jobs."""
    if chosen is None:
        jobs = submit_chain(files, plan, number, after=after)
    else:
        jobs = [submit_chosen(files, chosen, number, after=after)]
    filler = None
    if not after:
        # There is none without a backfill window, or a known queue.
        with contextlib.suppress(ClusterError):
            filler = submit_filler(files)
    return jobs if filler is None else [*jobs, filler]


def refuse_second(files: ChainFiles) -> None:
    """Refuse when a chain of this run has jobs in the queue.

    Raises:
        ClusterError: Names them.
    """
    if live := jobs_now(entries(files)):
        shown = ", ".join(f"{number} ({job.state.lower()})" for number, job in live.items())
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
    """Continue with a chain that has ended or lost its next link.

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
        used = dataclasses.replace(plan.from_link(before.first_number), chain=before.chain)
        used = dataclasses.replace(used, work_seconds=before.work_seconds)
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
    chosen = choose_first(files, used, number)
    _write(files, used, job_text, "resumed")
    return _submitted(files, used, number, chosen)


def stop(files: ChainFiles, *, after_checkpoint: bool) -> str:
    """End a chain: now, or when its running link has saved.

    Returns:
        What was done, in one sentence.

    Raises:
        ClusterError: There is no chain, or Slurm gives no answer.
    """
    read_plan(files)
    journal = entries(files)
    live = jobs_now(journal)
    running = [number for number, job in live.items() if is_live(job.state)]
    waiting = [number for number, job in live.items() if is_waiting(job.state)]
    if after_checkpoint and running:
        replace_file(files.stop, b"after checkpoint\n")
        return (
            f"job {running[0]} saves at its next step and ends, and no link follows; `outlast "
            "cluster resume` continues"
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
    return (
        f"cancelled {', '.join(live)}; `outlast cluster resume` continues from the last checkpoint"
    )


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
            "that waits or runs can be adopted; `outlast submit` continues from its checkpoints"
        )
    journal = entries(files)
    number = next_number(files)
    plan = plan.from_link(number)
    chosen = choose_first(files, plan, number + 1, after=job)
    _write(files, plan, job_text, "resumed" if journal else "created")
    found = queued([job])
    nodes = found[0].nodes if found else plan.nodes_of(number)
    note(files, "submitted", job=job, number=number, after="", nodes=nodes, adopted=True)
    return _submitted(files, plan, number + 1, chosen, job)


def next_number(files: ChainFiles) -> int:
    """Number of the link that would be submitted next, from 1.

    Those that were submitted and have never started are submitted again.
    """
    begun = [
        int(entry["number"])
        for entry in of_kind(entries(files), "started", "submitted")
        if (entry["kind"] == "started" or entry.get("adopted")) and not is_filler(entry)
    ]
    return max(begun, default=0) + 1


_USEFUL = ("compute", "data", "communication", "evaluation", "other")
"""Purposes of `outlast.records` that a run without interruptions has as well."""
_NOT_KNOWN = "not known"
_LEAST_FREE_BYTES = 2**20
"""With less a link cannot keep its log, journal and fence."""


@dataclass(frozen=True)
class LinkStatus:
    """One link.

    Attributes:
        number: From 1.
        job: Slurm's number.
        nodes: That it had.
        processes: That it trained on.
        wait_seconds: From the end of the link before (of the first: from its submission) to the
            beginning of its script; None where the link before left no word.
        seconds: That its script has run, until now or as it or accounting says; None where it died
            without a word and there is no accounting.
        first_step: Steps done at its start.
        last_step: At its end, or now.
        verdict: What it ended with; ``running``, or ``lost`` without a word.
        reason: See `outlast.cluster.verdict`.
        role: ``link``, or ``filler`` that trained while link `number` waited.
        predicted_wait_seconds: What `wait_seconds` was predicted to be, at P10 and P90; None where
            the link's nodes and limit were given.
    """

    number: int
    job: str
    nodes: int
    processes: int
    wait_seconds: float | None
    seconds: float | None
    first_step: int
    last_step: int
    verdict: str
    reason: str
    role: str = "link"
    predicted_wait_seconds: tuple[float, float] | None = None


@dataclass(frozen=True)
class ChainStatus:
    """A chain.

    Attributes:
        chain: Its eight characters.
        name: Of the run.
        outcome: ``running``, ``waiting``, ``stalled`` (nothing in the queue), or as it ended.
        reason: Why it ended, or why Slurm could not be asked.
        step: Of the newest complete checkpoint.
        steps: Of the whole run; 0: not known.
        links: Oldest first.
        jobs: State by number of those in the queue.
        seconds: What the links' time went to; "useful" is training, "not known" all of a program
            that keeps no records.
        goodput: Useful share of the links' time; None where it is not known.
        left_seconds: Predicted until all steps are done, waits included; None: not known.
        save_seconds: Median of the saves; None before the first.
        chosen: Of a chain whose links are chosen: which was submitted last, as what, and why.
        waits: Of each of `jobs` that waits: why, and what can be done.
    """

    chain: str
    name: str
    outcome: str
    reason: str
    step: int
    steps: int
    links: list[LinkStatus]
    jobs: dict[str, str]
    seconds: dict[str, float]
    goodput: float | None
    left_seconds: float | None
    save_seconds: float | None
    chosen: str
    waits: dict[str, str]

    @property
    def gaps_seconds(self) -> list[float]:
        """From the end of each link to the beginning of the next."""
        return [link.wait_seconds for link in self.links[1:] if link.wait_seconds is not None]


def status_of(files: ChainFiles, *, ask_slurm: bool = True) -> ChainStatus:
    """Return the present status of the chain.

    Raises:
        ClusterError: There is no chain.
    """
    plan = read_plan(files)
    journal = entries(files)
    log = run_log(files)
    live: dict[str, str] = {}
    waits: dict[str, str] = {}
    problem = ""
    if ask_slurm:
        try:
            now = jobs_now(journal)
            live = {number: job.state for number, job in now.items()}
            waits = {key: waiting_words(job) for key, job in now.items() if is_waiting(job.state)}
        except ClusterError as error:
            problem = str(error)
    holder = read_holder(files.fence)
    # A link whose node was lost leaves its fence behind: where Slurm answers, its word counts.
    alive = holder.job if holder is not None and (problem or not ask_slurm) else ""
    links = links_of(plan, journal, log.step, alive, live)
    lost = [link.job for link in links if link.seconds is None]
    if ask_slurm and lost:
        # Accounting may say it of those that had no last word; of a requeued job the newest counts.
        elapsed = {record.identity: record.elapsed_seconds for record in history_of(lost)}
        for place, link in enumerate(links):
            if link.seconds is None:
                links[place] = dataclasses.replace(link, seconds=elapsed.get(link.job))
    if (ending := finished(journal)) is not None:
        outcome, reason = str(ending["outcome"]), str(ending["reason"])
    elif links and links[-1].verdict == "running":
        outcome, reason = "running", problem
    elif live:
        outcome, reason = "waiting", problem or waits.get(next(iter(live)), "")
    elif problem or not ask_slurm:
        outcome, reason = "unknown", problem or "Slurm was not asked"
    else:
        outcome = "stalled"
        reason = "nothing of it is in the queue; `outlast cluster resume` continues"
        with contextlib.suppress(OSError):
            # With a full disk the last link could not even say so.
            if shutil.disk_usage(files.path).free < _LEAST_FREE_BYTES:
                reason += f", once there is space: the disk of {files.run} is full"
    seconds = spent_seconds(files, links)
    total = sum(seconds.values())
    known = total > 0.0 and _NOT_KNOWN not in seconds
    goodput = seconds.get("useful", 0.0) / total if known else None
    steps = log.steps or plan.steps
    return ChainStatus(
        chain=plan.chain,
        name=plan.name,
        outcome=outcome,
        reason=reason,
        step=log.step,
        steps=steps,
        links=links,
        jobs=live,
        seconds=seconds,
        goodput=goodput,
        left_seconds=left_seconds(plan, links, log.step, steps) if outcome != "done" else 0.0,
        save_seconds=statistics.median(log.save_seconds) if log.save_seconds else None,
        chosen=choice_words(journal),
        waits=waits,
    )


def links_of(
    plan: ChainPlan, journal: Sequence[Entry], step: int, holder: str, live: Mapping[str, str]
) -> list[LinkStatus]:
    """The links that have started."""
    started = of_kind(journal, "started")
    ended, lost = by_job(journal, "ended"), by_job(journal, "lost")
    submitted, chosen = by_job(journal, "submitted"), by_job(journal, "chosen")
    found = []
    for before, start, after in zip([None, *started], started, [*started[1:], None], strict=False):
        job, number = str(start["job"]), int(start["number"])
        end, seconds = ended.get(job), None
        if end is not None:
            verdict, reason = str(end.get("verdict", "")), str(end.get("reason", ""))
            seconds = float(end["seconds"])
        elif job in lost or after is not None:
            verdict, reason = "lost", f"ended as {lost.get(job, {}).get('state') or 'unknown'}"
        elif job == holder or job in live:
            verdict, reason = "running", ""
            seconds = max(time.time() - float(start["began"]), 0.0)
        else:
            verdict, reason = "lost", "ended without a word"
        known = end["step"] if end else after["step"] if after else step
        since = submitted.get(job) if before is None else ended.get(str(before["job"]))
        told = chosen.get(job, {}).get("told")
        waited = None if since is None else float(start["began"]) - float(since["time"])
        found.append(
            LinkStatus(
                number=number,
                job=job,
                nodes=int(start.get("nodes", 1)),
                processes=int(start.get("processes", plan.processes_of(number))),
                wait_seconds=None if waited is None else max(waited, 0.0),
                seconds=seconds,
                first_step=int(start["step"]),
                last_step=int(known),
                verdict=verdict,
                reason=reason,
                role="filler" if is_filler(start) else "link",
                predicted_wait_seconds=(float(told[0]), float(told[2])) if told else None,
            )
        )
    return found


def spent_seconds(files: ChainFiles, links: Sequence[LinkStatus]) -> dict[str, float]:
    """Time of links that have ended, and of the running one, by cause."""
    from outlast.records import LOST, read_run

    allocated = sum(link.seconds for link in links if link.seconds is not None)
    try:
        purposes = read_run(files.run).seconds()
    except OutlastError:
        return {_NOT_KNOWN: allocated} if allocated else {}
    useful = sum(purposes.get(item, 0.0) for item in _USEFUL)
    found = {
        "useful": useful,
        "starts": purposes.get("startup", 0.0) + purposes.get("restart", 0.0),
        "checkpoints": purposes.get("checkpoint", 0.0),
        "steps done again": purposes.get(LOST, 0.0),
    }
    # From the script to the trainer, and from the trainer's last word to the script's.
    rest = allocated - sum(found.values())
    found["before and after training"] = max(rest, 0.0)
    return {name: value for name, value in found.items() if value > 0.0}


def left_seconds(
    plan: ChainPlan, links: Sequence[LinkStatus], step: int, steps: int
) -> float | None:
    """Predicted seconds until all steps are done, as links have gone so far; None: not known."""
    ended = [link for link in links if link.seconds is not None and link.verdict != "running"]
    done = [link for link in ended if link.last_step > link.first_step]
    if not steps or not done:
        return None
    trained = sum(link.last_step - link.first_step for link in done)
    ran = sum(link.seconds or 0.0 for link in done)
    waits = [link.wait_seconds for link in links[1:] if link.wait_seconds is not None]
    wait = statistics.mean(waits) if waits else 0.0
    rest = max(steps - step, 0) * ran / trained
    usable = plan.usable_seconds()
    return rest + (rest / usable if usable else 0.0) * wait


if __name__ == "__main__":
    from outlast.cluster.link import run_link

    try:
        shape = (int(sys.argv[4]), float(sys.argv[5])) if len(sys.argv) > 5 else None
        filler = shape is not None and sys.argv[3] == "filler"
        sys.exit(run_link(ChainFiles(Path(sys.argv[1])), int(sys.argv[2]), shape, filler=filler))
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_INPUT)
