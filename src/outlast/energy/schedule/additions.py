"""What a profiler of forwards and backwards does not see: transfers and the end of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.energy.schedule.dag import Operation, Schedule

if TYPE_CHECKING:
    from outlast.energy.profile import Key

LINK = -1
"""The device number of operations on a link."""


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
    """What a profile must know about links, besides the devices' operations."""
    return frozenset(operation.key for operation in schedule.operations if operation.device == LINK)
