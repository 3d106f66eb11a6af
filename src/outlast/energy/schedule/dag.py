"""A training step as operations and who waits for whom."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from outlast.energy.profile import Key
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        """What its time and energy depend on."""
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
        """How long the step takes if operations last so long, in seconds."""
        starts = self.earliest_starts(seconds)
        return max((start + own for start, own in zip(starts, seconds, strict=True)), default=0.0)


def _name(operation: Operation) -> str:
    return f"{operation.phase} {operation.microbatch} of stage {operation.stage}"
