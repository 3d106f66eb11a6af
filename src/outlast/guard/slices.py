"""The slices of a patrol: what lies in them, and what the optimizer may have done to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from outlast.guard import optimizer as bounds
from outlast.guard.rest import hash64

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.guard.findings import Site
    from outlast.guard.judged import Judged

_CPU_NUMBERS, _DEVICE_NUMBERS, _WHOLE_NUMBERS = 2**16, 2**20, 2**24
"""Numbers of a block: few enough for a cache, many enough to be worth the calls."""

_SETTINGS: dict[bounds.Kind, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    "adam": itemgetter("lr", "weight_decay", "betas"),
    "muon": itemgetter("lr", "weight_decay"),
}
"""What a step depends on, of the optimizers whose updates are bounded."""


Reader = tuple[
    "Callable[[tuple[Any, ...]], None]",
    "Callable[[dict[str, Any]], tuple[Any, ...]]",
    "Optimizer",
    int,
]
"""Where to put a step's settings, what picks them, and the optimizer's group that has them."""


class Group:
    """One parameter group of one optimizer, and what its parameters may have done so far.

    A step only notes its settings; `catch_up` works out what they mean when a slice needs it.

    Attributes:
        distance: How far parameters may have moved.
        growth: Logarithm of what weight decay may have stretched them by.
        noted: Settings of the steps since `catch_up`.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer = optimizer
        self.number = number
        self.kind = bounds.kind_of(optimizer)
        self._settings = _SETTINGS.get(self.kind)
        self.noted: list[tuple[Any, ...]] = []
        self.distance = math.inf if self._settings is None else 0.0
        self.growth = 0.0
        self._reach: float | None = None
        self._last_betas: Any = None
        # Smallest and largest of both, so far.
        self._betas: tuple[float, float, float, float] | None = None

    def reader(self) -> Reader | None:
        """What notes a step, in as few objects as can be; None where updates have no bound."""
        if self._settings is None:
            return None
        return self.noted.append, self._settings, self.optimizer, self.number

    @property
    def options(self) -> dict[str, Any]:
        """Looked up, since a restart replaces the dictionary."""
        options: dict[str, Any] = self.optimizer.param_groups[self.number]
        return options

    def decay(self, dtype: torch.dtype) -> bounds.Decay | None:
        """Of moments of this type; None where the betas lie on a device."""
        if self._betas is None:
            return None
        low1, high1, low2, high2 = self._betas
        # r grows with b1 and falls with b2; c does the opposite.
        return bounds.decay_of((high1, low2), dtype).widest(bounds.decay_of((low1, high2), dtype))

    def catch_up(self) -> None:
        """Add the noted steps to what may have happened."""
        if len(self.noted) > 1 and any(isinstance(rate, torch.Tensor) for rate, *_ in self.noted):
            # What a tensor was in the steps before the last one is not known.
            self.distance = math.inf
        for (rate, weight_decay, *betas), run in groupby(self.noted):
            if betas:
                self._meet(betas[0])
            self._move(number(rate), number(weight_decay), sum(1 for _ in run))
        self.noted.clear()

    def adam_bound(
        self, decay: bounds.Decay, dtype: torch.dtype, steps: bounds.Number, moved: bounds.Number
    ) -> tuple[bounds.Number, bounds.Number] | None:
        """What a step keeps of a parameter, and its longest update; None where there is no bound.

        Args:
            decay: Of its moments.
            dtype: Of its moments.
            steps: Its step count.
            moved: By how much that has grown: 0 or 1.
        """
        options = self.options
        rate, weight_decay = number(options["lr"]), number(options["weight_decay"])
        beta1, beta2 = (number(option) for option in options["betas"])
        if rate is None or weight_decay is None or beta1 is None or beta2 is None:
            return None
        if options["eps"] == 0.0:
            return None
        decoupled = options.get("decoupled_weight_decay", False)
        keep = 1.0 - moved * (rate * weight_decay if decoupled else 0.0)
        reach = bounds.adam_reach(decay, (beta1, beta2), options["eps"], steps)
        return keep, moved * rate * reach * bounds.update_slack(dtype)

    def muon_bound(self, parameter: Tensor, moved: float) -> tuple[float, float] | None:
        """The same, with the largest singular value of an update; `moved` is 0 or 1."""
        options = self.options
        rate, weight_decay = number(options["lr"]), number(options["weight_decay"])
        if rate is None or weight_decay is None:
            return None
        return 1.0 - moved * rate * weight_decay, moved * rate * _muon_reach(options, parameter)

    def _move(self, rate: float | None, weight_decay: float | None, steps: int) -> None:
        if self._reach is None:
            self._reach = self._longest_update()
        if rate is None or weight_decay is None or math.isinf(self._reach):
            self.distance = math.inf
        elif rate:
            self.distance += steps * rate * self._reach
            self.growth += steps * math.log(max(1.0, abs(1.0 - rate * weight_decay)))

    def _meet(self, betas: tuple[Any, Any]) -> None:
        if betas is self._last_betas:
            return
        if self._last_betas is not None and betas != self._last_betas:
            # No bound on all steps is known for betas that change.
            self._reach = math.inf
        self._last_betas = betas
        beta1, beta2 = (number(item) for item in betas)
        if beta1 is None or beta2 is None:
            return
        low1, high1, low2, high2 = self._betas or (beta1, beta1, beta2, beta2)
        self._betas = min(low1, beta1), max(high1, beta1), min(low2, beta2), max(high2, beta2)

    def _longest_update(self) -> float:
        """Of a coordinate, in any step, per learning rate."""
        options = self.options
        if self.kind == "muon":
            return max(_muon_reach(options, parameter) for parameter in options["params"])
        if self._betas is None:
            return math.inf
        reach = 0.0
        for dtype in {parameter.dtype for parameter in options["params"]}:
            decay = self.decay(dtype)
            assert decay is not None
            ever = bounds.adam_reach_ever(decay, (self._betas[0], self._betas[2]), options["eps"])
            reach = max(reach, ever * bounds.update_slack(dtype))
        return reach


