"""Forecasts of queue waits: the queue simulated many times, with the behaviour of its users.

Slurm's own estimate takes every wall time at its word and expects nobody else. Here each sample
draws how long jobs really run, given how long they have run already, and what arrives, both learnt
from a log of past jobs or assumed; the scheduler is simulated with the wall times that were asked
for. Quantiles over samples are the prediction. Where past predictions and starts are known, they
are corrected by the quantile of past errors (conformalised quantiles: Romano, Patterson and Candes,
NeurIPS 2019).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from outlast.cluster.simulate.engine import Queue, forward
from outlast.cluster.simulate.state import IDEAL
from outlast.cluster.workload import Array, Integers, Workload

DAY = 86_400.0
_FEWEST = 40
"""Past jobs below which a class of limits is not told apart."""
_CLASSES = 8
_EMPTY = np.zeros(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrivals:
    """Jobs that come later.

    Attributes:
        submit_seconds: (jobs,) on the queue's clock, ascending.
        nodes: (jobs,)
        limit_seconds: (jobs,)
        run_seconds: (jobs,) how long each really runs.
    """

    submit_seconds: Array
    nodes: Integers
    limit_seconds: Array
    run_seconds: Array


NOTHING = Arrivals(
    submit_seconds=_EMPTY, nodes=np.zeros(0, np.int64), limit_seconds=_EMPTY, run_seconds=_EMPTY
)


@dataclass(frozen=True, eq=False, kw_only=True)
class World:
    """One way in which a queue may go on.

    Attributes:
        running_end_seconds: (running,) when each running job ends.
        pending_run_seconds: (pending,) how long each pending job runs.
        arrivals: What comes later.
    """

    running_end_seconds: Array
    pending_run_seconds: Array
    arrivals: Arrivals = NOTHING


@dataclass(frozen=True, eq=False, kw_only=True)
class Behaviour:
    """Statistics of a queue's users.

    Attributes:
        edges: (classes - 1,) limits in seconds that part the classes.
        used: (classes,) of each class of limits, sorted shares of the wall time that jobs used.
        past: Past jobs from which those that come later are drawn; None: nothing comes.
    """

    edges: Array
    used: tuple[Array, ...]
    past: Workload | None = None

    @classmethod
    def assumed(cls) -> Behaviour:
        """Without a log: run time over request is uniform and one job in ten meets its limit.

        As Tsafrir, Etsion and Feitelson (JSSPP 2005) describe users' estimates.
        """
        return cls(edges=_EMPTY, used=(np.append((np.arange(90) + 0.5) / 90.0, np.ones(10)),))

    @classmethod
    def learnt(cls, past: Workload, *, arrivals: bool = True) -> Behaviour:
        """From a log of jobs that have ended.

        Args:
            past: The log; limits that are infinite say nothing of shares.
            arrivals: Whether jobs like these come later too: only where the log has everybody's.
        """
        known = np.isfinite(past.limit_seconds)
        limits = past.limit_seconds[known]
        if len(limits) < _FEWEST:
            base = cls.assumed()
            return cls(edges=base.edges, used=base.used, past=past if arrivals else None)
        shares = np.minimum(past.run_seconds[known] / limits, 1.0)
        count = min(_CLASSES, len(limits) // _FEWEST)
        edges = np.unique(np.quantile(limits, np.arange(1, count) / count))
        classes = np.searchsorted(edges, limits, side="right")
        everything = np.sort(shares)
        used = []
        for index in range(len(edges) + 1):
            members = np.sort(shares[classes == index])
            used.append(members if len(members) >= _FEWEST else everything)
        return cls(edges=edges, used=tuple(used), past=past if arrivals else None)

    def shares(self, limits: Array, elapsed: Array, source: np.random.Generator) -> Array:
        """Shares of their limits that jobs use, given how much they have used already: (jobs,)."""
        found = np.ones(len(limits))
        classes = np.searchsorted(self.edges, limits, side="right")
        begun = np.clip(elapsed / limits, 0.0, 1.0)
        for item, used in enumerate(self.used):
            mine = np.flatnonzero(classes == item)
            first = np.searchsorted(used, begun[mine], side="right")
            drawn = first + (source.random(len(mine)) * (len(used) - first)).astype(np.int64)
            # A job that has run longer than all others is taken to go on up to its limit.
            found[mine] = np.append(used, 1.0)[drawn]
        return found

    def world(self, queue: Queue, horizon_seconds: float, source: np.random.Generator) -> World:
        """One way in which the queue may go on, with arrivals up to a horizon."""
        now, ends = queue.now_seconds, queue.running_end_seconds
        starts = queue.running_start_seconds
        if starts is None:
            # Seen at a random moment of its limit, a job has used a random part of it.
            left = ends - now
            starts = now - left * source.random(len(left))
        limits = np.maximum(ends - starts, 1.0)
        finite = np.where(np.isfinite(limits), limits, 7 * DAY)
        used = self.shares(finite, now - starts, source)
        running = np.clip(starts + used * finite, now + 1.0, np.maximum(ends, now + 1.0))
        asked = queue.pending_limit_seconds
        asked = np.where(np.isfinite(asked), asked, 7 * DAY)
        pending = asked * self.shares(asked, np.zeros(len(asked)), source)
        return World(
            running_end_seconds=running,
            pending_run_seconds=pending,
            arrivals=self._arrivals(now, queue.nodes, horizon_seconds, source),
        )

    def _arrivals(
        self, now: float, nodes: int, horizon_seconds: float, source: np.random.Generator
    ) -> Arrivals:
        """Whole days of the log at the same time of day, each drawn at random."""
        past = self.past
        if past is None or len(past) < 2:
            return NOTHING
        submits = past.submit_seconds
        days = int((submits[-1] - submits[0]) // DAY)
        if days < 1:
            return NOTHING
        # The last whole days of the log, such that each begins at the queue's time of day.
        latest = submits[-1] - (submits[-1] - now) % DAY - DAY
        first = max(0, int((latest - submits[0]) // DAY))
        parts, shifts = [], []
        for day in range(int(np.ceil(horizon_seconds / DAY))):
            begin = latest - DAY * int(source.integers(0, first + 1))
            low, high = np.searchsorted(submits, (begin, begin + DAY), side="left")
            parts.append(np.arange(low, high))
            shifts.append(np.full(high - low, now + day * DAY - begin))
        chosen = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if not len(chosen):
            return NOTHING
        return Arrivals(
            submit_seconds=submits[chosen] + np.concatenate(shifts),
            nodes=np.minimum(past.nodes[chosen], nodes),
            limit_seconds=past.limit_seconds[chosen],
            run_seconds=past.run_seconds[chosen],
        )


Backfill = Literal["easy", "conservative"]
Kind = TypeVar("Kind", Array, Integers)
CONSERVATIVE_JOBS = 60
"""Waiting jobs up to which the reservations of all of them are simulated."""


def as_slurm(queue: Queue) -> Backfill:
    """The kind of backfill that stands for Slurm's: it leaves every waiting job its place.

    In a long queue EASY stands for it, since all those reservations would take minutes to simulate.
    Jobs as large as the others start at the same time; small ones up to twice too soon.
    """
    return "conservative" if len(queue.pending_nodes) <= CONSERVATIVE_JOBS else "easy"


def window_seconds(queue: Queue, nodes: int, *, backfill: Backfill = "easy") -> float:
    """For how long that many nodes can be had now by a job put last into the queue; 0: not at all.

    No job that waits is delayed by it beyond what backfill allows: the first one (EASY, Lifka 1995)
    or any of them (conservative), if all use their whole limits.
    """
    if nodes > queue.free_nodes:
        return 0.0
    return forward(queue, backfill, IDEAL, None, None)[0].window_seconds(nodes)


def without(queue: Queue, jobs: Collection[int]) -> Queue:
    """The queue as it would be without some jobs, waiting or running."""
    gone = list(jobs)
    stays = ~np.isin(_numbers(queue.running_jobs, len(queue.running_nodes)), gone)
    waits = ~np.isin(_numbers(queue.pending_jobs, len(queue.pending_nodes)), gone)
    return replace(
        queue,
        running_nodes=queue.running_nodes[stays],
        running_end_seconds=queue.running_end_seconds[stays],
        running_start_seconds=_of(queue.running_start_seconds, stays),
        running_jobs=_of(queue.running_jobs, stays),
        pending_nodes=queue.pending_nodes[waits],
        pending_limit_seconds=queue.pending_limit_seconds[waits],
        pending_priority=queue.pending_priority[waits],
        pending_age_seconds=queue.pending_age_seconds[waits],
        pending_jobs=_of(queue.pending_jobs, waits),
    )


def place_of(queue: Queue, job: int) -> int | None:
    """Number of jobs that wait before this one; None where it does not wait."""
    found = np.flatnonzero(_numbers(queue.pending_jobs, len(queue.pending_nodes)) == job)
    return int(found[0]) if len(found) else None


def starts_now(queue: Queue, *, backfill: Backfill = "easy") -> list[int]:
    """Places in the queue of the jobs that a pass of the scheduler would start now."""
    if not queue.free_nodes or queue.pending_nodes.min(initial=queue.nodes) > queue.free_nodes:
        return []
    simulation, _ = forward(queue, backfill, IDEAL, None, None)
    simulation.run(until=queue.now_seconds)
    first = len(queue.running_nodes)
    places = range(len(queue.pending_nodes))
    return [place for place in places if simulation.start_of(first + place) <= queue.now_seconds]


def _numbers(jobs: Integers | None, count: int) -> Integers:
    return np.full(count, -1, np.int64) if jobs is None else jobs


def _of(values: Kind | None, mask: npt.NDArray[np.bool_]) -> Kind | None:
    return None if values is None else values[mask]


LEVELS = (0.1, 0.5, 0.9)
HORIZON_SECONDS = 7 * 86_400.0
_SOON = 300.0
"""Waits are compared as logarithms of themselves and these seconds."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StartForecast:
    """Predicted start of a job of one shape, submitted now.

    Attributes:
        nodes: That it asks for.
        wall_seconds: That it asks for.
        wait_seconds: (samples,) one wait per sample, ascending in no order.
        p10_seconds: One wait in ten is shorter; likewise the next two.
    """

    nodes: int
    wall_seconds: float
    wait_seconds: Array
    p10_seconds: float
    p50_seconds: float
    p90_seconds: float

    @property
    def certain(self) -> bool:
        """True if it starts at once in every sample: its nodes are free and nobody is before it."""
        return not self.wait_seconds.max() > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Shift of the logarithms of waits, at each level, by the errors of past predictions.

    Attributes:
        p10: For the level 0.1; likewise the next two. 0: nothing is known.
        count: Past predictions that it comes from.
    """

    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    count: int = 0

    @classmethod
    def learnt(cls, predicted: Sequence[StartForecast], waited: Sequence[float]) -> Correction:
        """From past predictions and how long the jobs did wait.

        Jobs whose start was certain say nothing and are left out.
        """
        pairs = [
            (forecast, wait)
            for forecast, wait in zip(predicted, waited, strict=True)
            if not forecast.certain
        ]
        if not pairs:
            return cls()
        moves = []
        for level, name in zip(LEVELS, ("p10_seconds", "p50_seconds", "p90_seconds"), strict=True):
            errors = sorted(_log(wait) - _log(getattr(item, name)) for item, wait in pairs)
            # The quantile that covers one more job, of all n + 1, at least at the level.
            rank = min(math.ceil(level * (len(errors) + 1)), len(errors)) - 1
            moves.append(errors[rank])
        return cls(p10=moves[0], p50=moves[1], p90=moves[2], count=len(pairs))


def forecast_waits(
    queue: Queue,
    shapes: Sequence[tuple[int, float]],
    behaviour: Behaviour | None = None,
    *,
    samples: int = 32,
    seed: int = 0,
    backfill: Backfill = "easy",
    correction: Correction | None = None,
    after: int | None = None,
) -> list[StartForecast]:
    """Predict how long jobs of several shapes would wait, each if it alone were submitted now.

    All shapes meet the same samples, so that their difference is not left to chance.

    Args:
        queue: What runs and waits.
        shapes: (nodes, wall seconds) of each.
        behaviour: Of the queue's users; None: what is assumed without a log.
        samples: Ways in which the queue may go on.
        seed: Of the random numbers: the same prediction for the same seed.
        backfill: Kind of the scheduler.
        correction: From past predictions.
        after: Number of a running job for whose end they wait (``afterany``). It is taken to use
            all of its limit, and waits are counted from there; None, or a job that does not run:
            they could start now.
    """
    knows = behaviour or Behaviour.assumed()
    source = np.random.default_rng(seed)
    worlds = [knows.world(queue, HORIZON_SECONDS, source) for _ in range(samples)]
    before = None if after is None else _running_place(queue, after)
    ready = queue.now_seconds if before is None else float(queue.running_end_seconds[before])
    if before is not None:
        worlds = [_with_end(world, before, ready) for world in worlds]
    waits = np.array(
        [[_wait(queue, world, shape, backfill, ready) for world in worlds] for shape in shapes]
    ).reshape(len(shapes), samples)
    return [
        _forecast(nodes, wall, wait, correction or Correction())
        for (nodes, wall), wait in zip(shapes, waits, strict=True)
    ]


def corrected(forecast: StartForecast, correction: Correction) -> StartForecast:
    """The same prediction with its quantiles moved by what past predictions were off."""
    return _forecast(forecast.nodes, forecast.wall_seconds, forecast.wait_seconds, correction)


def corrected_waits(forecast: StartForecast, correction: Correction) -> Array:
    """The samples, each moved by what past predictions of its rank were off: (samples,) seconds.

    Between the levels of the correction the move is interpolated, beyond them it stays.
    """
    waits = forecast.wait_seconds
    moved = (correction.p10, correction.p50, correction.p90)
    if forecast.certain or not any(moved):
        return waits
    ranks = np.argsort(np.argsort(waits, kind="stable"), kind="stable") + 0.5
    moves = np.interp(ranks / len(waits), LEVELS, moved)
    return np.maximum((waits + _SOON) * np.exp(moves) - _SOON, 0.0)


def _running_place(queue: Queue, job: int) -> int | None:
    """Index of a running job in the queue's arrays; None where it does not run."""
    if queue.running_jobs is None:
        return None
    places = np.flatnonzero(queue.running_jobs == job)
    return int(places[0]) if len(places) else None


