"""The live queue as the simulator's `Queue`, from which starts are forecast."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from outlast.cluster.simulate.engine import Queue
from outlast.cluster.slurm.jobs import QueuedJob, queued

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.slurm.partitions import Partition

# What waits for something else than nodes does not compete for them yet.
_NOT_IN_LINE = ("dependency", "begintime", "jobheld", "reservation", "deadline", "assoc", "qos")
_NO_LIMIT_SECONDS = 365 * 86400.0


def queue_now(partitions: Sequence[Partition]) -> Queue:
    """The queue of these partitions now, everybody's jobs.

    Raises:
        ClusterError: squeue is missing or gives no answer.
    """
    names = [partition.name for partition in partitions]
    return queue_of(partitions, queued(partitions=names, everyone=True, ended_too=False))


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
    running = [job for job in jobs if job.state in ("RUNNING", "COMPLETING", "SUSPENDED")]
    waiting = sorted(
        (job for job in jobs if job.state == "PENDING" and _in_line(job)),
        key=lambda job: (-(job.priority or 0.0), job.submitted or moment),
    )
    busy = sum(job.nodes for job in running)
    # Partitions that share nodes list the same idle ones: the largest count is nearest.
    idle = max((partition.idle_nodes for partition in partitions), default=0)
    return Queue(
        now_seconds=moment,
        nodes=busy + idle,
        running_nodes=np.array([job.nodes for job in running], dtype=np.int64),
        running_end_seconds=np.array([_end(job, moment) for job in running], dtype=np.float64),
        pending_nodes=np.array([job.nodes for job in waiting], dtype=np.int64),
        pending_limit_seconds=np.array([_limit(job) for job in waiting], dtype=np.float64),
        pending_priority=np.array([job.priority or 0.0 for job in waiting], dtype=np.float64),
        pending_age_seconds=np.array(
            [max(moment - (job.submitted or moment), 0.0) for job in waiting], dtype=np.float64
        ),
        running_jobs=np.array([_number(job) for job in running], dtype=np.int64),
        pending_jobs=np.array([_number(job) for job in waiting], dtype=np.int64),
        running_start_seconds=np.array(
            [moment if job.starts is None else job.starts for job in running], dtype=np.float64
        ),
    )


def _in_line(job: QueuedJob) -> bool:
    reason = job.reason.replace(" ", "").lower()
    return job.nodes > 0 and not any(item in reason for item in _NOT_IN_LINE)


def _number(job: QueuedJob) -> int:
    return int(job.number) if job.number.isdigit() else -1


def _end(job: QueuedJob, now: float) -> float:
    if job.ends is not None:
        return max(job.ends, now + 1.0)
    return now + _limit(job)


def _limit(job: QueuedJob) -> float:
    limit = job.limit_seconds
    return _NO_LIMIT_SECONDS if limit is None or math.isinf(limit) else max(limit, 1.0)
