"""The choice among policies and shapes, by predicting them all on the present queue.

Nodes are those with which the job is predicted to end first; fillers train until it starts, where
it is predicted to wait for long enough. Where one long job on the reference nodes is best, that is
what is said.

Nodes and wall time are chosen by simulating the queue for every shape that the site allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outlast.cluster.policies.anchor_filler import AnchorFiller
from outlast.cluster.policies.decision import (
    MINUTE,
    Decision,
    MalleableJob,
    Situation,
    Submission,
    hours,
)
from outlast.cluster.policies.forecast import (
    Backfill,
    Behaviour,
    Correction,
    StartForecast,
    corrected_waits,
    forecast_waits,
    window_seconds,
)
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
        """Mean finish time: the criterion of the choice."""
        return float(np.mean(self.finish_seconds))

    def finish_quantile(self, level: float) -> float:
        """Seconds from now until the job is done, at a level."""
        return float(np.quantile(self.finish_seconds, level))


def candidates(
    situation: Situation,
    walls: Sequence[float] = (),
    *,
    windows: bool = True,
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
        windows: Whether to try the length of the window that is free now, too.
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
        for wall in _walls(situation, nodes, walls, backfill if windows else None)
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
    situation: Situation, nodes: int, walls: Sequence[float], windows: Backfill | None
) -> list[float]:
    """Wall times worth trying on so many nodes, without those beyond what is left."""
    job, limits = situation.job, situation.limits
    whole = limits.wall_to_finish(job, nodes)
    tried = {whole, *(wall for wall in walls if wall < whole)}
    if windows is not None:
        window = min(window_seconds(situation.queue, nodes, backfill=windows), whole)
        if window >= limits.min_wall_seconds:
            tried.add(math.floor(window / MINUTE) * MINUTE)
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
        walls: Wall times to try, in seconds, beside all that is left and the free window.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """Best submission now, with the reason.

    Attributes:
        best: The shape to submit.
        long_job: One long job on the reference nodes.
        ranking: All shapes, the soonest finished first.
        fillers: Whether fillers are worth watching for until it starts.
        reason: One sentence.
    """

    best: Candidate
    long_job: Candidate
    ranking: tuple[Candidate, ...]
    fillers: bool
    reason: str


def choose(
    situation: Situation,
    behaviour: Behaviour | None = None,
    *,
    walls: tuple[float, ...] = (),
    windows: bool = False,
    samples: int = 32,
    seed: int = 0,
    backfill: Backfill = "easy",
    correction: Correction | None = None,
    thrift: float = 0.02,
    after: int | None = None,
) -> Choice:
    """Predict every shape on the present queue and choose.

    Args:
        situation: The queue without own jobs that wait, and what is left of the job.
        behaviour: Of the queue's users; None: what is assumed without a log.
        walls: Wall times to try, in seconds, beside all that is left.
        windows: Whether to try the length of the window that is free now, too; a filler takes it
            without giving up the place in the queue, so not where fillers are possible.
        samples: Ways in which the queue may go on.
        seed: Of the random numbers.
        backfill: Kind of the scheduler.
        correction: From past predictions.
        thrift: A shape with fewer node hours is taken if it ends later by at most this share.
        after: Number of the running job for whose end it waits, as for `forecast_waits`.

    Raises:
        ClusterError: No shape that is allowed makes progress, or none is predicted to start.
    """
    ranking = candidates(
        situation,
        walls,
        windows=windows,
        behaviour=behaviour,
        samples=samples,
        seed=seed,
        backfill=backfill,
        correction=correction,
        after=after,
    )
    if math.isinf(ranking[0].mean_finish_seconds):
        raise ClusterError(
            f"sizes = {situation.job.sizes}: none of them is predicted to start on the "
            f"{situation.queue.nodes} nodes that are up; ask for fewer nodes"
        )
    best = thriftiest(ranking, thrift)
    reference = situation.job.reference_nodes
    own = [candidate for candidate in ranking if candidate.nodes == reference]
    long_job = max(own, key=lambda candidate: candidate.wall_seconds) if own else best
    wanted = situation.limits.min_wall_seconds
    fillers = best.start.p90_seconds >= wanted and situation.limits.max_jobs > 1
    return Choice(
        best=best,
        long_job=long_job,
        ranking=tuple(ranking),
        fillers=fillers,
        reason=_reason(situation.job, best, long_job, fillers, follows=after is not None),
    )


def _reason(
    job: MalleableJob, best: Candidate, long_job: Candidate, fillers: bool, *, follows: bool
) -> str:
    start, shape = (
        f"predicted to start {_within(best, follows=follows)}",
        f"{_nodes(best)} for {hours(best.wall_seconds)}",
    )
    whole = long_job.wall_seconds >= job.wall_to_finish(long_job.nodes)
    long = "one long job" if whole else "links as long as they may be"
    # What follows another job is counted from the end of that.
    ends = f"in {hours(best.mean_finish_seconds)}{' from then' if follows else ''}"
    if best is long_job and not fillers:
        return (
            f"just submit {long}, {shape}: {start}, and no other shape is predicted to end the run "
            f"sooner than {ends}"
        )
    if best is long_job:
        return (
            f"{long}, {shape}, {'holds' if whole else 'hold'} the place in the queue, {start}; "
            "fillers train in backfill windows until then"
        )
    text = (
        f"{shape}, {start}, {'ends' if best.nodes == 1 else 'end'} the job {ends}, {long} on "
        f"{_nodes(long_job)} in {hours(long_job.mean_finish_seconds)} (both predicted)"
    )
    return f"{text}; fillers train in backfill windows until it starts" if fillers else text


def _nodes(candidate: Candidate) -> str:
    return "1 node" if candidate.nodes == 1 else f"{candidate.nodes} nodes"


def _within(candidate: Candidate, *, follows: bool) -> str:
    start = candidate.start
    if start.certain:
        return "as soon as the job before it ends" if follows else "at once"
    within = f"in {hours(start.p10_seconds)} to {hours(start.p90_seconds)}"
    return f"{within} after the end of the job before it" if follows else within


@dataclass(frozen=True, eq=False, kw_only=True)
class Automatic:
    """The nodes that are predicted to end the job first, and fillers until they are there.

    Attributes:
        behaviour: Of the queue's users.
        samples: Ways in which the queue may go on.
        seed: Of the random numbers.
        correction: From past predictions.
        fillers: What decides once a job holds the place.
    """

    behaviour: Behaviour | None = None
    samples: int = 16
    seed: int = 0
    correction: Correction | None = None
    fillers: AnchorFiller = field(default_factory=AnchorFiller)
    name: str = "automatic"
    watches: bool = True

    def decide(self, situation: Situation) -> Decision:
        """Decide the next actions."""
        if situation.own:
            return self.fillers.decide(situation)
        choice = choose(
            situation,
            self.behaviour,
            samples=self.samples,
            seed=self.seed,
            backfill=self.fillers.backfill,
            correction=self.correction,
        )
        best = choice.best
        submission = Submission(
            nodes=best.nodes,
            wall_seconds=best.wall_seconds,
            expected_start_seconds=situation.queue.now_seconds + best.start.p50_seconds,
        )
        return Decision(reason=choice.reason, submit=(submission,))
