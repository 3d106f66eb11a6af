"""Fault tolerance of candidates: tiers, intervals, replicas, states in memory, what cannot be.

Prices come from `outlast.recover.cost`; here they are asked for once per different node, and spread
over the candidates. Ranks are placed as the trainer does: stages outermost, then replicas, then
what divides one replica.

Prices of checkpoints come from `outlast.checkpoint.cost`, once for each different combination of
nodes, state and tiers, those of recovery without them through `kept`; `reliability` does the rest
for all candidates at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from outlast.checkpoint.cost import Failures, SaveCost, Sizes, choose_tiers, save_seconds
from outlast.errors import PlanError
from outlast.plan.batch import once_each
from outlast.plan.goodput import Goodput, goodput
from outlast.plan.reliability import (
    DAY_SECONDS,
    Guard,
    Pace,
    Reliability,
    Replicas,
    Tier,
    lost_nodes,
)
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
    from outlast.plan.batch import Array, Mask
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Settings
    from outlast.plan.mechanisms import Step
    from outlast.plan.model import Context
    from outlast.plan.space import Block


SLACK_SHARE = 0.5
"""Prior: of a step, in which devices compute and links and the host's memory are free."""
SOCKET_BYTES_PER_S = 4e9
"""Prior, of a process that sends to another one over sockets, as `outlast.recover` does."""
COMBINE_BYTES_PER_S = 3e9
"""Prior, of a process that sums stripes of parity."""
NOT_KEPT = -1.0
"""Nodes that may be lost where nothing is kept."""


