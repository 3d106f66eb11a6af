"""What a queue shows at one moment, and when a job put into it would start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from outlast.cluster.simulate.book import Book
from outlast.cluster.simulate.settings import IDEAL, Settings
from outlast.cluster.workload.jobs import Array, Integers
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.simulate.engine import Simulation


@dataclass(frozen=True, eq=False, kw_only=True)
class Queue:
    """Running and pending jobs, as ``squeue`` shows them.

    Attributes:
        now_seconds: The moment, on the same clock as the ends.
        nodes: Nodes of the machine that are up, busy or free.
        running_nodes: (running,)
        running_end_seconds: (running,) when each will have reached its limit.
        pending_nodes: (pending,) in the order in which the scheduler takes them; only jobs that
            could start now, were there room (no dependency, no begin time ahead).
        pending_limit_seconds: (pending,)
        pending_priority: (pending,) descending; a candidate without a priority comes last.
        pending_age_seconds: (pending,) since each could have started.
        running_start_seconds: (running,) when each started, where that is known.
        running_jobs: (running,) their numbers, where they are known; pending_jobs likewise.
    """

    now_seconds: float
    nodes: int
    running_nodes: Integers
    running_end_seconds: Array
    pending_nodes: Integers
    pending_limit_seconds: Array
    pending_priority: Array
    pending_age_seconds: Array
    running_start_seconds: Array | None = None
    running_jobs: Integers | None = None
    pending_jobs: Integers | None = None

    @property
    def free_nodes(self) -> int:
        """Nodes without a job."""
        return max(0, self.nodes - int(self.running_nodes.sum()))


def queue_of(book: Book) -> Queue:
    """What a simulation's queue shows now."""
    pending = [entry[3] for entry in book.pending]
    running = [job for _, job in book.running]
    return Queue(
        now_seconds=book.now,
        nodes=book.up,
        running_nodes=np.array([book.need[job] for job in running], np.int64),
        running_end_seconds=np.array([book.release[job] for job in running], np.float64),
        pending_nodes=np.array([book.need[job] for job in pending], np.int64),
        pending_limit_seconds=np.array([book.limit[job] for job in pending], np.float64),
        pending_priority=np.array([book.priority_now(job) for job in pending], np.float64),
        pending_age_seconds=np.array([book.now - book.since(job) for job in pending], np.float64),
        running_start_seconds=np.array([book.start[job] for job in running], np.float64),
        running_jobs=np.array(running, np.int64),
        pending_jobs=np.array(pending, np.int64),
    )


def forecast_start(
    queue: Queue,
    nodes: int,
    limit_seconds: float,
    *,
    backfill: Literal["easy", "conservative"] = "easy",
    scheduler: Settings = IDEAL,
    priority: float | None = None,
    running_end_seconds: Array | None = None,
    pending_run_seconds: Array | None = None,
) -> float:
    """When a job submitted now would start, if no other came after it.

    Simulates the queue forward. Without the last two arguments every job uses its whole limit,
    which is what the scheduler itself believes.

    Args:
        queue: What is running and pending.
        nodes: That the job asks for.
        limit_seconds: That the job asks for.
        backfill: Kind of the scheduler.
        scheduler: Its configuration; ages and failures play no part.
        priority: The job's; None for behind all that are pending.
        running_end_seconds: (running,) when each running job really ends, at most its limit.
        pending_run_seconds: (pending,) how long each pending job really runs.

    Returns:
        Seconds on the queue's clock, at least `queue.now_seconds`.

    Raises:
        ClusterError: The machine has fewer nodes than are asked for.
    """
    if nodes > queue.nodes:
        raise ClusterError(f"nodes = {nodes} is more than the {queue.nodes} that are up")
    simulation, before = forward(
        queue, backfill, scheduler, running_end_seconds, pending_run_seconds
    )
    rank = (
        len(queue.pending_nodes)
        if priority is None
        else int(np.searchsorted(-queue.pending_priority, -priority, side="right"))
    )
    job = simulation.submit(nodes, limit_seconds, limit_seconds, priority=before - rank + 0.5)
    return simulation.run_until_start(job)


def forecast_starts(
    queue: Queue,
    candidates: Sequence[tuple[int, float]],
    *,
    backfill: Literal["easy", "conservative"] = "easy",
    scheduler: Settings = IDEAL,
    priority: float | None = None,
    running_end_seconds: Array | None = None,
    pending_run_seconds: Array | None = None,
) -> Array:
    """`forecast_start` of several (nodes, limit_seconds), each alone: (candidates,)."""
    return np.array(
        [
            forecast_start(
                queue,
                nodes,
                limit_seconds,
                backfill=backfill,
                scheduler=scheduler,
                priority=priority,
                running_end_seconds=running_end_seconds,
                pending_run_seconds=pending_run_seconds,
            )
            for nodes, limit_seconds in candidates
        ],
        dtype=np.float64,
    )


def forward(
    queue: Queue,
    backfill: Literal["easy", "conservative"],
    scheduler: Settings,
    running_end_seconds: Array | None,
    pending_run_seconds: Array | None,
) -> tuple[Simulation, int]:
    """A simulation in the queue's state, and the priority of its first pending job."""
    from dataclasses import replace

    from outlast.cluster.simulate.engine import Simulation

    still = replace(
        scheduler, age_weight=0.0, size_weight=0.0, preemption="off", node_failures_per_second=0.0
    )
    simulation = Simulation(queue.nodes, backfill=backfill, scheduler=still, now=queue.now_seconds)
    limits = queue.running_end_seconds
    ends = limits if running_end_seconds is None else running_end_seconds
    for nodes, limit, end in zip(
        queue.running_nodes.tolist(), limits.tolist(), ends.tolist(), strict=True
    ):
        simulation.place(nodes, limit, end)
    runs = queue.pending_limit_seconds if pending_run_seconds is None else pending_run_seconds
    before = len(queue.pending_nodes)
    for rank, (nodes, limit, run) in enumerate(
        zip(
            queue.pending_nodes.tolist(),
            queue.pending_limit_seconds.tolist(),
            runs.tolist(),
            strict=True,
        )
    ):
        simulation.submit(nodes, limit, run, priority=before - rank)
    return simulation, before
