"""How good predictions would have been in the past: from a log with starts to a correction."""

from __future__ import annotations

import numpy as np

from outlast.cluster.policies.behaviour import Behaviour
from outlast.cluster.policies.holes import Backfill, as_slurm
from outlast.cluster.policies.predict import Correction, StartForecast, forecast_waits
from outlast.cluster.simulate.queue import Queue
from outlast.cluster.workload.jobs import Array, Integers, Workload


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
    for job in _near(log, start_seconds, like, count):
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


def _near(
    log: Workload, start_seconds: Array, like: tuple[int, float] | None, count: int
) -> Integers:
    """Jobs of about this shape, spread over the second half of the log."""
    known = np.flatnonzero(np.isfinite(start_seconds) & np.isfinite(log.limit_seconds))
    known = known[len(known) // 4 :]
    if like is not None and len(known) > 2 * count:
        away = np.abs(np.log(log.nodes[known] / like[0]))
        away += np.abs(np.log(log.limit_seconds[known] / like[1]))
        known = np.sort(known[np.argsort(away, kind="stable")[: 2 * count]])
    step = max(len(known) // max(count, 1), 1)
    found: Integers = known[::step][:count]
    return found
