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

The checkpoint margin, or lead, is the time before the limit at which a link begins its last save. A
link of remaining time ``W`` that begins its last save ``x`` before the end keeps ``W - x`` seconds
of work with probability ``F(x)``, the share of saves that take at most ``x``. The best lead
maximises ``(W - x) F(x)``, that is ``F(x) / f(x) = W - x`` (Barbut, Benoit, Herault, Robert and
Vivien, "When to checkpoint at the end of a fixed-length reservation?", FTXS 2023).

``F`` is not known but seen: the logarithms of save times are taken as normal with unknown mean and
spread, and ``F`` is what they predict of one more save, a Student distribution. With few saves it
is wide; what is believed of the spread before any was seen (`PRIOR_SPREAD`, as if from
`PRIOR_SAVES` saves) keeps it from being absurdly so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.chain_files import ChainFiles, run_log, write_progress
from outlast.errors import ClusterError
from outlast.records.directory import replace_file
from outlast.records.lease import is_of_another_job, leave_without_lease
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.cluster.chain_files import ChainPlan

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
        return before != self._limit_end and not abs(before - self._limit_end) <= 1.0


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
    left, boot = clock.left_seconds(), boot_identity()
    if math.isinf(left):
        return Countdown(job, boot, None, None, None, None, lead_seconds, stop)
    end, end_time = time.monotonic() + left, time.time() + left
    stop_at, stop_at_time = end - lead_seconds, end_time - lead_seconds
    return Countdown(job, boot, stop_at, stop_at_time, end, end_time, lead_seconds, stop)


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
        """Why to stop now, in a few words; an empty text to continue."""
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
        return "the link's end" if left < self.one_step_seconds else ""

    @property
    def one_step_seconds(self) -> float:
        """Expected duration of one more step: that of the slowest of the last ones."""
        return max(self._steps, default=0.0)


def stop_when_of() -> StopWhen | None:
    """Stop condition for a process of a link; None outside of a chain."""
    chain, job = _chain(), os.environ.get(JOB)
    leave_without_lease()
    return StopWhen(str(chain.path), job) if chain and job else None


def _chain() -> ChainFiles | None:
    """The chain of whose link this process is; a job that one of them submits is no link."""
    chain = os.environ.get(CHAIN)
    return ChainFiles(Path(chain)) if chain and not is_of_another_job(os.environ) else None


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
        lead = DEFAULT_LEAD_SECONDS if lead_seconds is None else lead_seconds
        _known.append(link or (_JobLimit(job, lead) if job else lambda: ""))
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
    if chain := _chain():
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
    if chain := _chain():
        # What is not told is not believed: the chain continues.
        with contextlib.suppress(OSError):
            write_progress(chain, steps=steps, outcome=outcome)


class _JobLimit:
    """The time limit of a Slurm job that is no link; Slurm is asked by a thread of its own."""

    def __init__(self, job: str, lead_seconds: float) -> None:
        # Imported when needed, since a link's ranks need no Slurm commands.
        from outlast.cluster.slurm import left_seconds_now

        self._lead_seconds = lead_seconds
        self._steps = StopWhen("", job)
        known = known_left_seconds(os.environ, None, None)
        self._clock = LinkClock(partial(left_seconds_now, job), known_seconds=known)
        threading.Thread(target=self._keep, name="outlast-job-limit", daemon=True).start()

    def __call__(self) -> str:
        self._steps()
        lead = self._lead_seconds + self._steps.one_step_seconds
        return "the job's time limit" if self._clock.left_seconds() < lead else ""

    def _keep(self) -> None:
        while True:
            self._clock.refresh()
            time.sleep(5.0)


_known: list[Callable[[], str]] = []


PRIOR_SPREAD = 0.15
"""Standard deviation of the logarithm of save times, before any was seen."""
PRIOR_SAVES = 4
"""As how many saves that belief counts.

Simulated: more saves of a wider spread keep leads long where saves hardly scatter (6 of 0.25: 1.5
times the best idle tail); fewer make the prediction's tails heavy (2 of 0.1: 1.6 times after 3 to 9
saves; so does a log-uniform belief: 1.8).
"""
MISSED_AT_MOST = 0.005
"""A lead that more saves than this share outlast is never chosen, however short the link."""
NEWEST_SAVES = 200
"""Older saves than so many say little of today's file system."""
_STEPS = 60
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class SaveTimes:
    """Distribution of save times: log-Student.

    Attributes:
        centre: Mean of the logarithms of seconds.
        spread: Scale of the logarithm of the next save.
        freedom: Degrees of freedom.
    """

    centre: float
    spread: float
    freedom: int

    def share_within(self, seconds: float) -> float:
        """Probability that the next save takes at most `seconds`."""
        if seconds <= 0.0:
            return 0.0
        return _student((math.log(seconds) - self.centre) / self.spread, self.freedom)

    def quantile_seconds(self, share: float) -> float:
        """Seconds within which this share of saves ends, for shares up to 1 - 1e-7."""
        low, high = -1e3, 1e3
        # Until the middle is one of them.
        while low < (middle := 0.5 * (low + high)) < high:
            if _student(middle, self.freedom) < share:
                low = middle
            else:
                high = middle
        return math.exp(self.centre + self.spread * high)


