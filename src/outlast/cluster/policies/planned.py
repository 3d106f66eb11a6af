"""Nodes and wall time chosen by simulating the queue: for jobs that run on several node counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outlast.cluster.policies.behaviour import Behaviour
from outlast.cluster.policies.decision import Decision, Situation, Submission
from outlast.cluster.policies.holes import Backfill, hole_seconds
from outlast.cluster.policies.job import MINUTE, MalleableJob
from outlast.cluster.policies.predict import (
    Correction,
    StartForecast,
    corrected_waits,
    forecast_waits,
)
from outlast.cluster.policies.words import hours
from outlast.errors import ClusterError


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """One (nodes, wall time) and what is predicted of it.

    Attributes:
        start: When it would start.
        finish_seconds: (samples,) from now until the whole job is done, with corrected waits, the
            links after this one taken to fare alike.
        node_seconds: Of the whole job.
    """

    start: StartForecast
    finish_seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
    node_seconds: float

    @property
    def nodes(self) -> int:
        """To ask for."""
        return self.start.nodes

    @property
    def wall_seconds(self) -> float:
        """To ask for."""
        return self.start.wall_seconds

    @property
    def mean_finish_seconds(self) -> float:
        """What the choice is made by."""
        return float(np.mean(self.finish_seconds))

    def finish_quantile(self, level: float) -> float:
        """Seconds from now until the job is done, at a level."""
        return float(np.quantile(self.finish_seconds, level))


def candidates(
    situation: Situation,
    walls: Sequence[float] = (),
    *,
    holes: bool = True,
    behaviour: Behaviour | None = None,
    samples: int = 32,
    seed: int = 0,
    backfill: Backfill = "easy",
    correction: Correction | None = None,
    after: int | None = None,
) -> list[Candidate]:
    """All shapes that make progress, with their predictions, the soonest finished first.

    Args:
        situation: The queue, without own jobs that wait, and what is left of the job.
        walls: Wall times to try, in seconds, beside all that is left.
        holes: Whether to try the length of the hole that is free now, too.
        behaviour: As for `forecast_waits`, like the rest.
        samples: See there.
        seed: See there.
        backfill: See there.
        correction: See there.
        after: See there.

    Raises:
        ClusterError: No shape that is allowed makes progress.
    """
    job, limits = situation.job, situation.limits
    shapes = [
        (nodes, wall)
        for nodes in limits.sizes(job)
        if nodes <= situation.queue.nodes
        for wall in _walls(situation, nodes, walls, backfill if holes else None)
    ]
    allowed = limits.max_node_seconds - situation.used_node_seconds
    useful = [shape for shape in shapes if job.progress(*shape) > 0.0]
    affordable = [shape for shape in useful if _node_seconds(job, *shape) <= allowed]
    if not affordable:
        raise ClusterError(_nothing(situation, bool(useful)))
    found = forecast_waits(
        situation.queue,
        affordable,
        behaviour,
        samples=samples,
        seed=seed,
        backfill=backfill,
        correction=correction,
        after=after,
    )
    return sorted(
        (_candidate(job, forecast, correction or Correction()) for forecast in found),
        key=lambda candidate: candidate.mean_finish_seconds,
    )


def _walls(
    situation: Situation, nodes: int, walls: Sequence[float], holes: Backfill | None
) -> list[float]:
    """Wall times worth trying on so many nodes, without those beyond what is left."""
    job, limits = situation.job, situation.limits
    whole = limits.wall_to_finish(job, nodes)
    tried = {whole, *(wall for wall in walls if wall < whole)}
    if holes is not None:
        hole = min(hole_seconds(situation.queue, nodes, backfill=holes), whole)
        if hole >= limits.min_wall_seconds:
            tried.add(math.floor(hole / MINUTE) * MINUTE)
    return sorted(tried, reverse=True)


def _candidate(job: MalleableJob, start: StartForecast, correction: Correction) -> Candidate:
    nodes, wall = start.nodes, start.wall_seconds
    progress = job.progress(nodes, wall)
    # What is left afterwards takes its share of as many such links.
    links = job.work_seconds / progress if progress else math.inf
    one = corrected_waits(start, correction) + job.link_seconds(nodes, wall)
    return Candidate(
        start=start,
        finish_seconds=one * max(links, 1.0),
        node_seconds=_node_seconds(job, nodes, wall),
    )


def _node_seconds(job: MalleableJob, nodes: int, wall: float) -> float:
    links = max(job.work_seconds / job.progress(nodes, wall), 1.0)
    return nodes * job.link_seconds(nodes, wall) * links


def _nothing(situation: Situation, useful: bool) -> str:
    if useful:
        left = situation.limits.max_node_seconds - situation.used_node_seconds
        return f"node hours: {left / 3600.0:.0f} are left, which no node count can do with"
    most = situation.queue.nodes
    if min(situation.limits.sizes(situation.job)) > most:
        return f"sizes = {situation.job.sizes}: only {most} nodes are up, too few for any of them"
    longest = situation.limits.longest
    return (
        f"wall time {hours(longest)}: restart, last save and lead alone take "
        f"{situation.job.overhead(situation.job.reference_nodes):g} s; ask for more"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned:
    """Each link has the nodes and the wall time with which the job is predicted to end first.

    Attributes:
        walls: Wall times to try, in seconds, beside all that is left and the free hole.
        behaviour: Of the queue's users.
        samples: Ways in which the queue may go on.
        seed: Of the random numbers.
        backfill: Kind of the scheduler.
        thrift: A shape with fewer node hours is taken if it ends later by at most this share.
    """

    walls: tuple[float, ...] = ()
    behaviour: Behaviour | None = None
    samples: int = 16
    seed: int = 0
    backfill: Backfill = "easy"
    thrift: float = 0.0
    name: str = "planned nodes and wall time"
    watches: bool = False

    def decide(self, situation: Situation) -> Decision:
        """Submit the best link when there is none."""
        if situation.own:
            return Decision(reason="a link is in the queue")
        ranking = candidates(
            situation,
            self.walls,
            behaviour=self.behaviour,
            samples=self.samples,
            seed=self.seed,
            backfill=self.backfill,
        )
        best = thriftiest(ranking, self.thrift)
        submission = Submission(
            nodes=best.nodes,
            wall_seconds=best.wall_seconds,
            expected_start_seconds=situation.queue.now_seconds + best.start.p50_seconds,
        )
        reason = (
            f"{best.nodes} nodes for {hours(best.wall_seconds)} end first: predicted in "
            f"{hours(best.mean_finish_seconds)}"
        )
        return Decision(reason=reason, submit=(submission,))


def thriftiest(ranking: Sequence[Candidate], thrift: float) -> Candidate:
    """Of all that end at most a share later than the first, the one of fewest node hours."""
    latest = ranking[0].mean_finish_seconds * (1.0 + thrift)
    near = [candidate for candidate in ranking if candidate.mean_finish_seconds <= latest]
    return min(near, key=lambda candidate: (candidate.node_seconds, candidate.mean_finish_seconds))
