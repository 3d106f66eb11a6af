"""The last thing that a link does: see to the jobs that follow, and write down how it ends."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.filling import fill
from outlast.cluster.chain.journal import (
    entries,
    links_submitted,
    note_or_print,
    submitted_jobs,
)
from outlast.cluster.chain.leading import lead_seconds_of
from outlast.cluster.chain.progress import run_log
from outlast.cluster.chain.submission import cancel, submit_link
from outlast.cluster.chain.verdict import Verdict
from outlast.cluster.slurm.commands import Patience
from outlast.cluster.slurm.history import state_now
from outlast.errors import ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.cluster.chain.journal import Entry
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

# Slurm may end the job soon.
_PATIENCE = Patience(answer_seconds=5.0, total_seconds=4.0, first_pause_seconds=1.0)


@dataclass(frozen=True)
class Ending:
    """The end of link `number`, which is job `job`."""

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str

    def conclude(
        self,
        verdict: Verdict,
        next_job: Callable[[], tuple[str, str]],
        *,
        told_to_stop: bool,
    ) -> Verdict:
        """See to the jobs that follow.

        Args:
            verdict: On this link.
            next_job: Of a dependent chain: the job of the next link, or "" and why there is none.
            told_to_stop: Whether the link was told to end before its time.

        Returns:
            The verdict, or another one where no link can follow.
        """
        if self.plan.kind == "filler":
            verdict = self._filled(verdict, told_to_stop=told_to_stop)
        elif not verdict.ends_the_chain:
            verdict = self._followed(verdict, next_job)
        if verdict.ends_the_chain:
            note_or_print(self.files, "finished", outcome=verdict.outcome, reason=verdict.reason)
            # Those that cannot be cancelled from here find that the chain has ended.
            cancel(other_jobs(self.plan, self.number, self.job, entries(self.files)))
            with contextlib.suppress(OSError):
                self.files.stop.unlink()
        return verdict

    def _filled(self, verdict: Verdict, *, told_to_stop: bool) -> Verdict:
        """What follows a filler: nothing but its link, or another filler in the next hole."""
        if verdict.outcome != "done" and (gone := waiting_link_cancelled(self.files, self.number)):
            return Verdict("cancelled", gone)
        if verdict.outcome in ("gave_up", "cancelled"):
            return Verdict("continue", f"the filler: {verdict.reason}")
        if not (verdict.ends_the_chain or told_to_stop):
            # A filler is a gain, never a reason to fail.
            with contextlib.suppress(OutlastError):
                fill(self.files)
        return verdict

    def _followed(self, verdict: Verdict, next_job: Callable[[], tuple[str, str]]) -> Verdict:
        """Whether a link follows; a user who cancelled it has cancelled the chain."""
        if is_last(self.plan, self.number):
            used = self.plan.links - self.plan.first_number + 1
            return Verdict(
                "stopped", f"slurm.links: all {used} links are used up ({verdict.reason})"
            )
        if self.plan.kind == "dependent":
            following, problem = next_job()
            if not following:
                return Verdict("stopped", f"no link follows: {problem}")
        else:
            following = self._submitted_before()
        if not following:
            return verdict
        if _was_cancelled(following):
            return Verdict("cancelled", f"job {following}, the next link, was cancelled")
        return verdict

    def _submitted_before(self) -> str:
        """The job of the next link, where all were submitted at once."""
        array, _, place = self.job.partition("_")
        if self.plan.kind == "array":
            return f"{array}_{int(place or 0) + 1}"
        jobs = [str(entry["job"]) for entry in links_submitted(entries(self.files))]
        here = jobs.index(array) if array in jobs else len(jobs)
        return jobs[here + 1] if here + 1 < len(jobs) else ""


def waiting_link_cancelled(files: ChainFiles, number: int) -> str:
    """That link `number`, for which a filler trains, was cancelled; else an empty text."""
    links = [entry for entry in links_submitted(entries(files)) if entry["number"] == number]
    job = str(links[-1]["job"]) if links else ""
    return f"job {job}, the waiting link, was cancelled" if _was_cancelled(job) else ""


def submit_again(files: ChainFiles, plan: ChainPlan, number: int, job: str, holder: str) -> str:
    """Let link `number`, job `job`, which finds `holder` alive, run after that.

    Nothing is submitted where others go on with the chain: a link that was submitted after this
    one, or those of which a copy was submitted by hand.

    Returns:
        The new job, or an empty text.

    Raises:
        ClusterError: It cannot be submitted.
    """
    submitted = links_submitted(entries(files))
    if plan.kind != "dependent" or not submitted or str(submitted[-1]["job"]) != job:
        return ""
    lead = lead_seconds_of(
        plan,
        run_log(files).save_seconds,
        at_risk_seconds=plan.usable_seconds() or 0.0,
        hard_end=True,
    )
    return submit_link(files, plan, number, after=holder, lead_seconds=lead)


def _was_cancelled(job: str) -> bool:
    with contextlib.suppress(ClusterError):
        return bool(job) and state_now(job, _PATIENCE) == "CANCELLED"
    return False


def is_last(plan: ChainPlan, number: int) -> bool:
    """Whether the chain may have no link after this one."""
    return 0 < plan.links <= number


def other_jobs(plan: ChainPlan, number: int, job: str, journal: Sequence[Entry]) -> list[str]:
    """The chain's other jobs, and the places of this job's own array that come after it."""
    array, _, place = job.partition("_")
    others = [job for job in submitted_jobs(journal) if job != array]
    last = plan.links - 1 - (number - int(place or 0) - 1)
    if place and int(place) < last:
        others.append(f"{array}_[{int(place) + 1}-{last}]")
    return others
