"""One link of a chain, from the start of its batch script to its exit code.

It takes the fence, submits the link that follows, starts the run's processes with srun, tells them
when to save and stop, and says in the journal how it went. It needs neither torch nor the command
line, so it is ready in half a second.

The ranks read a file at step boundaries, which says when to stop; signals are the back-up.

While a link waits in the queue no node is its own. Those of the link before are, and those of a
filler that trains in the meantime, and the next link may well get them again: there the data that
it will need are copied beside the training (`Prefetching`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from outlast.cluster import stopping
from outlast.cluster.chain_files import (
    entries,
    finished,
    is_filler,
    links_submitted,
    note_or_print,
    of_kind,
    read_plan,
    reported_progress,
    run_log,
    script_has_stopped,
    submitted_jobs,
    unfinished,
    write_progress,
)
from outlast.cluster.choosing import reason_to_yield, submit_filler
from outlast.cluster.fence import WAIT_SECONDS, Fence, FenceHeldError, read_holder
from outlast.cluster.slurm import (
    IMPATIENT,
    Patience,
    ask,
    has_ended,
    hosts_in,
    installed,
    is_live,
    left_seconds_now,
    state_now,
)
from outlast.cluster.stopping import (
    LinkClock,
    countdown,
    known_left_seconds,
    lead_seconds_of,
    write_countdown,
)
from outlast.cluster.submission import BEGAN, cancel, submit_link
from outlast.cluster.verdict import (
    TERMINATED,
    Verdict,
    fruitless_links,
    verdict_of,
    verdict_on_previous,
)
from outlast.errors import (
    EXIT_DONE,
    EXIT_GIVE_UP,
    EXIT_TO_BE_CONTINUED,
    RECORD_TELLS,
    ClusterError,
    OutlastError,
)
from outlast.records.directory import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType

    from outlast.cluster.chain_files import ChainFiles, ChainPlan, Entry, RunLog
    from outlast.cluster.fence import Holder

HANDOVER_SECONDS = 900.0
"""A filler's step and its save; then its processes end."""
_PREFETCH_END_SECONDS = 5.0
_LOOK_SECONDS = 0.5
# Ranks read the file that tells them to stop; where a shared file system shows it late, a signal
# does the same.
_SIGNAL_AFTER_SECONDS = 10.0
# Slurm's documentation lets a warning come a minute before the lead that it was asked for.
_EARLIEST_WARNING_SECONDS = 120.0
_QUEUE_SECONDS = 60.0
_LEAD_EVERY_SECONDS = 10.0
# Slurm may end the job soon.
_ENDING_PATIENCE = Patience(answer_seconds=5.0, total_seconds=4.0, first_pause_seconds=1.0)
_SIGNAL_DELAY_SECONDS = 1.0
# Within which Slurm says of a job that its node is lost, after srun has ended for it.
_LOSS_SECONDS = 3.0
# Longest wait for sbatch to submit the next link, for one answer of Slurm at the link's end, and
# for the thread that submits.
_SUBMIT_SECONDS = 600.0
_ANSWER_SECONDS = 30.0
_SHORTEST_ANSWER_SECONDS = 5.0
_JOIN_SECONDS = 30.0
# For what a link writes down at its end.
_KEPT_SECONDS = 5.0
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@dataclass
class LinkJob:
    """The job that is a link.

    Attributes:
        files: Of the chain.
        plan: Of the chain, with the nodes and the limit of this link.
        number: Of the link, from 1.
        job: Slurm's number of the job; of a place of an array, ``7_2``.
    """

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str

    @property
    def is_filler(self) -> bool:
        """True if it trains while link `number` waits."""
        return self.plan.kind == "filler"

    @property
    def is_last(self) -> bool:
        """True if the chain may have no link after this one."""
        return 0 < self.plan.links <= self.number

    def note(self, kind: str, **fields: object) -> None:
        """Append an entry about this job to the journal."""
        note_or_print(self.files, kind, job=self.job, **fields)

    def other_jobs(self, journal: Sequence[Entry]) -> list[str]:
        """The chain's other jobs, and the places of this job's own array that come after it."""
        array, _, place = self.job.partition("_")
        others = [job for job in submitted_jobs(journal) if job != array]
        last = self.plan.links - 1 - (self.number - int(place or 0) - 1)
        if place and int(place) < last:
            others.append(f"{array}_[{int(place) + 1}-{last}]")
        return others


