"""Policies that look at the queue: anchor and filler, planned shapes, and the choice among them.

`AnchorFiller`: one long job, the anchor, keeps the place in the queue, backfill windows train
meanwhile. The anchor asks for all that is left. While it waits, a filler takes what backfill leaves
free, on at most as many nodes, from the same checkpoint. The filler saves and ends as soon as
anybody's job could start on its nodes: first, because a scheduler gives nodes only once they are
free, and because a filler that stands in the way of those before the anchor delays the anchor
itself. The anchor's limit falls as work gets done, so that it fits smaller backfill windows itself.
A filler that can finish the job makes the anchor superfluous. A lone window is no reason to leave
the queue: giving up the place costs more than the window gains.

`Planned` and `choose`: nodes and wall time are those with which the job is predicted to end first,
by simulating the queue for every shape that the site allows. `Automatic` adds fillers until the job
starts, where it is predicted to wait for long enough. Where one long job on the reference nodes is
best, that is what is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outlast.cluster.policies.decision import (
    MINUTE,
    Decision,
    MalleableJob,
    OwnJob,
    Situation,
    Submission,
    hours,
)
from outlast.cluster.policies.forecast import (
    ASSUMED,
    QUICK,
    Outlook,
    StartForecast,
    corrected_waits,
    forecast_waits,
    place_of,
    starts_now,
    window_seconds,
    without,
)
from outlast.cluster.simulate import Backfill, Queue
from outlast.cluster.workload import Array
from outlast.errors import ClusterError

_LONGEST_FILLER_SECONDS = 86400.0
_SHORTEN_BY_SECONDS = 900.0
"""The anchor's limit is lowered in steps of at least this."""
_REST_SECONDS = MINUTE
"""From the end of a filler until the next one: without any, a window that the scheduler refuses
would be asked for again at once."""
_AHEAD_SECONDS = 8 * 3600.0
"""Fillers are compared by what they get done in this time: beyond it windows will have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFiller:
    """One long job and fillers in the backfill windows before it starts.

    Attributes:
        gain: A filler moves to more nodes where they get this many times as much done.
        polite: Whether fillers make way for every job that could start on their nodes; otherwise
            only for the anchor and those before it.
        backfill: Kind of the scheduler: whose jobs could start. Windows are those that leave every
            waiting job its reservation, whatever the scheduler.
    """

    gain: float = 1.2
    polite: bool = True
    backfill: Backfill = "easy"
    name: str = "anchor and filler"
    watches: bool = True

    def decide(self, situation: Situation) -> Decision:
        """Decide the next actions."""
        main, filler = situation.main, situation.filler
        if main is None:
            # No job holds a place yet.
            if filler is not None:
                return Decision(reason="the filler finishes the job")
            nodes = situation.job.reference_nodes
            wall = situation.limits.wall_to_finish(situation.job, nodes)
            anchor = Submission(nodes=nodes, wall_seconds=wall)
            return Decision(reason="one long job holds the place in the queue", submit=(anchor,))
        if main.running:
            # The anchor has its nodes.
            if filler is None:
                return Decision(reason="the long job runs")
            if filler.ending:
                return Decision(reason="the long job continues when the filler has saved")
            if not filler.running:
                return Decision(reason="the long job runs", cancel=(filler.number,))
            if self._filler_is_sooner(situation, main, filler):
                return Decision(
                    reason="the filler finishes sooner than the long job", cancel=(main.number,)
                )
            return Decision(
                reason="the long job has started: the filler saves and ends",
                hand_over=(filler.number,),
            )
        return self._beside_waiting(situation, main, filler)

    def _beside_waiting(
        self, situation: Situation, main: OwnJob, filler: OwnJob | None
    ) -> Decision:
        """Decide the next actions while the anchor waits."""
        # Its new limit, where enough has been done since it was asked for.
        wall = situation.limits.wall_to_finish(situation.job, main.nodes)
        lower = wall <= main.limit_seconds - _SHORTEN_BY_SECONDS
        shorten = ((main.number, wall),) if lower else ()
        if filler is None:
            submit = None
            full = len(situation.own) >= situation.limits.max_jobs
            if not full and situation.quiet_seconds >= _REST_SECONDS:
                submit = _best_window(situation, main, situation.queue)
            if submit is None:
                return Decision(reason="no backfill window is worth a filler", shorten=shorten)
            reason = f"{submit.nodes} nodes are free for {hours(submit.wall_seconds)}"
            return Decision(reason=reason, shorten=shorten, submit=(submit,))
        if filler.ending:
            return Decision(reason="the filler saves")
        if not filler.running:
            return Decision(
                reason="the window was gone before the filler could start", cancel=(filler.number,)
            )
        if filler.nodes >= main.nodes and _finishes(situation, filler):
            return Decision(reason="the filler finishes the job", cancel=(main.number,))
        if filler.nodes >= main.nodes or self._filler_is_sooner(situation, main, filler):
            return Decision(reason="the filler is as fast as the long job", shorten=shorten)
        freed = without(situation.queue, {filler.number})
        if self._in_the_way(freed, place_of(situation.queue, main.number)):
            reason = "a job could start on the filler's nodes: the filler saves and ends"
        elif self._larger(situation, main, filler, freed):
            reason = "more nodes are free: the filler saves and moves"
        else:
            return Decision(reason="the long job waits", shorten=shorten)
        return Decision(reason=reason, hand_over=(filler.number,), shorten=shorten)

    def _in_the_way(self, freed: Queue, place: int | None) -> bool:
        """True if a job would start now on the freed queue, without the filler.

        Args:
            freed: The queue without the filler.
            place: Of the anchor.
        """
        starts = starts_now(freed, backfill=self.backfill)
        if self.polite or not starts:
            return bool(starts)
        return place is not None and starts[0] <= place

    def _larger(self, situation: Situation, main: OwnJob, filler: OwnJob, freed: Queue) -> bool:
        """True if a filler on more nodes would get enough more done, its restart charged."""
        queue, job = situation.queue, situation.job
        found = _best_window(situation, main, freed) if queue.free_nodes else None
        if found is None or found.nodes <= filler.nodes:
            return False
        stays = min(filler.left_seconds(queue.now_seconds), _AHEAD_SECONDS)
        moved = job.progress(found.nodes, min(found.wall_seconds, _AHEAD_SECONDS))
        return moved > self.gain * job.speed(filler.nodes) * stays

    def _filler_is_sooner(self, situation: Situation, main: OwnJob, filler: OwnJob) -> bool:
        """True if a running filler finishes the job before an anchor that starts now would."""
        job = situation.job
        begun = job.save_seconds + job.run_seconds(main.nodes)
        return _finishes(situation, filler) and _seconds_in_filler(job, filler) <= begun


def _best_window(situation: Situation, main: OwnJob, queue: Queue) -> Submission | None:
    """The filler in the window of the queue that gets most done soon; None where none is worth it.

    Args:
        situation: What is left, and the limits.
        main: The anchor that waits.
        queue: With the windows.
    """
    job, limits = situation.job, situation.limits
    best: tuple[float, Submission | None] = (0.0, None)
    for nodes in limits.sizes(job):
        if nodes > main.nodes or nodes > queue.free_nodes:
            continue
        longest = min(_LONGEST_FILLER_SECONDS, limits.longest)
        # Also under EASY: what delays a job before the anchor delays the anchor.
        window = min(window_seconds(queue, nodes, backfill="conservative"), longest)
        finish = job.wall_to_finish(nodes)
        wall = finish if finish <= window else math.floor(window / MINUTE) * MINUTE
        if wall < limits.min_wall_seconds and wall < finish:
            continue
        done = job.progress(nodes, min(wall, _AHEAD_SECONDS))
        if done > best[0]:
            best = (done, Submission(nodes=nodes, wall_seconds=wall, role="filler"))
    return best[1]


def _seconds_in_filler(job: MalleableJob, filler: OwnJob) -> float:
    """Seconds until a running filler would have done all, its save included."""
    return job.work_seconds / job.speed(filler.nodes) + job.save_seconds


def _finishes(situation: Situation, filler: OwnJob) -> bool:
    """True if a running filler finishes the job within its limit."""
    left = filler.left_seconds(situation.queue.now_seconds) - situation.job.lead_seconds
    return _seconds_in_filler(situation.job, filler) <= left


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
    finish_seconds: Array
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
    situation: Situation, outlook: Outlook, walls: Sequence[float] = (), *, windows: bool = True
) -> list[Candidate]:
    """All shapes that make progress, with their predictions, the soonest finished first.

    Args:
        situation: The queue, without own jobs that wait, and what is left of the job.
        outlook: What is assumed.
        walls: Wall times to try, in seconds, beside all that is left.
        windows: Whether to try the length of the window that is free now, too.

    Raises:
        ClusterError: No shape that is allowed makes progress.
    """
    job, limits, queue = situation.job, situation.limits, situation.queue
    shapes = []
    for nodes in limits.sizes(job):
        if nodes > queue.nodes:
            continue
        whole = limits.wall_to_finish(job, nodes)
        tried = {whole, *(wall for wall in walls if wall < whole)}
        if windows:
            window = min(window_seconds(queue, nodes, backfill=outlook.backfill), whole)
            if window >= limits.min_wall_seconds:
                tried.add(math.floor(window / MINUTE) * MINUTE)
        shapes += [(nodes, wall) for wall in sorted(tried, reverse=True)]
    allowed = limits.max_node_seconds - situation.used_node_seconds
    useful = [shape for shape in shapes if job.progress(*shape) > 0.0]
    affordable = [shape for shape in useful if _node_seconds(job, *shape) <= allowed]
    if not affordable:
        raise ClusterError(_nothing(situation, bool(useful)))
    found = []
    for start in forecast_waits(queue, affordable, outlook):
        shape = start.nodes, start.wall_seconds
        # What is left afterwards takes its share of as many such links.
        links = max(job.work_seconds / job.progress(*shape), 1.0)
        one = corrected_waits(start, outlook.correction) + job.link_seconds(*shape)
        held = _node_seconds(job, *shape)
        found.append(Candidate(start=start, finish_seconds=one * links, node_seconds=held))
    return sorted(found, key=lambda candidate: candidate.mean_finish_seconds)


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
        ranking: All shapes, the soonest finished first.
        reason: One sentence.
    """

    best: Candidate
    ranking: tuple[Candidate, ...]
    reason: str


