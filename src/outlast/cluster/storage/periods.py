"""How often each of several jobs should save when they share one file system.

Young/Daly's period per job is not the best when the file system is shared (Herault, Robert,
Bouteiller, Arnold, Ferreira, Bosilca and Dongarra 2018, Optimal cooperative checkpointing for
shared high-performance computing platforms). Minimise the node-time that saves and failures waste,

    sum_i n_i (C_i / P_i + P_i / (2 mu_i))   with   sum_i C_i / P_i <= budget,

over the periods P_i. With the multiplier lambda of the budget,

    P_i = sqrt(2 mu_i C_i (1 + lambda / n_i)),

and lambda = 0, Young/Daly's periods, where these keep the budget; else it is found by bisection. A
save in the background costs its job less than it costs the file system, say o_i in place of C_i in
the first sum; then P_i = sqrt(2 mu_i (o_i + lambda C_i / n_i)).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class SavingJob:
    """What matters of a job that saves to a shared file system.

    Attributes:
        nodes: How many wait while it saves.
        save_seconds: What a save takes with the whole bandwidth.
        mtbf_seconds: Mean time between failures of the whole job.
        overhead_seconds: By which a save lengthens the run; None: the whole time of the save.
    """

    nodes: float
    save_seconds: float
    mtbf_seconds: float
    overhead_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """What a save costs the job itself."""
        return self.save_seconds if self.overhead_seconds is None else self.overhead_seconds

    def __post_init__(self) -> None:
        """Refuse figures without a meaning."""
        for name in ("nodes", "save_seconds", "mtbf_seconds", "overhead_seconds"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (value > 0 and math.isfinite(value)):
                raise ClusterError(f"{name} = {value} of a job: give a finite number above 0")


@dataclass(frozen=True)
class Periods:
    """Periods of jobs that share a file system.

    Attributes:
        seconds: From one save to the next, by job.
        multiplier: Lambda; 0 where every job has Young/Daly's period.
        load: Share of the time for which the file system is busy with saves.
        waste: Expected share of all node-time that saves and what is lost at failures take, when
            no save waits for another.
    """

    seconds: tuple[float, ...]
    multiplier: float
    load: float
    waste: float


def young_daly(job: SavingJob) -> float:
    """The period that is best for a job alone: ``sqrt(2 mu o)``, in seconds."""
    return _period(job, 0.0)


def shared_periods(jobs: Sequence[SavingJob], budget: float = 1.0) -> Periods:
    """The periods that waste the least node-time within a budget of bandwidth.

    Args:
        jobs: All that save to the file system, or all of one project.
        budget: Share of the time for which saves may keep the file system busy; above 0.

    Raises:
        ClusterError: For a budget that is not above 0, or no jobs.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ClusterError(f"budget = {budget}: give a share of the time above 0, as 0.5")
    if not jobs:
        raise ClusterError("there are no jobs to find periods for: give one or more")
    multiplier = 0.0
    if _load(jobs, 0.0) > budget:
        low, high = 0.0, 1.0
        while _load(jobs, high) > budget:
            low, high = high, 4.0 * high
        for _ in range(_ROUNDS):
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            if _load(jobs, middle) > budget:
                low = middle
            else:
                high = middle
        # The upper end keeps the budget.
        multiplier = high
    seconds = tuple(_period(job, multiplier) for job in jobs)
    return Periods(seconds, multiplier, _load(jobs, multiplier), waste_of(jobs, seconds))


def waste_of(jobs: Sequence[SavingJob], seconds: Sequence[float]) -> float:
    """The expected share of node-time that is wasted with given periods, when no save waits."""
    wasted = math.fsum(
        job.nodes * (job.cost_seconds / period + period / (2.0 * job.mtbf_seconds))
        for job, period in zip(jobs, seconds, strict=True)
    )
    return wasted / math.fsum(job.nodes for job in jobs)


def _period(job: SavingJob, multiplier: float) -> float:
    cost = job.cost_seconds + multiplier * job.save_seconds / job.nodes
    return math.sqrt(2.0 * job.mtbf_seconds * cost)


def _load(jobs: Sequence[SavingJob], multiplier: float) -> float:
    return math.fsum(job.save_seconds / _period(job, multiplier) for job in jobs)


def jittered(period_seconds: float, number: int, *, key: str, share: float = 0.1) -> float:
    """A period with jitter, so that jobs that began together do not go on saving together.

    The first one is anywhere between 0 and one period, the later ones are within `share` of it;
    their mean is the period.

    Args:
        period_seconds: The period.
        number: Of the save, from 0.
        key: What differs between jobs, e.g. the job's number; the same key gives the same jitter.
        share: Largest deviation.

    Returns:
        Seconds from the save before (or from the start) to this one.
    """
    if not 0.0 <= share < 1.0:
        raise ClusterError(f"share = {share} of the jitter: give a number from 0 to less than 1")
    chance = random.Random(f"{key}/{number}").random()
    return period_seconds * (chance if number == 0 else 1.0 + share * (2.0 * chance - 1.0))
