"""A run's links on the simulator: what each of them trains, and when it ends.

A link begins with a restart, trains until it is told to end, has done all, or must save to meet its
limit, and ends with a save. A main job that starts while a filler still trains waits for that one's
save before it restarts, on its own nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.cluster.policies.decision import OwnJob, Role
from outlast.cluster.policies.job import MalleableJob

_SPARE_SECONDS = 1.0
"""A link that ends at its limit ends a second before it, so that rounding never kills a save."""


@dataclass(slots=True)
class Link:
    """One job of the run.

    Attributes:
        number: Of the simulation.
        role: Its part in the policy.
        nodes: That it asked for.
        limit_seconds: That it may run.
        job: What was left when it began to restart.
        pace: Real seconds of training per expected second; 1 where the expectation is right.
        started_seconds: When it got its nodes; infinite before.
        ready_seconds: When it could begin to restart.
        told_seconds: When it was told to save and end; infinite if not.
        ended_seconds: When it gave up its nodes.
        progress_seconds: Reference seconds that it got done, once it has ended.
    """

    number: int
    role: Role
    nodes: int
    limit_seconds: float
    job: MalleableJob
    pace: float = 1.0
    started_seconds: float = math.inf
    ready_seconds: float = math.inf
    told_seconds: float = math.inf
    ended_seconds: float = math.inf
    progress_seconds: float = 0.0

    @property
    def running(self) -> bool:
        """Whether it holds its nodes."""
        return self.started_seconds < math.inf and self.ended_seconds == math.inf

    @property
    def first_step_seconds(self) -> float:
        """When it begins to train."""
        return self.ready_seconds + self.job.restart(self.nodes)

    @property
    def rate(self) -> float:
        """Reference seconds per second of training."""
        return self.job.speed(self.nodes) / self.pace

    def training_until(self) -> float:
        """When it stops training: done, told, or at the latest for its limit."""
        must = self.started_seconds + self.limit_seconds - self.job.save_seconds - _SPARE_SECONDS
        done = self.first_step_seconds + self.job.work_seconds / self.rate
        until = min(done, self.told_seconds, must - self.job.lead_seconds)
        return max(until, self.first_step_seconds)

    def trained(self, now_seconds: float) -> float:
        """Reference seconds done by a moment."""
        until = min(now_seconds, self.training_until())
        done = max(until - self.first_step_seconds, 0.0) * self.rate
        # The last step of all work must not be lost to rounding.
        return self.job.work_seconds if done > self.job.work_seconds - 1e-6 else done

    def kept(self, now_seconds: float, period_seconds: float) -> float:
        """Reference seconds in the last checkpoint before a moment, where no last save was made."""
        done = self.trained(now_seconds)
        return done // (period_seconds * self.rate) * period_seconds * self.rate

    def run_seconds(self) -> float:
        """From its start to the end of its save; it saves nothing where it trained nothing."""
        if self.told_seconds <= self.first_step_seconds:
            return max(self.told_seconds - self.started_seconds, 0.0)
        return self.training_until() + self.job.save_seconds - self.started_seconds

    def seen(self) -> OwnJob:
        """As a policy sees it."""
        return OwnJob(
            number=self.number,
            role=self.role,
            nodes=self.nodes,
            limit_seconds=self.limit_seconds,
            started_seconds=self.started_seconds if self.running else None,
            ending=self.told_seconds < math.inf,
        )
