"""States that nodes keep in their memory for a restart, and replica groups that go on live.

Prices come from `outlast.recover.cost`; here they are asked for once per different node, and spread
over the candidates. Ranks are placed as the trainer does: stages outermost, then replicas, then
what divides one replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.plan.reliability.recovery import Replicas, Tier, lost_nodes
from outlast.recover.cost import (
    RECONNECT_SECONDS,
    SILENCE_SHARE,
    detection_seconds,
    keep_seconds,
    parity_groups,
    parity_seconds,
    rebuild_seconds,
    transfer_seconds,
)

if TYPE_CHECKING:
    from outlast.plan.cases import Array
    from outlast.plan.cluster import Cluster
    from outlast.plan.mechanisms import Step
    from outlast.plan.pareto.space import Block

SLACK_SHARE = 0.5
"""Prior: of a step, in which devices compute and links and the host's memory are free."""
SOCKET_BYTES_PER_S = 4e9
"""Prior, of a process that sends to another one over sockets, as `outlast.recover` does."""
COMBINE_BYTES_PER_S = 3e9
"""Prior, of a process that sums stripes of parity."""
NOT_KEPT = -1.0
"""Nodes that may be lost where nothing is kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What keeping states costs and survives; arrays have shape (candidates,).

    Attributes:
        outlives: Nodes lost together of which a state is left; `NOT_KEPT` where none is kept.
        every_seconds: Running time from one kept state to the next.
        blocked_seconds: By how much keeping one makes a step longer.
        copied_seconds: Until a node has its copy.
        safe_seconds: Until its parity is there, too.
        load_seconds: To load the state from the node's own memory.
        rebuild_seconds: To have a lost node's state first, from parity or from a replica.
    """

    outlives: Array
    every_seconds: Array
    blocked_seconds: Array
    copied_seconds: Array
    safe_seconds: Array
    load_seconds: Array
    rebuild_seconds: Array

    @property
    def used(self) -> np.ndarray:
        """(candidates,) of bool."""
        return self.outlives > NOT_KEPT

    def tiers(self, cluster: Cluster) -> list[Tier]:
        """One for each number of nodes that the cluster's failures take; together they cost once.

        From the one that survives least; where a candidate's state survives less, it is not used.
        """
        losses = sorted({0, *(lost_nodes(cause) for cause in cluster.failures)})
        return [
            Tier(
                name="kept" if lost == 0 else f"kept, {lost} lost",
                survives_nodes=float(lost),
                every=np.where(self.outlives >= lost, 1.0, 0.0),
                blocked_seconds=self.blocked_seconds if lost == 0 else 0.0,
                write_seconds=self.copied_seconds if lost == 0 else self.safe_seconds,
                restore_seconds=self.load_seconds + (self.rebuild_seconds if lost else 0.0),
                kept=True,
            )
            for lost in losses
        ]


def kept_states(
    cluster: Cluster, block: Block, step: Step, *, nodes: Array, state: Array, memory_rate: float
) -> Kept | None:
    """What the candidates keep; None where none of them keeps anything.

    Args:
        cluster: On what they run.
        block: The candidates.
        step: Their steps.
        nodes: (candidates,) that they take.
        state: (candidates,) bytes, every replica counted once.
        memory_rate: Bytes per second between a node's devices and its memory.
    """
    chosen = [setting.recovery for setting in block.settings]
    if all(recovery.mode != "restart" for recovery in chosen):
        return None
    devices, held, copies = _held(block, cluster, state)
    wanted = block.by_setting(
        [-1.0 if recovery.parity is None else recovery.parity for recovery in chosen]
    )
    largest = block.by_setting([recovery.parity_group for recovery in chosen])
    used = block.by_setting([recovery.mode == "restart" for recovery in chosen]) > 0.0
    used &= devices > 1.0
    processes = np.minimum(devices, cluster.devices_per_node)
    sockets = cluster.storage.peer_bytes_per_s / cluster.devices_per_node
    link = sockets or min(cluster.fabric_bytes_per_s, SOCKET_BYTES_PER_S)
    keys = np.column_stack([nodes, held, copies, wanted, largest, processes])
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    prices = np.array([_price(row, link, memory_rate) for row in found])[inverse.ravel()]
    outlives, copy, parity, load, rebuild = np.where(used[:, None], prices, 0.0).T
    # Copying takes a processor's own time, and a device's step does not notice it.
    slack = np.zeros(len(block)) if cluster.processor else SLACK_SHARE * step.seconds
    every = block.by_setting([recovery.every_steps for recovery in chosen])
    return Kept(
        outlives=np.where(used, outlives, NOT_KEPT),
        every_seconds=every * step.seconds,
        blocked_seconds=np.maximum(copy + parity - slack, 0.0),
        copied_seconds=np.minimum(copy, slack),
        safe_seconds=np.minimum(copy + parity, slack),
        load_seconds=load,
        rebuild_seconds=rebuild,
    )


