"""Anchor and filler: one long job keeps the place in the queue, backfill windows train meanwhile.

The anchor asks for all that is left. While it waits, a filler takes what backfill leaves free, on
at most as many nodes, from the same checkpoint. The filler saves and ends as soon as anybody's
job could start on its nodes: first, because a scheduler gives nodes only once they are free, and
because a filler that stands in the way of those before the anchor delays the anchor itself. The
anchor's limit falls as work gets done, so that it fits smaller backfill windows itself. A filler
that can finish the job makes the anchor superfluous.

A lone window is no reason to leave the queue: giving up the place costs more than the window gains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    Backfill,
    place_of,
    starts_now,
    window_seconds,
    without,
)
from outlast.cluster.simulate.engine import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFiller:
    """One long job and fillers in the backfill windows before it starts.

    Attributes:
        anchor_nodes: Of the long job; None for the reference.
        longest_filler_seconds: Of a filler.
        shorten_by_seconds: The anchor's limit is lowered in steps of at least this.
        rest_seconds: From the end of a filler until the next one, at least a minute.
        outlook_seconds: Fillers are compared by what they get done in this time: beyond it windows
            will have changed.
        gain: A filler moves to more nodes where they get this many times as much done.
        polite: Whether fillers make way for every job that could start on their nodes; otherwise
            only for the anchor and those before it.
        backfill: Kind of the scheduler: whose jobs could start. Holes are those that leave every
            waiting job its reservation, whatever the scheduler.
    """

    anchor_nodes: int | None = None
    longest_filler_seconds: float = 86400.0
    shorten_by_seconds: float = 900.0
    rest_seconds: float = MINUTE
    outlook_seconds: float = 8 * 3600.0
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
            nodes = self.anchor_nodes or situation.job.reference_nodes
            wall = situation.limits.wall_to_finish(situation.job, nodes)
            anchor = Submission(nodes=nodes, wall_seconds=wall)
            return Decision(reason="one long job holds the place in the queue", submit=(anchor,))
        if main.running:
            # The anchor has its nodes.
            if filler is None:
                return Decision(reason="the long job runs")
            if filler.ending:
                return Decision(reason="the long job goes on when the filler has saved")
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
        if filler is None:
            # The anchor waits and nothing trains.
            shorten = self._shorten(situation, main)
            submit = self._filler(situation, main)
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
        return self._training(situation, main, filler)

    def _training(self, situation: Situation, main: OwnJob, filler: OwnJob) -> Decision:
        """The anchor waits while a filler trains."""
        left = filler.left_seconds(situation.queue.now_seconds)
        done = self._time_in_filler(situation, filler)
        if filler.nodes >= main.nodes and done <= left - situation.job.lead_seconds:
            return Decision(reason="the filler finishes the job", cancel=(main.number,))
        shorten = self._shorten(situation, main)
        if filler.nodes >= main.nodes or self._filler_is_sooner(situation, main, filler):
            return Decision(reason="the filler is as fast as the long job", shorten=shorten)
        if self._in_the_way(situation, main, filler):
            reason = "a job could start on the filler's nodes: the filler saves and ends"
        elif self._larger(situation, main, filler):
            reason = "more nodes are free: the filler saves and moves"
        else:
            return Decision(reason="the long job waits", shorten=shorten)
        return Decision(reason=reason, hand_over=(filler.number,), shorten=shorten)

    def _in_the_way(self, situation: Situation, main: OwnJob, filler: OwnJob) -> bool:
        """True if a job would start now, were the filler's nodes free."""
        freed = without(situation.queue, {filler.number})
        starts = starts_now(freed, backfill=self.backfill)
        if self.polite or not starts:
            return bool(starts)
        place = place_of(situation.queue, main.number)
        return place is not None and starts[0] <= place

    def _filler(self, situation: Situation, main: OwnJob) -> Submission | None:
        """The next filler, if any window is worth it."""
        # Without any rest, a window that the scheduler refuses would be asked for again at once.
        rest = max(self.rest_seconds, MINUTE)
        if len(situation.own) >= situation.limits.max_jobs or situation.quiet_seconds < rest:
            return None
        return self._best_window(situation, main, situation.queue)

    def _best_window(self, situation: Situation, main: OwnJob, queue: Queue) -> Submission | None:
        """The window of the queue that gets most done soon."""
        job, limits = situation.job, situation.limits
        best: tuple[float, int, float] | None = None
        for nodes in limits.sizes(job):
            if nodes > main.nodes or nodes > queue.free_nodes:
                continue
            longest = min(self.longest_filler_seconds, limits.longest)
            # Also under EASY: what delays a job before the anchor delays the anchor.
            window = min(window_seconds(queue, nodes, backfill="conservative"), longest)
            finish = job.wall_to_finish(nodes)
            wall = finish if finish <= window else math.floor(window / MINUTE) * MINUTE
            if wall < limits.min_wall_seconds and wall < finish:
                continue
            done = self._soon(job, nodes, wall)
            if done > 0.0 and (best is None or done > best[0]):
                best = (done, nodes, wall)
        if best is None:
            return None
        return Submission(
            nodes=best[1],
            wall_seconds=best[2],
            role="filler",
            expected_start_seconds=queue.now_seconds,
        )

    def _larger(self, situation: Situation, main: OwnJob, filler: OwnJob) -> bool:
        """True if a filler on more nodes would get enough more done, its restart charged."""
        queue, job = situation.queue, situation.job
        if not queue.free_nodes:
            return False
        found = self._best_window(situation, main, without(queue, {filler.number}))
        if found is None or found.nodes <= filler.nodes:
            return False
        stays = min(filler.left_seconds(queue.now_seconds), self.outlook_seconds)
        moved = self._soon(job, found.nodes, found.wall_seconds)
        return moved > self.gain * job.speed(filler.nodes) * stays

    def _soon(self, job: MalleableJob, nodes: int, wall_seconds: float) -> float:
        return job.progress(nodes, min(wall_seconds, self.outlook_seconds))

    def _shorten(self, situation: Situation, main: OwnJob) -> tuple[tuple[int, float], ...]:
        """The waiting anchor's new limit, where enough has been done since it was asked for."""
        wall = situation.limits.wall_to_finish(situation.job, main.nodes)
        if wall > main.limit_seconds - self.shorten_by_seconds:
            return ()
        return ((main.number, wall),)

    def _time_in_filler(self, situation: Situation, filler: OwnJob) -> float:
        """Seconds until a running filler would have done all, its save included."""
        job = situation.job
        return job.work_seconds / job.speed(filler.nodes) + job.save_seconds

    def _filler_is_sooner(self, situation: Situation, main: OwnJob, filler: OwnJob) -> bool:
        """True if a running filler finishes the job before an anchor that starts now would."""
        done = self._time_in_filler(situation, filler)
        if done > filler.left_seconds(situation.queue.now_seconds) - situation.job.lead_seconds:
            return False
        return done <= situation.job.save_seconds + situation.job.run_seconds(main.nodes)
