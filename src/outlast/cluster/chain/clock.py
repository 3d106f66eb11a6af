"""How long a link has left, by its own clock.

Slurm is asked for what is left of the limit (``squeue -o %L``); between two answers, and where
there is none, the machine's monotonic clock counts on, which nobody can set. Slurm is asked again
now and then, since an administrator may change the limit of a running job. The signal before the
limit is only the back-up: it comes up to a minute early, and 22.05 sends it for the batch process
or for the steps, not for both.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outlast.cluster.slurm.commands import SlurmMissingError, SlurmUnreachableError
from outlast.errors import ClusterError
from outlast.records.directory import replace_file
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

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
        """When the link ends, on the monotonic clock."""
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
    """What is left of a job's limit without asking Slurm; None where it cannot be known.

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
    """What the supervising process of a link tells its ranks, as the file clock.json.

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
    """What was published; None where there is nothing, or it is damaged."""
    try:
        return Countdown(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