def smallest_groups(nodes: Array, largest: Array) -> Array:
    """(candidates,) nodes of the smallest group that shares parity."""
    found, inverse = np.unique(np.column_stack([nodes, largest]), axis=0, return_inverse=True)
    sizes = [parity_groups(int(count), int(most))[0] for count, most in found]
    return np.array(sizes, dtype=np.float64)[inverse.ravel()]


def _held(block: Block, cluster: Cluster, state: Array) -> tuple[Array, Array, Array]:
    """(candidates,) devices, bytes that a node keeps, and nodes that hold the same."""
    layouts, count = block.layouts, len(block.layouts)

    def spread(values: Array) -> Array:
        rows: Array = np.broadcast_to(values, (count,))[block.layout]
        return rows

    sharded = layouts.sharding > 0.0
    divided = np.where(sharded, layouts.sharding_ranks, layouts.expert)
    replicas = spread(np.maximum(layouts.data // divided, 1.0))
    # Ranks from a rank to the one that holds the same; and parts that differ among them.
    apart = spread(layouts.tensor * layouts.context * divided)
    parts = spread(layouts.tensor * divided * np.where(sharded, layouts.context, 1.0))
    stages, devices = spread(layouts.pipeline), spread(layouts.devices)
    node = float(cluster.devices_per_node)
    copies = np.minimum(replicas, np.ceil(((replicas - 1.0) * apart + 1.0) / node))
    stages_here = np.clip(node / (replicas * apart), 1.0, stages)
    here = np.minimum(np.minimum(node, devices), parts * stages_here)
    return devices, state / (stages * parts) * here, copies


def _price(row: Array, link: float, memory_rate: float) -> tuple[float, float, float, float, float]:
    """Of one kind of node: lost nodes outlived, seconds of copy, parity, load and rebuild."""
    nodes, held, copies, wanted, largest, processes = row.tolist()
    smallest, size = parity_groups(int(nodes), int(largest))
    losses = int(wanted)
    if wanted < 0.0:
        losses = int(copies < 2.0)
    if smallest <= losses:
        losses = 0
    share = held / processes
    copy = keep_seconds(held, memory_rate)
    parity = parity_seconds(share, losses, link, COMBINE_BYTES_PER_S)
    rebuild = transfer_seconds(share, link)
    if losses > copies - 1.0:
        rebuild = rebuild_seconds(share, size, link, COMBINE_BYTES_PER_S)
    return max(copies - 1.0, losses), copy, parity, transfer_seconds(held, memory_rate), rebuild


def live_replicas(cluster: Cluster, block: Block, step: Step, state: Array) -> Replicas | None:
    """Groups of the candidates that go on live; None where none does.

    Args:
        cluster: On what they run.
        block: The candidates.
        step: Their steps.
        state: (candidates,) bytes of a group.
    """
    chosen = [setting.recovery for setting in block.settings]
    live = block.by_setting([recovery.mode == "live" for recovery in chosen]) > 0.0
    if not live.any():
        return None
    data = np.broadcast_to(block.layouts.data, (len(block.layouts),))[block.layout]
    silence = [
        detection_seconds(
            look_seconds=0.0, silence_seconds=SILENCE_SHARE * recovery.heartbeat_seconds
        )
        for recovery in chosen
    ]
    link = min(cluster.fabric_bytes_per_s, SOCKET_BYTES_PER_S)
    sizes, inverse = np.unique(state, return_inverse=True)
    healing = np.array([transfer_seconds(float(size), link) for size in sizes])[inverse.ravel()]
    return Replicas(
        groups=np.where(live, data, 1.0),
        step_seconds=np.where(live, step.seconds, 0.0),
        regroup_seconds=np.where(live, RECONNECT_SECONDS, 0.0),
        rejoin_seconds=np.where(live, RECONNECT_SECONDS, 0.0),
        recovery_seconds=np.where(live, healing, 0.0),
        detection_seconds=np.where(live, block.by_setting(silence), 0.0),
    )
