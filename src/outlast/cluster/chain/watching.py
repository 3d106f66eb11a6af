"""Supervision of a link's program: when it is to stop, and its end where another link writes.

The ranks read a file at step boundaries; signals are the back-up.

While a link waits in the queue no node is its own. Those of the link before are, and those of a
filler that trains in the meantime, and the next link may well get them again: there the data that
it will need are copied beside the training (`Prefetching`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.cluster.chain import stopping
from outlast.cluster.chain.fence import read_holder
from outlast.cluster.chain.files import note_or_print
from outlast.cluster.chain.filler import reason_to_yield
from outlast.cluster.chain.margin import lead_seconds_of
from outlast.cluster.chain.next_job import waiting_link_cancelled
from outlast.cluster.chain.stopping import RECORD_TELLS, countdown, write_countdown
from outlast.cluster.slurm.commands import IMPATIENT, Patience, ask, installed
from outlast.cluster.slurm.jobs import has_ended, state_now
from outlast.errors import ClusterError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outlast.cluster.chain.fence import Fence
    from outlast.cluster.chain.files import ChainFiles, ChainPlan, RunLog
    from outlast.cluster.chain.stopping import LinkClock


_PATIENCE_SECONDS = 5.0


@dataclass
class Prefetching:
    """The copying beside the training of link `number`, which is job `job`."""

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str
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
            # A program of one's own has data of its own.
            if not self.plan.command and wants_prefetch(self.files.job):
                nodes = self.plan.nodes_of(self.number)
                known = {stopping.CHAIN, stopping.JOB}
                try:
                    self._process = subprocess.Popen(
                        prefetch_words(self.plan.python, self.files.job, nodes),
                        env={
                            name: value for name, value in os.environ.items() if name not in known
                        },
                    )
                except OSError as error:
                    print(f"data are not prefetched for the next link: {error}", flush=True)
        if self._process is not None and self._process.poll() is not None:
            self._note()

    def end(self) -> None:
        """End it with the link; what was copied by then is gone on with later."""
        if self._process is not None:
            # srun takes its tasks on other nodes with it only where it is asked to end.
            self._ask_to_end()
            try:
                self._process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                # The next link waits for this job's end; what is half copied does no harm.
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE_SECONDS)
            self._note()

    def _ask_to_end(self) -> None:
        """Ask once, and end it if it does not do so soon; waits for nothing."""
        if self._process is None:
            return
        if math.isinf(self._kill_at):
            self._process.terminate()
            self._kill_at = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > self._kill_at:
            self._process.kill()

    def _note(self) -> None:
        assert self._process is not None
        note_or_print(self.files, "prefetched", job=self.job, code=self._process.returncode)
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
    from outlast.cluster.staging.job import prefetch_command

    words = prefetch_command(python, job_file, nodes, beside_training=True)
    if nodes == 1 and not installed("srun"):
        return words[words.index(python) :]
    return words


def program_of(files: ChainFiles, plan: ChainPlan, number: int) -> list[str]:
    """Name and arguments of the program of link `number`.

    ``outlast train`` as a step of all processes, or the job's own shell line. One process needs no
    srun, which containers may lack.
    """
    if plan.command:
        return ["bash", "-c", plan.command]
    train = [plan.python, "-m", "outlast", "train", str(files.job)]
    nodes, processes = plan.nodes_of(number), plan.processes_of(number)
    if processes == 1 and not installed("srun"):
        return train
    # A rank that died must not leave the others waiting for it. Those that stop to be continued end
    # with 0 here, one after the other.
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={processes}",
        "--kill-on-bad-exit=1",
        f"--export=ALL,{RECORD_TELLS}=1",
        *train,
    ]


HANDOVER_SECONDS = 900.0
"""A filler's step and its save; then its processes end."""
_LOOK_SECONDS = 0.5

# Ranks read the file that tells them to stop; where a shared file system shows it late, a signal
# does the same.
_SIGNAL_AFTER_SECONDS = 10.0

# Slurm's documentation lets a warning come a minute before the lead that it was asked for.
_EARLIEST_WARNING_SECONDS = 120.0
_QUEUE_SECONDS = 60.0
_LEAD_EVERY_SECONDS = 10.0
_ENDING_PATIENCE = Patience(answer_seconds=5.0, total_seconds=4.0, first_pause_seconds=1.0)


@dataclass
class Watch:
    """Runs the program of link `number`, which is job `job`.

    Attributes:
        began: When the job's script began, seconds since the epoch.
        signals: Names of those that the link has been sent, as they come.
        stop: Why the program was told to stop, or an empty text.
        state: What Slurm said of the job when it was told to end.
        fenced: Whether another link has taken the fence.
        lead_seconds: How long before the link's end the last save begins.
    """

    files: ChainFiles
    plan: ChainPlan
    number: int
    job: str
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
            self.plan,
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
            program_of(self.files, self.plan, self.number),
            env={
                **os.environ,
                stopping.CHAIN: str(self.files.path),
                stopping.JOB: self.job,
                **self.fence.lease,
                "PYTHONUNBUFFERED": "1",
            },
        )
        prefetching = Prefetching(self.files, self.plan, self.number, self.job)
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
                if not self.plan.command and log.stops == stops:
                    process.send_signal(signal.SIGUSR1)

    def _publish(self) -> None:
        """Tell the ranks when to stop, if that has changed."""
        clock = self.clock
        end, lead, stop = self._published
        unmoved = end == clock.end or abs(end - clock.end) <= 1.0
        if unmoved and abs(lead - self.lead_seconds) <= 0.02 * lead and stop == self.stop:
            return
        state = countdown(self.job, clock, self.lead_seconds, self.stop)
        if write_countdown(self.files.clock, state):
            self._published = (clock.end, self.lead_seconds, self.stop)

    def _why_stop(self) -> str:
        """Reason, besides the clock and signals, for the link to end."""
        if self.files.stop.exists():
            return "outlast cluster stop"
        return self._make_way() if self.plan.kind == "filler" else ""

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
            note_or_print(
                self.files, "signalled", job=self.job, signal=name, left=left, state=self.state
            )

    def _make_way(self) -> str:
        """Why a filler ends now: the link has started, or somebody could on these nodes."""
        if self.files.handover.exists():
            return "the link has started"
        now = time.monotonic()
        if now - self._looked_at_queue > _QUEUE_SECONDS:
            self._looked_at_queue = now
            # The queue is asked beside the loop, which must not wait.
            threading.Thread(target=self._look_at_queue, daemon=True).start()
        return self._reason_to_yield

    def _look_at_queue(self) -> None:
        left = self.plan.limit_seconds or 0.0
        with contextlib.suppress(OutlastError):
            self._reason_to_yield = waiting_link_cancelled(
                self.files, self.number
            ) or reason_to_yield(self.files, self.job, self.plan, left, self.began)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask a program that runs to save and end, and wait for it; kill it where that is in vain.

        The heartbeat goes on, without which its ranks would end in the middle of their save.
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
        holder = read_holder(self.files.fence)
        if holder is not None and holder.job != self.job:
            with contextlib.suppress(ClusterError):
                ask(["scancel", "--signal=KILL", os.environ["SLURM_JOB_ID"]], IMPATIENT)

    def _in_time(self) -> bool:
        """True if Slurm's warning is not needed, since the link's own clock knows the same limit.

        Long before the limit it is no warning of Slurm's: a person asks for a stop.
        """
        left = self.clock.limit_left_seconds()
        earliest = self._longest_lead_seconds + _EARLIEST_WARNING_SECONDS
        return self.clock.source == "squeue" and self.lead_seconds < left < earliest
