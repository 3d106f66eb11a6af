"""Forecasts of queue waits: the queue simulated many times, with the behaviour of its users.

Slurm's own estimate takes every wall time at its word and expects nobody else. Here each sample
draws how long jobs really run, given how long they have run already, and what arrives, both learnt
from a log of past jobs or assumed; the scheduler is simulated with the wall times that were asked
for. Quantiles over samples are the prediction. Where past predictions and starts are known, they
are corrected by the quantile of past errors (conformalised quantiles: Romano, Patterson and Candes,
NeurIPS 2019).

Queues come from squeue now (`queue_now`) or from a log (`queue_at`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from outlast.cluster.simulate import Backfill, Queue, forward
from outlast.cluster.slurm import Partition, QueuedJob, queued
from outlast.cluster.workload import Array, Workload

DAY = 86_400.0
_FEWEST = 40
"""Past jobs below which a class of limits is not told apart."""
_CLASSES = 8
_EMPTY = np.zeros(0)


Arrival: TypeAlias = tuple[float, int, float, float]
"""A job that comes later: when, on the queue's clock; its nodes, its limit, and how long it really
runs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class World:
    """One way in which a queue may continue.

    Attributes:
        running_end_seconds: (running,) when each running job ends.
        pending_run_seconds: (pending,) how long each pending job runs.
        arrivals: What comes later, by time.
    """

    running_end_seconds: Array
    pending_run_seconds: Array
    arrivals: Sequence[Arrival] = ()


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
        later = past if arrivals else None
        known = np.isfinite(past.limit_seconds)
        limits = past.limit_seconds[known]
        if len(limits) < _FEWEST:
            return replace(cls.assumed(), past=later)
        shares = np.minimum(past.run_seconds[known] / limits, 1.0)
        count = min(_CLASSES, len(limits) // _FEWEST)
        edges = np.unique(np.quantile(limits, np.arange(1, count) / count))
        classes = np.searchsorted(edges, limits, side="right")
        everything = np.sort(shares)
        used = []
        for index in range(len(edges) + 1):
            members = np.sort(shares[classes == index])
            used.append(members if len(members) >= _FEWEST else everything)
        return cls(edges=edges, used=tuple(used), past=later)

    def shares(self, limits: Array, elapsed: Array, source: np.random.Generator) -> Array:
        """Shares of their limits that jobs use, given how much they have used already: (jobs,)."""
        found = np.ones(len(limits))
        classes = np.searchsorted(self.edges, limits, side="right")
        begun = np.clip(elapsed / limits, 0.0, 1.0)
        for item, used in enumerate(self.used):
            mine = np.flatnonzero(classes == item)
            first = np.searchsorted(used, begun[mine], side="right")
            drawn = first + (source.random(len(mine)) * (len(used) - first)).astype(np.int64)
            # A job that has run longer than all others is taken to continue up to its limit.
            found[mine] = np.append(used, 1.0)[drawn]
        return found

    def world(self, queue: Queue, horizon_seconds: float, source: np.random.Generator) -> World:
        """One way in which the queue may continue, with arrivals up to a horizon."""
        now, ends = queue.now_seconds, queue.running_end_seconds
        starts = queue.running_start_seconds
        limits = np.maximum(ends - starts, 1.0)
        finite = np.where(np.isfinite(limits), limits, 7 * DAY)
        used = self.shares(finite, now - starts, source)
        running = np.clip(starts + used * finite, now + 1.0, np.maximum(ends, now + 1.0))
        asked = queue.pending_limit_seconds
        asked = np.where(np.isfinite(asked), asked, 7 * DAY)
        pending = asked * self.shares(asked, np.zeros(len(asked)), source)
        arrivals = self._arrivals(now, queue.nodes, horizon_seconds, source)
        return World(running_end_seconds=running, pending_run_seconds=pending, arrivals=arrivals)

    def _arrivals(
        self, now: float, nodes: int, horizon_seconds: float, source: np.random.Generator
    ) -> list[Arrival]:
        """Whole days of the log at the same time of day, each drawn at random."""
        past = self.past
        if past is None or len(past) < 2:
            return []
        submits = past.submit_seconds
        if submits[-1] - submits[0] < DAY:
            return []
        # The last whole days of the log, such that each begins at the queue's time of day.
        latest = submits[-1] - (submits[-1] - now) % DAY - DAY
        first = max(0, int((latest - submits[0]) // DAY))
        parts, shifts = [], []
        for day in range(int(np.ceil(horizon_seconds / DAY))):
            begin = latest - DAY * int(source.integers(0, first + 1))
            low, high = np.searchsorted(submits, (begin, begin + DAY), side="left")
            parts.append(np.arange(low, high))
            shifts.append(np.full(high - low, now + day * DAY - begin))
        jobs = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        times = submits[jobs] + np.concatenate([np.zeros(0), *shifts])
        sizes = np.minimum(past.nodes[jobs], nodes)
        columns = (times, sizes, past.limit_seconds[jobs], past.run_seconds[jobs])
        return list(zip(*(column.tolist() for column in columns), strict=True))


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
    return forward(queue, backfill).window_seconds(nodes) if nodes <= queue.free_nodes else 0.0


def without(queue: Queue, jobs: Collection[int]) -> Queue:
    """The queue as it would be without some jobs, waiting or running."""
    running = ~np.isin(queue.running_jobs, list(jobs))
    pending = ~np.isin(queue.pending_jobs, list(jobs))
    left: dict[str, Any] = {}
    for name, column in vars(queue).items():
        if name.startswith(("running", "pending")):
            left[name] = column[running if name.startswith("running") else pending]
    return replace(queue, **left)


def place_of(queue: Queue, job: int) -> int | None:
    """Number of jobs that wait before this one; None where it does not wait."""
    return next(iter(np.flatnonzero(queue.pending_jobs == job).tolist()), None)


def starts_now(queue: Queue, *, backfill: Backfill = "easy") -> list[int]:
    """Places in the queue of the jobs that a pass of the scheduler would start now."""
    if not queue.free_nodes or queue.pending_nodes.min(initial=queue.nodes) > queue.free_nodes:
        return []
    simulation = forward(queue, backfill)
    simulation.run(until=queue.now_seconds)
    pending = simulation.starts()[len(queue.running_nodes) :]
    return np.flatnonzero(pending <= queue.now_seconds).tolist()


# What waits for something else than nodes does not compete for them yet.
_NOT_IN_LINE = ("dependency", "begintime", "jobheld", "reservation", "deadline", "assoc", "qos")
_NO_LIMIT_SECONDS = 365 * DAY


def queue_now(partitions: Sequence[Partition]) -> Queue:
    """The queue of these partitions now, everybody's jobs.

    Raises:
        ClusterError: squeue is missing or gives no answer.
    """
    names = [partition.name for partition in partitions]
    return queue_of(partitions, queued(partitions=names, ended_too=False))


def queue_of(
    partitions: Sequence[Partition], jobs: Sequence[QueuedJob], now: float | None = None
) -> Queue:
    """The simulator's queue of one partition, or of several as if they were one.

    Nodes that jobs of other partitions use are left out, since nobody says for how long.

    Args:
        partitions: Which a job may start in.
        jobs: Of them, as squeue lists them.
        now: Seconds since the epoch; default: the present.
    """
    moment = time.time() if now is None else now

    def number(job: QueuedJob) -> int:
        return int(job.number) if job.number.isdigit() else -1

    def limit(job: QueuedJob) -> float:
        known = job.limit_seconds
        return _NO_LIMIT_SECONDS if known is None or math.isinf(known) else max(known, 1.0)

    def in_line(job: QueuedJob) -> bool:
        reason = job.reason.replace(" ", "").lower()
        return job.nodes > 0 and not any(item in reason for item in _NOT_IN_LINE)

    running = []
    for job in jobs:
        if job.state in ("RUNNING", "COMPLETING", "SUSPENDED"):
            start = moment if job.starts is None else job.starts
            end = moment + limit(job) if job.ends is None else max(job.ends, moment + 1.0)
            running.append((job.nodes, start, end, number(job)))
    waiting = sorted(
        (job for job in jobs if job.state == "PENDING" and in_line(job)),
        key=lambda job: (-(job.priority or 0.0), job.submitted or moment),
    )
    # Partitions that share nodes list the same idle ones: the largest count is nearest.
    idle = max((partition.idle_nodes for partition in partitions), default=0)
    busy = sum(nodes for nodes, *_ in running)
    pending = [(job.nodes, limit(job), number(job)) for job in waiting]
    return Queue.of_jobs(moment, busy + idle, running, pending)


def queue_at(log: Workload, start_seconds: Array, moment: float, *, before: int) -> Queue:
    """The queue as it was at a moment, out of a log.

    Args:
        log: Everybody's jobs.
        start_seconds: (jobs,) when each started; infinite for those that have not.
        moment: On the log's clock.
        before: Only jobs before this place in the log: those submitted earlier.
    """
    starts, nodes, limits = start_seconds[:before], log.nodes[:before], log.limit_seconds[:before]
    ends = starts + np.minimum(log.run_seconds[:before], limits)
    runs = np.flatnonzero((starts <= moment) & (ends > moment))
    waits = np.flatnonzero(starts > moment)
    running = [(nodes[job], starts[job], starts[job] + limits[job], job) for job in runs.tolist()]
    pending = [(nodes[job], limits[job], job) for job in waits.tolist()]
    return Queue.of_jobs(moment, log.machine_nodes, running, pending)


LEVELS = (0.1, 0.5, 0.9)
HORIZON_SECONDS = 7 * 86_400.0
_SOON = 300.0
"""Waits are compared as logarithms of themselves and these seconds."""


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, slots=True)
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
        return cls(moves[0], moves[1], moves[2], len(pairs))

    @property
    def moves(self) -> tuple[float, float, float]:
        """The shifts, by level."""
        return self.p10, self.p50, self.p90


@dataclass(frozen=True, eq=False, kw_only=True)
class Outlook:
    """Assumptions of a forecast.

    Attributes:
        behaviour: Of the queue's users; None: what is assumed without a log.
        samples: Ways in which the queue may continue.
        seed: Of the random numbers: the same prediction for the same seed.
        backfill: Kind of the scheduler.
        correction: From past predictions.
        after: Number of a running job for whose end the jobs wait (``afterany``). It is taken to
            use all of its limit, and waits are counted from there; None, or a job that does not
            run: they could start now.
    """

    behaviour: Behaviour | None = None
    samples: int = 32
    seed: int = 0
    backfill: Backfill = "easy"
    correction: Correction = Correction()
    after: int | None = None


ASSUMED = Outlook()
QUICK = Outlook(samples=16)


def forecast_waits(
    queue: Queue, shapes: Sequence[tuple[int, float]], outlook: Outlook
) -> list[StartForecast]:
    """Predict how long jobs of several shapes would wait, each if it alone were submitted now.

    All shapes meet the same samples, so that their difference is not left to chance.

    Args:
        queue: What runs and waits.
        shapes: (nodes, wall seconds) of each.
        outlook: What is assumed.
    """
    knows = outlook.behaviour or Behaviour.assumed()
    source = np.random.default_rng(outlook.seed)
    worlds = [knows.world(queue, HORIZON_SECONDS, source) for _ in range(outlook.samples)]
    ready = queue.now_seconds
    for place in np.flatnonzero(queue.running_jobs == outlook.after)[:1].tolist():
        ready = float(queue.running_end_seconds[place])
        for world in worlds:
            world.running_end_seconds[place] = ready
    found = []
    for shape in shapes:
        waits = [_wait(queue, world, shape, outlook.backfill, ready) for world in worlds]
        found.append(_forecast(*shape, np.array(waits), outlook.correction))
    return found


def corrected(forecast: StartForecast, correction: Correction) -> StartForecast:
    """The same prediction with its quantiles moved by what past predictions were off."""
    return _forecast(forecast.nodes, forecast.wall_seconds, forecast.wait_seconds, correction)


def corrected_waits(forecast: StartForecast, correction: Correction) -> Array:
    """The samples, each moved by what past predictions of its rank were off: (samples,) seconds.

    Between the levels of the correction the move is interpolated, beyond them it stays.
    """
    waits, moved = forecast.wait_seconds, correction.moves
    if forecast.certain or not any(moved):
        return waits
    ranks = np.argsort(np.argsort(waits, kind="stable"), kind="stable") + 0.5
    moves = np.interp(ranks / len(waits), LEVELS, moved)
    return np.maximum((waits + _SOON) * np.exp(moves) - _SOON, 0.0)


def _wait(
    queue: Queue, world: World, shape: tuple[int, float], backfill: Backfill, ready: float
) -> float:
    nodes, wall = shape
    if nodes > queue.nodes:
        return math.inf
    simulation = forward(queue, backfill, world.running_end_seconds, world.pending_run_seconds)
    job = simulation.submit(nodes, wall, wall, priority=0.5, at=ready)
    for at, wanted, limit, run in world.arrivals:
        simulation.submit(wanted, limit, run, at=at)
    return simulation.run_until_start(job) - ready


def _forecast(nodes: int, wall: float, waits: Array, correction: Correction) -> StartForecast:
    """The quantiles of the waits, corrected; where all start at once, so it stays."""
    if not waits.max() > 0.0:
        low = middle = high = 0.0
    elif not np.isfinite(waits).all():
        low = middle = high = math.inf
    else:
        low, middle, high = (
            max(math.exp(_log(float(np.quantile(waits, level))) + move) - _SOON, 0.0)
            for level, move in zip(LEVELS, correction.moves, strict=True)
        )
    return StartForecast(nodes, wall, waits, min(low, middle), middle, max(high, middle))


def _log(wait_seconds: float) -> float:
    return math.log(wait_seconds + _SOON)


def learn_correction(
    log: Workload,
    start_seconds: Array,
    outlook: Outlook,
    *,
    like: tuple[int, float] | None = None,
    count: int = 60,
    slurm: bool = False,
) -> Correction:
    """Predict the starts of past jobs as if they were submitted now, and compare.

    Args:
        log: Everybody's jobs that have started, sorted by submission.
        start_seconds: (jobs,) when each did.
        outlook: What is assumed; its seed is another one for each job.
        like: (nodes, wall seconds) of the jobs to be predicted: past jobs near it are taken.
        count: Of past jobs.
        slurm: Whether to take for each queue the kind of backfill that stands for Slurm's, see
            `as_slurm`.
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
    for job in known[::step][:count].tolist():
        moment = float(log.submit_seconds[job])
        queue = queue_at(log, start_seconds, moment, before=job)
        if queue.free_nodes >= log.nodes[job] and not len(queue.pending_nodes):
            continue
        shape = (int(log.nodes[job]), float(log.limit_seconds[job]))
        kind = as_slurm(queue) if slurm else outlook.backfill
        here = replace(outlook, seed=outlook.seed + job, backfill=kind)
        forecasts += forecast_waits(queue, [shape], here)
        waited.append(float(start_seconds[job]) - moment)
    return Correction.learnt(forecasts, waited)
