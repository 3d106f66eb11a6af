"""A training step as operations and who waits for whom."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.energy.profile import Key
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
            if device < 0 or not apart:
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
        waiting = [len(before) for before in self.predecessors]
        ready = [index for index, count in enumerate(waiting) if not count]
        order = []
        while ready:
            index = heapq.heappop(ready)
            order.append(index)
            for after in self.successors[index]:
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, after)
        if len(order) < len(self.operations):
            stuck = self.operations[next(i for i, count in enumerate(waiting) if count)]
            raise EnergyError(
                f"the schedule has a circle: {len(self.operations) - len(order)} operations wait "
                f"for each other, among them {stuck.phase} of microbatch {stuck.microbatch} in "
                f"stage {stuck.stage}; no operation may come before itself"
            )
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


class Work(NamedTuple):
    """Next piece of a device's work: a phase of a (virtual) stage for a micro-batch."""

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


FORMAT = "outlast schedule"


VERSION = 1


_FIELDS = ("format", "version", "devices", "operations", "edges")


def schedule_text(schedule: Schedule) -> str:
    """A schedule as JSON text."""
    return json.dumps(schedule_content(schedule)) + "\n"


def schedule_content(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a JSON object, to put into another one."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "devices": schedule.devices,
        "operations": [[o.device, o.stage, o.phase, o.microbatch] for o in schedule.operations],
        "edges": [list(edge) for edge in schedule.edges],
    }


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
    return schedule_from_content(content, source)


def schedule_from_content(content: object, source: str = "the schedule") -> Schedule:
    """Read a schedule from a parsed JSON object; otherwise as `schedule_from_text`."""
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
    operations = [
        _operation(row, f"{source}: operation {index}", devices)
        for index, row in enumerate(_rows(content, "operations", source))
    ]
    if not operations:
        raise EnergyError(f"{source} has no operations; a step has at least one")
    seen: dict[Operation, int] = {}
    for index, operation in enumerate(operations):
        if seen.setdefault(operation, index) != index:
            raise EnergyError(
                f"{source}: operation {index} repeats operation {seen[operation]} "
                f"({operation.phase} of stage {operation.stage}, micro-batch "
                f"{operation.microbatch}); name each once"
            )
    edges: dict[tuple[int, int], None] = {}
    for index, row in enumerate(_rows(content, "edges", source)):
        edge = _edge(row, f"{source}: edge {index}", len(operations))
        if edge in edges:
            raise EnergyError(f"{source}: edge {index} repeats {list(edge)}; name each once")
        edges[edge] = None
    schedule = Schedule(tuple(operations), tuple(edges), devices)
    schedule.check(source)
    return schedule


def _rows(content: dict[str, Any], name: str, source: str) -> list[Any]:
    rows = content.get(name)
    if not isinstance(rows, list):
        raise EnergyError(f"{source}: {name} = {rows!r:.60} is no list")
    return rows


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


def _edge(row: object, name: str, operations: int) -> tuple[int, int]:
    if not isinstance(row, list) or len(row) != 2:
        raise EnergyError(f"{name} = {row!r:.60} is not [before, after]")
    before, after = (_whole(item, name, most=operations - 1) for item in row)
    return before, after


def _whole(value: object, name: str, least: int = 0, most: float = math.inf) -> int:
    # JSON's true is a Python int, and NaN a float.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == math.inf else f" to {most:g}"
        raise EnergyError(f"{name} = {value!r:.60} is no whole number from {least}{upper}")
    return value
