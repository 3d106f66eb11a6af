"""The job after a link: submitted once, beside the training or when the link ends."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import entries, links_submitted, note_or_print, submitted_jobs
from outlast.cluster.chain.filler import submit_filler
from outlast.cluster.chain.margin import first_lead_seconds
from outlast.cluster.chain.submission import cancel, submit_link
from outlast.cluster.chain.verdict import Verdict
from outlast.cluster.slurm.commands import Patience
from outlast.cluster.slurm.jobs import state_now
from outlast.errors import ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.cluster.chain.files import ChainFiles, ChainPlan, Entry


# Slurm may end the job soon.
_PATIENCE = Patience(answer_seconds=5.0, total_seconds=4.0, first_pause_seconds=1.0)


@dataclass(frozen=True)
class LinkEnd:
    """The end of link `number`, which is job `job`."""

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str

    def conclude(
        self, verdict: Verdict, next_job: Callable[[], tuple[str, str]], *, told_to_stop: bool
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
        """Submit the job after a filler: nothing but its link, or a filler for the next window."""
        if verdict.outcome != "done" and (gone := waiting_link_cancelled(self.files, self.number)):
            return Verdict("cancelled", gone)
        if verdict.outcome in ("gave_up", "cancelled"):
            return Verdict("continue", f"the filler: {verdict.reason}")
        if not (verdict.ends_the_chain or told_to_stop):
            # A filler is a gain, never a reason to fail.
            with contextlib.suppress(OutlastError):
                submit_filler(self.files)
        return verdict

    def _followed(self, verdict: Verdict, next_job: Callable[[], tuple[str, str]]) -> Verdict:
        """Return True if a link follows; a user who cancelled it has cancelled the chain."""
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
    """Sentence that link `number`, for which a filler trains, was cancelled; else an empty text."""
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
    lead = first_lead_seconds(files, plan)
    return submit_link(files, plan, number, after=holder, lead_seconds=lead)


def _was_cancelled(job: str) -> bool:
    with contextlib.suppress(ClusterError):
        return bool(job) and state_now(job, _PATIENCE) == "CANCELLED"
    return False


def is_last(plan: ChainPlan, number: int) -> bool:
    """True if the chain may have no link after this one."""
    return 0 < plan.links <= number


def other_jobs(plan: ChainPlan, number: int, job: str, journal: Sequence[Entry]) -> list[str]:
    """The chain's other jobs, and the places of this job's own array that come after it."""
    array, _, place = job.partition("_")
    others = [job for job in submitted_jobs(journal) if job != array]
    last = plan.links - 1 - (number - int(place or 0) - 1)
    if place and int(place) < last:
        others.append(f"{array}_[{int(place) + 1}-{last}]")
    return others


_PATIENCE_SECONDS = 600.0
_ANSWER_SECONDS = 30.0
_SHORTEST_ANSWER_SECONDS = 5.0
_JOIN_SECONDS = 30.0

# For what a link writes down at its end.
_KEPT_SECONDS = 5.0


def _never() -> float:
    return math.inf


@dataclass
class NextJob:
    """Submits the link after `number`, to start when job `after` has ended.

    Attributes:
        lead_seconds: How long before its end that link's last save should begin, by what is known
            when it is submitted.
        left_seconds: Until Slurm ends this link; nothing is waited for any longer.
    """

    files: ChainFiles
    plan: ChainPlan
    number: int
    after: str
    lead_seconds: float = 0.0
    left_seconds: Callable[[], float] = _never
    _job: str = ""
    _problem: str = ""
    _thread: threading.Thread | None = None
    _submitting: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Submit in a thread where links submit each other: sbatch may wait, training need not."""
        if self.plan.kind == "dependent" and not is_last(self.plan, self.number):
            self._thread = threading.Thread(target=self.submit, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait a while for that thread."""
        if self._thread is not None:
            self._thread.join(timeout=min(_JOIN_SECONDS, self._spare_seconds()))

    def submit(self) -> tuple[str, str]:
        """Submit, unless that is done; returns the job's number, or why there is none."""
        # The thread that does so first may still be waiting for the controller.
        longest = _PATIENCE_SECONDS + _ANSWER_SECONDS + _JOIN_SECONDS
        if not self._submitting.acquire(timeout=min(longest, self._spare_seconds())):
            return "", "Slurm has not answered sbatch, and this link must end"
        try:
            if not self._job:
                try:
                    self._job = self._submitted()
                except ClusterError as error:
                    self._problem = str(error)
                    print(f"the next link could not be submitted: {error}", flush=True)
            return self._job, self._problem
        finally:
            self._submitting.release()

    def _spare_seconds(self) -> float:
        return max(self.left_seconds() - _KEPT_SECONDS, 0.0)

    def _patience(self) -> Patience:
        spare = self._spare_seconds()
        return Patience(
            answer_seconds=min(_ANSWER_SECONDS, max(spare, _SHORTEST_ANSWER_SECONDS)),
            total_seconds=min(_PATIENCE_SECONDS, spare),
        )

    def _submitted(self) -> str:
        number = self.number + 1
        if not self.plan.chooses:
            return submit_link(
                self.files,
                self.plan,
                number,
                after=self.after,
                lead_seconds=self.lead_seconds,
                patience=self._patience(),
            )
        # Needs NumPy, which other links do not wait for.
        from outlast.cluster.chain.choosing import choose_next, submit_chosen

        chosen = choose_next(self.files, self.plan, number, self.after)
        job = submit_chosen(self.files, chosen, number, after=self.after, patience=self._patience())
        print(f"link {number} is job {job}: {chosen.reason}", flush=True)
        return job