THRIFT = 0.02
"""A shape with fewer node hours is chosen if it ends later by at most this share."""


def choose(
    situation: Situation, outlook: Outlook = ASSUMED, walls: tuple[float, ...] = ()
) -> Choice:
    """Predict every shape on the present queue and choose.

    The window that is free now is not among the shapes: a filler takes it without giving up the
    place in the queue.

    Args:
        situation: The queue without own jobs that wait, and what is left of the job.
        outlook: What is assumed.
        walls: Wall times to try, in seconds, beside all that is left.

    Raises:
        ClusterError: No shape that is allowed makes progress, or none is predicted to start.
    """
    job, limits = situation.job, situation.limits
    ranking = candidates(situation, outlook, walls, windows=False)
    if math.isinf(ranking[0].mean_finish_seconds):
        raise ClusterError(
            f"sizes = {job.sizes}: none of them is predicted to start on the "
            f"{situation.queue.nodes} nodes that are up; ask for fewer nodes"
        )
    best = thriftiest(ranking, THRIFT)
    own = [candidate for candidate in ranking if candidate.nodes == job.reference_nodes]
    long_job = max(own, key=lambda candidate: candidate.wall_seconds) if own else best
    # Whether fillers are worth watching for until it starts.
    fillers = best.start.p90_seconds >= limits.min_wall_seconds and limits.max_jobs > 1
    follows = outlook.after is not None
    if best.start.certain:
        within = "as soon as the job before it ends" if follows else "at once"
    else:
        within = f"in {hours(best.start.p10_seconds)} to {hours(best.start.p90_seconds)}"
        within += " after the end of the job before it" if follows else ""
    start, shape = f"predicted to start {within}", f"{_nodes(best)} for {hours(best.wall_seconds)}"
    whole = long_job.wall_seconds >= job.wall_to_finish(long_job.nodes)
    long = "one long job" if whole else "links as long as they may be"
    # What follows another job is counted from the end of that.
    ends = f"in {hours(best.mean_finish_seconds)}{' from then' if follows else ''}"
    if best is long_job and not fillers:
        reason = (
            f"just submit {long}, {shape}: {start}, and no other shape is predicted to end the run "
            f"sooner than {ends}"
        )
    elif best is long_job:
        reason = (
            f"{long}, {shape}, {'holds' if whole else 'hold'} the place in the queue, {start}; "
            "fillers train in backfill windows until then"
        )
    else:
        reason = (
            f"{shape}, {start}, {'ends' if best.nodes == 1 else 'end'} the job {ends}, {long} on "
            f"{_nodes(long_job)} in {hours(long_job.mean_finish_seconds)} (both predicted)"
        )
        reason += "; fillers train in backfill windows until it starts" if fillers else ""
    return Choice(best=best, ranking=tuple(ranking), reason=reason)


