"""One link of a chain, from the start of its batch script to its exit code.

It takes the fence, submits the link that follows, starts the run's processes with srun, tells them
when to save and stop, and says in the journal how it went. It needs neither torch nor the command
line, so it is ready in half a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.cluster.chain.fence import WAIT_SECONDS, Fence, FenceHeldError
from outlast.cluster.chain.files import (
    entries,
    finished,
    is_filler,
    note_or_print,
    of_kind,
    read_plan,
    reported_progress,
    run_log,
    script_has_stopped,
    unfinished,
    write_progress,
)
from outlast.cluster.chain.filler import filler_plan
from outlast.cluster.chain.next_job import LinkEnd, NextJob, other_jobs, submit_again
from outlast.cluster.chain.stopping import LinkClock, asking, known_left_seconds
from outlast.cluster.chain.submission import cancel
from outlast.cluster.chain.verdict import (
    TERMINATED,
    Verdict,
    fruitless_links,
    verdict_of,
    verdict_on_previous,
)
from outlast.cluster.chain.watching import HANDOVER_SECONDS, Watch
from outlast.cluster.slurm.commands import IMPATIENT, Patience, installed
from outlast.cluster.slurm.jobs import is_live, left_seconds_now, state_now
from outlast.cluster.slurm.partitions import hosts_in
from outlast.cluster.slurm.script import BEGAN
from outlast.errors import EXIT_DONE, EXIT_GIVE_UP, EXIT_TO_BE_CONTINUED, ClusterError
from outlast.records.directory import replace_file

if TYPE_CHECKING:
    from types import FrameType

    from outlast.cluster.chain.fence import Holder
    from outlast.cluster.chain.files import ChainFiles, ChainPlan

_SIGNAL_DELAY_SECONDS = 1.0
# What a link waits for Slurm's word at its end.
_ANSWER_SECONDS = 30.0
# Within which Slurm says of a job that its node is lost, after srun has ended for it.
_LOSS_SECONDS = 3.0


def run_link(
    files: ChainFiles, number: int, shape: tuple[int, float] | None = None, *, filler: bool = False
) -> int:
    """Be link `number` of a chain, or the place of an array that this job is.

    Args:
        files: Of the chain.
        number: From 1.
        shape: Nodes and time limit in seconds that it was submitted with; None: as in the plan.
        filler: Whether it is a job that trains while link `number` waits.

    Returns:
        Exit code of the job: 0 all done, 3 to be continued by the next link, 5 the chain gives up
        or was cancelled.

    Raises:
        ClusterError: The chain cannot be read, or this is no Slurm job.
    """
    plan = read_plan(files)
    if shape is not None:
        plan = filler_plan(plan, *shape) if filler else plan.shaped(*shape)
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ClusterError("a link is started by Slurm: submit it with `outlast submit job.toml`")
    # The numbers of a chain's jobs as they were submitted: of an array, with the place in it.
    place = os.environ.get("SLURM_ARRAY_TASK_ID")
    if place is not None:
        job = f"{os.environ.get('SLURM_ARRAY_JOB_ID', job)}_{place}"
        number += int(place)
    link = Link(files, plan, number, job)
    previous = {item: signal.signal(item, link.signalled) for item in _SIGNALS}
    try:
        return link.run()
    finally:
        for key, handler in previous.items():
            signal.signal(key, handler)


_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@dataclass
class Link:
    """A running link."""

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str
    signals: list[str] = field(default_factory=list)
    _fenced: bool = False
    _told_to_stop: bool = False
    _changed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Note when the batch script began, so that set-up lines count as part of the link."""
        try:
            self.began = float(os.environ.get(BEGAN, ""))
        except ValueError:
            self.began = time.time()
        self._next_job = NextJob(self.files, self.plan, self.number, self.job.partition("_")[0])

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """Handle Slurm's warning (USR1) and its request to end (TERM): only remember it."""
        self.signals.append(signal.Signals(number).name)
        self._changed.set()

    def run(self) -> int:
        """From the fence to the exit code."""
        if (code := self._ended_before()) is not None:
            return code
        fence = Fence(self.files.fence, self.job, self._job_state, wait_seconds=self._patience)
        try:
            fence.acquire()
        except FenceHeldError as error:
            return self._fenced_out(error)
        try:
            # The holder before may have ended the chain, as a filler that has done all steps.
            if (code := self._ended_before()) is not None:
                return code
            before = verdict_on_previous(self.files, self.plan, self.job)
            verdict = self._work(fence) if before is None else before
            # Slurm may have lost this node, and another link may have begun: it is the one that
            # decides what follows.
            if self._fenced or not fence.held(at_once=True):
                return EXIT_TO_BE_CONTINUED
            # Under the fence, so that who gets it next knows whether the chain has ended.
            last = LinkEnd(self.files, self.plan, self.number, self.job)
            verdict = last.conclude(verdict, self._next_job.submit, told_to_stop=self._told_to_stop)
        finally:
            fence.release()
        print(f"link {self.number}: {verdict.outcome}: {verdict.reason}", flush=True)
        return verdict.code

    def _ended_before(self) -> int | None:
        """Exit code of a link whose chain has ended; None where that goes on."""
        journal = entries(self.files)
        if (ending := finished(journal)) is None:
            return None
        print(f"the chain has ended: {ending['reason']}", flush=True)
        cancel(other_jobs(self.plan, self.number, self.job, journal))
        return EXIT_DONE if ending["outcome"] == "done" else EXIT_GIVE_UP

    def _fenced_out(self, error: FenceHeldError) -> int:
        """Another link is alive, and this one goes away; where no link follows, it comes again."""
        holder = error.holder.job
        note_or_print(self.files, "fenced", job=self.job, holder=holder)
        print(error, flush=True)
        if (code := self._ended_before()) is not None:
            return code
        try:
            again = submit_again(self.files, self.plan, self.number, self.job, holder)
        except ClusterError as problem:
            reason = f"job {holder} goes on writing the run, and no link follows: {problem}"
            print(reason, flush=True)
            note_or_print(self.files, "finished", outcome="stopped", reason=reason)
            return EXIT_TO_BE_CONTINUED
        if again:
            print(f"job {again} goes on when job {holder} has ended", flush=True)
        return EXIT_TO_BE_CONTINUED

    def _patience(self, holder: Holder) -> float:
        """Seconds to wait for a live holder of the fence; a filler is asked to save and end."""
        if self.plan.kind == "filler":
            return 0.0
        submitted = of_kind(entries(self.files), "submitted")
        if holder.job not in {str(entry["job"]) for entry in submitted if is_filler(entry)}:
            return WAIT_SECONDS
        if not self.files.handover.exists():
            with contextlib.suppress(OSError):
                replace_file(self.files.handover, self.job.encode())
        return HANDOVER_SECONDS

    def _job_state(self, job: str) -> str | None:
        return state_now(job, IMPATIENT, of_processes=True)

    def _work(self, fence: Fence) -> Verdict:
        """Train, beside the submission of the next link, and judge how it went."""
        log = run_log(self.files)
        first, attempt = log.step, log.attempt
        fruitless = fruitless_links(entries(self.files), first)
        attempts = self.plan.attempts_without_progress
        if fruitless >= attempts:
            return verdict_of(
                1, progressed=False, saved=first > 0, fruitless=fruitless - 1, attempts=attempts
            )
        # What an earlier link could not write, still writes, or has told is not of this one.
        log.failure, log.over = "", attempt
        if reported_progress(self.files).get("outcome"):
            with contextlib.suppress(OSError):
                write_progress(self.files, outcome="")
        known = known_left_seconds(os.environ, self.plan.limit_seconds, self.began)
        passed = max(time.time() - self.began, 0.0)
        longest = self.plan.link_seconds - passed if self.plan.link_seconds else math.inf
        number = os.environ["SLURM_JOB_ID"]
        clock = LinkClock(
            asking(number, left_seconds_now), known_seconds=known, longest_seconds=longest
        )
        clock.refresh()
        filler = self.plan.kind == "filler"
        note_or_print(
            self.files,
            "started",
            job=self.job,
            number=self.number,
            began=self.began,
            step=first,
            nodes=self.plan.nodes_of(self.number),
            processes=self.plan.processes_of(self.number),
            hosts=hosts_in(os.environ.get("SLURM_JOB_NODELIST", "")),
            **({"role": "filler"} if filler else {}),
        )
        if not filler:
            with contextlib.suppress(OSError):
                self.files.handover.unlink()
        watch = Watch(
            self.files,
            self.plan,
            self.number,
            self.job,
            self.began,
            fence,
            clock,
            log,
            self.signals,
        )
        self._next_job.lead_seconds = watch.measure_lead()
        self._next_job.left_seconds = clock.limit_left_seconds
        self._next_job.begin()
        code = watch.train()
        if code in TERMINATED and not self.signals:
            # What has ended the program is on its way to this process, too.
            self._changed.wait(_SIGNAL_DELAY_SECONDS)
        watch.note_signals()
        self._next_job.lead_seconds = watch.lead_seconds
        self._told_to_stop, self._fenced = bool(watch.stop), watch.fenced
        last = run_log(self.files).step
        log.read()
        stopped = log.outcome == "to_be_continued" and log.attempt > attempt
        stopped = stopped or (last > first and script_has_stopped(self.files))
        if code == EXIT_DONE and stopped:
            code = EXIT_TO_BE_CONTINUED
        self._next_job.join()
        verdict = self._verdict(code, first, last, fruitless, watch)
        note_or_print(
            self.files,
            "ended",
            job=self.job,
            number=self.number,
            code=code,
            verdict=verdict.outcome,
            reason=verdict.reason,
            step=last,
            state=watch.state,
            left=watch.clock.limit_left_seconds(),
            seconds=time.time() - self.began,
        )
        return verdict

    def _doubts(self, watch: Watch) -> str:
        """Why the program's exit code of 0 is no proof that all is done; empty where it is."""
        silent = self._ask(watch)
        record = unfinished(self.files, self.plan)
        if record is not None:
            return record
        # srun ends with 0 where a node is lost: without a record, Slurm must say that all is well,
        # and srun may know before it.
        if is_live(watch.state or ""):
            time.sleep(max(min(_LOSS_SECONDS, watch.clock.limit_left_seconds()), 0.0))
            watch.state = None
            silent = self._ask(watch)
        if watch.state is None and installed("squeue"):
            return (
                "the program keeps no record of its end, and Slurm does not say that the job runs"
                f"{f' ({silent})' if silent else ''}"
            )
        return ""

    def _ask(self, watch: Watch) -> str:
        """Find out what Slurm says of this job; why it says nothing."""
        left = max(watch.clock.limit_left_seconds(), 0.0)
        patience = Patience(total_seconds=min(_ANSWER_SECONDS, left))
        try:
            watch.state = state_now(os.environ["SLURM_JOB_ID"], patience) or watch.state
        except ClusterError as error:
            return str(error)
        return ""

    def _verdict(self, code: int, first: int, last: int, fruitless: int, watch: Watch) -> Verdict:
        """Verdict on the exit code of the program."""
        if self._fenced:
            return Verdict("continue", "another link holds the fence")
        doubts = self._doubts(watch) if code == EXIT_DONE else ""
        return verdict_of(
            code,
            progressed=last > first,
            saved=last > 0,
            fruitless=fruitless,
            attempts=self.plan.attempts_without_progress,
            state=watch.state,
            signal=self.signals[-1] if self.signals else "",
            stop_asked=self.files.stop.exists(),
            failure=watch.log.failure,
            unfinished=doubts,
        )
