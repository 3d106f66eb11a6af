"""Cost of a shared cluster to a run: queue wait, links of a chain, a shared file system.

Pure functions for the planner; needs no torch. Every figure that comes out is predicted.

A run of `work` seconds in links of wall time `W`, with `o` seconds of each link lost (restart,
last save, its lead) and a wait of `a + b W` before each link, takes `n = ceil(work / (W - o))`
links and `n a + (1 + b)(work + n o)` seconds, gaps apart: see `chain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from outlast.errors import ClusterError


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Queue wait as an affine function of the wall time requested.

    Attributes:
        fixed_seconds: `a`.
        per_wall_second: `b`: seconds of waiting for each second asked for.
    """

    fixed_seconds: float = 0.0
    per_wall_second: float = 0.0

    def __post_init__(self) -> None:
        _at_least("fixed_seconds", self.fixed_seconds)
        _at_least("per_wall_second", self.per_wall_second)

    def seconds(self, wall_seconds: float) -> float:
        """Of a job that asks for `wall_seconds`."""
        return self.fixed_seconds + self.per_wall_second * wall_seconds

    @classmethod
    def fit(cls, wall_seconds: Sequence[float], wait_seconds: Sequence[float]) -> QueueWait:
        """Least squares with neither term negative, over jobs of one size.

        Args:
            wall_seconds: What past jobs asked for, (jobs,).
            wait_seconds: How long each of them waited, (jobs,).

        Raises:
            ClusterError: No jobs, or unequal numbers.
        """
        if not wall_seconds or len(wall_seconds) != len(wait_seconds):
            raise ClusterError(
                f"{len(wall_seconds)} wall times and {len(wait_seconds)} waits: give as many of "
                "each, at least one"
            )
        count = len(wall_seconds)
        mean_wall, mean_wait = sum(wall_seconds) / count, sum(wait_seconds) / count
        pairs = list(zip(wall_seconds, wait_seconds, strict=True))
        spread = sum((wall - mean_wall) ** 2 for wall in wall_seconds)
        joint = sum((wall - mean_wall) * (wait - mean_wait) for wall, wait in pairs)
        slope = max(joint / spread, 0.0) if spread else 0.0
        if mean_wait >= slope * mean_wall:
            return cls(mean_wait - slope * mean_wall, slope)
        # The best line would start below zero: the best one through the origin.
        return cls(
            0.0, sum(wall * wait for wall, wait in pairs) / sum(wall**2 for wall in wall_seconds)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOverhead:
    """Overhead of one link of a chain: the time in which it does not train.

    Attributes:
        restart_seconds: From its start to the first step, on its nodes.
        save_seconds: Its last checkpoint, on its nodes.
        lead_seconds: By how much that begins earlier than it must.
        step_seconds: A link ends at a step, on average half of one early.
        gap_seconds: Between two links where nothing waits, on no nodes (measured on Slurm: 2.4 to
            3.0 s for a dependent job, 120 s more for a requeued one).
    """

    restart_seconds: float
    save_seconds: float
    lead_seconds: float = 0.0
    step_seconds: float = 0.0
    gap_seconds: float = 3.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _at_least(field.name, getattr(self, field.name))

    @property
    def seconds(self) -> float:
        """On the link's nodes: `o`."""
        return (
            self.restart_seconds + self.save_seconds + self.lead_seconds + self.step_seconds / 2.0
        )

    def waste(self, wall_seconds: float) -> float:
        """Share of a full link's node time without progress: `o / W`.

        Raises:
            ClusterError: The link has no time to train.
        """
        _trains(wall_seconds, self.seconds)
        return self.seconds / wall_seconds


@dataclass(frozen=True, slots=True)
class Chain:
    """Cost of a chain of equal links.

    Attributes:
        links: How many.
        seconds: From the first submission to the end.
        wait_seconds: Of it, in the queue and between links.
        overhead_seconds: Of it, on nodes without progress.
    """

    links: int
    seconds: float
    wait_seconds: float
    overhead_seconds: float

    @property
    def waste(self) -> float:
        """Share of the node time without progress."""
        return self.overhead_seconds / (self.seconds - self.wait_seconds)


def chain(
    work_seconds: float, wall_seconds: float, overhead: LinkOverhead, wait: QueueWait | None = None
) -> Chain:
    """A run cut into links of at most `wall_seconds`, each of which waits in the queue.

    The last link asks only for what it needs.

    Args:
        work_seconds: Time to train without any interruption, on the nodes of the chain.
        wall_seconds: Limit of a link; infinite for one long job.
        overhead: Of each link.
        wait: Of each link; without it nothing waits.

    Raises:
        ClusterError: A link has no time to train: the wall time is too short.
    """
    _at_least("work_seconds", work_seconds)
    lost, queue = overhead.seconds, wait or QueueWait()
    _trains(wall_seconds, lost)
    full = max(math.ceil(work_seconds / (wall_seconds - lost) - 1e-9), 1) - 1
    last = work_seconds + lost
    waiting = 0.0
    if full:
        last -= full * (wall_seconds - lost)
        waiting = full * (queue.seconds(wall_seconds) + overhead.gap_seconds)
    waiting += queue.seconds(last)
    lost_in_all = lost * (full + 1)
    return Chain(full + 1, work_seconds + lost_in_all + waiting, waiting, lost_in_all)


def contended_seconds(alone_seconds: float, load_of_others: float) -> float:
    """Time of a transfer on a file system whose bandwidth others use: `C / (1 - u)`.

    The mean of an M/G/1 queue with processor sharing, whatever the sizes of the transfers
    (Kleinrock, Queueing Systems II, section 4.4): each of those under way gets an equal share.

    Args:
        alone_seconds: `C`, at full bandwidth.
        load_of_others: `u`, the share of the bandwidth that the others' requests ask for.

    Raises:
        ClusterError: The others leave nothing.
    """
    _at_least("alone_seconds", alone_seconds)
    if not 0.0 <= load_of_others < 1.0:
        raise ClusterError(
            f"load_of_others = {load_of_others}: give a share of the bandwidth from 0 to below 1; "
            "at 1 no transfer ends"
        )
    return alone_seconds / (1.0 - load_of_others)


def save_waste(save_seconds: float, period_seconds: float, *, load_of_others: float = 0.0) -> float:
    """Share of the node time that saves which stop training take under contention: `C' / (C' + P)`.

    Args:
        save_seconds: Of one save at full bandwidth.
        period_seconds: From one save's end to the next one's begin.
        load_of_others: As for `contended_seconds`.

    Raises:
        ClusterError: The others leave no bandwidth.
    """
    slowed = contended_seconds(save_seconds, load_of_others)
    if not slowed:
        return 0.0
    _at_least("period_seconds", period_seconds)
    return slowed / (slowed + period_seconds)


def _trains(wall_seconds: float, overhead_seconds: float) -> None:
    if not wall_seconds > overhead_seconds:
        raise ClusterError(
            f"wall_seconds = {wall_seconds:g}: restart, last save and lead alone take "
            f"{overhead_seconds:g} s; ask for more"
        )


def _at_least(name: str, value: float) -> None:
    if not value >= 0.0 or math.isinf(value):
        raise ClusterError(f"{name} = {value}: give a finite number of at least 0")
