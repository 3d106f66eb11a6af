"""Jobs of a log or of a generator, as arrays sorted by submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outlast.errors import ClusterError

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Workload:
    """What was asked of a machine, and how long each job really ran.

    Attributes:
        submit_seconds: (jobs,) when each was submitted, ascending; the origin is the log's own.
        nodes: (jobs,) whole nodes that each held.
        limit_seconds: (jobs,) the wall time that its user asked for.
        run_seconds: (jobs,) how long its program runs if nothing stops it; beyond the limit where
            the log says that the limit ended it.
        machine_nodes: Size of the machine that the log is of.
        priority: (jobs,) what the site adds to each job's priority; None means 0.
        tier: (jobs,) priority tier of each job's partition; None means 0.
        start_seconds: (jobs,) when each really started; None where the log does not say, and for
            jobs whose arrivals were moved.
        name: Of the log, for tables.
        notes: What was left out or assumed when the log was read, one sentence each.
    """

    submit_seconds: Array
    nodes: Integers
    limit_seconds: Array
    run_seconds: Array
    machine_nodes: int
    priority: Array | None = None
    tier: Integers | None = None
    start_seconds: Array | None = None
    name: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ClusterError(f"workload {self.name!r}: " + "; ".join(problems))

    def __len__(self) -> int:
        return len(self.submit_seconds)

    @property
    def node_seconds(self) -> float:
        """Work in the log: nodes times the seconds that each job held them."""
        return float(np.sum(self.nodes * np.minimum(self.run_seconds, self.limit_seconds)))

    @property
    def load(self) -> float:
        """Work submitted per second of arrivals and node: 1 is all that the machine can do."""
        span = float(self.submit_seconds[-1] - self.submit_seconds[0]) if len(self) else 0.0
        return self.node_seconds / (span * self.machine_nodes) if span > 0 else 0.0

    def at_load(self, load: float) -> Workload:
        """The same jobs with arrivals stretched or compressed to a load."""
        if not load > 0:
            raise ClusterError(f"load = {load:g} must be above 0")
        if self.load == 0:
            raise ClusterError(f"workload {self.name!r} has no load to scale: it needs two jobs")
        first = self.submit_seconds[0]
        stretched = first + (self.submit_seconds - first) * (self.load / load)
        return replace(self, submit_seconds=stretched, start_seconds=None)

    def chosen(self, jobs: npt.NDArray[np.bool_] | Integers | slice) -> Workload:
        """Some of the jobs, by a mask, by ascending indices or by a slice."""
        return replace(
            self,
            submit_seconds=self.submit_seconds[jobs],
            nodes=self.nodes[jobs],
            limit_seconds=self.limit_seconds[jobs],
            run_seconds=self.run_seconds[jobs],
            priority=None if self.priority is None else self.priority[jobs],
            tier=None if self.tier is None else self.tier[jobs],
            start_seconds=None if self.start_seconds is None else self.start_seconds[jobs],
        )


def workload(
    submit_seconds: Sequence[float] | Array,
    nodes: Sequence[int] | Integers,
    limit_seconds: Sequence[float] | Array,
    run_seconds: Sequence[float] | Array,
    *,
    machine_nodes: int,
    priority: Sequence[float] | Array | None = None,
    tier: Sequence[int] | Integers | None = None,
    start_seconds: Sequence[float] | Array | None = None,
    name: str = "",
    notes: Sequence[str] = (),
) -> Workload:
    """A `Workload` of plain sequences in any order; jobs of one second keep their order."""
    submits = np.asarray(submit_seconds, dtype=np.float64)
    order = np.argsort(submits, kind="stable")
    return Workload(
        submit_seconds=submits[order],
        nodes=np.asarray(nodes, dtype=np.int64)[order],
        limit_seconds=np.asarray(limit_seconds, dtype=np.float64)[order],
        run_seconds=np.asarray(run_seconds, dtype=np.float64)[order],
        machine_nodes=machine_nodes,
        priority=None if priority is None else np.asarray(priority, dtype=np.float64)[order],
        tier=None if tier is None else np.asarray(tier, dtype=np.int64)[order],
        start_seconds=(
            None if start_seconds is None else np.asarray(start_seconds, dtype=np.float64)[order]
        ),
        name=name,
        notes=tuple(notes),
    )


def busiest(starts: Array, runs: Array, nodes: Integers) -> int:
    """Most nodes that were in use at once, by start times: the least size of the log's machine."""
    times = np.concatenate((starts, starts + runs))
    changes = np.concatenate((nodes, -nodes))
    # What ends at one second gives its nodes to what starts at it.
    order = np.lexsort((changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))


def _problems(jobs: Workload) -> list[str]:
    count = len(jobs.submit_seconds)
    arrays = (
        jobs.nodes,
        jobs.limit_seconds,
        jobs.run_seconds,
        jobs.priority,
        jobs.tier,
        jobs.start_seconds,
    )
    if any(len(array) != count for array in arrays if array is not None):
        return ["its arrays differ in length"]
    if jobs.machine_nodes < 1:
        return [f"machine_nodes = {jobs.machine_nodes} must be at least 1"]
    found = []
    if not np.all(np.isfinite(jobs.submit_seconds)) or np.any(np.diff(jobs.submit_seconds) < 0):
        found.append("submit_seconds must be finite and ascending")
    if np.any(jobs.nodes < 1) or np.any(jobs.nodes > jobs.machine_nodes):
        found.append(f"nodes must lie in 1 to machine_nodes = {jobs.machine_nodes}")
    if not np.all(jobs.limit_seconds > 0):
        found.append("limit_seconds must be above 0")
    if not np.all(jobs.run_seconds >= 0):
        found.append("run_seconds must not be below 0")
    return found