@dataclass
class Prefetching:
    """The copying beside the training of a link."""

    link: LinkJob
    _begun: bool = False
    _kill_at: float = math.inf
    _process: subprocess.Popen[bytes] | None = None

    def look(self, *, under_way: bool, ending: bool = False) -> None:
        """Begin once training is under way; write down how it went when it has ended.

        Args:
            under_way: Whether the link trains.
            ending: Whether its last save may be under way, which is to have the file system.
        """
        if ending:
            self._ask_to_end()
        elif under_way and not self._begun:
            self._begun = True
            plan, job = self.link.plan, self.link.files.job
            # A program of one's own has data of its own.
            if not plan.command and wants_prefetch(job):
                known = {stopping.CHAIN, stopping.JOB}
                try:
                    self._process = subprocess.Popen(
                        prefetch_words(plan.python, job, plan.nodes_of(self.link.number)),
                        env={name: text for name, text in os.environ.items() if name not in known},
                    )
                except OSError as error:
                    print(f"data are not prefetched for the next link: {error}", flush=True)
        if self._process is not None and self._process.poll() is not None:
            self._note()

    def end(self) -> None:
        """End it with the link; what was copied by then is continued with later."""
        if self._process is not None:
            # srun takes its tasks on other nodes with it only where it is asked to end.
            self._ask_to_end()
            try:
                self._process.wait(_PREFETCH_END_SECONDS)
            except subprocess.TimeoutExpired:
                # The next link waits for this job's end; what is half copied does no harm.
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PREFETCH_END_SECONDS)
            self._note()

    def _ask_to_end(self) -> None:
        """Ask once, and end it if it does not do so soon; waits for nothing."""
        if self._process is None:
            return
        if math.isinf(self._kill_at):
            self._process.terminate()
            self._kill_at = time.monotonic() + _PREFETCH_END_SECONDS
        elif time.monotonic() > self._kill_at:
            self._process.kill()

    def _note(self) -> None:
        assert self._process is not None
        self.link.note("prefetched", code=self._process.returncode)
        self._process = None


def wants_prefetch(job_file: Path) -> bool:
    """True if a job leaves copying to the prefetch, instead of waiting for it at the start."""
    # Half a second's imports, which no link needs before it trains.
    from outlast.job import load_job

    with contextlib.suppress(OutlastError):
        staging = load_job(job_file, []).staging
        return bool(staging.directory) and staging.prefetch and not staging.wait
    return False


def prefetch_words(python: str, job_file: Path, nodes: int) -> Sequence[str]:
    """Command that prefetches on all nodes of this job; one node needs no srun."""
    from outlast.cluster.staging import prefetch_command

    words = prefetch_command(python, job_file, nodes, beside_training=True)
    if nodes == 1 and not installed("srun"):
        return words[words.index(python) :]
    return words


def program_of(link: LinkJob) -> list[str]:
    """Name and arguments of the program of a link.

    ``outlast train`` as a step of all processes, or the job's own shell line. One process needs no
    srun, which containers may lack.
    """
    plan = link.plan
    if plan.command:
        return ["bash", "-c", plan.command]
    train = [plan.python, "-m", "outlast", "train", str(link.files.job)]
    nodes, processes = plan.nodes_of(link.number), plan.processes_of(link.number)
    if processes == 1 and not installed("srun"):
        return train
    # A rank that died must not leave the others waiting for it. Those that stop to be continued end
    # with 0 here, one after the other.
    step = ["srun", f"--nodes={nodes}", f"--ntasks={processes}", "--kill-on-bad-exit=1"]
    return [*step, f"--export=ALL,{RECORD_TELLS}=1", *train]


