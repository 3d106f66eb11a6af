"""Schedules of pipeline-parallel training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.energy.schedule.linked import Work, linked
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.schedule.dag import Schedule


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
