"""A step with sharded parameters (FSDP, ZeRO-3): computing beside collectives on the link."""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.energy.schedule.additions import LINK
from outlast.energy.schedule.dag import Operation, Schedule
from outlast.errors import EnergyError


def sharded(
    layers: int, microbatches: int = 1, *, prefetch: int = 1, reshard_after_forward: bool = True
) -> Schedule:
    """A step of one of the equal devices; a "stage" is a unit that is sharded as a whole.

    Collectives ("gather_forward", "gather_backward", "reduce_scatter") run one after another on
    the link, beside computing. A unit computes when it has been gathered; it is gathered no more
    than `prefetch` units ahead, since gathered units take memory; gradients leave after the unit's
    backward, behind the gather that was already asked for (the order of torch's FSDP2).

    Args:
        layers: Units.
        microbatches: Per step; gradients are reduced after each.
        prefetch: How many units are gathered ahead of the one that computes; 0 overlaps nothing
            but gradients.
        reshard_after_forward: Whether units are gathered again for the backward; the last one never
            is, because it is needed at once.

    Raises:
        EnergyError: For fewer than one layer or micro-batch or a negative prefetch.
    """
    for name, value, least in (
        ("layers", layers, 1),
        ("microbatches", microbatches, 1),
        ("prefetch", prefetch, 0),
    ):
        if value < least:
            raise EnergyError(f"{name} = {value} is below {least}")
    step = _Step()
    walk = [("forward", layer) for layer in range(layers)]
    walk += [("backward", layer) for layer in reversed(range(layers))]
    for batch in range(microbatches):
        finished: list[int] = []
        for phase, layer in walk:
            kept = phase == "backward" and (not reshard_after_forward or layer == layers - 1)
            gathered: list[int] = []
            if not kept:
                # Memory for it is free when the unit before the `prefetch` last ones has computed.
                ahead = len(step.computes) - 1 - prefetch
                room = [step.computes[ahead]] if ahead >= 0 else []
                gather = Operation(LINK, layer, f"gather_{phase}", batch)
                gathered = [step.add(gather, after=room)]
            step.reduce(finished)
            here = step.add(Operation(0, layer, phase, batch), after=gathered)
            finished = [here] if phase == "backward" else []
        step.reduce(finished)
    return Schedule(tuple(step.operations), tuple(step.edges), devices=1)


@dataclass
class _Step:
    """Operations so far, and the two queues in which they run."""

    operations: list[Operation] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)

    def add(self, operation: Operation, after: list[int]) -> int:
        """Put an operation at the end of its queue; it also waits for `after`."""
        here = len(self.operations)
        queue = self.collectives if operation.device == LINK else self.computes
        self.edges += [(before, here) for before in sorted({*after, *queue[-1:]})]
        self.operations.append(operation)
        queue.append(here)
        return here

    def reduce(self, backwards: list[int]) -> None:
        """Send the gradients of finished backwards."""
        for index in backwards:
            done = self.operations[index]
            sent = Operation(LINK, done.stage, "reduce_scatter", done.microbatch)
            self.add(sent, after=[index])
