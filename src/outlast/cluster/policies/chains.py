"""The plain policies: one long job, and a chain of links of one fixed wall time."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.cluster.policies.decision import Decision, Situation, Submission
from outlast.cluster.policies.words import hours
from outlast.errors import ClusterError


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