@dataclass
class Watch:
    """Runs the program of a link.

    Attributes:
        link: The job.
        began: When the job's script began, seconds since the epoch.
        fence: Which the link holds.
        clock: Time that is left to the link.
        log: Of the run.
        signals: Names of those that the link has been sent, as they come.
        stop: Why the program was told to stop, or an empty text.
        state: What Slurm said of the job when it was told to end.
        fenced: Whether another link has taken the fence.
        lead_seconds: How long before the link's end the last save begins.
    """

    link: LinkJob
    began: float
    fence: Fence
    clock: LinkClock
    log: RunLog
    signals: list[str]
    stop: str = ""
    state: str | None = None
    fenced: bool = False
    lead_seconds: float = 0.0
    _longest_lead_seconds: float = 0.0
    _told: int = 0
    _published: tuple[float, float, str] = (-math.inf, 0.0, "")
    _looked_at_queue: float = field(default_factory=time.monotonic)
    _reason_to_yield: str = ""

    def measure_lead(self) -> float:
        """Update the start of the last save, in seconds before the end, from the saves so far."""
        clock = self.clock
        left = clock.left_seconds()
        self.lead_seconds = lead_seconds_of(
            self.link.plan,
            self.log.save_seconds,
            at_risk_seconds=left + max(time.time() - self.began, 0.0),
            hard_end=clock.limit_left_seconds() <= left + 60.0,
        )
        self._longest_lead_seconds = max(self._longest_lead_seconds, self.lead_seconds)
        return self.lead_seconds

    def train(self) -> int:
        """Run the program of the link and tell it when to stop; returns its exit code."""
        self._publish()
        process = subprocess.Popen(
            program_of(self.link),
            env={
                **os.environ,
                stopping.CHAIN: str(self.link.files.path),
                stopping.JOB: self.link.job,
                **self.fence.lease,
                "PYTHONUNBUFFERED": "1",
            },
        )
        prefetching = Prefetching(self.link)
        try:
            return self._watch(process, prefetching)
        finally:
            prefetching.end()
            # The fence is not given back while the program runs.
            self._end(process)

    def _watch(self, process: subprocess.Popen[bytes], prefetching: Prefetching) -> int:
        clock, log = self.clock, self.log
        starts = len(log.restart_seconds)
        signal_at, signalled, stops, looked = math.inf, False, log.stops, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=_LOOK_SECONDS)
            now = time.monotonic()
            self.note_signals()
            self.stop = self.stop or self._why_stop()
            if not self.fence.held():
                self.fenced = True
                self._kill(process)
            clock.refresh()
            if log.read() or now - looked > _LEAD_EVERY_SECONDS:
                looked = now
                self.measure_lead()
            self._publish()
            prefetching.look(
                under_way=len(log.restart_seconds) > starts,
                ending=bool(self.stop) or clock.left_seconds() < self.lead_seconds,
            )
            if self.stop:
                signal_at = min(signal_at, now + _SIGNAL_AFTER_SECONDS)
            elif clock.left_seconds() < self.lead_seconds:
                # In time for the save, also where that has a short lead.
                pause = min(_SIGNAL_AFTER_SECONDS, 0.5 * self.lead_seconds)
                signal_at = min(signal_at, now + pause)
            if now > signal_at and not signalled:
                signalled = True
                # A program that is not ours may die of it, and so may ranks that stop already.
                if not self.link.plan.command and log.stops == stops:
                    process.send_signal(signal.SIGUSR1)

    def _publish(self) -> None:
        """Tell the ranks when to stop, if that has changed."""
        clock = self.clock
        end, lead, stop = self._published
        unmoved = end == clock.end or abs(end - clock.end) <= 1.0
        if unmoved and abs(lead - self.lead_seconds) <= 0.02 * lead and stop == self.stop:
            return
        state = countdown(self.link.job, clock, self.lead_seconds, self.stop)
        if write_countdown(self.link.files.clock, state):
            self._published = (clock.end, self.lead_seconds, self.stop)

    def _why_stop(self) -> str:
        """Reason, besides the clock and signals, for the link to end."""
        if self.link.files.stop.exists():
            return "outlast cluster stop"
        if not self.link.is_filler:
            return ""
        # A filler ends when the link has started, or somebody could on these nodes.
        if self.link.files.handover.exists():
            return "the link has started"
        now = time.monotonic()
        if now - self._looked_at_queue > _QUEUE_SECONDS:
            self._looked_at_queue = now
            # The queue is asked beside the loop, which must not wait.
            threading.Thread(target=self._look_at_queue, daemon=True).start()
        return self._reason_to_yield

    def note_signals(self) -> None:
        """Tell the ranks to stop; on TERM also find out why, while Slurm still says so."""
        clock = self.clock
        while self._told < len(self.signals):
            name = self.signals[self._told]
            self._told += 1
            # The limit may have been lowered since it was asked for.
            clock.refresh(at_once=True)
            if name == "SIGUSR1" and self._in_time():
                continue
            self.stop = self.stop or name
            self._publish()
            if name == "SIGTERM" and self.state is None:
                with contextlib.suppress(ClusterError):
                    state = state_now(os.environ["SLURM_JOB_ID"], _ENDING_PATIENCE)
                    self.state = state if has_ended(state or "") else None
            left = clock.limit_left_seconds()
            self.link.note("signalled", signal=name, left=left, state=self.state)

    def _look_at_queue(self) -> None:
        link = self.link
        with contextlib.suppress(OutlastError):
            self._reason_to_yield = waiting_link_cancelled(link) or reason_to_yield(
                link.files, link.job, link.plan, self.began
            )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask a program that runs to save and end, and wait for it; kill it where that is in vain.

        The heartbeat continues, without which its ranks would end in the middle of their save.
        """
        if process.poll() is not None:
            return
        process.terminate()
        until = time.monotonic() + HANDOVER_SECONDS
        while process.poll() is None:
            if not self.fence.held():
                self.fenced = True
                self._kill(process)
            elif time.monotonic() > until:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_LOOK_SECONDS)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End this link's processes on all nodes at once, since another link writes the run."""
        process.kill()
        # Tasks on other nodes outlive an srun that is killed. A later start of this very job has
        # its number: then they are left to find out by themselves that they have lost the lease.
        holder = read_holder(self.link.files.fence)
        if holder is not None and holder.job != self.link.job:
            with contextlib.suppress(ClusterError):
                ask(["scancel", "--signal=KILL", os.environ["SLURM_JOB_ID"]], IMPATIENT)

    def _in_time(self) -> bool:
        """True if Slurm's warning is not needed, since the link's own clock knows the same limit.

        Long before the limit it is no warning of Slurm's: a person asks for a stop.
        """
        left = self.clock.limit_left_seconds()
        earliest = self._longest_lead_seconds + _EARLIEST_WARNING_SECONDS
        return self.clock.source == "squeue" and self.lead_seconds < left < earliest


