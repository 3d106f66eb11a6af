"""How the simulated scheduler is set up, in Slurm's terms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from outlast.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A scheduler's configuration; the default is ideal: it looks at every event, at once.

    Attributes:
        backfill_interval_seconds: Least time between two backfill passes (``bf_interval``); 0 for
            a pass at every event. Jobs at the front of the queue start at once in any case.
        backfill_phase_seconds: Passes come at whole intervals before or after this moment, as in a
            busy Slurm; None for as soon as the interval is over.
        backfill_resolution_seconds: Conservative plans are made in steps of this length
            (``bf_resolution``): ends of reservations are rounded down to it; 0 for exact times.
        backfill_window_seconds: How far ahead reservations are made (``bf_window``).
        backfill_jobs: Most pending jobs that a backfill pass looks at (``bf_max_job_test``).
        end_window_seconds: Conservative plans count ends of running jobs in batches: all within
            this time of the batch's first count as its last, and each batch's time doubles
            (what ``bf_window_linear`` changes; 30 s in Slurm); 0 for exact ends.
        named_nodes: Conservative plans reserve certain nodes, as Slurm's do, not only a number of
            them; slower, and no nodes may fail.
        age_weight: Priority of a job that has waited `age_seconds` (``PriorityWeightAge``).
        age_seconds: Waiting beyond this adds nothing (``PriorityMaxAge``).
        size_weight: Priority of a job as large as the machine (``PriorityWeightJobSize``).
        ages_while_dependent: Age counts from submission, also while a job waits for another
            (``PriorityFlags=ACCRUE_ALWAYS``); otherwise from when it could start.
        priority_seconds: Ages are read this often (``PriorityCalcPeriod``).
        preemption: What becomes of a running job whose nodes a job of a higher tier takes
            (``PreemptMode``).
        requeue_seconds: A requeued job cannot start again sooner; Slurm's BeginTime adds 120 s.
        completing_seconds: Nodes are free again this long after their job's end.
        node_failures_per_second: Of each node.
        repair_seconds: Mean time until a failed node is back (exponential).
        after_failure: Whether a job whose node failed is queued again (``JobRequeue``) or ends.
    """

    backfill_interval_seconds: float = 0.0
    backfill_phase_seconds: float | None = None
    backfill_resolution_seconds: float = 0.0
    backfill_window_seconds: float = math.inf
    backfill_jobs: int = 1_000_000_000
    end_window_seconds: float = 0.0
    named_nodes: bool = False
    age_weight: float = 0.0
    age_seconds: float = 7 * 86400.0
    size_weight: float = 0.0
    ages_while_dependent: bool = False
    priority_seconds: float = 300.0
    preemption: Literal["off", "requeue", "cancel"] = "off"
    requeue_seconds: float = 120.0
    completing_seconds: float = 0.0
    node_failures_per_second: float = 0.0
    repair_seconds: float = 3600.0
    after_failure: Literal["requeue", "fail"] = "requeue"

    def __post_init__(self) -> None:
        for name in (
            "backfill_interval_seconds",
            "backfill_resolution_seconds",
            "end_window_seconds",
            "requeue_seconds",
            "completing_seconds",
            "node_failures_per_second",
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ClusterError(f"{name} = {value:g} must be finite and not below 0")
        for name in ("backfill_window_seconds", "age_seconds", "priority_seconds"):
            if not getattr(self, name) > 0:
                raise ClusterError(f"{name} = {getattr(self, name):g} must be above 0")
        if not 0 < self.repair_seconds < math.inf:
            raise ClusterError(f"repair_seconds = {self.repair_seconds:g} must be finite, above 0")
        if self.named_nodes and self.node_failures_per_second:
            raise ClusterError("named_nodes and node_failures_per_second exclude each other")
        if self.backfill_jobs < 1:
            raise ClusterError(f"backfill_jobs = {self.backfill_jobs} must be at least 1")


IDEAL = Settings()
"""Looks at every event, at once, over the whole queue."""

SLURM = Settings(
    backfill_interval_seconds=30.0,
    backfill_resolution_seconds=60.0,
    backfill_window_seconds=86400.0,
    backfill_jobs=500,
    end_window_seconds=30.0,
)
"""The defaults of ``SchedulerParameters`` in Slurm 22.05, with first in, first out."""