def _with_end(world: World, place: int, end_seconds: float) -> World:
    ends = world.running_end_seconds.copy()
    ends[place] = end_seconds
    return replace(world, running_end_seconds=ends)


def _wait(
    queue: Queue, world: World, shape: tuple[int, float], backfill: Backfill, ready: float
) -> float:
    nodes, wall = shape
    if nodes > queue.nodes:
        return math.inf
    simulation, _ = forward(
        queue, backfill, IDEAL, world.running_end_seconds, world.pending_run_seconds
    )
    job = simulation.submit(nodes, wall, wall, priority=0.5, at=ready)
    later = world.arrivals
    for at, wanted, limit, run in zip(
        later.submit_seconds.tolist(),
        later.nodes.tolist(),
        later.limit_seconds.tolist(),
        later.run_seconds.tolist(),
        strict=True,
    ):
        simulation.submit(wanted, limit, run, at=at)
    return simulation.run_until_start(job) - ready


def _forecast(nodes: int, wall: float, waits: Array, correction: Correction) -> StartForecast:
    low, middle, high = (
        _moved(waits, level, move)
        for level, move in zip(
            LEVELS, (correction.p10, correction.p50, correction.p90), strict=True
        )
    )
    return StartForecast(
        nodes=nodes,
        wall_seconds=wall,
        wait_seconds=waits,
        p10_seconds=min(low, middle),
        p50_seconds=middle,
        p90_seconds=max(high, middle),
    )


