"""Save and stop in time: the question that a training loop asks once a step.

Inside a link of a chain the answer comes from the file that the link keeps beside the checkpoints.
In any other Slurm job it comes from that job's own time limit. Outside of Slurm it is always no.

    from outlast.cluster import should_stop

    for step in range(first, steps):
        train(step)
        if should_stop():        # on rank 0, handed to the others; see docs/cluster.md
            save(step + 1)
            sys.exit(3)          # to be continued
    report_outcome("completed")  # where it reports its progress

A link's own process asks Slurm how much is left of the limit (``squeue -o %L``). Between two
answers, and where there is none, the machine's monotonic clock counts, which nobody can set; Slurm
is asked again now and then, since an administrator may change the limit of a running job. The
signal before the limit is only the back-up: it comes up to a minute early, and 22.05 sends it for
the batch process or for the steps, not for both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.chain.files import ChainFiles, write_progress
from outlast.cluster.slurm.commands import SlurmMissingError, SlurmUnreachableError
from outlast.errors import ClusterError
from outlast.records.directory import replace_file
from outlast.records.lease import is_of_another_job, leave_without_lease
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


ASK_AGAIN_SECONDS = 30.0
_ASK_SOONEST_SECONDS = 4.0


class LinkClock:
    """Counts down to the end of a link.

    Args:
        ask: What is left by the limit now, in seconds; infinity without a limit, None where it is
            not known. May raise ClusterError.
        known_seconds: What is left where Slurm cannot be asked: the limit less what has passed
            since the job started; None where that is not known either.
        longest_seconds: A link's own end (``slurm.link_seconds``) from now; infinity without one.
        monotonic: Seconds of a clock that nobody sets.
    """

    def __init__(
        self,
        ask: Callable[[], float | None],
        *,
        known_seconds: float | None = None,
        longest_seconds: float = math.inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._monotonic = monotonic
        self._begun = monotonic()
        self._own_end = self._begun + longest_seconds
        self._limit_end = self._begun + known_seconds if known_seconds is not None else math.inf
        self._asked = -math.inf
        self.source = "job's own time limit" if known_seconds is not None else "none"

    @property
    def end(self) -> float:
        """End of the link, on the monotonic clock."""
        return min(self._own_end, self._limit_end)

    def left_seconds(self) -> float:
        """Until the link ends; infinity where it never does."""
        return self.end - self._monotonic()

    def limit_left_seconds(self) -> float:
        """Until Slurm ends the job; infinity where that is not known."""
        return self._limit_end - self._monotonic()

    def refresh(self, *, at_once: bool = False) -> bool:
        """Ask Slurm again if it is time, or `at_once`; whether the end has moved by over 1 s."""
        now = self._monotonic()
        left = self.left_seconds()
        # The nearer the end, the more a changed limit matters.
        pause = min(ASK_AGAIN_SECONDS, max(left / 10.0, _ASK_SOONEST_SECONDS))
        if now - self._asked < pause and not at_once:
            return False
        self._asked = now
        try:
            answer = self._ask()
        except ClusterError:
            return False
        if answer is None:
            return False
        before, self._limit_end = self._limit_end, self._monotonic() + answer
        self.source = "squeue"
        if math.isinf(before) and math.isinf(self._limit_end):
            return False
        return not abs(before - self._limit_end) <= 1.0


def known_left_seconds(
    environment: Mapping[str, str], limit_seconds: float | None, began: float | None
) -> float | None:
    """Seconds left of a job's limit without asking Slurm; None where they cannot be known.

    Args:
        environment: Of the job; SLURM_JOB_END_TIME is there from 23.02 on.
        limit_seconds: That it asked for.
        began: When its script began, seconds since the epoch.
    """
    now = time.time()
    with contextlib.suppress(KeyError, ValueError):
        return max(float(environment["SLURM_JOB_END_TIME"]) - now, 0.0)
    if limit_seconds is None:
        return None
    with contextlib.suppress(KeyError, ValueError):
        return max(float(environment["SLURM_JOB_START_TIME"]) + limit_seconds - now, 0.0)
    passed = 0.0 if began is None else min(max(now - began, 0.0), limit_seconds)
    return limit_seconds - passed


def asking(job: str, ask: Callable[[str], float | None]) -> Callable[[], float | None]:
    """`ask` about `job`, whose failures of passing kind mean "not known now"."""

    def answer() -> float | None:
        try:
            return ask(job)
        except (SlurmMissingError, SlurmUnreachableError):
            return None

    return answer


@dataclass(frozen=True)
class Countdown:
    """Message of a link's supervising process to its ranks: the file clock.json.

    Times of the monotonic clock hold in the boot of the machine that wrote them, also inside its
    containers; the others elsewhere. None stands for "never".

    Attributes:
        job: Slurm's number of the link's job.
        stop_at: When the last save is to begin, less nothing: a rank stops at the last step
            boundary before it. Monotonic seconds.
        stop_at_time: The same, seconds since the epoch.
        end: When the link ends. Monotonic seconds.
        end_time: The same, seconds since the epoch.
        lead_seconds: Between the two.
        stop: Why the link is to stop now, or an empty text.
    """

    job: str
    boot: str
    stop_at: float | None
    stop_at_time: float | None
    end: float | None
    end_time: float | None
    lead_seconds: float
    stop: str = ""

    def seconds_to_stop(self, boot: str, *, trusts_clocks: bool = True) -> float:
        """Until the last save is to begin, seen from a process of a machine in this boot.

        Args:
            boot: See `outlast.records.process.boot_identity`.
            trusts_clocks: Whether wall clocks of two machines are compared where the boot differs;
                if not, that is left to the ranks that need not.
        """
        if self.stop:
            return -math.inf
        if self.stop_at is None or self.stop_at_time is None:
            return math.inf
        if boot and boot == self.boot:
            return self.stop_at - time.monotonic()
        if not trusts_clocks:
            return math.inf
        return self.stop_at_time - time.time()


def countdown(job: str, clock: LinkClock, lead_seconds: float, stop: str = "") -> Countdown:
    """The present state of `clock`."""
    left = clock.left_seconds()
    ends = not math.isinf(left)
    now, moment = time.monotonic(), time.time()
    return Countdown(
        job=job,
        boot=boot_identity(),
        stop_at=now + left - lead_seconds if ends else None,
        stop_at_time=moment + left - lead_seconds if ends else None,
        end=now + left if ends else None,
        end_time=moment + left if ends else None,
        lead_seconds=lead_seconds,
        stop=stop,
    )


def write_countdown(path: Path, state: Countdown) -> bool:
    """Publish `state`; False where the disk is full or does not answer: the one before is there."""
    try:
        replace_file(path, json.dumps(asdict(state)).encode())
    except OSError:
        return False
    return True


def read_countdown(path: Path) -> Countdown | None:
    """Countdown that was published; None where there is nothing, or it is damaged."""
    try:
        return Countdown(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


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
            found = read_countdown(ChainFiles(Path(self.chain)).clock)
            if found is not None and found.job == self.job:
                self._read = found
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

    def _one_step(self) -> float:
        """Expected duration of one more step: that of the slowest of the last ones."""
        return max(self._steps, default=0.0)


def stop_when_of(environment: Mapping[str, str] | None = None) -> StopWhen | None:
    """Stop condition for a process of a link; None outside of a chain."""
    known = os.environ if environment is None else environment
    chain, job = _chain_of(known), known.get(JOB)
    leave_without_lease()
    return StopWhen(str(chain.path), job) if chain and job else None


def _chain_of(environment: Mapping[str, str]) -> ChainFiles | None:
    """The chain of whose link a process is; a job that one of them submits is no link."""
    chain = environment.get(CHAIN)
    return ChainFiles(Path(chain)) if chain and not is_of_another_job(environment) else None


def should_stop(lead_seconds: float | None = None) -> bool:
    """Return True when this process should save and end now; call it once a step, between steps.

    It costs about a microsecond, and reads a small file twice a second. In a run of several
    processes ask on one and tell the others (a broadcast or the maximum over all), since they must
    stop at the same step.

    Args:
        lead_seconds: In a Slurm job that is no link of a chain: how long before the limit the save
            has to begin; default: two minutes. A link knows better by itself.
    """
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
    return bool(_known[0]())


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
        from outlast.cluster.slurm.jobs import left_seconds_now

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
