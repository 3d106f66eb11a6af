"""Small spaces and what judges them, for the tests of searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from plan_runs import NODE, SHORT

from outlast.plan.cluster import Cluster, Prices
from outlast.plan.configuration import Mechanisms
from outlast.plan.objectives import Objectives
from outlast.plan.space import Block

SMALL = replace(SHORT, batch=16)

CLOCKS = Mechanisms(clock_mhz=(1200.0, 1500.0, 1800.0), guard=("off", "linear"))


def candidates_of(front):
    """Of all points."""
    return [front.candidate(point) for point in range(len(front))]


def cluster(nodes: int, name: str = "h100", **more: object) -> Cluster:
    """Nodes of the shared tests with fp8, without prices."""
    usual = {
        "peak_flop_per_s": {"bf16": 989e12, "fp8": 1979e12},
        "matmul_flop_per_s": {"bf16": 720e12, "fp8": 1200e12},
        "prices": Prices(),
    }
    return replace(NODE, name=name, device=name, nodes=nodes, **(usual | more))


def judged(power: float = 2.2, watts: float = 400.0) -> Callable[[Block], Objectives]:
    """A run of fixed work: more speed at higher clocks and more power, less memory when divided."""

    def evaluate(block: Block) -> Objectives:
        many = block.layouts.taken(block.layout)
        clock = block.by_setting(lambda each: each.clock_mhz or 2000.0) / 2000.0
        guarded = block.by_setting(lambda each: each.guard != "off")
        waste = (many.pipeline - 1) / many.micro_batches / many.stages_per_rank
        slower = (1 + waste) * (1 + 0.02 * many.tensor) * (1 + 0.1 * many.recompute)
        hours = 1e22 / many.devices / many.peak_flop_per_s / clock * slower * (1 + 0.05 * guarded)
        held = many.memory_bytes * 2.0 / (many.tensor * many.pipeline)
        held = held / np.where(many.sharding == 3, many.sharding_ranks, 1) / (1 + many.recompute)
        return Objectives(
            hours=hours,
            kwh=hours * many.devices * watts / 1000 * (0.3 + 0.7 * clock**power),
            lost_hours=hours * 0.1 * (1 - 0.5 * guarded),
            loss_difference=0.01 * many.quantized,
            memory_bytes=held,
            capacity_bytes=many.memory_bytes,
            fits=held <= many.memory_bytes,
            cliff=held > 0.9 * many.memory_bytes,
            half_widths={"hours": np.array([0.05]), "kwh": np.array([0.08])},
        )

    return evaluate