def _moved(waits: Array, level: float, move: float) -> float:
    """A quantile of the waits, corrected; where all start at once, so it stays."""
    if not waits.max() > 0.0:
        return 0.0
    if not np.isfinite(waits).all():
        return math.inf
    wait = float(np.quantile(waits, level))
    return max(math.exp(_log(wait) + move) - _SOON, 0.0)


def _log(wait_seconds: float) -> float:
    return math.log(wait_seconds + _SOON)


def queue_at(log: Workload, start_seconds: Array, moment: float, *, before: int) -> Queue:
    """The queue as it was at a moment, out of a log.

    Args:
        log: Everybody's jobs.
        start_seconds: (jobs,) when each started; infinite for those that have not.
        moment: On the log's clock.
        before: Only jobs before this place in the log: those submitted earlier.
    """
    chosen = slice(0, before)
    starts, nodes, limits = start_seconds[chosen], log.nodes[chosen], log.limit_seconds[chosen]
    ends = starts + np.minimum(log.run_seconds[chosen], limits)
    submits = log.submit_seconds[chosen]
    runs = (starts <= moment) & (ends > moment)
    waits = starts > moment
    order = np.argsort(submits[waits], kind="stable")
    return Queue(
        now_seconds=moment,
        nodes=log.machine_nodes,
        running_nodes=nodes[runs],
        running_end_seconds=starts[runs] + limits[runs],
        running_start_seconds=starts[runs],
        pending_nodes=nodes[waits][order],
        pending_limit_seconds=limits[waits][order],
        pending_priority=np.zeros(int(waits.sum())),
        pending_age_seconds=moment - submits[waits][order],
    )


