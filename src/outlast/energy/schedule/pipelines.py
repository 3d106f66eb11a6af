"""Schedules of pipeline-parallel training steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.energy.schedule.graph import GRADIENT_PHASES, LINK, Operation, Schedule, Work, linked
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.energy.profile import Key


def single_stage(microbatches: int = 1) -> Schedule:
    """A step on one device without a pipeline: each micro-batch forward, then backward."""
    return one_f_one_b(1, microbatches)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al., 2019): all micro-batches forward, then all backward.

    Args:
        stages: One on each device.
        microbatches: Per step and device.

    Raises:
        EnergyError: For fewer than one stage or micro-batch.
    """
    _check(stages=stages, microbatches=microbatches)
    return linked(
        [
            [
                Work(stage, phase, b)
                for phase in ("forward", "backward")
                for b in range(microbatches)
            ]
            for stage in range(stages)
        ]
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush): warm-up forwards, then one forward and one backward in turn.

    Args:
        stages: One on each device.
        microbatches: Per step and device.

    Raises:
        EnergyError: For fewer than one stage or micro-batch.
    """
    _check(stages=stages, microbatches=microbatches)
    orders = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)
        order = [Work(stage, "forward", batch) for batch in range(early)]
        for batch in range(microbatches - early):
            order += [Work(stage, "forward", batch + early), Work(stage, "backward", batch)]
        late = range(microbatches - early, microbatches)
        order += [Work(stage, "backward", batch) for batch in late]
        orders.append(order)
    return linked(orders)


def interleaved(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., SC'21): device d has the stages d, d + devices, ...

    Args:
        devices: Of the pipeline.
        microbatches: Per step; a multiple of `devices`, since they go in groups of so many.
        stages_per_device: Virtual stages on each device; with 1 it is 1F1B.

    Raises:
        EnergyError: For fewer than one of them, or another number of micro-batches.
    """
    _check(devices=devices, microbatches=microbatches, stages_per_device=stages_per_device)
    if microbatches % devices:
        raise EnergyError(
            f"microbatches = {microbatches} is not a multiple of devices = {devices}: interleaved "
            "1F1B sends micro-batches through in groups of that size"
        )
    total = microbatches * stages_per_device

    def forward(device: int, step: int) -> Work:
        group, within = divmod(step, devices * stages_per_device)
        chunk, batch = divmod(within, devices)
        return Work(chunk * devices + device, "forward", group * devices + batch)

    def backward(device: int, step: int) -> Work:
        mirrored = forward(device, step)
        top = stages_per_device - 1 - mirrored.stage // devices
        return Work(top * devices + device, "backward", mirrored.microbatch)

    orders = []
    for device in range(devices):
        early = 2 * (devices - device - 1) if stages_per_device > 1 else devices - device - 1
        early = min(early + (stages_per_device - 1) * devices, total)
        order = [forward(device, step) for step in range(early)]
        for step in range(total - early):
            order += [forward(device, step + early), backward(device, step)]
        order += [backward(device, step) for step in range(total - early, total)]
        orders.append(order)
    return linked(orders)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al., ICLR'24): 1F1B with split backwards, whose second half fills the bubble.

    Gradients of inputs go in 1F1B's order, so that no device keeps more activations than there.
    Those of weights, which nobody waits for, come `stage` micro-batches later.

    Args:
        stages: One on each device.
        microbatches: Per step and device.

    Raises:
        EnergyError: For fewer than one stage or micro-batch.
    """
    _check(stages=stages, microbatches=microbatches)
    orders = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)
        order = [Work(stage, "forward", batch) for batch in range(early)]
        for batch in range(microbatches):
            if batch + early < microbatches:
                order.append(Work(stage, "forward", batch + early))
            order.append(Work(stage, "backward_input", batch))
            if batch >= stage:
                order.append(Work(stage, "backward_weight", batch - stage))
        late = range(max(microbatches - stage, 0), microbatches)
        order += [Work(stage, "backward_weight", batch) for batch in late]
        orders.append(order)
    return linked(orders)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise EnergyError(f"{name} = {value} is below 1")


def with_transfers(schedule: Schedule) -> Schedule:
    """Put a transfer between operations on different devices that wait for each other.

    It runs on a link and takes no device's time: "send_forward" of the stage that sends
    activations, "send_backward" of the stage that sends gradients. Transfers that are already
    there stay as they are.
    """
    operations = list(schedule.operations)
    edges: list[tuple[int, int]] = []
    for before, after in schedule.edges:
        one, other = operations[before], operations[after]
        if LINK in {one.device, other.device} or one.device == other.device:
            edges.append((before, after))
            continue
        phase = "send_forward" if one.phase == "forward" else "send_backward"
        edges += [(before, len(operations)), (len(operations), after)]
        operations.append(Operation(LINK, one.stage, phase, one.microbatch))
    return Schedule(tuple(operations), tuple(edges), schedule.devices)


def with_tail(schedule: Schedule) -> Schedule:
    """Let every device end with a "tail": optimizer step, gradient and embedding synchronisation.

    It bears the number of the device's first stage, and comes once per step (micro-batch -1).
    It waits for all that runs on the device and for collectives that nothing else waits for. A
    device that has one keeps it.
    """
    operations, edges = list(schedule.operations), list(schedule.edges)
    ended = {operation.device for operation in schedule.operations if operation.phase == "tail"}
    sent = [
        index
        for index, operation in enumerate(schedule.operations)
        if operation.device == LINK and not schedule.successors[index]
    ]
    for device in sorted({operation.device for operation in schedule.operations} - ended - {LINK}):
        own = [
            index
            for index, operation in enumerate(schedule.operations)
            if operation.device == device
        ]
        inside = set(own)
        last = [i for i in own if inside.isdisjoint(schedule.successors[i])]
        edges += [(before, len(operations)) for before in (*last, *sent)]
        stage = min(schedule.operations[index].stage for index in own)
        operations.append(Operation(device, stage, "tail", -1))
    return Schedule(tuple(operations), tuple(edges), schedule.devices)


def link_keys(schedule: Schedule) -> frozenset[Key]:
    """Labels of links that a profile must hold besides the devices' operations."""
    return frozenset(operation.key for operation in schedule.operations if operation.device == LINK)