@dataclass(frozen=True, slots=True)
class InMemoryCheckpoints:
    """Cost and survivors of in-memory checkpoints; arrays have shape (candidates,).

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


def in_memory_checkpoints(
    cluster: Cluster, block: Block, step: Step, *, nodes: Array, state: Array, memory_rate: float
) -> InMemoryCheckpoints | None:
    """In-memory checkpoints of the candidates; None where none of them keeps anything.

    Args:
        cluster: On what they run.
        block: The candidates.
        step: Their steps.
        nodes: (candidates,) that they take.
        state: (candidates,) bytes, every replica counted once.
        memory_rate: Bytes per second between a node's devices and its memory.
    """
    if all(setting.recovery.mode != "restart" for setting in block.settings):
        return None
    devices, held, copies = _held(block, cluster, state)
    wanted = block.by_setting(
        lambda setting: -1 if setting.recovery.parity is None else setting.recovery.parity
    )
    largest = block.by_setting(lambda setting: setting.recovery.parity_group)
    used = block.by_setting(lambda setting: setting.recovery.mode == "restart") & (devices > 1.0)
    processes = np.minimum(devices, cluster.devices_per_node)
    sockets = cluster.storage.peer_bytes_per_s / cluster.devices_per_node
    link = sockets or min(cluster.fabric_bytes_per_s, SOCKET_BYTES_PER_S)
    price = partial(_price, link, memory_rate)
    prices = once_each(price, nodes, held, copies, wanted, largest, processes)
    outlives, copy, parity, load, rebuild = np.where(used[:, None], prices, 0.0).T
    # Copying takes a processor's own time, and a device's step does not notice it.
    slack = np.zeros(len(block)) if cluster.processor else SLACK_SHARE * step.seconds
    every = block.by_setting(lambda setting: setting.recovery.every_steps)
    return InMemoryCheckpoints(
        outlives=np.where(used, outlives, NOT_KEPT),
        every_seconds=every * step.seconds,
        blocked_seconds=np.maximum(copy + parity - slack, 0.0),
        copied_seconds=np.minimum(copy, slack),
        safe_seconds=np.minimum(copy + parity, slack),
        load_seconds=load,
        rebuild_seconds=rebuild,
    )


def _held(block: Block, cluster: Cluster, state: Array) -> tuple[Array, Array, Array]:
    """(candidates,) devices, bytes that a node keeps, and nodes that hold the same."""
    layouts, spread = block.layouts, block.spread
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


def _price(
    link: float, memory_rate: float, *node: float
) -> tuple[float, float, float, float, float]:
    """Of one kind of node: lost nodes outlived, seconds of copy, parity, load and rebuild."""
    nodes, held, copies, wanted, largest, processes = node
    smallest, size = parity_groups(int(nodes), int(largest))
    losses = int(copies < 2.0) if wanted < 0.0 else int(wanted)
    losses = losses if smallest > losses else 0
    share = held / processes
    copy = keep_seconds(held, memory_rate)
    parity = parity_seconds(share, losses, link, COMBINE_BYTES_PER_S)
    rebuild = transfer_seconds(share, link)
    if losses > copies - 1.0:
        rebuild = rebuild_seconds(share, size, link, COMBINE_BYTES_PER_S)
    return max(copies - 1.0, losses), copy, parity, transfer_seconds(held, memory_rate), rebuild


STAGING_BYTES_PER_S = 4e10
"""Prior, of a node from its devices to its memory, where the cluster says nothing: two PCIe 4 links
at two thirds of their rate (`outlast.hardware`: 31 GB/s each)."""
ABSENT_BYTES_PER_S = 1e15
"""Of a tier that the cluster lacks. A run with it is impossible (`possible`), and its other
figures are as if saving there took no time."""
ENCODING_BYTES_PER_S = 2e9
"""Prior, of a node: what two writers of `outlast.checkpoint` encode (docs/checkpoint.md)."""
WRITING_SLOWDOWN = 0.02
"""Prior: by how much a step is longer while a save is written."""
NO_FAILURES_SECONDS = 3600.0
"""Between saves where nothing is expected to fail."""
SURVIVES = {"memory": 0.0, "local": 0.0, "peer": 1.0, "shared": np.inf}
"""Nodes lost at once that a tier outlives; the order is that of the tiers."""
MOST_KEPT = 100_000.0
"""States kept in memory between two checkpoints, however seldom anything fails."""
NOTICED = 0.5
"""Own prior: of the wrong values that no guard finds, the share that people notice, as a loss that
rises; the others stay in the model."""
LEAST_RATE = 1e-12
LEAST_OVERHEAD_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class FaultTolerance:
    """Arrays have shape (candidates,).

    Attributes:
        run: The candidates as `reliability` sees them.
        goodput: ETTR and what the rest is lost to.
        interval_seconds: Between saves of the tier of checkpoints that saves most often.
    """

    run: Reliability
    goodput: Goodput
    interval_seconds: Array


def fault_tolerance(context: Context, block: Block, step: Step) -> FaultTolerance:
    """Goodput of candidates.

    Args:
        context: What the candidates share.
        block: The candidates.
        step: Their steps.
    """
    cluster, layouts = context.cluster, block.layouts
    nodes = _nodes(cluster, block)
    state = step.parameters * block.spread(
        np.where(layouts.half > 0.0, layouts.value_bytes + 12.0, 12.0)
    )
    kept = in_memory_checkpoints(
        cluster, block, step, nodes=nodes, state=state, memory_rate=_rate(cluster, "memory")
    )
    left = np.full(len(block), NOT_KEPT) if kept is None else kept.outlives
    keys = np.column_stack([block.setting, nodes, state, left])
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    saves = [_saves(context, block.settings[int(setting)], *others) for setting, *others in found]
    interval, shortest, prices = (
        np.array(column)[inverse.ravel()] for column in zip(*saves, strict=True)
    )
    base, times = interval, np.ones(1)
    if kept is not None:
        given = block.by_setting(lambda setting: setting.checkpoint_seconds)
        most = np.where(given > 0.0, np.inf, MOST_KEPT)
        longest = np.maximum(shortest, most * kept.every_seconds)
        base = np.where(kept.used, kept.every_seconds, interval)
        # Base intervals from checkpoint to checkpoint: a whole number, and no save begins before
        # the last one is durable.
        times = np.ceil(np.minimum(interval, longest) / base * (1.0 - 1e-9))
        times = np.where(kept.used, np.maximum(times, 1.0), 1.0)
        interval = base * times
    tiers = [
        Tier(
            name=name,
            survives_nodes=outlives,
            every=every * times,
            blocked_seconds=blocked,
            write_seconds=write,
            slowdown=slowdown,
            restore_seconds=restore,
        )
        for (name, outlives), price in zip(SURVIVES.items(), prices.swapaxes(0, 1), strict=True)
        for every, blocked, write, slowdown, restore in [price.T]
    ]
    tiers += [] if kept is None else kept.tiers(cluster)
    run = Reliability(
        nodes=nodes,
        causes=cluster.failures,
        interval_seconds=base,
        # What is kept goes first among those that survive as much: it is newest.
        tiers=tuple(sorted(tiers, key=lambda tier: (tier.survives_nodes, not tier.kept))),
        restart=replace(context.restart, spares=cluster.spares),
        replicas=_replicas(cluster, block, step, state),
        guard=Guard(
            coverage=step.guard_coverage,
            overhead=step.guard_overhead,
            latency_seconds=step.seconds,
            correction_seconds=step.seconds,
            noticed=NOTICED,
        ),
        pace=Pace(
            straggler_factor=step.straggler_factor,
            # A simulated step has the claims in it, which are a term of their own.
            coding_ratio=step.coding_ratio / (1.0 + step.coding_overhead),
            coding_overhead=step.coding_overhead,
        ),
    )
    return FaultTolerance(run, goodput(run), interval)


def _rate(cluster: Cluster, tier: str) -> float:
    """Bytes per second of a node, of the whole cluster for shared storage."""
    rate: float = getattr(cluster.storage, f"{tier}_bytes_per_s")
    if tier == "memory":
        return rate or STAGING_BYTES_PER_S
    return rate if rate > 0.0 else ABSENT_BYTES_PER_S


def _saves(
    context: Context, settings: Settings, nodes: float, state: float, outlives: float = NOT_KEPT
) -> tuple[float, float, list[tuple[float, ...]]]:
    """Of the tiers that survive more than `outlives` nodes, which memory does without them.

    Returns:
        The interval; the shortest one in which all saves become durable; and for each of
        `SURVIVES` intervals between its saves, blocked seconds, seconds of the write, the slowdown
        meanwhile and seconds of the restore, all 0 of one that is not used.
    """
    cluster = context.cluster
    if "shared" not in settings.tiers:
        raise PlanError(
            f"tiers = {', '.join(settings.tiers)}: nothing is left when a node is lost for good; "
            "add shared"
        )
    used = [tier for tier in SURVIVES if tier in settings.tiers and SURVIVES[tier] > outlives]
    priced = _priced(cluster, used, nodes, state)
    # Failures per second that each tier survives and none before it does, nor memory.
    rates = [0.0] * len(used)
    for cause in cluster.failures:
        # After wrong values memory is not trusted.
        if lost_nodes(cause) <= outlives and not cause.silent:
            continue
        place = next(n for n, tier in enumerate(used) if SURVIVES[tier] >= lost_nodes(cause))
        rates[place] += float(cause.per_day(nodes)) / DAY_SECONDS
    base, every = NO_FAILURES_SECONDS, tuple(1 for _ in rates)
    if sum(rates) > 0.0:
        waits = float(np.max(context.restart.restart_seconds))
        expected = [
            (save, Failures(max(rate, LEAST_RATE), waits, restore))
            for (save, restore), rate in zip(priced.values(), rates, strict=True)
        ]
        # The base interval, and what each tier's is in terms of it.
        chosen = choose_tiers(expected)
        base, every = chosen.base_seconds, chosen.every
    if outlives > NOT_KEPT and not settings.checkpoint_seconds:
        # Memory goes when all nodes do, which no list of failures has: files are not for never.
        rarest = max(_saves(context, settings, nodes, state)[0], NO_FAILURES_SECONDS)
        base = min(base, rarest) if sum(rates) > 0.0 else rarest
    base = settings.checkpoint_seconds or base
    # A version must be durable before the next one of its tier is begun.
    shortest = max(
        save.latency_seconds / times
        for times, (save, _) in zip(every, priced.values(), strict=True)
        if times
    )
    prices = {
        tier: (times, save.blocked_seconds, save.write_seconds, save.slowdown, restore)
        for times, (tier, (save, restore)) in zip(every, priced.items(), strict=True)
    }
    unused = (0.0,) * 5
    return max(base, shortest), shortest, [prices.get(tier, unused) for tier in SURVIVES]


def _priced(
    cluster: Cluster, used: list[str], nodes: float, state: float
) -> dict[str, tuple[SaveCost, float]]:
    """Of each tier: what a save costs, and seconds to restore it."""
    sizes, priced = Sizes(state_bytes=state), {}
    staging = state / (nodes * _rate(cluster, "memory"))
    for tier in used:
        rate = _rate(cluster, tier) * (1.0 if tier == "shared" else nodes)
        written = save_seconds(sizes, ENCODING_BYTES_PER_S * nodes, rate)
        write = 0.0 if tier == "memory" else written
        blocked = max(staging, LEAST_OVERHEAD_SECONDS)
        priced[tier] = SaveCost(blocked, write, WRITING_SLOWDOWN), transfer_seconds(state, rate)
    return priced


def _replicas(cluster: Cluster, block: Block, step: Step, state: Array) -> Replicas:
    """Live groups, or workers of a gradient code; no candidate is both.

    Of workers, all but as many as hold a chunk may be lost without a restart.
    """
    live = block.by_setting(lambda setting: setting.recovery.mode == "live")
    copies = block.by_setting(lambda setting: setting.coding_copies)
    coded = copies > 1.0
    if not (live | coded).any():
        return Replicas()
    data = block.spread(block.layouts.data)
    silence = block.by_setting(
        lambda setting: detection_seconds(
            look_seconds=0.0, silence_seconds=SILENCE_SHARE * setting.recovery.heartbeat_seconds
        )
    )
    link = min(cluster.fabric_bytes_per_s, SOCKET_BYTES_PER_S)
    healing = once_each(lambda size: transfer_seconds(size, link), state)
    return Replicas(
        groups=np.where(live | coded, data, 1.0),
        minimum=np.where(coded, np.maximum(data - copies + 1.0, 1.0), 1.0),
        step_seconds=step.seconds,
        regroup_seconds=np.where(live, RECONNECT_SECONDS, 0.0),
        rejoin_seconds=np.where(live, RECONNECT_SECONDS, 0.0),
        recovery_seconds=np.where(live, healing, 0.0),
        detection_seconds=np.where(live, silence, 0.0),
    )


def missing_tier(cluster: Cluster, settings: Settings) -> str:
    """A sentence on the first checkpoint tier that the cluster lacks; empty where it has all."""
    for tier in settings.tiers:
        if tier != "memory" and getattr(cluster.storage, f"{tier}_bytes_per_s") <= 0.0:
            other = "" if tier == "shared" else ", or leave the tier out"
            return (
                f"tiers = {', '.join(settings.tiers)}: {cluster.name} has no {tier} storage "
                f"({tier}_bytes_per_s = 0); give its rate under [storage] of the cluster file"
                f"{other}"
            )
    return ""


def _obstacles(cluster: Cluster, block: Block) -> tuple[dict[str, np.ndarray], dict[str, Mask]]:
    """Settings that do not go with the layout or with each other.

    Returns:
        (candidates,) numbers by name, and (candidates,) masks by the sentence to say of one
        candidate, which names the numbers in braces.
    """
    layouts, spread, of_settings = block.layouts, block.spread, block.by_setting
    copies = of_settings(lambda setting: setting.coding_copies)
    parity = of_settings(lambda setting: setting.recovery.parity or 0)
    largest = of_settings(lambda setting: setting.recovery.parity_group)
    live = of_settings(lambda setting: setting.recovery.mode == "live")
    nodes, data, sharded = _nodes(cluster, block), spread(layouts.data), layouts.sharding > 0.0
    divided = sharded | (layouts.tensor * layouts.context * layouts.pipeline > 1.0)
    small = parity > 0
    if small.any():
        # Nodes of the smallest group among which parity is made.
        smallest = once_each(lambda *counts: parity_groups(*map(int, counts))[0], nodes, largest)
        small = small & (smallest <= parity)
    numbers = {"copies": copies, "data": data, "parity": parity, "needed": parity + 1}
    numbers |= {"nodes": nodes, "largest": largest}
    return numbers, {
        "recovery = live does not go with coding_copies = {copies}, which sums over the replicas "
        "in its own way: set coding_copies = 1, or recovery = restart": live & (copies > 1),
        "recovery = live goes with whole replicas on one device each alone: set sharding = none, "
        "tensor = 1, context = 1 and pipeline = 1, or recovery = restart": live & spread(divided),
        "recovery parity = {parity} needs groups of at least {needed} nodes, and {nodes} in groups "
        "of at most {largest} make smaller ones: take more nodes, raise parity_group, or lower "
        "parity": small,
        "coding_copies = {copies} goes with whole replicas alone, since sharded states are lost "
        "with their holder: set sharding = none, or coding_copies = 1": (
            (copies > 1) & spread(sharded)
        ),
        "coding_copies = {copies} of each chunk need as many replicas, and data = {data}: raise "
        "data, or lower coding_copies": (copies > 1) & (copies > data),
    }


def possible(cluster: Cluster, block: Block) -> Mask:
    """(candidates,) of bool: the settings go with the cluster and with the layout."""
    stored = block.by_setting(lambda setting: not missing_tier(cluster, setting))
    return np.asarray(stored & ~np.any(list(_obstacles(cluster, block)[1].values()), axis=0))


def _nodes(cluster: Cluster, block: Block) -> np.ndarray:
    """(candidates,) nodes that they take."""
    return block.spread(np.ceil(block.layouts.devices / cluster.devices_per_node))


def why_impossible(cluster: Cluster, block: Block, row: int = 0) -> str:
    """A sentence on what a candidate cannot have; empty where it can have everything."""
    if missing := missing_tier(cluster, block.settings[int(block.setting[row])]):
        return missing
    numbers, masks = _obstacles(cluster, block)
    shown = {name: int(values[row]) for name, values in numbers.items()}
    return next((text.format(**shown) for text, mask in masks.items() if mask[row]), "")


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
