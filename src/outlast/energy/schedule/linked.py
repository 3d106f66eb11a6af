"""From the order of work on each device to a graph: who waits for whom."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from outlast.energy.schedule.dag import Operation, Schedule
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Work(NamedTuple):
    """What a device does next: a phase of a (virtual) stage for a micro-batch."""

    stage: int
    phase: str
    microbatch: int


GRADIENT_PHASES = ("backward", "backward_input")
"""Phases that make the gradient for which the stage before waits."""


def linked(orders: Sequence[Sequence[Work]]) -> Schedule:
    """The graph of a pipeline step.

    On a device, work goes in order. A forward waits for that of the stage before, a backward for
    its own forward and for the backward of the stage after, and the weights' half of a split
    backward for its other half.

    Args:
        orders: Of each device, first to last. Every stage runs each micro-batch forward once and
            backward once, whole ("backward") or split ("backward_input", "backward_weight").

    Raises:
        EnergyError: When work is missing, repeated or on two devices, when stages have different
            micro-batches, or when devices would wait for each other in a circle.
    """
    operations = tuple(
        Operation(device, *work) for device, order in enumerate(orders) for work in order
    )
    index = {
        Work(operation.stage, operation.phase, operation.microbatch): i
        for i, operation in enumerate(operations)
    }
    _check(operations)
    edges = [
        (i, i + 1)
        for i, (one, other) in enumerate(itertools.pairwise(operations))
        if one.device == other.device
    ]
    for before, after in _waits(index):
        # The device's own order already says so, unless it has it the wrong way round: then the
        # edge makes a circle, and that is an error that names it.
        if operations[before].device != operations[after].device or before > after:
            edges.append((before, after))
    schedule = Schedule(operations, tuple(edges), len(orders))
    _ = schedule.order
    return schedule


def _waits(index: Mapping[Work, int]) -> Iterator[tuple[int, int]]:
    last = max(work.stage for work in index)
    for work, here in index.items():
        stage, phase, batch = work
        if phase == "forward" and stage < last:
            yield here, index[Work(stage + 1, "forward", batch)]
        elif phase in GRADIENT_PHASES:
            yield index[Work(stage, "forward", batch)], here
            for before in GRADIENT_PHASES if stage < last else ():
                if (there := Work(stage + 1, before, batch)) in index:
                    yield index[there], here
        elif phase == "backward_weight":
            yield index[Work(stage, "backward_input", batch)], here


def _check(operations: Sequence[Operation]) -> None:
    """Each stage on one device, and each of its micro-batches once forward and once backward."""
    devices: dict[int, int] = {}
    phases: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for operation in operations:
        if devices.setdefault(operation.stage, operation.device) != operation.device:
            raise EnergyError(
                f"stage {operation.stage} runs on device {devices[operation.stage]} and on device "
                f"{operation.device}; a stage belongs to one device"
            )
        phases[operation.stage, operation.microbatch][operation.phase] += 1
    if sorted(devices) != list(range(len(devices))) or not devices:
        known = ", ".join(map(str, sorted(devices))) or "none"
        raise EnergyError(f"stages must be numbered 0, 1, 2, ... without gaps; there are {known}")
    batches = {stage: {b for s, b in phases if s == stage} for stage in devices}
    for stage, own in batches.items():
        if own != batches[0] or own != set(range(len(own))):
            raise EnergyError(
                f"stage {stage} runs {len(own)} micro-batches and stage 0 runs {len(batches[0])}, "
                "or they are numbered differently; every stage of a step runs the same "
                "micro-batches 0, 1, 2, ..."
            )
    whole = Counter(("forward", "backward"))
    split = Counter(("forward", "backward_input", "backward_weight"))
    for (stage, batch), found in phases.items():
        if found not in (whole, split):
            has = ", ".join(f"{count} x {phase}" for phase, count in sorted(found.items()))
            raise EnergyError(
                f"stage {stage} has {has} for micro-batch {batch}; a training step has one forward "
                "and one backward, or one backward_input and one backward_weight"
            )