_PHASES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


_OVERLAPPED = "OVERLAP_F_B"


_SKIPPED = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}


def from_torch(pipeline: Any) -> Schedule:
    """The graph of a torch pipeline schedule.

    A forward and a backward that torch overlaps on one rank (DualPipeV) become one after the other.

    Args:
        pipeline: A schedule of `torch.distributed.pipelining` (1F1B, GPipe, interleaved, zero
            bubble, ZBV, one's own), or its `pipeline_order`: rank -> actions, with or without
            communication.

    Raises:
        EnergyError: When it has no order, or the order is no training step (see `linked`).
    """
    order = _order_of(pipeline)
    ranks = sorted(order)
    if not ranks or ranks != list(range(len(ranks))):
        raise EnergyError(f"the pipeline order has the ranks {ranks}; it must have 0, 1, 2, ...")
    works = [[work for action in order[rank] for work in _works(action)] for rank in ranks]
    return linked([_counted_from_0(work) for work in works])


def _order_of(pipeline: Any) -> Mapping[int, Any]:
    order = pipeline
    if not isinstance(pipeline, Mapping):
        order = getattr(pipeline, "pipeline_order", None)
        # Schedules with one stage per rank make their order when asked.
        if order is None and hasattr(pipeline, "_get_pipeline_order"):
            order = pipeline._get_pipeline_order()
    if not isinstance(order, Mapping):
        raise EnergyError(
            f"{type(pipeline).__name__} has no pipeline_order: give a schedule of "
            "torch.distributed.pipelining that trains, or rank -> actions"
        )
    return order


def _counted_from_0(works: list[Work]) -> list[Work]:
    """Put right that torch 2.13's order of 1F1B (not what it runs) counts the last stage from 1."""
    forwards = {work.microbatch for work in works if work.phase == "forward"}
    gradients = {work.microbatch for work in works if work.phase in GRADIENT_PHASES}
    if 0 in forwards or forwards != {batch + 1 for batch in gradients}:
        return works
    return [work._replace(microbatch=work.microbatch - (work.phase == "forward")) for work in works]


def _works(action: Any) -> Iterator[Work]:
    if action is None:  # A bubble: the edges make it.
        return
    try:
        kind = str(action.computation_type.value)
        stage, batch = action.stage_index, action.microbatch_index
    except AttributeError as error:
        raise EnergyError(
            f"{action!r} in the pipeline order is no action of torch.distributed.pipelining"
        ) from error
    if kind == _OVERLAPPED:
        for sub_action in action.sub_actions or ():
            yield from _works(sub_action)
    elif kind in _PHASES:
        yield Work(int(stage), _PHASES[kind], int(batch))
    elif kind not in _SKIPPED:
        raise EnergyError(
            f"{action} in the pipeline order has the unknown kind {kind}; known are "
            f"{', '.join([*_PHASES, _OVERLAPPED, *sorted(_SKIPPED)])}"
        )


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