def _student(value: float, freedom: int) -> float:
    """Student's distribution function of two or more whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, equations 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    within = 2.0 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 * (1.0 + within)


def save_times(seconds: Sequence[float]) -> SaveTimes:
    """Fit the distribution of the next save time to `seconds` of earlier saves.

    Args:
        seconds: Of each save from its request to its publication, oldest first; at least one.

    Raises:
        ClusterError: No save, or one that took no time or less.
    """
    if not seconds or not all(0.0 < second < math.inf for second in seconds):
        raise ClusterError("save times must be above 0 s, and one at least must have been measured")
    logarithms = [math.log(second) for second in seconds[-NEWEST_SAVES:]]
    count = len(logarithms)
    centre = math.fsum(logarithms) / count
    squares = math.fsum((logarithm - centre) ** 2 for logarithm in logarithms)
    # One degree of freedom is spent on the centre, which the prior says nothing about.
    freedom = PRIOR_SAVES + count - 1
    variance = (PRIOR_SAVES * PRIOR_SPREAD**2 + squares) / freedom
    return SaveTimes(centre, math.sqrt(variance * (1.0 + 1.0 / count)), freedom)


def best_lead_seconds(times: SaveTimes, at_risk_seconds: float) -> float:
    """Seconds before the end at which the last save should begin.

    Args:
        times: What a save takes.
        at_risk_seconds: Work that is lost if the save is not done in time: the length of the link,
            or what has passed since its last checkpoint.

    Returns:
        The lead ``x`` that maximises ``(at_risk_seconds - x) F(x)``, but no less than what all but
        `MISSED_AT_MOST` of saves take; at most half of `at_risk_seconds`.
    """
    least = times.quantile_seconds(1.0 - MISSED_AT_MOST)
    longest = times.quantile_seconds(1.0 - 1e-7)
    if math.isinf(at_risk_seconds):
        return longest

    def worth(lead: float) -> float:
        return (at_risk_seconds - lead) * times.share_within(lead)

    low = times.quantile_seconds(0.5)
    high = max(min(longest, at_risk_seconds), times.quantile_seconds(0.6))
    # It has one peak: golden sections of the logarithm.
    left, right = math.log(low), math.log(high)
    for _ in range(_STEPS):
        first, second = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        if worth(math.exp(first)) < worth(math.exp(second)):
            left = first
        else:
            right = second
    best = math.exp(0.5 * (left + right))
    return min(max(best, least), 0.5 * at_risk_seconds)


END_SECONDS = 5.0
"""From the end of the save to that of the processes, and what Slurm's clock may be off."""
ASSUMED_SAVE_SECONDS = 30.0
"""Of a save, before one was measured."""
MOST_AT_RISK_SECONDS = 7 * 86400.0
"""Of a link whose length is not known, or longer than that: it saves on the way."""


def lead_seconds_of(
    plan: ChainPlan, save_seconds: Sequence[float], *, at_risk_seconds: float, hard_end: bool
) -> float:
    """Seconds before its end at which a link begins its last save.

    Args:
        plan: Of the chain; ``slurm.lead_seconds`` is taken as it is.
        save_seconds: Of the saves so far.
        at_risk_seconds: Length of the link; 0 or infinity: not known.
        hard_end: Whether Slurm ends the job there, and not the link itself.
    """
    if plan.lead_seconds:
        return plan.lead_seconds
    seen = list(save_seconds) or [plan.save_seconds]
    at_risk = min(at_risk_seconds if at_risk_seconds > 0.0 else math.inf, MOST_AT_RISK_SECONDS)
    lead = best_lead_seconds(save_times(seen), at_risk)
    return lead + (END_SECONDS if hard_end else 0.0)


def first_lead_seconds(files: ChainFiles, plan: ChainPlan) -> float:
    """Seconds before its limit at which Slurm warns a link submitted now."""
    usable = plan.usable_seconds() or 0.0
    saves = run_log(files).save_seconds
    return lead_seconds_of(plan, saves, at_risk_seconds=usable, hard_end=True)
