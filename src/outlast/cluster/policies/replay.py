"""What each policy would have done: the same run, submitted at many moments of a workload.

At each moment the simulation of everybody else is copied, and one run under one policy is added to
each copy. So the policies meet the same queue, and what follows is theirs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.cluster.policies.behaviour import Behaviour
from outlast.cluster.policies.decision import Policy
from outlast.cluster.policies.driver import Run
from outlast.cluster.policies.holes import Backfill
from outlast.cluster.policies.job import Limits, MalleableJob
from outlast.cluster.simulate.engine import Simulation
from outlast.cluster.simulate.settings import IDEAL, Settings
from outlast.cluster.workload.jobs import Workload
from outlast.errors import ClusterError

_LOOK_SECONDS = 6 * 3600.0
_LONGEST_SECONDS = 400 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run under one policy.

    Attributes:
        policy: Its name.
        moment: Of submission, on the workload's clock.
        turnaround_seconds: From submission to the end.
        node_seconds: That its jobs held.
        useful_node_seconds: Of them, in training that lasted.
        links: Jobs that started.
    """

    policy: str
    moment: float
    turnaround_seconds: float
    node_seconds: float
    useful_node_seconds: float
    links: int

    @property
    def waste(self) -> float:
        """Share of the node time without lasting progress."""
        return 1.0 - self.useful_node_seconds / self.node_seconds if self.node_seconds else 0.0


def play(
    simulation: Simulation,
    policy: Policy,
    job: MalleableJob,
    limits: Limits | None = None,
    *,
    pace: float = 1.0,
) -> Run:
    """Add one run to a copy of the simulation and go on until it is done.

    Args:
        simulation: Everybody else, up to the run's submission; stays as it is.
        policy: The run's.
        job: What is to be done.
        limits: Of the site and the user.
        pace: Real seconds of training per expected second.

    Raises:
        ClusterError: It is not done after more than a year.
    """
    world = copy.deepcopy(simulation)
    run = Run(policy=policy, job=job, limits=limits or Limits(), pace=pace)
    run.begin(world)
    while run.finished_seconds == math.inf:
        world.run(until=world.now + _LOOK_SECONDS, driver=run)
        if world.now > run.submitted_seconds + _LONGEST_SECONDS:
            raise ClusterError(
                f"{policy.name}: the run is not done after 400 days of simulation; on "
                f"{job.reference_nodes} of {world.nodes} nodes at this load it never may be"
            )
    return run


def outcome(run: Run) -> Outcome:
    """The figures of a run that is done."""
    return Outcome(
        policy=run.policy.name,
        moment=run.submitted_seconds,
        turnaround_seconds=run.turnaround_seconds,
        node_seconds=run.node_seconds,
        useful_node_seconds=run.useful_node_seconds,
        links=sum(math.isfinite(link.started_seconds) for link in run.links),
    )


def moments(
    workload: Workload,
    times: Sequence[float],
    *,
    backfill: Backfill = "easy",
    scheduler: Settings = IDEAL,
) -> Iterator[Simulation]:
    """The simulation of everybody else at ascending times; to be copied, not changed."""
    simulation = Simulation(
        workload.machine_nodes, backfill=backfill, scheduler=scheduler, workload=workload
    )
    for time in times:
        simulation.run(until=float(time))
        yield simulation


def submission_times(workload: Workload, count: int, seed: int) -> list[float]:
    """Moments in the middle half of a workload: the queue has filled, and goes on."""
    source = np.random.default_rng(seed)
    first, last = float(workload.submit_seconds[0]), float(workload.submit_seconds[-1])
    return sorted((first + (last - first) * source.uniform(0.2, 0.7, count)).tolist())


def seen_by_now(workload: Workload, simulation: Simulation) -> Workload:
    """The jobs of the workload that have ended: what a log shows at this moment."""
    ended = np.flatnonzero(simulation.ends()[: len(workload)] <= simulation.now)
    return workload.chosen(ended)


def behaviour_now(workload: Workload, simulation: Simulation) -> Behaviour:
    """What users of the queue are known to do at this moment."""
    return Behaviour.learnt(seen_by_now(workload, simulation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def rows(load: float, found: Sequence[Sequence[Outcome]]) -> list[Row]:
    """Compare outcomes.

    Args:
        load: Of the others.
        found: Of each submission, the outcomes of all policies; one long job first.
    """
    result = []
    for place, first in enumerate(found[0]):
        pairs = [(row[place], row[0]) for row in found]
        every = [row[place] for row in found]
        ratios = [mine.turnaround_seconds / base.turnaround_seconds for mine, base in pairs]
        nodes = [mine.node_seconds / base.node_seconds for mine, base in pairs]
        result.append(
            Row(
                load=load,
                policy=first.policy,
                runs=len(every),
                turnaround_seconds=float(np.mean([said.turnaround_seconds for said in every])),
                ratio=float(np.mean(ratios)),
                worst=max(ratios),
                node_ratio=float(np.mean(nodes)),
                links=float(np.mean([said.links for said in every])),
                waste=float(np.mean([said.waste for said in every])),
            )
        )
    return result


def replay(
    workload: Workload,
    policies: Sequence[Policy],
    job: MalleableJob,
    limits: Limits,
    *,
    runs: int = 10,
    seed: int = 0,
    backfill: Backfill = "easy",
    scheduler: Settings = IDEAL,
) -> list[Row]:
    """Submit one run at several moments of a workload, under one policy after the other.

    Args:
        workload: Everybody else.
        policies: One long job first: the others are compared with it. A policy that learns from a
            log (`behaviour`) is shown what has ended before each moment.
        job: The run.
        limits: Of the site and the user.
        runs: Moments.
        seed: Of the random numbers.
        backfill: Kind of the scheduler.
        scheduler: Its configuration.

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
    for simulation in moments(workload, times, backfill=backfill, scheduler=scheduler):
        knows = behaviour_now(workload, simulation)
        found.append(
            [outcome(play(simulation, informed(policy, knows), job, limits)) for policy in policies]
        )
    return rows(workload.load, found)


def informed(policy: Policy, behaviour: Behaviour) -> Policy:
    """The policy, told what the queue's users do, if it asks."""
    if hasattr(policy, "behaviour"):
        return replace(policy, behaviour=behaviour)  # type: ignore[type-var]
    return policy
