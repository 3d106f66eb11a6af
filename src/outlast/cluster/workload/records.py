"""What a log says of one job, and how many jobs of which kind become a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outlast.cluster.workload.jobs import Workload, busiest, workload
from outlast.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Record:
    """One job of a log; None where the log does not say.

    Attributes:
        submitted, started: Seconds.
        nodes: That it held.
        limit_seconds: Asked for; infinity without a limit.
        run_seconds: That it held them.
    """

    submitted: float | None
    started: float | None
    nodes: int | None
    limit_seconds: float | None
    run_seconds: float | None


def workload_of(
    records: Iterable[Record], *, machine_nodes: int | None, name: str, skipped: Counter[str]
) -> Workload:
    """The jobs that ran, as a workload.

    Args:
        records: In any order.
        machine_nodes: Size of the machine; None for the most nodes that the log shows in use.
        name: Of the log.
        skipped: Jobs that the reader left out, by reason.

    Raises:
        ClusterError: No job is left.
    """
    kept: list[tuple[float, float, int, float, float]] = []
    no_limit, starts_known = 0, True
    for record in records:
        if record.submitted is None or not record.nodes or record.nodes < 1:
            skipped["without submission or nodes"] += 1
        elif record.run_seconds is None or record.run_seconds <= 0:
            skipped["that never ran, or still do"] += 1
        elif machine_nodes is not None and record.nodes > machine_nodes:
            skipped[f"larger than the machine's {machine_nodes} nodes"] += 1
        else:
            limit = record.limit_seconds
            if limit is None or limit <= 0 or limit == np.inf:
                no_limit += 1
                limit = 0.0
            starts_known = starts_known and record.started is not None
            started = record.submitted if record.started is None else record.started
            kept.append((record.submitted, started, record.nodes, limit, record.run_seconds))
    if not kept:
        raise ClusterError(f"{name}: no job in it ran" + "".join(_words(skipped)))
    submits, starts, nodes, limits, runs = map(np.array, zip(*kept, strict=True))
    limits, runs = limits.astype(np.float64), runs.astype(np.float64)
    notes = [sentence.strip() for sentence in _words(skipped)]
    if no_limit:
        longest = float(max(limits.max(), runs.max()))
        limits = np.where(limits > 0, limits, longest)
        notes.append(
            f"{no_limit} jobs without a limit count as if they had asked for {longest:.0f} s, the "
            "longest in the log"
        )
    if machine_nodes is None:
        machine_nodes = max(busiest(starts, runs, nodes), int(nodes.max()))
        notes.append(f"the machine counts as {machine_nodes} nodes, the most in use at once")
    return workload(
        submits,
        nodes,
        limits,
        runs,
        machine_nodes=machine_nodes,
        start_seconds=starts if starts_known else None,
        name=name,
        notes=notes,
    )


def _words(skipped: Counter[str]) -> list[str]:
    return [f" {count} jobs {why} are left out" for why, count in sorted(skipped.items()) if count]
