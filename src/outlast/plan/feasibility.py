"""Feasibility of legal layouts: settings that the cluster cannot serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError
from outlast.plan.fault_tolerance import smallest_groups
from outlast.plan.settings import NO_RECOVERY

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.settings import Settings
    from outlast.plan.space import Block


def missing_tier(cluster: Cluster, settings: Settings) -> str:
    """A sentence on the first checkpoint tier that the cluster lacks; empty where it has all."""
    storage = cluster.storage
    rates = {
        "peer": storage.peer_bytes_per_s,
        "local": storage.local_bytes_per_s,
        "shared": storage.shared_bytes_per_s,
    }
    for tier in settings.tiers:
        if rates.get(tier, 1.0) <= 0.0:
            other = "" if tier == "shared" else ", or leave the tier out"
            return (
                f"tiers = {', '.join(settings.tiers)}: {cluster.name} has no {tier} storage "
                f"({tier}_bytes_per_s = 0); give its rate under [storage] of the cluster file"
                f"{other}"
            )
    return ""


def possible(cluster: Cluster, block: Block) -> np.ndarray:
    """(candidates,) of bool: the settings go with the cluster and with the layout."""
    count = len(block.layouts)
    stored = np.array([not missing_tier(cluster, setting) for setting in block.settings])[
        block.setting
    ]
    if any(setting.recovery != NO_RECOVERY for setting in block.settings):
        stored = stored & _recoverable(cluster, block)
    copies = np.array([setting.coding_copies for setting in block.settings])
    if copies.max() == 1:
        return stored
    held = copies[block.setting]
    sharded = np.broadcast_to(block.layouts.sharding > 0.0, (count,))[block.layout]
    data = np.broadcast_to(block.layouts.data, (count,))[block.layout]
    found: np.ndarray = stored & ~((held > 1) & (sharded | (held > data)))
    return found


def _recoverable(cluster: Cluster, block: Block) -> np.ndarray:
    """(candidates,) of bool: the way to go on without a checkpoint goes with the layout."""
    chosen = [setting.recovery for setting in block.settings]
    whole, nodes = _whole_replicas(block), _nodes(cluster, block)
    coded = block.by_setting([setting.coding_copies > 1 for setting in block.settings]) > 0.0
    live = block.by_setting([recovery.mode == "live" for recovery in chosen]) > 0.0
    parity = block.by_setting([recovery.parity or 0 for recovery in chosen])
    largest = block.by_setting([recovery.parity_group for recovery in chosen])
    smallest = smallest_groups(nodes, largest)
    found: np.ndarray = ~(live & (~whole | coded)) & ((parity == 0.0) | (smallest > parity))
    return found


def _why_not_recoverable(cluster: Cluster, block: Block, row: int) -> str:
    settings = block.settings[int(block.setting[row])]
    recovery = settings.recovery
    if recovery == NO_RECOVERY or bool(_recoverable(cluster, block)[row]):
        return ""
    if recovery.mode == "live" and settings.coding_copies > 1:
        return (
            f"recovery = live does not go with coding_copies = {settings.coding_copies}, which "
            "sums over the replicas in its own way: set coding_copies = 1, or recovery = restart"
        )
    if recovery.mode == "live":
        return (
            "recovery = live goes with whole replicas on one device each alone: set sharding = "
            "none, tensor = 1, context = 1 and pipeline = 1, or recovery = restart"
        )
    return (
        f"recovery parity = {recovery.parity} needs groups of at least {recovery.parity + 1} "  # type: ignore[operator]
        f"nodes, and {_nodes(cluster, block)[row]:g} in groups of at most {recovery.parity_group} "
        "make smaller ones: take more nodes, raise parity_group, or lower parity"
    )


def _whole_replicas(block: Block) -> np.ndarray:
    """(candidates,) of bool: each device holds the whole model."""
    each = block.layouts
    whole = (each.sharding == 0.0) & (each.tensor * each.context * each.pipeline == 1.0)
    spread: np.ndarray = np.broadcast_to(whole, (len(each),))[block.layout]
    return spread


def _nodes(cluster: Cluster, block: Block) -> np.ndarray:
    devices = np.broadcast_to(block.layouts.devices, (len(block.layouts),))[block.layout]
    nodes: np.ndarray = np.ceil(devices / cluster.devices_per_node)
    return nodes


def why_impossible(cluster: Cluster, block: Block, row: int = 0) -> str:
    """A sentence on what a candidate cannot have; empty where it can have everything."""
    settings = block.settings[int(block.setting[row])]
    found = missing_tier(cluster, settings) or _why_not_recoverable(cluster, block, row)
    if found or settings.coding_copies == 1:
        return found
    at = int(block.layout[row])
    count = len(block.layouts)
    if np.broadcast_to(block.layouts.sharding, (count,))[at] > 0.0:
        return (
            f"coding_copies = {settings.coding_copies} goes with whole replicas alone, since "
            "sharded states are lost with their holder: set sharding = none, or coding_copies = 1"
        )
    data = int(np.broadcast_to(block.layouts.data, (count,))[at])
    if settings.coding_copies > data:
        return (
            f"coding_copies = {settings.coding_copies} of each chunk need as many replicas, and "
            f"data = {data}: raise data, or lower coding_copies"
        )
    return ""


def refuse_impossible(cluster: Cluster, block: Block) -> None:
    """Refuse candidates none of which is possible, whatever memory they take.

    Raises:
        PlanError: With the reasons, a sentence each.
    """
    if not len(block) or possible(cluster, block).any():
        return
    firsts = np.unique(block.setting, return_index=True)[1]
    reasons = dict.fromkeys(why_impossible(cluster, block, int(row)) for row in firsts)
    raise PlanError("\n".join(reasons))


def out_of_memory(run: Configuration, pressing: float, usable_bytes: float) -> str:
    """A sentence on a run that needs more memory than the allocator can get."""
    return (
        f"out of memory: {pressing * usable_bytes / 2**30:,.1f} GiB are needed and the allocator "
        f"can get {usable_bytes / 2**30:,.1f} GiB with {_settings(run)}; recompute, shard or "
        "divide more, lower micro_batch, or take more devices"
    )


def in_cliff(run: Configuration, reserved_bytes: float, capacity_bytes: float) -> str:
    """A sentence on a run that is several times slower, since hardly any memory is left."""
    return (
        f"in the memory cliff: {reserved_bytes / 2**30:,.1f} GiB of {capacity_bytes / 2**30:,.1f} "
        f"GiB are reserved with {_settings(run)}, so that the allocator gives back and asks again "
        "in every step; recompute, shard or divide more, or lower micro_batch"
    )


def _settings(run: Configuration) -> str:
    return (
        f"micro_batch = {run.micro_batch}, sharding = {run.sharding}, tensor = {run.tensor}, "
        f"recompute = {run.recompute}"
    )
