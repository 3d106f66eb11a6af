"""Replay of policies: the same run, submitted at many moments of a workload.

At each moment the simulation of everybody else is copied, and one run under one policy is added to
each copy. So the policies meet the same queue, and what follows is theirs.

A link of the run begins with a restart, trains until it is told to end, has done all, or must save
to meet its limit, and ends with a save. A main job that starts while a filler still trains waits
for that one's save before it restarts, on its own nodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outlast.cluster.policies.automatic import Automatic, Planned
from outlast.cluster.policies.decision import Limits, MalleableJob, OwnJob, Policy, Role, Situation
from outlast.cluster.policies.forecast import Behaviour
from outlast.cluster.scheduler import Reason
from outlast.cluster.simulate import Backfill, Simulation
from outlast.cluster.workload import Workload
from outlast.errors import ClusterError

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
    started_seconds: float = math.inf
    ready_seconds: float = math.inf
    told_seconds: float = math.inf
    ended_seconds: float = math.inf
    progress_seconds: float = 0.0

    @property
    def running(self) -> bool:
        """True while it holds its nodes."""
        return self.started_seconds < math.inf and self.ended_seconds == math.inf

    @property
    def first_step_seconds(self) -> float:
        """Begin of its training."""
        return self.ready_seconds + self.job.restart(self.nodes)

    @property
    def rate(self) -> float:
        """Reference seconds per second of training."""
        return self.job.speed(self.nodes)

    def training_until(self) -> float:
        """End of its training: done, told to stop, or at the latest for its limit."""
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


_DONE = 1e-6
_PERIOD_SECONDS = 1800.0
"""Training between two checkpoints: what a link loses at most that is lost with its node or to a
preemption."""


@dataclass(slots=True)
class SimulatedRun:
    """One long run under a policy: a driver of the simulation.

    Attributes:
        policy: What decides.
        job: What is left, running links apart.
        limits: Of the site and the user.
        links: All jobs of the run so far, in order of submission.
        submitted_seconds: When the run began.
        finished_seconds: When it was done; infinite before.
    """

    policy: Policy
    job: MalleableJob
    limits: Limits = field(default_factory=Limits)
    links: list[Link] = field(default_factory=list)
    submitted_seconds: float = math.inf
    finished_seconds: float = math.inf

    @property
    def wants_ticks(self) -> bool:
        """True if the policy looks at the queue while its jobs wait."""
        return self.policy.watches

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

    @property
    def waste(self) -> float:
        """Share of the node time without lasting progress."""
        return 1.0 - self.useful_node_seconds / self.node_seconds if self.node_seconds else 0.0

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
            link.progress_seconds = link.trained(simulation.now)
            if reason != "done":
                # No last save was made: what counts is in the checkpoint before it.
                period = _PERIOD_SECONDS * link.rate
                link.progress_seconds = (
                    link.progress_seconds // period * _PERIOD_SECONDS * link.rate
                )
            if link.progress_seconds > 0.0:
                self.job = self.job.after(link.progress_seconds, link.nodes)
        if self.job.work_seconds <= _DONE:
            self.finished_seconds = simulation.now
            for other in self._open():
                simulation.cancel(other.number)
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

    def _decide(self, simulation: Simulation) -> None:
        decision = self.policy.decide(self.situation(simulation))
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
            submitted = simulation.submit(wanted.nodes, wanted.wall_seconds, wanted.wall_seconds)
            limit = wanted.wall_seconds
            self.links.append(Link(submitted, wanted.role, wanted.nodes, limit, self.job))

    def situation(self, simulation: Simulation) -> Situation:
        """Present input for the policy."""
        job = self.job
        for link in self.links:
            if link.running and link.ready_seconds < math.inf:
                job = job.after(link.trained(simulation.now), link.nodes)
        ends = (link.ended_seconds for link in self.links if link.role == "filler")
        return Situation(
            queue=simulation.snapshot(),
            job=job,
            limits=self.limits,
            own=tuple(link.seen() for link in self._open()),
            used_node_seconds=self.node_seconds,
            quiet_seconds=simulation.now - max(ends, default=-math.inf),
        )

    def _open(self) -> list[Link]:
        return [link for link in self.links if link.ended_seconds == math.inf]

    def _link(self, number: int) -> Link | None:
        return next((link for link in self.links if link.number == number), None)


_LOOK_SECONDS = 6 * 3600.0
_LONGEST_SECONDS = 400 * 86_400.0


def play(
    simulation: Simulation, policy: Policy, job: MalleableJob, limits: Limits | None = None
) -> SimulatedRun:
    """Add one run to a copy of the simulation and continue until it is done.

    Args:
        simulation: Everybody else, up to the run's submission; stays as it is.
        policy: The run's.
        job: What is to be done.
        limits: Of the site and the user.

    Raises:
        ClusterError: It is not done after more than a year.
    """
    world = copy.deepcopy(simulation)
    run = SimulatedRun(policy=policy, job=job, limits=limits or Limits())
    run.begin(world)
    while run.finished_seconds == math.inf:
        world.run(until=world.now + _LOOK_SECONDS, driver=run)
        if world.now > run.submitted_seconds + _LONGEST_SECONDS:
            raise ClusterError(
                f"{policy.name}: the run is not done after 400 days of simulation; on "
                f"{job.reference_nodes} of {world.nodes} nodes at this load it never may be"
            )
    return run


def moments(
    workload: Workload, times: Sequence[float], *, backfill: Backfill = "easy"
) -> Iterator[Simulation]:
    """The simulation of everybody else at ascending times; to be copied, not changed."""
    simulation = Simulation(workload.machine_nodes, backfill=backfill, workload=workload)
    for time in times:
        simulation.run(until=float(time))
        yield simulation


def submission_times(workload: Workload, count: int, seed: int) -> list[float]:
    """Moments in the middle half of a workload: the queue has filled, and continues."""
    source = np.random.default_rng(seed)
    first, last = float(workload.submit_seconds[0]), float(workload.submit_seconds[-1])
    return sorted((first + (last - first) * source.uniform(0.2, 0.7, count)).tolist())


def behaviour_now(workload: Workload, simulation: Simulation) -> Behaviour:
    """Behaviour of the queue's users as a log shows it now: by the jobs that have ended."""
    ended = np.flatnonzero(simulation.ends()[: len(workload)] <= simulation.now)
    return Behaviour.learnt(workload.chosen(ended))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy at one load, against one long job; all simulated.

    Attributes:
        load: Of the others.
        policy: Its name.
        runs: Submissions that the figures are of.
        turnaround_seconds: Mean from submission to the end.
        ratio: Mean of the turnaround over that of one long job, submission by submission.
        worst: The worst of them.
        node_ratio: Mean of the node hours over those of one long job.
        links: Mean number of jobs that started.
        waste: Mean share of node hours without lasting progress.
    """

    load: float
    policy: str
    runs: int
    turnaround_seconds: float
    ratio: float
    worst: float
    node_ratio: float
    links: float
    waste: float


def replay(
    workload: Workload,
    policies: Sequence[Policy],
    job: MalleableJob,
    limits: Limits,
    *,
    runs: int = 10,
    seed: int = 0,
    backfill: Backfill = "easy",
) -> list[PolicyResult]:
    """Submit one run at several moments of a workload, under one policy after the other.

    Args:
        workload: Everybody else.
        policies: One long job first: the others are compared with it. One that predicts is told
            what has ended before each moment.
        job: The run.
        limits: Of the site and the user.
        runs: Moments.
        seed: Of the random numbers.
        backfill: Kind of the scheduler.

    Raises:
        ClusterError: The machine is smaller than the run.
    """
    if job.reference_nodes > workload.machine_nodes:
        raise ClusterError(
            f"nodes = {job.reference_nodes}: the log's machine has {workload.machine_nodes}"
        )
    limits = replace(limits, max_nodes=min(limits.max_nodes, workload.machine_nodes))
    found = []
    times = submission_times(workload, runs, seed)
    for simulation in moments(workload, times, backfill=backfill):
        knows = behaviour_now(workload, simulation)
        found.append(
            [play(simulation, informed(policy, knows), job, limits) for policy in policies]
        )
    result = []
    for mine in zip(*found, strict=True):
        pairs = [(run, runs[0]) for run, runs in zip(mine, found, strict=True)]
        ratios = [run.turnaround_seconds / base.turnaround_seconds for run, base in pairs]
        nodes = [run.node_seconds / base.node_seconds for run, base in pairs]
        started = [sum(math.isfinite(link.started_seconds) for link in run.links) for run in mine]
        result.append(
            PolicyResult(
                load=workload.load,
                policy=mine[0].policy.name,
                runs=len(mine),
                turnaround_seconds=float(np.mean([run.turnaround_seconds for run in mine])),
                ratio=float(np.mean(ratios)),
                worst=max(ratios),
                node_ratio=float(np.mean(nodes)),
                links=float(np.mean(started)),
                waste=float(np.mean([run.waste for run in mine])),
            )
        )
    return result


def informed(policy: Policy, behaviour: Behaviour) -> Policy:
    """The policy, told what the queue's users do, if it predicts."""
    if isinstance(policy, Planned | Automatic):
        return replace(policy, outlook=replace(policy.outlook, behaviour=behaviour))
    return policy
