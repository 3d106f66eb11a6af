"""Input and output of a policy: plain values, for the simulator and for a live queue.

A malleable job runs on several node counts, in links. Work is counted in reference seconds: what
the job needs on its reference number of nodes without any restart. On `p` nodes it goes `speed(p)`
times as fast. The plain policies stand here, too: one long job, and links of one fixed wall time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

from outlast.cluster.simulate import Queue
from outlast.errors import ClusterError

SpeedCurve: TypeAlias = Callable[[int], float]
"""Nodes to speed, relative to that on the reference number of nodes."""
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class PowerSpeed:
    """Speed `(p / N0) ** exponent`.

    Attributes:
        reference_nodes: N0.
        exponent: 1 scales perfectly; 0.9 means that four times the nodes go 3.48 times as fast.
    """

    reference_nodes: int
    exponent: float = 0.9

    def __call__(self, nodes: int) -> float:
        """Speed on `nodes`, relative to the reference."""
        return float((nodes / self.reference_nodes) ** self.exponent)


@dataclass(frozen=True, slots=True)
class TableSpeed:
    """Measured or predicted speeds; between two sizes the logarithms are interpolated.

    Attributes:
        points: (nodes, speed), ascending in nodes.
        beyond: Beyond the ends the speed grows with nodes to this power; 0: it stays what it is
            there, so that nothing is hoped for that was not measured.
    """

    points: tuple[tuple[int, float], ...]
    beyond: float = 0.0

    def __post_init__(self) -> None:
        nodes = [item for item, _ in self.points]
        if not nodes or nodes != sorted(set(nodes)) or min(speed for _, speed in self.points) <= 0:
            raise ClusterError(
                f"speeds = {self.points}: give positive speeds of ascending node counts"
            )

    def __call__(self, nodes: int) -> float:
        """Speed on `nodes`, relative to the reference."""
        below = [point for point in self.points if point[0] <= nodes]
        above = [point for point in self.points if point[0] >= nodes]
        if not below or not above:
            end, speed = below[-1] if below else above[0]
            return float(speed * (nodes / end) ** self.beyond)
        (low, slow), (high, fast) = below[-1], above[0]
        if low == high:
            return slow
        share = math.log(nodes / low) / math.log(high / low)
        return float(slow * (fast / slow) ** share)


@dataclass(frozen=True, slots=True, kw_only=True)
class MalleableJob:
    """Remainder of a long job, and its behaviour in links.

    Attributes:
        work_seconds: Remaining work in reference seconds.
        sizes: Node counts that it can run on; the reference is among them.
        reference_nodes: What one long job would take.
        speed: Of node counts.
        restart_seconds: From a link's start to its first step.
        reshard_seconds: More of it where the link before had other nodes.
        save_seconds: The last checkpoint of a link.
        lead_seconds: By how much it begins earlier than it must, for safety.
        nodes_before: Of the last link; None before the first.
        margin: By how much the wall time asked for exceeds what is expected, as a share.
    """

    work_seconds: float
    reference_nodes: int
    sizes: tuple[int, ...]
    speed: SpeedCurve
    restart_seconds: float = 300.0
    reshard_seconds: float = 0.0
    save_seconds: float = 60.0
    lead_seconds: float = 0.0
    nodes_before: int | None = None
    margin: float = 0.1

    def __post_init__(self) -> None:
        costs = ("restart_seconds", "reshard_seconds", "save_seconds", "lead_seconds", "margin")
        for name in ("work_seconds", *costs):
            value = getattr(self, name)
            if not value >= 0.0 or math.isinf(value):
                raise ClusterError(f"{name} = {value}: give a finite number of at least 0")
        if self.reference_nodes not in self.sizes or min(self.sizes) < 1:
            raise ClusterError(
                f"sizes = {self.sizes}: give node counts of at least 1, with the reference of "
                f"{self.reference_nodes} among them"
            )

    def restart(self, nodes: int) -> float:
        """Seconds from the start of a link on `nodes` to its first step."""
        moved = self.nodes_before is not None and self.nodes_before != nodes
        return self.restart_seconds + (self.reshard_seconds if moved else 0.0)

    def overhead(self, nodes: int) -> float:
        """Seconds of a link on `nodes` without progress, where it ends at its limit."""
        return self.restart(nodes) + self.save_seconds + self.lead_seconds

    def run_seconds(self, nodes: int) -> float:
        """Seconds that one link on `nodes` takes to do all that is left."""
        return self.restart(nodes) + self.work_seconds / self.speed(nodes) + self.save_seconds

    def wall_to_finish(self, nodes: int) -> float:
        """The wall time to ask for to do all that is left in one link, in whole minutes."""
        wanted = self.run_seconds(nodes) * (1.0 + self.margin) + self.lead_seconds
        return max(math.ceil(wanted / MINUTE - 1e-9), 1) * MINUTE

    def progress(self, nodes: int, wall_seconds: float) -> float:
        """Reference seconds that a link gets done within its limit: `s(p)(W - r - c - lead)`."""
        useful = max(wall_seconds - self.overhead(nodes), 0.0)
        return min(self.speed(nodes) * useful, self.work_seconds)

    def link_seconds(self, nodes: int, wall_seconds: float) -> float:
        """Seconds that a link holds its nodes: its limit, or less where it finishes the job."""
        return min(wall_seconds, self.run_seconds(nodes))

    def after(self, progress_seconds: float, nodes: int) -> MalleableJob:
        """The remaining job after a link on `nodes` got that much done."""
        left = max(self.work_seconds - progress_seconds, 0.0)
        return replace(self, work_seconds=left, nodes_before=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits set by a site and a user.

    Attributes:
        max_wall_seconds: The longest wall time (Slurm's MaxTime); infinite for UNLIMITED.
        min_wall_seconds: Below this a link is not worth the queue's trouble, unless it finishes.
        max_nodes: Of one job.
        max_jobs: Of this user at a time (MaxSubmitJobs).
        max_node_seconds: Of all links together.
    """

    max_wall_seconds: float = math.inf
    min_wall_seconds: float = 3600.0
    max_nodes: int = 2**31
    max_jobs: int = 2**31
    max_node_seconds: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_wall_seconds >= MINUTE:
            raise ClusterError(f"max_wall_seconds = {self.max_wall_seconds:g}: give at least 60 s")
        if self.max_nodes < 1 or self.max_jobs < 1:
            raise ClusterError(
                f"max_nodes = {self.max_nodes}, max_jobs = {self.max_jobs}: give at least 1 each"
            )

    def sizes(self, job: MalleableJob) -> tuple[int, ...]:
        """The node counts of `job` that are allowed, largest first.

        Raises:
            ClusterError: None is.
        """
        found = tuple(sorted({size for size in job.sizes if size <= self.max_nodes}, reverse=True))
        if not found:
            raise ClusterError(
                f"sizes = {job.sizes}: the partition gives at most {self.max_nodes} nodes to a job"
            )
        return found

    def wall_to_finish(self, job: MalleableJob, nodes: int) -> float:
        """The wall time to ask for to finish `job` on `nodes`, or the longest that is allowed."""
        return min(job.wall_to_finish(nodes), self.longest)

    @property
    def longest(self) -> float:
        """The longest wall time, in whole minutes."""
        longest = self.max_wall_seconds
        return longest if math.isinf(longest) else math.floor(longest / MINUTE) * MINUTE