@dataclass(frozen=True)
class Range:
    """How large a block's parameters were, and what may have changed them until then."""

    largest: Tensor
    step: int
    version: int
    distance: float
    growth: float


@dataclass
class Entry:
    """One parameter."""

    name: str
    parameter: Tensor
    group: Group | None
    ranges: dict[int, Range] = field(default_factory=dict)

    @property
    def kind(self) -> bounds.Kind:
        """Of its optimizer."""
        return "other" if self.group is None else self.group.kind

    @property
    def state(self) -> dict[str, Any]:
        """What its optimizer keeps of it; empty before the first step."""
        if self.group is None:
            return {}
        state: dict[str, Any] = self.group.optimizer.state.get(self.parameter, {})
        return state


@dataclass(frozen=True)
class Block:
    """Numbers [start, end) of a parameter as it lies in memory."""

    entry: Entry
    start: int
    end: int

    def of(self, tensor: Tensor) -> Tensor | None:
        """This block of the parameter, or of what lies in memory as the parameter does."""
        own, part = local(self.entry.parameter), local(tensor)
        if part.shape != own.shape or part.stride() != own.stride():
            return None
        numbers = flat(part)
        return None if numbers is None else numbers[self.start : self.end]

    def parameter(self) -> Tensor:
        """The numbers (numbers,) of the parameter."""
        part = self.of(self.entry.parameter)
        assert part is not None
        return part

    def views(self) -> Views:
        """All that is there now."""
        state, others = {}, []
        for key, value in self.entry.state.items():
            if isinstance(value, torch.Tensor):
                part = self.of(value) if value.dim() else None
                if part is not None:
                    state[key] = part
                elif self.start == 0:
                    others.append(local(value).contiguous())
        return Views(self.parameter(), state, others)

    def gradient(self) -> Tensor | None:
        """(numbers,), where there is one that lies in memory as the parameter does."""
        gradient = self.entry.parameter.grad
        return None if gradient is None else self.of(gradient)


@dataclass(frozen=True)
class Views:
    """The memory of a block.

    Attributes:
        parameter: (numbers,)
        state: (numbers,) each, of the state that is as large as the parameter.
        others: Step counts and the like, whole, which belong to the first block.
    """

    parameter: Tensor
    state: dict[str, Tensor]
    others: list[Tensor]

    def optimizer(self) -> list[Tensor]:
        """All state."""
        return [*self.state.values(), *self.others]


