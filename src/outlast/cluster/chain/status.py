"""Status of a chain: links, progress, use of time, and the expected end.

All figures are measured, from the journal and the run's records, but the time that is left, which
is predicted from them.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.cluster.chain.fence import read_holder
from outlast.cluster.chain.files import (
    choice_words,
    entries,
    finished,
    is_filler,
    of_kind,
    read_plan,
    run_log,
)
from outlast.cluster.chain.submission import jobs_now
from outlast.cluster.slurm.jobs import history_of, is_waiting, waiting_words
from outlast.errors import ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.cluster.chain.files import ChainFiles, ChainPlan, Entry

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
        reason: See `outlast.cluster.chain.verdict`.
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
    seconds: dict[str, float] = field(default_factory=dict)
    goodput: float | None = None
    left_seconds: float | None = None
    save_seconds: float | None = None
    chosen: str = ""
    waits: dict[str, str] = field(default_factory=dict)

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
    if ask_slurm:
        # `links` with what accounting says of those that had no last word.
        lost = [link.job for link in links if link.seconds is None]
        records = history_of(lost) if lost else []
        # Of a job that was requeued the newest counts.
        elapsed = {record.identity: record.elapsed_seconds for record in records}
        links = [
            dataclasses.replace(link, seconds=elapsed.get(link.job))
            if link.seconds is None
            else link
            for link in links
        ]
    asked = ask_slurm and not problem
    outcome, reason = _outcome(journal, links, live, waits, problem, asked=asked)
    if outcome == "stalled":
        reason = _without_space(files, reason)
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
    ended = {str(entry["job"]): entry for entry in of_kind(journal, "ended")}
    lost = {str(entry["job"]): entry for entry in of_kind(journal, "lost")}
    submitted = {str(entry["job"]): float(entry["time"]) for entry in of_kind(journal, "submitted")}
    predicted = {str(entry["job"]): entry.get("told") for entry in of_kind(journal, "chosen")}
    found = []
    for index, start in enumerate(started):
        job = str(start["job"])
        end = ended.get(job)
        after = started[index + 1] if index + 1 < len(started) else None
        if end is not None:
            verdict, reason = str(end.get("verdict", "")), str(end.get("reason", ""))
        elif job in lost or after is not None:
            verdict, reason = "lost", f"ended as {lost.get(job, {}).get('state') or 'unknown'}"
        else:
            alive = job == holder or job in live
            verdict, reason = ("running", "") if alive else ("lost", "ended without a word")
        known = end["step"] if end else after["step"] if after else step
        before = started[index - 1] if index else None
        if before is None:
            since = submitted.get(str(start["job"]))
        else:
            ended_before = ended.get(str(before["job"]))
            since = None if ended_before is None else float(ended_before["time"])
        found.append(
            LinkStatus(
                number=int(start["number"]),
                job=job,
                nodes=int(start.get("nodes", 1)),
                processes=int(start.get("processes", plan.processes_of(int(start["number"])))),
                wait_seconds=None if since is None else max(float(start["began"]) - since, 0.0),
                seconds=_ran_seconds(start, end, running=verdict == "running"),
                first_step=int(start["step"]),
                last_step=int(known),
                verdict=verdict,
                reason=reason,
                role="filler" if is_filler(start) else "link",
                predicted_wait_seconds=_span(predicted.get(job)),
            )
        )
    return found


def _span(told: Sequence[float] | None) -> tuple[float, float] | None:
    """P10 and P90 of what an entry predicts."""
    return None if not told else (float(told[0]), float(told[2]))


def _ran_seconds(start: Entry, end: Entry | None, *, running: bool) -> float | None:
    if end is not None:
        return float(end["seconds"])
    return max(time.time() - float(start["began"]), 0.0) if running else None


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
    done = [
        link
        for link in links
        if link.seconds is not None
        and link.last_step > link.first_step
        and link.verdict != "running"
    ]
    if not steps or not done:
        return None
    trained = sum(status.last_step - status.first_step for status in done)
    ran = sum(status.seconds or 0.0 for status in done)
    waits = [link.wait_seconds for link in links[1:] if link.wait_seconds is not None]
    wait = statistics.mean(waits) if waits else 0.0
    rest = max(steps - step, 0) * ran / trained
    usable = plan.usable_seconds()
    more = rest / usable if usable else 0.0
    return rest + more * wait


def _outcome(
    journal: Sequence[Entry],
    links: Sequence[LinkStatus],
    live: Mapping[str, str],
    waits: Mapping[str, str],
    problem: str,
    *,
    asked: bool,
) -> tuple[str, str]:
    ending = finished(journal)
    if ending is not None:
        return str(ending["outcome"]), str(ending["reason"])
    if links and links[-1].verdict == "running":
        return "running", problem
    if live:
        return "waiting", problem or waits.get(next(iter(live)), "")
    if not asked:
        return "unknown", problem or "Slurm was not asked"
    return "stalled", "nothing of it is in the queue; `outlast cluster resume` goes on"


def _without_space(files: ChainFiles, reason: str) -> str:
    """`reason`, and whether the disk is full: then the last link could not even say so."""
    try:
        free_bytes = shutil.disk_usage(files.path).free
    except OSError:
        return reason
    if free_bytes >= _LEAST_FREE_BYTES:
        return reason
    return f"{reason}, once there is space: the disk of {files.run} is full"


def as_json(status: ChainStatus) -> dict[str, Any]:
    """`status` as plain values for JSON."""
    return dataclasses.asdict(status)