@dataclass
class NextJob:
    """Submits the link after `link`, to start when that has ended.

    Attributes:
        link: The running one.
        lead_seconds: How long before its end that link's last save should begin, by what is known
            when it is submitted.
        left_seconds: Until Slurm ends this link; nothing is waited for any longer.
    """

    link: LinkJob
    lead_seconds: float = 0.0
    left_seconds: Callable[[], float] = lambda: math.inf
    _job: str = ""
    _problem: str = ""
    _thread: threading.Thread | None = None
    _submitting: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Submit in a thread where links submit each other: sbatch may wait, training need not."""
        if self.link.plan.kind == "dependent" and not self.link.is_last:
            self._thread = threading.Thread(target=self.submit, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait a while for that thread."""
        if self._thread is not None:
            self._thread.join(timeout=min(_JOIN_SECONDS, self._spare_seconds()))

    def submit(self) -> tuple[str, str]:
        """Submit, unless that is done; returns the job's number, or why there is none."""
        # The thread that does so first may still be waiting for the controller.
        longest = _SUBMIT_SECONDS + _ANSWER_SECONDS + _JOIN_SECONDS
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
            total_seconds=min(_SUBMIT_SECONDS, spare),
        )

    def _submitted(self) -> str:
        files, plan, number = self.link.files, self.link.plan, self.link.number + 1
        after, patience = self.link.job.partition("_")[0], self._patience()
        if not plan.chooses:
            lead = self.lead_seconds
            return submit_link(
                files, plan, number, after=after, lead_seconds=lead, patience=patience
            )
        # Needs NumPy, which other links do not wait for.
        from outlast.cluster.choosing import choose_next, submit_chosen

        chosen = choose_next(files, plan, number, after)
        job = submit_chosen(files, chosen, number, after=after, patience=self._patience())
        print(f"link {number} is job {job}: {chosen.plan.reason}", flush=True)
        return job


def waiting_link_cancelled(filler: LinkJob) -> str:
    """Sentence that the link for which a filler trains was cancelled; else an empty text."""
    submitted = links_submitted(entries(filler.files))
    jobs = [str(entry["job"]) for entry in submitted if entry["number"] == filler.number]
    if jobs and _was_cancelled(jobs[-1]):
        return f"job {jobs[-1]}, the waiting link, was cancelled"
    return ""


def _was_cancelled(job: str) -> bool:
    with contextlib.suppress(ClusterError):
        return state_now(job, _ENDING_PATIENCE) == "CANCELLED"
    return False


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
        plan = plan.shaped(*shape, filler=filler)
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


