"""Whether a training loop should save and end now: one question a step.

Inside a link of a chain the answer comes from the file that the link keeps beside the checkpoints.
In any other Slurm job it comes from that job's own time limit. Outside of Slurm it is always no.

    from outlast.cluster import should_stop

    for step in range(first, steps):
        train(step)
        if should_stop():        # on rank 0, handed to the others; see docs/cluster.md
            save(step + 1)
            sys.exit(3)          # to be continued
    report_outcome("completed")  # where it reports its progress
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.chain.clock import LinkClock, asking, known_left_seconds, read_countdown
from outlast.cluster.chain.plan import ChainFiles
from outlast.cluster.chain.progress import write_progress
from outlast.errors import ClusterError
from outlast.records.lock import is_of_another_job, leave_without_lease
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.cluster.chain.clock import Countdown

CHAIN = "OUTLAST_CHAIN"
"""Environment variable of a link's processes: the folder of the chain."""
JOB = "OUTLAST_LINK_JOB"
"""And the number of the link's job."""

RECORD_TELLS = "OUTLAST_LINK_RECORD"
"""Set where ranks that stop to be continued end with 0, since srun ends the others after any other
code: the link takes it from the run's record."""

OUTCOMES = ("completed", "to_be_continued", "failed", "running")
"""How a program stands, as it reports it."""

DEFAULT_LEAD_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_REMEMBERED_STEPS = 20


@dataclass
class StopWhen:
    """Answers once a step whether to stop, and why.

    A rank that is asked between steps stops at the last boundary from which one more step would
    end too late for the save; how long steps take it sees from when it is asked.

    Args:
        chain: Folder of the chain.
        job: Number of the link's job; the file of another link is not believed.
    """

    chain: str
    job: str
    _read: Countdown | None = None
    _looked: float = -math.inf
    _asked: float | None = None
    _steps: list[float] = field(default_factory=list)
    _boot: str | None = None

    def __call__(self) -> str:
        """Why to stop now, in a few words; an empty text to go on."""
        now = time.monotonic()
        if self._asked is not None:
            self._steps = [*self._steps, now - self._asked][-_REMEMBERED_STEPS:]
        self._asked = now
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look()
        if self._read is None:
            return ""
        if self._read.stop:
            return self._read.stop
        if self._boot is None:
            self._boot = boot_identity()
        # The link's own process runs on the first node; ranks there need no second clock.
        first = os.environ.get("SLURM_NODEID", "0") == "0"
        left = self._read.seconds_to_stop(self._boot, trusts_clocks=first)
        if left < self._one_step():
            return "the link's end"
        return ""

    def _look(self) -> None:
        found = read_countdown(ChainFiles(Path(self.chain)).clock)
        if found is not None and found.job == self.job:
            self._read = found

    def _one_step(self) -> float:
        """What one more step is expected to take: as long as the slowest of the last ones."""
        return max(self._steps, default=0.0)


def stop_when_of(environment: Mapping[str, str] | None = None) -> StopWhen | None:
    """What tells a process of a link when to stop; None outside of a chain."""
    known = os.environ if environment is None else environment
    chain, job = _chain_of(known), known.get(JOB)
    leave_without_lease()
    return StopWhen(str(chain.path), job) if chain and job else None


def _chain_of(environment: Mapping[str, str]) -> ChainFiles | None:
    """The chain of whose link a process is; a job that one of them submits is no link."""
    chain = environment.get(CHAIN)
    return ChainFiles(Path(chain)) if chain and not is_of_another_job(environment) else None


def should_stop(lead_seconds: float | None = None) -> bool:
    """Whether this process should save and end now; call it once a step, between steps.

    It costs about a microsecond, and reads a small file twice a second. In a run of several
    processes ask on one and tell the others (a broadcast or the maximum over all), since they must
    stop at the same step.

    Args:
        lead_seconds: In a Slurm job that is no link of a chain: how long before the limit the save
            has to begin; default: two minutes. A link knows better by itself.
    """
    return bool(_of_this_process(lead_seconds)())


def report_progress(step: int, *, steps: int = 0, save_seconds: float | None = None) -> None:
    """Tell the chain that everything up to `step` is saved and durable; call it on one process.

    ``outlast train`` need not do so. For other programs it is how the chain knows progress from a
    crash loop, and when the last save has to begin.

    Args:
        step: Steps in the newest complete checkpoint.
        steps: Of the whole run, for the time that is left; 0: not known.
        save_seconds: What the save took until it was complete.
    """
    if chain := _chain_of(os.environ):
        write_progress(chain, step, steps, save_seconds)


def report_outcome(outcome: str, *, steps: int = 0) -> None:
    """Tell the chain how the program stands; call it on one process.

    A program that reports its progress ends with ``report_outcome("completed")``, when the last
    save is durable, also where it ends before its last step: an exit code of 0 is no proof, since
    srun ends with 0 when a node is lost, too. It holds for the link in which it is told.

    Args:
        outcome: ``completed``, ``to_be_continued``, ``failed`` or ``running``.
        steps: Of the whole run; 0: not known.

    Raises:
        ClusterError: It is none of these.
    """
    if outcome not in OUTCOMES:
        raise ClusterError(
            f'report_outcome("{outcome}") is none of {", ".join(OUTCOMES)}: a program that has '
            'done all its steps reports "completed"'
        )
    if chain := _chain_of(os.environ):
        # What is not told is not believed: the chain goes on.
        with contextlib.suppress(OSError):
            write_progress(chain, steps=steps, outcome=outcome)


class _JobLimit:
    """The time limit of a Slurm job that is no link; Slurm is asked by a thread of its own."""

    def __init__(self, job: str, lead_seconds: float) -> None:
        # Imported when needed, since a link's ranks need no Slurm commands.
        from outlast.cluster.slurm.queue import left_seconds_now

        self._lead_seconds = lead_seconds
        self._steps = StopWhen("", job)
        self._clock = LinkClock(
            asking(job, left_seconds_now), known_seconds=known_left_seconds(os.environ, None, None)
        )
        threading.Thread(target=self._keep, name="outlast-job-limit", daemon=True).start()

    def __call__(self) -> str:
        self._steps()
        lead = self._lead_seconds + self._steps._one_step()
        return "the job's time limit" if self._clock.left_seconds() < lead else ""

    def _keep(self) -> None:
        while True:
            self._clock.refresh()
            time.sleep(5.0)


class _Never:
    def __call__(self) -> str:
        return ""


_known: list[StopWhen | _JobLimit | _Never] = []


def _of_this_process(lead_seconds: float | None) -> StopWhen | _JobLimit | _Never:
    if not _known:
        job = os.environ.get("SLURM_JOB_ID")
        link = stop_when_of()
        if link is not None:
            _known.append(link)
        elif job:
            lead = DEFAULT_LEAD_SECONDS if lead_seconds is None else lead_seconds
            _known.append(_JobLimit(job, lead))
        else:
            _known.append(_Never())
    return _known[0]
