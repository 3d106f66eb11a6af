"""The choice between the policies, made by predicting them all on the present queue.

Nodes are those with which the job is predicted to end first; fillers train until it starts, where
it is predicted to wait for long enough. Where one long job on the reference nodes is best, that is
what is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outlast.cluster.policies.anchor_filler import AnchorFiller
from outlast.cluster.policies.behaviour import Behaviour
from outlast.cluster.policies.decision import Decision, Situation, Submission
from outlast.cluster.policies.holes import Backfill
from outlast.cluster.policies.job import MalleableJob
from outlast.cluster.policies.planned import Candidate, candidates, thriftiest
from outlast.cluster.policies.predict import Correction
from outlast.cluster.policies.words import hours
from outlast.errors import ClusterError


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """What is best to submit now, and why.

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

    @property
    def just_one_long_job(self) -> bool:
        """Whether nothing beats submitting one long job and waiting."""
        return self.best is self.long_job and not self.fillers


def choose(
    situation: Situation,
    behaviour: Behaviour | None = None,
    *,
    walls: tuple[float, ...] = (),
    holes: bool = False,
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
        holes: Whether to try the length of the hole that is free now, too; a filler takes it
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
        holes=holes,
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
    start, shape = f"predicted to start {_within(best, follows=follows)}", _shape(best)
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
            "fillers train in holes until then"
        )
    text = (
        f"{shape}, {start}, {'ends' if best.nodes == 1 else 'end'} the job {ends}, {long} on "
        f"{_nodes(long_job)} in {hours(long_job.mean_finish_seconds)} (both predicted)"
    )
    return f"{text}; fillers train in holes until it starts" if fillers else text


def _nodes(candidate: Candidate) -> str:
    return "1 node" if candidate.nodes == 1 else f"{candidate.nodes} nodes"


def _shape(candidate: Candidate) -> str:
    return f"{_nodes(candidate)} for {hours(candidate.wall_seconds)}"


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
        """What to do now."""
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
