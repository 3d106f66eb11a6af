"""Schedules of pipeline-parallel training steps."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from outlast.energy.schedule.dag import Operation, Schedule
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

Work = tuple[str, int]
"""A phase and a micro-batch."""


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush): warm-up forwards, then one forward and one backward in turn.

    Args:
        stages: One on each device.
        microbatches: Per step and device.

    Raises:
        EnergyError: For fewer than one stage or micro-batch.
    """
    _check(stages, microbatches)
    orders = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)
        order: list[Work] = [("forward", batch) for batch in range(early)]
        for batch in range(microbatches - early):
            order += [("forward", batch + early), ("backward", batch)]
        order += [("backward", batch) for batch in range(microbatches - early, microbatches)]
        orders.append(order)
    return _linked(orders)


def _linked(orders: Sequence[Sequence[Work]]) -> Schedule:
    """Add who waits for whom: on a stage in order, between stages by micro-batch."""
    operations = [
        Operation(stage, stage, phase, batch)
        for stage, order in enumerate(orders)
        for phase, batch in order
    ]
    index = {(each.stage, each.phase, each.microbatch): i for i, each in enumerate(operations)}
    edges = [
        (i, i + 1)
        for i, (one, other) in enumerate(itertools.pairwise(operations))
        if one.stage == other.stage
    ]
    for (stage, phase, batch), here in index.items():
        if stage + 1 < len(orders):
            there = index[stage + 1, phase, batch]
            edges.append((here, there) if phase == "forward" else (there, here))
    return Schedule(tuple(operations), tuple(edges), len(orders))


def _check(stages: int, microbatches: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise EnergyError(f"{name} = {value} is below 1")
