"""While the program of a link runs: it is told when to stop, and ended where another link writes.

The ranks read a file at step boundaries; signals are the back-up.
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
from outlast.cluster.chain.clock import countdown, write_countdown
from outlast.cluster.chain.ending import waiting_link_cancelled
from outlast.cluster.chain.fence import read_holder
from outlast.cluster.chain.filling import in_the_way
from outlast.cluster.chain.journal import note_or_print
from outlast.cluster.chain.leading import lead_seconds_of
from outlast.cluster.chain.prefetching import Prefetching
from outlast.cluster.chain.program import program_of
from outlast.cluster.slurm.commands import IMPATIENT, Patience, ask
from outlast.cluster.slurm.history import state_now
from outlast.cluster.slurm.states import has_ended
from outlast.errors import ClusterError, OutlastError

if TYPE_CHECKING:
    from outlast.cluster.chain.clock import LinkClock
    from outlast.cluster.chain.fence import Fence
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan
    from outlast.cluster.chain.progress import RunLog

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
    _in_the_way: str = ""

    def measure_lead(self) -> float:
        """When the last save begins, in seconds before the end, from the saves so far."""
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
        """What beside the clock and signals asks the link to end."""
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
        return self._in_the_way

    def _look_at_queue(self) -> None:
        left = self.plan.limit_seconds or 0.0
        with contextlib.suppress(OutlastError):
            self._in_the_way = waiting_link_cancelled(self.files, self.number) or in_the_way(
                self.files, self.job, self.plan, left, self.began
            )

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
        """Whether Slurm's warning is not needed, since the link's own clock knows the same limit.

        Long before the limit it is no warning of Slurm's: a person asks for a stop.
        """
        left = self.clock.limit_left_seconds()
        earliest = self._longest_lead_seconds + _EARLIEST_WARNING_SECONDS
        return self.clock.source == "squeue" and self.lead_seconds < left < earliest
