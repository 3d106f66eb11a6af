"""What a policy sees and what it decides: plain values, for the simulator and for a live queue."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outlast.cluster.policies.job import Limits, MalleableJob
from outlast.cluster.simulate.queue import Queue

Role = Literal["main", "filler"]
"""Main: the job that holds the run's place in the queue. Filler: trains meanwhile, in holes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """One of the run's own jobs, waiting or running.

    Attributes:
        number: As in `Queue.running_jobs` and `Queue.pending_jobs`.
        role: Its part in the policy.
        nodes: That it asked for.
        limit_seconds: That it may run.
        started_seconds: On the queue's clock; None while it waits.
        ending: It has been told to save and end.
    """

    number: int
    role: Role
    nodes: int
    limit_seconds: float
    started_seconds: float | None = None
    ending: bool = False

    @property
    def running(self) -> bool:
        """Whether it has its nodes."""
        return self.started_seconds is not None

    def left_seconds(self, now_seconds: float) -> float:
        """Of its limit, at a moment."""
        begun = now_seconds if self.started_seconds is None else self.started_seconds
        return begun + self.limit_seconds - now_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a policy decides from.

    Attributes:
        queue: Everybody's jobs, the own ones among them.
        job: What is left of the run now; the progress of a running link is taken off.
        limits: Of the site and the user.
        own: The run's jobs that wait or run.
        used_node_seconds: Of the run so far.
        quiet_seconds: Since the run's last filler ended.
    """

    queue: Queue
    job: MalleableJob
    limits: Limits = field(default_factory=Limits)
    own: tuple[OwnJob, ...] = ()
    used_node_seconds: float = 0.0
    quiet_seconds: float = math.inf

    @property
    def main(self) -> OwnJob | None:
        """The job that holds the run's place, waiting or running."""
        return next((job for job in self.own if job.role == "main"), None)

    @property
    def filler(self) -> OwnJob | None:
        """The job that trains meanwhile."""
        return next((job for job in self.own if job.role == "filler"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be submitted.

    Attributes:
        nodes: To ask for.
        wall_seconds: To ask for; infinite where the site sets no limit and none is wanted.
        role: Its part in the policy.
        expected_start_seconds: Predicted, on the queue's clock; None where nothing was simulated.
    """

    nodes: int
    wall_seconds: float
    role: Role = "main"
    expected_start_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, in this order: end, cancel, shorten, submit.

    Attributes:
        reason: One sentence for the user.
        hand_over: Running links that save and end now, so that another goes on.
        cancel: Waiting or running jobs that are not needed any more.
        shorten: Jobs and their new, lower limits in seconds.
        submit: New jobs.
    """

    reason: str
    hand_over: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    shorten: tuple[tuple[int, float], ...] = ()
    submit: tuple[Submission, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.hand_over or self.cancel or self.shorten or self.submit)


class Policy(Protocol):
    """Decides what to submit, from what is seen; keeps nothing between two decisions.

    Attributes:
        name: For tables.
        watches: Whether it is asked again whenever the queue changes, or only when the run has no
            job left.
    """

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def watches(self) -> bool:
        """Whether it is asked again whenever the queue changes."""

    def decide(self, situation: Situation) -> Decision:
        """What to do now."""