@dataclass
class Link(LinkJob):
    """A running link."""

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
        self._next_job = NextJob(self)

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
            verdict = self._conclude(verdict)
        finally:
            fence.release()
        print(f"link {self.number}: {verdict.outcome}: {verdict.reason}", flush=True)
        return verdict.code

    def _ended_before(self) -> int | None:
        """Exit code of a link whose chain has ended; None where that continues."""
        journal = entries(self.files)
        if (ending := finished(journal)) is None:
            return None
        print(f"the chain has ended: {ending['reason']}", flush=True)
        cancel(self.other_jobs(journal))
        return EXIT_DONE if ending["outcome"] == "done" else EXIT_GIVE_UP

    def _fenced_out(self, error: FenceHeldError) -> int:
        """Another link is alive, and this one goes away; where no link follows, it comes again."""
        holder = error.holder.job
        self.note("fenced", holder=holder)
        print(error, flush=True)
        if (code := self._ended_before()) is not None:
            return code
        submitted = links_submitted(entries(self.files))
        # Others continue with the chain where a link was submitted after this one, or where this is
        # a copy that was submitted by hand.
        if self.plan.kind != "dependent" or not submitted or str(submitted[-1]["job"]) != self.job:
            return EXIT_TO_BE_CONTINUED
        try:
            again = submit_link(self.files, self.plan, self.number, after=holder)
            print(f"job {again} continues when job {holder} has ended", flush=True)
        except ClusterError as problem:
            reason = f"job {holder} continues writing the run, and no link follows: {problem}"
            print(reason, flush=True)
            note_or_print(self.files, "finished", outcome="stopped", reason=reason)
        return EXIT_TO_BE_CONTINUED

    def _patience(self, holder: Holder) -> float:
        """Seconds to wait for a live holder of the fence; a filler is asked to save and end."""
        if self.is_filler:
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
        asked = partial(left_seconds_now, os.environ["SLURM_JOB_ID"])
        clock = LinkClock(asked, known_seconds=known, longest_seconds=longest)
        clock.refresh()
        self.note(
            "started",
            number=self.number,
            began=self.began,
            step=first,
            nodes=self.plan.nodes_of(self.number),
            processes=self.plan.processes_of(self.number),
            hosts=hosts_in(os.environ.get("SLURM_JOB_NODELIST", "")),
            **({"role": "filler"} if self.is_filler else {}),
        )
        if not self.is_filler:
            with contextlib.suppress(OSError):
                self.files.handover.unlink()
        watch = Watch(self, self.began, fence, clock, log, self.signals)
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
        self.note(
            "ended",
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

    def _conclude(self, verdict: Verdict) -> Verdict:
        """See to the jobs that follow.

        Returns:
            The verdict, or another one where no link can follow.
        """
        if self.is_filler:
            verdict = self._after_filler(verdict)
        elif not verdict.ends_the_chain:
            verdict = self._followed(verdict)
        if verdict.ends_the_chain:
            note_or_print(self.files, "finished", outcome=verdict.outcome, reason=verdict.reason)
            # Those that cannot be cancelled from here find that the chain has ended.
            cancel(self.other_jobs(entries(self.files)))
            with contextlib.suppress(OSError):
                self.files.stop.unlink()
        return verdict

    def _after_filler(self, verdict: Verdict) -> Verdict:
        """Submit the job after a filler: nothing but its link, or a filler for the next window."""
        if verdict.outcome != "done" and (gone := waiting_link_cancelled(self)):
            return Verdict("cancelled", gone)
        if verdict.outcome in ("gave_up", "cancelled"):
            return Verdict("continue", f"the filler: {verdict.reason}")
        if not (verdict.ends_the_chain or self._told_to_stop):
            # A filler is a gain, never a reason to fail.
            with contextlib.suppress(OutlastError):
                submit_filler(self.files)
        return verdict

    def _followed(self, verdict: Verdict) -> Verdict:
        """Submit or find the next link; a user who cancelled it has cancelled the chain."""
        if self.is_last:
            used = self.plan.links - self.plan.first_number + 1
            return Verdict(
                "stopped", f"slurm.links: all {used} links are used up ({verdict.reason})"
            )
        array, _, place = self.job.partition("_")
        if self.plan.kind == "dependent":
            following, problem = self._next_job.submit()
            if not following:
                return Verdict("stopped", f"no link follows: {problem}")
        elif self.plan.kind == "array":
            following = f"{array}_{int(place or 0) + 1}"
        else:
            jobs = [str(entry["job"]) for entry in links_submitted(entries(self.files))]
            following = dict(itertools.pairwise(jobs)).get(array, "")
        if following and _was_cancelled(following):
            return Verdict("cancelled", f"job {following}, the next link, was cancelled")
        return verdict