@dataclass
class Piece:
    """A block in a round, with what it was before the step."""

    block: Block
    old: Tensor
    steps: bounds.Number | None
    version: int

    @classmethod
    @torch.no_grad()
    def of(cls, block: Block) -> Piece:
        """As it is now."""
        data, steps = block.parameter(), steps_of(block.entry.state)
        # What an unknown optimizer may do to a parameter is unknown.
        checked = block.entry.kind != "other"
        old = data.clone() if checked else torch.full((1,), torch.nan, device=data.device)
        return cls(block, old, 0.0 if steps is None else steps, data._version)

    def range_since_last_round(self, parameter: Tensor, step: int) -> Judged | None:
        """Judge whether the largest number is one that steps can have made since the last round.

        Args:
            parameter: (numbers,) now.
            step: Now.
        """
        entry, group = self.block.entry, self.block.entry.group
        if group is None or math.isinf(group.distance):
            return None
        least, most = torch.aminmax(parameter)
        version, before = parameter._version, entry.ranges.get(self.block.start)
        now = Range(torch.maximum(-least, most), step, version, group.distance, group.growth)
        entry.ranges[self.block.start] = now
        if before is None:
            return None
        steps = step - before.step
        if version - before.version != steps * (version - self.version):
            # Something else has written to it, or some steps have left it out.
            return None
        growth, distance = now.growth - before.growth, now.distance - before.distance
        return bounds.check_range(now.largest, before.largest, step - before.step, growth, distance)


@dataclass
class Round:
    """Blocks that are checked around one step, and what the checks have said so far."""

    pieces: list[Piece]
    seconds: float = 0.0
    hashes: tuple[Tensor, Tensor] | None = None
    writes: list[tuple[int, int]] = field(default_factory=list)
    judged: list[tuple[Site, Judged]] = field(default_factory=list)
    not_finite: list[tuple[str, int | Tensor]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Of its first block."""
        return self.pieces[0].old.device

    def views(self) -> list[Views]:
        """All that is there now."""
        return [piece.block.views() for piece in self.pieces]


def state_of(views: list[Views]) -> list[Tensor]:
    """All optimizer state of some blocks."""
    return [tensor for view in views for tensor in view.optimizer()]


def hashes_of(views: list[Views]) -> tuple[Tensor, Tensor]:
    """Of parameters and of state."""
    parameters, state = hash64([view.parameter for view in views]), state_of(views)
    return parameters, hash64(state) if state else torch.zeros_like(parameters)


def writes_of(views: list[Views]) -> list[tuple[int, int]]:
    """What changes when a program, and not a fault, writes to the tensors."""
    return [
        (tensor.data_ptr(), tensor._version)
        for view in views
        for tensor in (view.parameter, *view.optimizer())
    ]


def cut(entry: Entry, whole: bool) -> list[Block]:
    """The blocks of a parameter; on a device, `whole` ones are larger."""
    part = local(entry.parameter)
    numbers = _CPU_NUMBERS
    if part.device.type != "cpu":
        numbers = _WHOLE_NUMBERS if whole else _DEVICE_NUMBERS
    return [
        Block(entry, start, min(start + numbers, part.numel()))
        for start in range(0, part.numel(), numbers)
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without its history, as the same memory."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def flat(part: Tensor) -> Tensor | None:
    """(numbers,) in the order of the memory, or None where that has gaps or overlaps."""
    if part.is_contiguous():
        return part.view(-1)
    expected = 1
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return part.as_strided((part.numel(),), (1,))


def number(value: object) -> float | None:
    """A setting, or None where it lies on a device that would have to be waited for."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return None
    return float(value)  # type: ignore[arg-type]


def steps_of(state: dict[str, Any]) -> bounds.Number | None:
    """An Adam's step count: a float, a tensor on a device, or None where there is none yet."""
    steps = state.get("step")
    if isinstance(steps, torch.Tensor):
        steps = local(steps)
        return float(steps) if steps.device.type == "cpu" else steps.double()
    return steps


def _muon_reach(options: dict[str, Any], parameter: Tensor) -> float:
    """Largest singular value of an update per learning rate."""
    coefficients, longest = tuple(options["ns_coefficients"]), max(parameter.shape)
    reach = bounds.orthogonal_reach(coefficients, options["ns_steps"], longest)
    factor = bounds.muon_factor(options["adjust_lr_fn"], parameter.shape)
    return reach * factor * bounds.update_slack(parameter.dtype)