Role = Literal["main", "filler"]
"""Main: the job that holds the run's place in the queue. Filler: trains meanwhile, in backfill
windows."""


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
        """True while it holds its nodes."""
        return self.started_seconds is not None

    def left_seconds(self, now_seconds: float) -> float:
        """Of its limit, at a moment."""
        begun = now_seconds if self.started_seconds is None else self.started_seconds
        return begun + self.limit_seconds - now_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Input of a policy's decision.

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
    """

    nodes: int
    wall_seconds: float
    role: Role = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions, in this order: end, cancel, shorten, submit.

    Attributes:
        reason: One sentence for the user.
        hand_over: Running links that save and end now, so that another continues.
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
        """True if there is anything to do."""
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
        """True for a policy that is asked again whenever the queue changes."""

    def decide(self, situation: Situation) -> Decision:
        """Decide the next actions."""


def hours(seconds: float) -> str:
    """``20 min``, ``7.5 h``, ``3.2 d``; ``no limit`` for infinity."""
    if math.isinf(seconds):
        return "no limit"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    if seconds < 48.5 * 3600.0:
        return f"{seconds / 3600.0:.3g} h"
    return f"{seconds / 86400.0:.3g} d"


@dataclass(frozen=True, slots=True)
class OneLongJob:
    """Ask for the reference nodes and all the time that is left, or the longest that is allowed."""

    name: str = "one long job"
    watches: bool = False

    def decide(self, situation: Situation) -> Decision:
        """Submit the next job when there is none."""
        if situation.own:
            return Decision(reason="the job is in the queue")
        job, limits = situation.job, situation.limits
        wall = limits.wall_to_finish(job, job.reference_nodes)
        whole = wall >= job.wall_to_finish(job.reference_nodes)
        reason = (
            "one job does all that is left"
            if whole
            else f"the site allows {hours(wall)} at a time: links of that length follow each other"
        )
        return _submit(situation, job.reference_nodes, wall, reason)


@dataclass(frozen=True, slots=True)
class FixedLinks:
    """Ask for the reference nodes and one wall time, again and again.

    Attributes:
        wall_seconds: Of a link; the last asks for what it needs.
    """

    wall_seconds: float
    watches: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"links of {hours(self.wall_seconds)}"

    def decide(self, situation: Situation) -> Decision:
        """Submit the next link when there is none."""
        if situation.own:
            return Decision(reason="a link is in the queue")
        job = situation.job
        wall = min(self.wall_seconds, situation.limits.wall_to_finish(job, job.reference_nodes))
        return _submit(
            situation, job.reference_nodes, wall, f"links of {hours(wall)} were asked for"
        )


def _submit(situation: Situation, nodes: int, wall_seconds: float, reason: str) -> Decision:
    """One job, refused where it could never get anything done."""
    job, limits = situation.job, situation.limits
    if nodes > limits.max_nodes:
        raise ClusterError(
            f"reference_nodes = {nodes}: the partition gives at most {limits.max_nodes} to a job"
        )
    if job.work_seconds > 0.0 and not job.progress(nodes, wall_seconds) > 0.0:
        raise ClusterError(
            f"wall time {hours(wall_seconds)}: restart, last save and lead alone take "
            f"{job.overhead(nodes):g} s; ask for more"
        )
    return Decision(reason=reason, submit=(Submission(nodes=nodes, wall_seconds=wall_seconds),))