def learn_correction(
    log: Workload,
    start_seconds: Array,
    behaviour: Behaviour,
    *,
    like: tuple[int, float] | None = None,
    count: int = 60,
    samples: int = 16,
    seed: int = 0,
    backfill: Backfill | None = "easy",
) -> Correction:
    """Predict the starts of past jobs as if they were submitted now, and compare.

    Args:
        log: Everybody's jobs that have started, sorted by submission.
        start_seconds: (jobs,) when each did.
        behaviour: Of the queue's users.
        like: (nodes, wall seconds) of the jobs to be predicted: past jobs near it are taken.
        count: Of past jobs.
        samples: As for `forecast_waits`, like the rest.
        seed: See there.
        backfill: See there; None: for each queue the kind that is taken for Slurm's.
    """
    forecasts: list[StartForecast] = []
    waited: list[float] = []
    # Jobs of about this shape, spread over the second half of the log.
    known = np.flatnonzero(np.isfinite(start_seconds) & np.isfinite(log.limit_seconds))
    known = known[len(known) // 4 :]
    if like is not None and len(known) > 2 * count:
        away = np.abs(np.log(log.nodes[known] / like[0]))
        away += np.abs(np.log(log.limit_seconds[known] / like[1]))
        known = np.sort(known[np.argsort(away, kind="stable")[: 2 * count]])
    step = max(len(known) // max(count, 1), 1)
    found: Integers = known[::step][:count]
    for job in found:
        moment = float(log.submit_seconds[job])
        queue = queue_at(log, start_seconds, moment, before=int(job))
        if queue.free_nodes >= log.nodes[job] and not len(queue.pending_nodes):
            continue
        shape = (int(log.nodes[job]), float(log.limit_seconds[job]))
        forecasts += forecast_waits(
            queue,
            [shape],
            behaviour,
            samples=samples,
            seed=seed + int(job),
            backfill=backfill or as_slurm(queue),
        )
        waited.append(float(start_seconds[job]) - moment)
    return Correction.learnt(forecasts, waited)
