"""Training steps as graphs of operations: pipelines, sharding, files, fits to measured steps."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.energy.profile import Curve, Key, Point
from outlast.errors import EnergyError
from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outlast.energy.profile import Profile

Array: TypeAlias = NDArray[np.float64]
LINK = -1
"""Device number of operations on a link."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A piece of work that runs at one clock.

    Attributes:
        device: Which of the pipeline's devices runs it, from 0; -1 for a link, which draws nothing.
        stage: The (virtual) stage, by which the profile knows it.
        phase: "forward", "backward", "backward_input", "backward_weight", "tail"; on links
            "send_forward", "send_backward", "reduce_scatter"; or another name that the profile
            knows.
        microbatch: From 0; -1 for what happens once per step.
    """

    device: int
    stage: int
    phase: str
    microbatch: int

    @property
    def key(self) -> Key:
        """Label under which a profile lists its time and energy."""
        return Key(self.stage, self.phase)


@dataclass(frozen=True)
class Schedule:
    """A directed acyclic graph of operations.

    Attributes:
        operations: All operations of one training step.
        edges: (before, after) as indices into `operations`. The order of operations on one device
            is given by edges too.
        devices: Number of devices, which draw blocking power when none of their operations run.
    """

    operations: tuple[Operation, ...]
    edges: tuple[tuple[int, int], ...]
    devices: int

    def check(self, where: str = "the schedule") -> None:
        """Refuse a graph that is no step: nothing that reads schedules looks again.

        The operations of one device must be in one order, given by edges or by paths over other
        devices. Otherwise they would run at once, and both draw the device's power. Operations on
        links may overlap.

        Args:
            where: What to call it in the sentence.

        Raises:
            EnergyError: Names the first thing that is wrong and what would be right.
        """
        for number, operation in enumerate(self.operations):
            if not -1 <= operation.device < self.devices:
                raise EnergyError(
                    f"{where}: operation {number} ({_name(operation)}) is on device "
                    f"{operation.device}, but there are {self.devices}: number devices from "
                    "0, and links -1"
                )
        for edge in self.edges:
            if not all(0 <= end < len(self.operations) for end in edge):
                raise EnergyError(
                    f"{where}: edge {tuple(edge)} names an operation that is not there: the "
                    f"operations are 0 to {len(self.operations) - 1}"
                )
        own: dict[int, list[int]] = defaultdict(list)
        for index in self.order:
            own[self.operations[index].device].append(index)
        direct = set(self.edges)
        for device, indices in sorted(own.items()):
            apart = [pair for pair in itertools.pairwise(indices) if pair not in direct]
            if device == LINK or not apart:
                continue
            # Of each operation, the last one of this device that it waits for, by way of others.
            last: list[int] = [-1] * len(self.operations)
            place = {index: number for number, index in enumerate(indices)}
            for index in self.order:
                last[index] = max(
                    (place.get(before, last[before]) for before in self.predecessors[index]),
                    default=-1,
                )
            for one, other in apart:
                if last[other] != place[one]:
                    raise EnergyError(
                        f"{where}: device {device} would run operations {one} "
                        f"({_name(self.operations[one])}) and {other} "
                        f"({_name(self.operations[other])}) at once: say by an edge which of them "
                        "comes first"
                    )

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """Of each operation."""
        found: list[list[int]] = [[] for _ in self.operations]
        for before, after in self.edges:
            found[after].append(before)
        return found

    @cached_property
    def successors(self) -> list[list[int]]:
        """Of each operation."""
        found: list[list[int]] = [[] for _ in self.operations]
        for before, after in self.edges:
            found[before].append(after)
        return found

    @cached_property
    def order(self) -> list[int]:
        """A topological order, the same one whenever it is asked for.

        Raises:
            EnergyError: When operations wait for each other in a circle; names one of them.
        """
        order = self.topological(range(len(self.operations)))
        if len(order) < len(self.operations):
            stuck = self.operations[min(set(range(len(self.operations))) - set(order))]
            raise EnergyError(
                f"the schedule has a circle: {len(self.operations) - len(order)} operations wait "
                f"for each other, among them {stuck.phase} of microbatch {stuck.microbatch} in "
                f"stage {stuck.stage}; no operation may come before itself"
            )
        return order

    def topological(self, priorities: Sequence[float]) -> list[int]:
        """Operations in an order in which none comes before one that it waits for.

        Those that wait for each other in a circle, and what comes behind them, are left out.

        Args:
            priorities: (operations,) of those that are ready, the smallest comes first.
        """
        waiting = [len(before) for before in self.predecessors]
        ready = [(priorities[index], index) for index, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, index = heapq.heappop(ready)
            order.append(index)
            for after in self.successors[index]:
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, (priorities[after], after))
        return order

    def earliest_starts(self, seconds: Sequence[float]) -> list[float]:
        """(operations,) when each can begin if operations last so long."""
        starts = [0.0] * len(self.operations)
        for index in self.order:
            starts[index] = max(
                (starts[before] + seconds[before] for before in self.predecessors[index]),
                default=0.0,
            )
        return starts

    def latest_ends(self, seconds: Sequence[float], deadline_seconds: float) -> list[float]:
        """(operations,) when each must have ended for the step to end at the deadline."""
        ends = [deadline_seconds] * len(self.operations)
        for index in reversed(self.order):
            ends[index] = min(
                (ends[after] - seconds[after] for after in self.successors[index]),
                default=deadline_seconds,
            )
        return ends

    def makespan(self, seconds: Sequence[float]) -> float:
        """Seconds of the step if operations last so long."""
        starts = self.earliest_starts(seconds)
        return max((start + own for start, own in zip(starts, seconds, strict=True)), default=0.0)


def _name(operation: Operation) -> str:
    return f"{operation.phase} {operation.microbatch} of stage {operation.stage}"


class Action(NamedTuple):
    """Next piece of a device's work: a phase of a (virtual) stage for a micro-batch."""

    stage: int
    phase: str
    microbatch: int


