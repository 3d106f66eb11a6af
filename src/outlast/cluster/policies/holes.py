"""What the queue leaves free: holes for fillers, and when a waiting job could start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from outlast.cluster.simulate.queue import Queue, forward
from outlast.cluster.simulate.settings import IDEAL
from outlast.cluster.workload.jobs import Array, Integers

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


def hole_seconds(queue: Queue, nodes: int, *, backfill: Backfill = "easy") -> float:
    """For how long that many nodes can be had now by a job put last into the queue; 0: not at all.

    No job that waits is delayed by it beyond what backfill allows: the first one (EASY, Lifka 1995)
    or any of them (conservative), if all use their whole limits.
    """
    if nodes > queue.free_nodes:
        return 0.0
    return forward(queue, backfill, IDEAL, None, None)[0].hole_seconds(nodes)


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
    """How many jobs wait before this one; None where it does not wait."""
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
