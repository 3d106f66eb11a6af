"""A policy's run on the simulator: carries decisions out and keeps the books."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outlast.cluster.policies.decision import Decision, Policy, Role, Situation
from outlast.cluster.policies.job import Limits, MalleableJob
from outlast.cluster.policies.links import Link
from outlast.cluster.simulate.book import Reason
from outlast.cluster.simulate.engine import Simulation

_DONE = 1e-6


@dataclass(slots=True)
class Run:
    """One long run under a policy: a driver of the simulation.

    Attributes:
        policy: What decides.
        job: What is left, running links apart.
        limits: Of the site and the user.
        pace: Real seconds of training per expected second.
        period_seconds: Training between two checkpoints: what a link loses at most that is lost
            with its node or to a preemption.
        links: All jobs of the run so far, in order of submission.
        submitted_seconds: When the run began.
        finished_seconds: When it was done; infinite before.
        wants_ticks: Whether the policy looks at the queue while its jobs wait.
    """

    policy: Policy
    job: MalleableJob
    limits: Limits = field(default_factory=Limits)
    pace: float = 1.0
    period_seconds: float = 1800.0
    links: list[Link] = field(default_factory=list)
    submitted_seconds: float = math.inf
    finished_seconds: float = math.inf
    wants_ticks: bool = field(init=False)

    def __post_init__(self) -> None:
        self.wants_ticks = self.policy.watches

    @property
    def node_seconds(self) -> float:
        """Nodes times the seconds that the run's jobs held them, so far as they have ended."""
        return sum(
            link.nodes * (link.ended_seconds - link.started_seconds)
            for link in self.links
            if math.isfinite(link.started_seconds) and math.isfinite(link.ended_seconds)
        )

    @property
    def useful_node_seconds(self) -> float:
        """Nodes times the seconds of training that lasted."""
        return sum(link.nodes * link.progress_seconds / link.rate for link in self.links)

    @property
    def turnaround_seconds(self) -> float:
        """From submission to the end."""
        return self.finished_seconds - self.submitted_seconds

    def begin(self, simulation: Simulation) -> None:
        """Submit what the policy wants now."""
        self.submitted_seconds = simulation.now
        self._decide(simulation)

    def started(self, simulation: Simulation, job: int) -> None:
        """One of the jobs got its nodes: its link begins, or waits for another's save."""
        link = self._link(job)
        if link is None:
            return
        others = any(link.running for link in self.links)
        link.started_seconds = simulation.now
        if not others:
            self._set_off(simulation, link)

    def ended(self, simulation: Simulation, job: int, reason: Reason) -> None:
        """One of the jobs gave up its nodes or its place."""
        link = self._link(job)
        if link is None or link.ended_seconds < math.inf:
            return
        link.ended_seconds = simulation.now
        # A job that is put back into the queue waits two minutes and more: a new one does not.
        simulation.cancel(job)
        if link.ready_seconds < math.inf:
            self._count(link, simulation.now, reason)
        if self.job.work_seconds <= _DONE:
            self._finish(simulation)
            return
        for other in self.links:
            if other.running and other.ready_seconds == math.inf:
                self._set_off(simulation, other)
        if not self._open():
            self._decide(simulation)

    def tick(self, simulation: Simulation) -> None:
        """The queue has changed."""
        if self.finished_seconds == math.inf:
            self._decide(simulation)

    def _set_off(self, simulation: Simulation, link: Link) -> None:
        """From now on the link restarts and trains."""
        link.ready_seconds = simulation.now
        link.job = self.job
        simulation.set_run_seconds(link.number, link.run_seconds())

    def _count(self, link: Link, now: float, reason: Reason) -> None:
        """Take off what a link has got done and saved."""
        # What no last save has kept is what the checkpoint before it has.
        link.progress_seconds = (
            link.trained(now) if reason == "done" else link.kept(now, self.period_seconds)
        )
        if link.progress_seconds > 0.0:
            self.job = self.job.after(link.progress_seconds, link.nodes)

    def _finish(self, simulation: Simulation) -> None:
        self.finished_seconds = simulation.now
        for link in self._open():
            simulation.cancel(link.number)

    def _decide(self, simulation: Simulation) -> None:
        self._apply(simulation, self.policy.decide(self.situation(simulation)))

    def situation(self, simulation: Simulation) -> Situation:
        """What the policy sees now."""
        job = self.job
        for link in self.links:
            if link.running and link.ready_seconds < math.inf:
                job = job.after(link.trained(simulation.now), link.nodes)
        return Situation(
            queue=simulation.snapshot(),
            job=job,
            limits=self.limits,
            own=tuple(link.seen() for link in self._open()),
            used_node_seconds=self.node_seconds,
            quiet_seconds=simulation.now
            - max(
                (link.ended_seconds for link in self.links if link.role == "filler"),
                default=-math.inf,
            ),
        )

    def _apply(self, simulation: Simulation, decision: Decision) -> None:
        for number in decision.hand_over:
            link = self._link(number)
            if link is not None and link.told_seconds == math.inf:
                link.told_seconds = simulation.now
                simulation.set_run_seconds(number, link.run_seconds())
        for number in decision.cancel:
            simulation.cancel(number)
        for number, limit in decision.shorten:
            link = self._link(number)
            if link is not None:
                link.limit_seconds = limit
                simulation.shorten(number, limit)
        for wanted in decision.submit:
            self._submit(simulation, wanted.nodes, wanted.wall_seconds, wanted.role)

    def _submit(self, simulation: Simulation, nodes: int, wall: float, role: Role) -> None:
        number = simulation.submit(nodes, wall, wall)
        self.links.append(
            Link(
                number=number,
                role=role,
                nodes=nodes,
                limit_seconds=wall,
                job=self.job,
                pace=self.pace,
            )
        )

    def _open(self) -> list[Link]:
        return [link for link in self.links if link.ended_seconds == math.inf]

    def _link(self, number: int) -> Link | None:
        return next((link for link in self.links if link.number == number), None)