GRADIENT_PHASES = ("backward", "backward_input")
"""Phases that make the gradient for which the stage before waits."""


def linked(orders: Sequence[Sequence[Action]]) -> Schedule:
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
        Action(operation.stage, operation.phase, operation.microbatch): i
        for i, operation in enumerate(operations)
    }
    _check_pipeline(operations)
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


def _waits(index: Mapping[Action, int]) -> Iterator[tuple[int, int]]:
    last = max(work.stage for work in index)
    for work, here in index.items():
        stage, phase, batch = work
        if phase == "forward" and stage < last:
            yield here, index[Action(stage + 1, "forward", batch)]
        elif phase in GRADIENT_PHASES:
            yield index[Action(stage, "forward", batch)], here
            for before in GRADIENT_PHASES if stage < last else ():
                if (there := Action(stage + 1, before, batch)) in index:
                    yield index[there], here
        elif phase == "backward_weight":
            yield index[Action(stage, "backward_input", batch)], here


def _check_pipeline(operations: Sequence[Operation]) -> None:
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


FORMAT = "outlast schedule"
VERSION = 1
_FIELDS = ("format", "version", "devices", "operations", "edges")


def schedule_from_text(text: str, source: str = "the schedule") -> Schedule:
    """Read a schedule.

    Args:
        text: JSON.
        source: Where it came from, for messages.

    Raises:
        EnergyError: When it is no JSON, has a wrong field, repeats an operation or an edge, names
            an operation that is not there, has a circle, or does not say in which order a device
            runs its operations.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnergyError(f"{source} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise EnergyError(
            f'{source} is no schedule: it must be an object with "format": "{FORMAT}"'
        )
    if unknown := sorted(set(content) - set(_FIELDS)):
        raise EnergyError(f"{source} has the unknown field {unknown[0]}; known: {_FIELDS}")
    if content.get("version") != VERSION:
        raise EnergyError(
            f"{source} has version {content.get('version')!r}, this reads {VERSION}: write it anew"
        )
    devices = _whole(content.get("devices"), f"{source}: devices", least=1)
    rows = {name: content.get(name) for name in ("operations", "edges")}
    for name, found in rows.items():
        if not isinstance(found, list):
            raise EnergyError(f"{source}: {name} = {found!r:.60} is no list")
    operations: dict[Operation, int] = {}
    for index, row in enumerate(content["operations"]):
        name = f"{source}: operation {index}"
        operation = _operation(row, name, devices)
        if operations.setdefault(operation, index) != index:
            raise EnergyError(
                f"{name} repeats operation {operations[operation]} ({operation.phase} of stage "
                f"{operation.stage}, micro-batch {operation.microbatch}); name each once"
            )
    if not operations:
        raise EnergyError(f"{source} has no operations; a step has at least one")
    edges: dict[tuple[int, int], None] = {}
    for index, row in enumerate(content["edges"]):
        name = f"{source}: edge {index}"
        if not isinstance(row, list) or len(row) != 2:
            raise EnergyError(f"{name} = {row!r:.60} is not [before, after]")
        before, after = (_whole(item, name, most=len(operations) - 1) for item in row)
        if (before, after) in edges:
            raise EnergyError(f"{name} repeats {row}; name each once")
        edges[before, after] = None
    schedule = Schedule(tuple(operations), tuple(edges), devices)
    schedule.check(source)
    return schedule


def _operation(row: object, name: str, devices: int) -> Operation:
    if not isinstance(row, list) or len(row) != 4:
        raise EnergyError(f"{name} = {row!r:.60} is not [device, stage, phase, microbatch]")
    phase = row[2]
    if not isinstance(phase, str) or not phase:
        raise EnergyError(f'{name}: phase = {phase!r:.60} is no name such as "forward"')
    return Operation(
        device=_whole(row[0], f"{name}: device", least=LINK, most=devices - 1),
        stage=_whole(row[1], f"{name}: stage"),
        phase=phase,
        microbatch=_whole(row[3], f"{name}: microbatch", least=-1),
    )


def _whole(value: object, name: str, least: int = 0, most: float = math.inf) -> int:
    # JSON's true is a Python int, and NaN a float.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == math.inf else f" to {most:g}"
        raise EnergyError(f"{name} = {value!r:.60} is no whole number from {least}{upper}")
    return value


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
    _at_least(1, stages=stages, microbatches=microbatches)
    return linked(
        [
            [
                Action(stage, phase, b)
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
    return _one_f_one_b(stages, microbatches, split=False)


def interleaved(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., SC'21): device d has the stages d, d + devices, ...

    Args:
        devices: Of the pipeline.
        microbatches: Per step; a multiple of `devices`, since they go in groups of so many.
        stages_per_device: Virtual stages on each device; with 1 it is 1F1B.

    Raises:
        EnergyError: For fewer than one of them, or another number of micro-batches.
    """
    _at_least(1, devices=devices, microbatches=microbatches, stages_per_device=stages_per_device)
    if microbatches % devices:
        raise EnergyError(
            f"microbatches = {microbatches} is not a multiple of devices = {devices}: interleaved "
            "1F1B sends micro-batches through in groups of that size"
        )
    total = microbatches * stages_per_device

    def forward(device: int, step: int) -> Action:
        group, within = divmod(step, devices * stages_per_device)
        chunk, batch = divmod(within, devices)
        return Action(chunk * devices + device, "forward", group * devices + batch)

    def backward(device: int, step: int) -> Action:
        mirrored = forward(device, step)
        top = stages_per_device - 1 - mirrored.stage // devices
        return Action(top * devices + device, "backward", mirrored.microbatch)

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
    return _one_f_one_b(stages, microbatches, split=True)