def _nodes(candidate: Candidate) -> str:
    return "1 node" if candidate.nodes == 1 else f"{candidate.nodes} nodes"


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned:
    """Each link has the nodes and the wall time with which the job is predicted to end first.

    The wall times are all that is left and the free window.

    Attributes:
        outlook: What is assumed.
    """

    outlook: Outlook = QUICK
    name: str = "planned nodes and wall time"
    watches: bool = False

    def decide(self, situation: Situation) -> Decision:
        """Submit the best link when there is none."""
        if situation.own:
            return Decision(reason="a link is in the queue")
        best = thriftiest(candidates(situation, self.outlook), 0.0)
        submission = Submission(nodes=best.nodes, wall_seconds=best.wall_seconds)
        reason = (
            f"{best.nodes} nodes for {hours(best.wall_seconds)} end first: predicted in "
            f"{hours(best.mean_finish_seconds)}"
        )
        return Decision(reason=reason, submit=(submission,))


@dataclass(frozen=True, eq=False, kw_only=True)
class Automatic:
    """The nodes that are predicted to end the job first, and fillers until they are there.

    Attributes:
        outlook: What is assumed; the kind of backfill is that of `fillers`.
        fillers: What decides once a job holds the place.
    """

    outlook: Outlook = QUICK
    fillers: AnchorFiller = field(default_factory=AnchorFiller)
    name: str = "automatic"
    watches: bool = True

    def decide(self, situation: Situation) -> Decision:
        """Decide the next actions."""
        if situation.own:
            return self.fillers.decide(situation)
        choice = choose(situation, replace(self.outlook, backfill=self.fillers.backfill))
        best = choice.best
        submission = Submission(nodes=best.nodes, wall_seconds=best.wall_seconds)
        return Decision(reason=choice.reason, submit=(submission,))
