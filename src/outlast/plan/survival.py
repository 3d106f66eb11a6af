"""How candidates get through failures: their checkpoint tiers and intervals, guard, code, restarts.

Prices of checkpoints come from `outlast.checkpoint.cost`, once for each different combination of
nodes, state and tiers; `reliability` does the rest for all candidates at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.checkpoint.cost import Failures, SaveCost, Sizes, choose_tiers, save_seconds
from outlast.errors import PlanError
from outlast.plan.reliability.goodput import Goodput, goodput
from outlast.plan.reliability.recovery import (
    DAY_SECONDS,
    Guard,
    Pace,
    Reliability,
    Replicas,
    Restart,
    Tier,
    lost_nodes,
)
from outlast.recover.cost import transfer_seconds

if TYPE_CHECKING:
    from outlast.plan.cases import Array
    from outlast.plan.cluster import Cluster
    from outlast.plan.context import Context
    from outlast.plan.mechanisms import Step
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.pareto.space import Block

STAGING_BYTES_PER_S = 4e10
"""Prior, of a node from its devices to its memory, where the cluster says nothing: two PCIe 4 links
at two thirds of their rate (`outlast.hardware`: 31 GB/s each)."""
ABSENT_BYTES_PER_S = 1e15
"""Of a tier that the cluster lacks. A run with it is impossible (`unfit` says so), and its other
figures are as if saving there took no time."""
ENCODING_BYTES_PER_S = 2e9
"""Prior, of a node: what two writers of `outlast.checkpoint` encode (docs/checkpoint.md)."""
WRITING_SLOWDOWN = 0.02
"""Prior: by how much a step is longer while a save is written."""
NO_FAILURES_SECONDS = 3600.0
"""Between saves where nothing is expected to fail."""
SURVIVES = {"memory": 0.0, "local": 0.0, "peer": 1.0, "shared": np.inf}
"""Nodes lost at once that a tier outlives; the order is that of the tiers."""
LEAST_RATE = 1e-12
LEAST_OVERHEAD_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Survival:
    """Arrays have shape (candidates,).

    Attributes:
        run: The candidates as `reliability` sees them.
        goodput: ETTR and what the rest is lost to.
        interval_seconds: Between saves of the tier that saves most often.
    """

    run: Reliability
    goodput: Goodput
    interval_seconds: Array


@dataclass(frozen=True, slots=True)
class _Saves:
    """Of one combination: interval, and for each of `SURVIVES` every, costs and restore seconds."""

    interval: float
    every: tuple[int, ...]
    costs: tuple[SaveCost, ...]
    restores: tuple[float, ...]


def survival(context: Context, block: Block, step: Step) -> Survival:
    """Goodput of candidates.

    Args:
        context: What the candidates share.
        block: The candidates.
        step: Their steps.
    """
    cluster, count = context.cluster, len(block.layouts)
    nodes_of = np.ceil(block.layouts.devices / cluster.devices_per_node)
    nodes = np.broadcast_to(nodes_of, (count,))[block.layout]
    weights = np.broadcast_to(
        np.where(block.layouts.half > 0.0, block.layouts.value_bytes + 12.0, 12.0), (count,)
    )[block.layout]
    state = step.parameters * weights

    keys = np.column_stack([block.setting, nodes, state])
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    table = [
        _saves(context, block.settings[int(setting)], number, held)
        for setting, number, held in found
    ]
    at = inverse.ravel()
    interval = np.array([each.interval for each in table])[at]
    run = Reliability(
        nodes=nodes,
        causes=cluster.failures,
        interval_seconds=interval,
        tiers=tuple(_tier(table, at, number) for number in range(len(SURVIVES))),
        restart=Restart(
            restart_seconds=context.restart.restart_seconds,
            replace_seconds=context.restart.replace_seconds,
            spares=cluster.spares,
        ),
        replicas=_replicas(block, step),
        guard=Guard(
            coverage=step.guard_coverage,
            overhead=step.guard_overhead,
            latency_seconds=step.seconds,
            correction_seconds=step.seconds,
            noticed=0.5,
        ),
        pace=Pace(coding_ratio=step.coding_ratio, coding_overhead=step.coding_overhead),
    )
    return Survival(run, goodput(run), interval)


def _rate(cluster: Cluster, tier: str) -> float:
    """Bytes per second of a node, of the whole cluster for shared storage."""
    storage = cluster.storage
    if tier == "memory":
        return storage.memory_bytes_per_s or STAGING_BYTES_PER_S
    rate = {
        "peer": storage.peer_bytes_per_s,
        "local": storage.local_bytes_per_s,
        "shared": storage.shared_bytes_per_s,
    }[tier]
    return rate if rate > 0.0 else ABSENT_BYTES_PER_S


def _saves(context: Context, settings: Settings, nodes: float, state: float) -> _Saves:
    cluster = context.cluster
    if "shared" not in settings.tiers:
        raise PlanError(
            f"tiers = {', '.join(settings.tiers)}: nothing is left when a node is lost for good; "
            "add shared"
        )
    sizes = Sizes(state_bytes=state)
    staging = state / (nodes * _rate(cluster, "memory"))
    used = [tier for tier in SURVIVES if tier in settings.tiers]
    priced = {}
    for tier in used:
        rate = _rate(cluster, tier) * (1.0 if tier == "shared" else nodes)
        written = save_seconds(sizes, ENCODING_BYTES_PER_S * nodes, rate)
        write = 0.0 if tier == "memory" else written
        blocked = max(staging, LEAST_OVERHEAD_SECONDS)
        priced[tier] = SaveCost(blocked, write, WRITING_SLOWDOWN), transfer_seconds(state, rate)
    rates = _rates(cluster, used, nodes)
    if sum(rates) <= 0.0:
        base, every = NO_FAILURES_SECONDS, tuple(1 for _ in used)
    else:
        waits = context.restart.restart_seconds
        chosen = choose_tiers(
            [
                (
                    priced[tier][0],
                    Failures(max(rate, LEAST_RATE), float(np.max(waits)), priced[tier][1]),
                )
                for tier, rate in zip(used, rates, strict=True)
            ]
        )
        base, every = chosen.base_seconds, chosen.every
    base = settings.checkpoint_seconds or base
    # A version must be durable before the next one of its tier is begun.
    shortest = max(
        priced[tier][0].latency_seconds / times
        for tier, times in zip(used, every, strict=True)
        if times
    )
    counts = dict(zip(used, every, strict=True))
    blank = SaveCost(0.0), 0.0
    return _Saves(
        max(base, shortest),
        tuple(counts.get(tier, 0) for tier in SURVIVES),
        tuple(priced.get(tier, blank)[0] for tier in SURVIVES),
        tuple(priced.get(tier, blank)[1] for tier in SURVIVES),
    )


def _rates(cluster: Cluster, used: list[str], nodes: float) -> list[float]:
    """Failures per second that each tier survives and none before it does."""
    rates = [0.0] * len(used)
    for cause in cluster.failures:
        place = next(n for n, tier in enumerate(used) if SURVIVES[tier] >= lost_nodes(cause))
        rates[place] += nodes * cause.per_node_day / cause.nodes_hit / DAY_SECONDS
    return rates


def _tier(table: list[_Saves], at: np.ndarray, number: int) -> Tier:
    name, outlives = list(SURVIVES.items())[number]

    def column(values: list[float]) -> Array:
        spread: Array = np.array(values, dtype=np.float64)[at]
        return spread

    return Tier(
        name=name,
        survives_nodes=outlives,
        every=column([float(each.every[number]) for each in table]),
        blocked_seconds=column([each.costs[number].blocked_seconds for each in table]),
        write_seconds=column([each.costs[number].write_seconds for each in table]),
        slowdown=column([each.costs[number].slowdown for each in table]),
        restore_seconds=column([each.restores[number] for each in table]),
    )


def _replicas(block: Block, step: Step) -> Replicas:
    """Workers of a gradient code: all but as many as hold a chunk may be lost without a restart."""
    copies = np.array([each.coding_copies for each in block.settings])[block.setting]
    if copies.max() == 1:
        return Replicas()
    data = np.broadcast_to(block.layouts.data, (len(block.layouts),))[block.layout]
    groups = np.where(copies > 1, data, 1.0)
    least = np.where(copies > 1, np.maximum(data - copies + 1.0, 1.0), 1.0)
    return Replicas(groups=groups, minimum=least, step_seconds=step.seconds)