def _one_f_one_b(stages: int, microbatches: int, *, split: bool) -> Schedule:
    _at_least(1, stages=stages, microbatches=microbatches)
    orders = []
    for stage in range(stages):
        early = min(stages - stage - 1, microbatches)
        order = [Action(stage, "forward", batch) for batch in range(early)]
        for batch in range(microbatches):
            if batch + early < microbatches:
                order.append(Action(stage, "forward", batch + early))
            order.append(Action(stage, "backward_input" if split else "backward", batch))
            if split and batch >= stage:
                order.append(Action(stage, "backward_weight", batch - stage))
        late = range(max(microbatches - stage, 0), microbatches if split else 0)
        order += [Action(stage, "backward_weight", batch) for batch in late]
        orders.append(order)
    return linked(orders)


def _at_least(least: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise EnergyError(f"{name} = {value} is below {least}")


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
    ranks = sorted(order)
    if not ranks or ranks != list(range(len(ranks))):
        raise EnergyError(f"the pipeline order has the ranks {ranks}; it must have 0, 1, 2, ...")
    orders = []
    for rank in ranks:
        works = [work for action in order[rank] for work in _works(action)]
        forwards = {work.microbatch for work in works if work.phase == "forward"}
        gradients = {work.microbatch for work in works if work.phase in GRADIENT_PHASES}
        # torch 2.13's order of 1F1B (not what it runs) counts the last stage's forwards from 1.
        shifted = 0 not in forwards and forwards == {batch + 1 for batch in gradients}
        orders.append(
            [
                work._replace(microbatch=work.microbatch - (work.phase == "forward"))
                if shifted
                else work
                for work in works
            ]
        )
    return linked(orders)


def _works(action: Any) -> Iterator[Action]:
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
        yield Action(int(stage), _PHASES[kind], int(batch))
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
    _at_least(1, layers=layers, microbatches=microbatches)
    _at_least(0, prefetch=prefetch)
    operations: list[Operation] = []
    edges: list[tuple[int, int]] = []
    # Two queues, each of which runs in order.
    computes: list[int] = []
    collectives: list[int] = []

    def add(operation: Operation, after: list[int]) -> int:
        """Put an operation at the end of its queue; it also waits for `after`."""
        here = len(operations)
        queue = collectives if operation.device == LINK else computes
        edges.extend((before, here) for before in sorted({*after, *queue[-1:]}))
        operations.append(operation)
        queue.append(here)
        return here

    def send_gradients(finished: list[int]) -> None:
        for index in finished:
            done = operations[index]
            add(Operation(LINK, done.stage, "reduce_scatter", done.microbatch), [index])

    walk = [("forward", layer) for layer in range(layers)]
    walk += [("backward", layer) for layer in reversed(range(layers))]
    for batch in range(microbatches):
        finished: list[int] = []
        for phase, layer in walk:
            gathered: list[int] = []
            if phase == "forward" or (reshard_after_forward and layer < layers - 1):
                # Memory for it is free when the unit before the `prefetch` last ones has computed.
                ahead = len(computes) - 1 - prefetch
                room = [computes[ahead]] if ahead >= 0 else []
                gathered = [add(Operation(LINK, layer, f"gather_{phase}", batch), room)]
            send_gradients(finished)
            here = add(Operation(0, layer, phase, batch), gathered)
            finished = [here] if phase == "backward" else []
        send_gradients(finished)
    return Schedule(tuple(operations), tuple(edges), devices=1)


@dataclass(frozen=True)
class ExecutedStep:
    """A step, operation by operation.

    Attributes:
        operation_seconds: (operations,) in the schedule's order.
        step_seconds: Of the whole step, the end included.
    """

    operation_seconds: tuple[float, ...]
    step_seconds: float

    def check(self, schedule: Schedule, name: str) -> None:
        """Refuse what cannot be the measurement of this schedule.

        Raises:
            EnergyError: For another number of operations, negative or infinite figures and NaN.
        """
        if not self.operation_seconds:
            raise EnergyError(f"{name} has no operation_seconds; measure them")
        if len(self.operation_seconds) != len(schedule.operations):
            raise EnergyError(
                f"{name} has {len(self.operation_seconds)} operation_seconds, but its schedule has "
                f"{len(schedule.operations)}: they must be measured on the same schedule"
            )
        for value in self.operation_seconds:
            if not (math.isfinite(value) and value >= 0):
                raise EnergyError(f"{name} has operation_seconds = {value}; measure it again")
        if not (math.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise EnergyError(f"{name} has step_seconds = {self.step_seconds}; measure it again")


FEWEST_STEPS = 4
"""Below this, nothing is fitted: two durations would explain anything."""


@dataclass(frozen=True)
class Explanation:
    """A schedule with transfers and tails, and how well it explains measured steps.

    Attributes:
        profiled: The schedule without them.
        schedule: The same with those that take time; its operations begin with those of
            `profiled`.
        transfer_seconds: Fitted duration of each transfer.
        tail_seconds: Fitted duration of each device's tail.
        residual: Largest relative error of the step time, over steps not used for the fit that
            predicted them (two halves, each predicted from the other).
        fitted_share: Largest share of a step's time that only the fitted durations explain.
    """

    profiled: Schedule
    schedule: Schedule
    transfer_seconds: float
    tail_seconds: float
    residual: float
    fitted_share: float

    def operation_seconds(self, profiled_seconds: Sequence[float]) -> list[float]:
        """Durations of all operations, from those of the profiled ones."""
        added = self.schedule.operations[len(self.profiled.operations) :]
        fitted = [self.transfer_seconds if o.device == LINK else self.tail_seconds for o in added]
        return [*profiled_seconds, *fitted]

    def step_seconds(self, profiled_seconds: Sequence[float]) -> float:
        """Predicted duration of a step, from those of the profiled operations."""
        return self.schedule.makespan(self.operation_seconds(profiled_seconds))

    def extended(self, profile: Profile) -> Profile:
        """A profile that knows transfers and tails too, for plans of `schedule`.

        No clock changes them. A tail is given blocking power, so that it favours no clock.
        """
        added = self.schedule.operations[len(self.profiled.operations) :]
        links = {operation.key for operation in added if operation.device == LINK}
        curves = dict(profile.curves)
        for key in {name.key for name in added}:
            seconds = self.transfer_seconds if key in links else self.tail_seconds
            joules = 0.0 if key in links else profile.blocking_watts * seconds
            curves[key] = Curve((Point(0, seconds, joules),))
        return replace(profile, curves=curves)


def explained(
    schedule: Schedule,
    steps: Sequence[ExecutedStep],
    tolerance: float = 0.02,
    fitted_limit: float = 0.05,
) -> Explanation:
    """Fit transfers and tails to measured steps, or refuse.

    Args:
        schedule: Of the operations that were timed. Transfers or tails that were timed are in it.
        steps: That ran with it; at least four, with different clocks, for a fit. With fewer, the
            timed operations alone must explain the time.
        tolerance: Largest residual.
        fitted_limit: Largest share of the time that fitted durations may stand for.

    Raises:
        EnergyError: When the schedule does not explain the times: names residual and limit, and
            what is probably missing. Also for malformed steps.
    """
    if not steps:
        raise EnergyError("no measured step: a plan needs at least one to be checked against")
    for number, step in enumerate(steps):
        step.check(schedule, f"measured step {number}")
    whole = with_tail(with_transfers(schedule))
    timing = _Timing(
        whole,
        np.array([step.operation_seconds for step in steps]).T,
        np.array([step.step_seconds for step in steps]),
    )
    alone = timing.spans(0.0)
    fitted_share = float(np.max(1 - alone / timing.measured))
    longer = float(np.median(alone / timing.measured)) - 1
    if longer > tolerance:
        raise EnergyError(
            f"the timed operations alone would take {longer:.1%} "
            f"longer than the measured step (limit {tolerance:.1%}): another schedule ran, or "
            "their times include waiting"
        )
    if len(steps) < FEWEST_STEPS:
        transfer = tail = 0.0
        errors = alone / timing.measured - 1
    else:
        transfer, tail = timing.fit()
        odd, even = timing.some(slice(1, None, 2)), timing.some(slice(0, None, 2))
        errors = np.concatenate([odd.errors(*even.fit()), even.errors(*odd.fit())])
    residual = float(np.max(np.abs(errors)))
    worst = f"{residual:.1%} of the measured step time (limit {tolerance:.1%})"
    if residual > tolerance and len(steps) < FEWEST_STEPS:
        raise EnergyError(
            f"the schedule leaves {worst} unexplained: time transfers and the end of the step too, "
            f"or measure at least {FEWEST_STEPS} steps with different clocks to fit them"
        )
    if residual > tolerance:
        raise EnergyError(
            f"the schedule leaves {worst} unexplained, even with fitted transfers and tail: "
            "something that changes from step to step is missing (input loading, stragglers, other "
            "jobs), or another schedule ran"
        )
    if len(steps) >= FEWEST_STEPS and fitted_share > fitted_limit:
        raise EnergyError(
            f"{fitted_share:.1%} of the measured step time passes outside the timed operations "
            f"(limit {fitted_limit:.1%}; fitted transfers and tail leave {residual:.1%}): the step "
            "is probably communication-bound, so time transfers and tail and give them as "
            "operations of the schedule, or accept fitted ones with a higher fitted_limit"
        )
    # What takes no time is left out: a profile may not hold operations of 0 s.
    kept = with_transfers(schedule) if transfer else schedule
    kept = with_tail(kept) if tail else kept
    return Explanation(schedule, kept, transfer, tail, residual, fitted_share)


@dataclass(frozen=True)
class _Timing:
    """Measured steps against a schedule in which only the first operations were timed.

    Attributes:
        schedule: With transfers and tails.
        seconds: (timed operations, steps).
        measured: (steps,) seconds.
    """

    schedule: Schedule
    seconds: Array
    measured: Array

    def some(self, which: slice) -> _Timing:
        """A part of the steps."""
        return _Timing(self.schedule, self.seconds[:, which], self.measured[which])

    @cached_property
    def _added_transfers(self) -> Array:
        """(operations, 1): 1 for each transfer that was not timed."""
        timed = len(self.seconds)
        added = [i >= timed and o.device == LINK for i, o in enumerate(self.schedule.operations)]
        return np.array(added, dtype=np.float64)[:, None]

    def spans(self, transfer_seconds: float) -> Array:
        """(steps,) time from the first start to the last end, without the tail."""
        seconds = self._added_transfers * transfer_seconds + np.zeros(len(self.measured))
        seconds[: len(self.seconds)] = self.seconds
        ends = np.zeros_like(seconds)
        for index in self.schedule.order:
            before = self.schedule.predecessors[index]
            start = ends[before].max(axis=0) if before else 0.0
            ends[index] = start + seconds[index]
        found: Array = ends.max(axis=0)
        return found

    def tail(self, spans: Array) -> float:
        """The duration of the tail that leaves least squares of relative errors."""
        weights = self.measured**-2.0
        return max(0.0, float(np.sum((self.measured - spans) * weights) / np.sum(weights)))

    def errors(self, transfer_seconds: float, tail_seconds: float) -> Array:
        """(steps,) relative errors of the step time."""
        found: Array = (self.spans(transfer_seconds) + tail_seconds) / self.measured - 1
        return found

    def fit(self) -> tuple[float, float]:
        """Durations of a transfer and of the tail, in seconds, by least squares."""
        require("energy", "what a schedule leaves out", "scipy")
        from scipy.optimize import minimize_scalar

        alone = self.spans(0.0)
        gap = self.tail(alone)
        if not gap or not self._added_transfers.any():
            return 0.0, gap

        def loss(transfer_seconds: float) -> float:
            spans = self.spans(transfer_seconds)
            return float(np.sum(((spans + self.tail(spans)) / self.measured - 1) ** 2))

        # Transfers can explain the whole gap at most. Time on the path rises with each of them, so
        # one that takes `gap` is more than enough; halving it finds the range where they matter.
        most = gap
        while self.tail(self.spans(most / 2)) <= 0 and most > gap * 1e-6:
            most /= 2
        found = minimize_scalar(
            loss, bounds=(0.0, most), method="bounded", options={"xatol": most * 1e-3}
        )
        # A flat optimum is a coin toss: without evidence for it, there is no transfer time.
        transfer = float(found.x) if found.fun < loss(0.0) * (1 - 1e-6) else 0.0
        return transfer, self.tail(self.spans(transfer))
