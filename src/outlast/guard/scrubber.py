"""Scrubbing of parameters and optimizer state, a slice per round, as of memory.

A round takes one slice. Before an optimizer step its parameters are copied; after the step its
moments and update are checked against `outlast.guard.optimizer`'s bounds and its bytes are hashed;
before the next step they are hashed again, and compared over the replicas. Rounds go through all
parameters in turn. How much a round takes, and after how many steps the next one follows, is set
so that all of it takes a given share of the steps' time: a wrong number that stays and that a check
can see is found within `Scrubber.period_steps`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from outlast.guard import optimizer as bounds
from outlast.guard.findings import LASTING
from outlast.guard.parameter_writes import data_writes, step_done
from outlast.guard.replica_hashes import Replica, Replicas, compare, hash64
from outlast.guard.residual import ResidualTest, equality_test, exact_test
from outlast.guard.watch import Watch
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.guard.findings import Outcome, Site
    from outlast.guard.policy import Policy


_CPU_NUMBERS, _DEVICE_NUMBERS = (2**16, 2**18), (2**20, 2**24)
"""Numbers of a block, few enough for a cache; of a `whole` one, many enough for few calls."""

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


class OptimizerGroup:
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
        """Note a step in as few objects as can be; None where updates have no bound."""
        if self._settings is None:
            return None
        return self.noted.append, self._settings, self.optimizer, self.number

    @property
    def options(self) -> dict[str, Any]:
        """Looked up, since a restart replaces the dictionary."""
        options: dict[str, Any] = self.optimizer.param_groups[self.number]
        return options

    def decay(self, dtype: torch.dtype) -> bounds.Decay | None:
        """The decay of moments of this type; None where the betas lie on a device."""
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
        """Return the decay of a parameter and its longest update; None where there is no bound.

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
        eps = bounds.stored_eps(options["eps"], dtype)
        if eps == 0.0:
            return None
        decoupled = options.get("decoupled_weight_decay", False)
        keep = 1.0 - moved * (rate * weight_decay if decoupled else 0.0)
        reach = bounds.adam_reach(decay, (beta1, beta2), eps, steps)
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
        """Longest update of a coordinate in any step, per learning rate."""
        options = self.options
        if self.kind == "muon":
            return max(_muon_reach(options, parameter) for parameter in options["params"])
        if self._betas is None:
            return math.inf
        reach = 0.0
        for dtype in {parameter.dtype for parameter in options["params"]}:
            decay = self.decay(dtype)
            assert decay is not None
            eps = bounds.stored_eps(options["eps"], dtype)
            ever = bounds.adam_reach_ever(decay, (self._betas[0], self._betas[2]), eps)
            reach = max(reach, ever * bounds.update_slack(dtype))
        return reach


@dataclass(frozen=True)
class BlockRange:
    """Largest parameters of a block, and their possible growth until then."""

    largest: Tensor
    step: int
    version: int
    distance: float
    growth: float


@dataclass
class ScrubbedParameter:
    """A parameter, and the largest numbers that rounds have found in its blocks."""

    name: str
    parameter: Tensor
    group: OptimizerGroup | None
    ranges: dict[int, BlockRange] = field(default_factory=dict)

    @property
    def kind(self) -> bounds.Kind:
        """Kind of its optimizer."""
        return "other" if self.group is None else self.group.kind

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of it; empty before the first step."""
        if self.group is None:
            return {}
        state: dict[str, Any] = self.group.optimizer.state.get(self.parameter, {})
        return state


@dataclass(frozen=True)
class Block:
    """Numbers [start, end) of a parameter as it lies in memory."""

    entry: ScrubbedParameter
    start: int
    end: int

    def of(self, tensor: Tensor) -> Tensor | None:
        """This block of the parameter, or of what lies in memory as the parameter does."""
        return self._part(local(self.entry.parameter), local(tensor))

    def _part(self, own: Tensor, part: Tensor) -> Tensor | None:
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
        state, others, own = {}, [], local(self.entry.parameter)
        parameter = self._part(own, own)
        assert parameter is not None
        for key, value in self.entry.state.items():
            if isinstance(value, torch.Tensor):
                numbers = local(value)
                part = self._part(own, numbers) if value.dim() else None
                if part is not None:
                    state[key] = part
                elif self.start == 0:
                    others.append(numbers.contiguous())
        return Views(parameter, state, others, self.writes(parameter))

    def writes(self, numbers: Tensor) -> int:
        """Count of the writes to the parameter, of which `numbers` is a view."""
        return numbers._version + data_writes(self.entry.parameter)

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
        writes: Of a program to the parameter so far.
    """

    parameter: Tensor
    state: dict[str, Tensor]
    others: list[Tensor]
    writes: int

    def optimizer(self) -> list[Tensor]:
        """All state of the optimizer."""
        return [*self.state.values(), *self.others]


@dataclass
class BlockPiece:
    """A block in a round, with what it was before the step."""

    block: Block
    old: Tensor
    steps: bounds.Number | None
    version: int

    @classmethod
    @torch.no_grad()
    def of(cls, block: Block) -> BlockPiece:
        """Copy a block as it is before a step."""
        data, steps = block.parameter(), steps_of(block.entry.state)
        # What an unknown optimizer may do to a parameter is unknown.
        checked = block.entry.kind != "other"
        old = data.clone() if checked else torch.full((1,), torch.nan, device=data.device)
        return cls(block, old, 0.0 if steps is None else steps, block.writes(data))

    def range_since_last_round(self, parameter: Tensor, step: int) -> ResidualTest | None:
        """Judge whether the largest number is one that steps can have made since the last round.

        Args:
            parameter: (numbers,) now.
            step: Now.
        """
        entry, group = self.block.entry, self.block.entry.group
        if group is None or math.isinf(group.distance):
            return None
        least, most = torch.aminmax(parameter)
        version, before = self.block.writes(parameter), entry.ranges.get(self.block.start)
        now = BlockRange(torch.maximum(-least, most), step, version, group.distance, group.growth)
        entry.ranges[self.block.start] = now
        if before is None:
            return None
        steps = step - before.step
        if version - before.version != steps * (version - self.version):
            # Something else has written to it, or some steps have left it out.
            return None
        growth, distance = now.growth - before.growth, now.distance - before.distance
        return bounds.check_range(now.largest, before.largest, steps, growth, distance)


@dataclass
class Round:
    """Blocks that are checked around one step, and what the checks have said so far."""

    pieces: list[BlockPiece]
    seconds: float = 0.0
    step: int = 0
    hashes: tuple[Tensor, Tensor] | None = None
    writes: list[tuple[int, int]] = field(default_factory=list)
    judged: list[tuple[Site, ResidualTest]] = field(default_factory=list)
    not_finite: list[tuple[str, int | Tensor]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Device of its first block."""
        return self.pieces[0].old.device

    def views(self) -> list[Views]:
        """All that is there now."""
        return [piece.block.views() for piece in self.pieces]


@dataclass(frozen=True)
class StepResult:
    """Hashes of some blocks as a step has left them.

    Attributes:
        step: Optimizer steps done with it.
        blocks: In order.
        hashes: As of `hashes_of`.
    """

    step: int
    blocks: list[Block]
    hashes: tuple[Tensor, Tensor]


def state_of(views: list[Views]) -> list[Tensor]:
    """All optimizer state of some blocks."""
    return [tensor for view in views for tensor in view.optimizer()]


def hashes_of(views: list[Views]) -> tuple[Tensor, Tensor]:
    """Hashes of the parameters and of the state of some blocks."""
    parameters, state = hash64([view.parameter for view in views]), state_of(views)
    return parameters, hash64(state) if state else torch.zeros_like(parameters)


def writes_of(views: list[Views]) -> list[tuple[int, int]]:
    """Counters that change when a program, and not a fault, writes to the tensors."""
    return [
        place
        for view in views
        for place in (
            (view.parameter.data_ptr(), view.writes),
            *((tensor.data_ptr(), tensor._version) for tensor in view.optimizer()),
        )
    ]


def cut(entry: ScrubbedParameter, whole: bool) -> list[Block]:
    """The blocks of a parameter; `whole` ones are larger."""
    part = local(entry.parameter)
    numbers = (_CPU_NUMBERS if part.device.type == "cpu" else _DEVICE_NUMBERS)[whole]
    return [
        Block(entry, start, min(start + numbers, part.numel()))
        for start in range(0, part.numel(), numbers)
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without its history, as the same memory."""
    part = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part.detach()


def flat(part: Tensor) -> Tensor | None:
    """(numbers,) in the order of the memory, or None where that has gaps or is no plain array."""
    if part.layout is not torch.strided or part.is_nested or part.is_quantized or part.is_meta:
        return None
    if part.is_conj() or part.is_neg():
        return None
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


LONGEST_GAP = 1000
"""Steps after which a round is made even if it takes more than was earned."""


class CheckBudget:
    """Budget of the checks, as a share of the steps' time.

    Every step earns ``budget`` times a step's usual time; what checks took is subtracted, so that
    over any number of steps they take at most what was earned, and one round. What a round has
    overdrawn is earned before the next one, unless that takes more than `LONGEST_GAP` steps.

    A round of some blocks with some numbers is predicted to take ``blocks x + numbers y`` seconds,
    with x and y fitted to the rounds so far, old ones counting less and less.

    Args:
        budget: Share of the time.

    Attributes:
        credit: Seconds earned and not yet spent.
        step_seconds: A step's usual time.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.credit = 0.0
        self.step_seconds = 0.0
        # Two imagined rounds to begin with: a block takes 0.2 ms, a million numbers take 2 ms.
        self._blocks, self._both, self._numbers = 1.0, 0.0, 1.0
        self._block_seconds, self._number_seconds = 2e-4, 2e-3

    def earn(self, seconds: float, steps: int = 1) -> None:
        """So many steps took so long; a pause among them counts as much as they do."""
        usual = self.step_seconds
        mean = min(seconds / steps, 2.0 * usual) if usual else seconds / steps
        self.step_seconds = mean + (usual - mean) * (7.0 / 8.0) ** steps if usual else mean
        # Never more than the share of what has really passed.
        self.credit += self.budget * min(seconds, steps * self.step_seconds)

    def spend(self, seconds: float) -> None:
        """The checks took so long."""
        self.credit -= seconds

    def learn(self, blocks: int, numbers: int, seconds: float) -> None:
        """A round of so many blocks with so many numbers took so long."""
        millions = numbers / 1e6
        fade = 0.95
        self._blocks = fade * self._blocks + blocks * blocks
        self._both = fade * self._both + blocks * millions
        self._numbers = fade * self._numbers + millions * millions
        self._block_seconds = fade * self._block_seconds + blocks * seconds
        self._number_seconds = fade * self._number_seconds + millions * seconds

    def predict(self, blocks: int, numbers: int) -> float:
        """Seconds of a round."""
        determinant = self._blocks * self._numbers - self._both**2
        per_block = self._block_seconds / self._blocks
        per_million = 0.0
        if determinant > 1e-9 * self._blocks * self._numbers:
            per_million = self._blocks * self._number_seconds - self._both * self._block_seconds
            per_million = max(per_million / determinant, 0.0)
            per_block = max((self._block_seconds - self._both * per_million) / self._blocks, 0.0)
        return blocks * per_block + numbers / 1e6 * per_million

    def plan(self, sizes: Sequence[int], first: int) -> tuple[int, int]:
        """Plan when the next round should be, and how far it should go.

        Args:
            sizes: Numbers of each block.
            first: The block to begin with.

        Returns:
            Steps to wait, and the block to end before, at least ``first + 1``.
        """
        last, numbers = first + 1, sizes[first]
        missing = self.predict(1, numbers) - self.credit
        if missing > 0.0:
            earned = self.budget * self.step_seconds
            return (min(math.ceil(missing / earned), LONGEST_GAP) if earned else 1), last
        while last < len(sizes):
            numbers += sizes[last]
            if self.predict(last + 1 - first, numbers) > self.credit:
                break
            last += 1
        if last - first == len(sizes):
            # There is nothing to save for.
            self.credit = min(self.credit, self.predict(len(sizes), numbers))
        return 0, last


_FIRST_ROUND = 10
"""Steps before the first round: those of a training that still loads and compiles."""


class Scrubber:
    """Checks of parameters and optimizer state around the optimizer's steps.

    A step without a round costs the comparison of two integers, and a note of the rates. What the
    first round would load is loaded here, outside of any step; all rounds are paid for.

    What level ``light`` cannot see, until another check or a later round does:

    - a fault that came and went while another slice was watched, such as a step that moved its
      parameters too far, or a second moment that was negative or too small for a few steps (the
      next gradients fill it again; what it has done to a parameter only the range check may see);
    - a flipped sign or low bit of a parameter or of a first moment that changed outside of the
      watched slice: it is within all bounds, and only replicas tell;
    - a second moment that became larger, which slows its parameter down and breaks no bound;
    - wrong gradients, and wrong updates that are no longer than some gradients could make them;
    - numbers that a program wrote, and a fault in a slice that a program wrote to in the same step;
    - moments and updates of optimizers other than Adam, AdamW, Muon and SGD (of SGD: only what is
      not finite), and parameters in `uncovered`.

    Args:
        watch: What all checks of the guard share.
        parameters: Names and parameters, as of ``model.named_parameters()``.
        optimizers: That step together.
        group: Of ranks whose parameters are equal bit for bit, such as those of DDP or of the
            replicating dimension of HSDP; None where nothing is replicated. All of them construct
            their scrubbers together.
        whole: Check everything in every step instead of slices; copies all parameters for it.
        clock: Seconds.

    Attributes:
        seconds: Spent by rounds so far, on this process, without waiting for other ranks.
        steps: Optimizer steps seen.
        uncovered: Names of parameters whose memory cannot be cut into slices.
    """

    def __init__(
        self,
        watch: Watch,
        parameters: Iterable[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
        group: dist.ProcessGroup | None = None,
        whole: bool = False,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.watch = watch
        self.seconds = 0.0
        self.steps = 0
        self.uncovered: list[str] = []
        self._replicas: Replicas | None = None
        self._whole = whole
        self._clock = clock
        self._budget = CheckBudget(watch.policy.light_budget)
        self._groups = [
            OptimizerGroup(optimizer, index)
            for optimizer in optimizers
            for index in range(len(optimizer.param_groups))
        ]
        self._entries = self._enter(parameters)
        self._blocks = [block for entry in self._entries for block in cut(entry, whole)]
        self._sizes = [block.end - block.start for block in self._blocks]
        readers = [group.reader() for group in self._groups if self._blocks]
        self._readers = [reader for reader in readers if reader is not None]
        self._reported: set[str] = set()
        # Of each block the steps of the newest state in which it was found right.
        self._verified = [watch.step] * len(self._blocks)
        self._left: StepResult | None = None
        self._cursor = 0
        # The step in which there is something to do, and the block that a round ends before.
        self._due, self._until = (0, len(self._blocks)) if whole else (_FIRST_ROUND, 1)
        self._round: Round | None = None
        self._learning = False
        self._visited: tuple[int, float] | None = None
        if self._blocks and group is not None and dist.get_world_size(group) > 1:
            self._replicas = Replicas(group, self._blocks[0].parameter().device)
        self._begun, self._last_period = 0, 0
        if not whole:
            # Do what takes longer the first time, outside of any step.
            parts = [(entry.kind, local(entry.parameter)) for entry in self._entries]
            kinds = {
                (kind, part.dtype, part.device): part for kind, part in parts if not part.is_meta
            }
            for (kind, _, _), part in kinds.items():
                _rehearse(self.watch.policy, kind, part)
            if self._replicas is not None:
                self._replicas.connect()

    @property
    def elements(self) -> int:
        """Elements of the parameters that rounds go through, of all ranks that shard them."""
        return sum(entry.parameter.numel() for entry in self._entries)

    @property
    def period_steps(self) -> int | None:
        """Steps in which everything is checked once: of the last time, or as it goes this time.

        None before the first round.
        """
        going = 0
        if self._cursor:
            share = sum(self._sizes[: self._cursor]) / sum(self._sizes)
            going = math.ceil((max(self.steps, self._due) - self._begun) / share)
        return max(going, self._last_period) or None

    @torch.no_grad()
    def begin(self) -> None:
        """Watch what is there now until the first step, where everything is checked."""
        if not (self._whole and self._blocks):
            return
        started = self._clock()
        # No step is checked, so what was there before is not copied.
        pieces = [
            BlockPiece(block, block.parameter()[:0], 0.0, block.writes(block.parameter()))
            for block in self._blocks
        ]
        first = self._round = Round(pieces)
        self._note_result(first, first.views(), self.watch.step)
        self._charge(started, first)

    def _note_result(self, current: Round, views: list[Views], step: int) -> None:
        """Note the round's slice as it is after `step` steps, as it is to stay until the next."""
        current.step = step
        current.hashes, current.writes = hashes_of(views), writes_of(views)
        self._left = StepResult(step, [piece.block for piece in current.pieces], current.hashes)
        if self._whole:
            # A weight that the passes find changed was right then, which `has_left` can tell.
            self.watch.intact_steps["weight"] = step

    def before_step(self) -> None:
        """End the last round, and begin another if it is time; right before the optimizer's step.

        All ranks of a group call it together. A second call before the step does nothing.
        """
        if self.steps < self._due and self.watch.fault_hook is None:
            return
        before = self._visited
        if not self._blocks or (before is not None and before[0] == self.steps):
            return
        if self.watch.fault_hook is not None:
            # As aliases with versions of their own: what a fault hook does is no write.
            for entry in self._entries:
                self.watch.touch("weight.rest", entry.name, local(entry.parameter).data)
                for key, value in entry.state.items():
                    if isinstance(value, torch.Tensor):
                        self.watch.touch(
                            "optimizer.state", f"{entry.name}.{key}", local(value).data
                        )
        self._visited = self.steps, self._clock()
        if before is not None:
            self._budget.earn(self._visited[1] - before[1], self.steps - before[0])
        self.finish(used=True)
        if self.steps >= self._due:
            begun = self._clock()
            self._round = Round(list(map(BlockPiece.of, self._blocks[self._cursor : self._until])))
            self._charge(begun, self._round)

    def written(self, optimizer: Optimizer) -> None:
        """Look anew at what the program has written to since `before_step`, as `optimizer` steps.

        Without it the optimizer's update would be taken for longer than it can be.
        """
        current = self._round
        if current is None or current.hashes is not None:
            return
        for number, piece in enumerate(current.pieces):
            block = piece.block
            group = block.entry.group
            if group is None or group.optimizer is not optimizer:
                continue
            if block.writes(block.parameter()) != piece.version:
                current.pieces[number] = BlockPiece.of(block)

    def after_step(self) -> None:
        """Check what the step has done to the slice; right after the optimizer's step.

        What it finds is said by the next `before_step` or `finish`.
        """
        self.steps += 1
        step_done()
        for note, settings, optimizer, number in self._readers:
            note(settings(optimizer.param_groups[number]))
        if self._round is not None:
            self._look(self._round)

    @torch.no_grad()
    def _look(self, current: Round) -> None:
        if current.hashes is not None:
            return
        started = self._clock()
        for group in self._groups:
            group.catch_up()
        views = current.views()
        for piece, view in zip(current.pieces, views, strict=True):
            self._examine(piece, view, current)
        # The step is counted when all of its checks are made.
        self._note_result(current, views, self.watch.step + 1)
        self._charge(started, current)

    def finish(self, *, used: bool = False) -> None:
        """End a round whose step is done: compare its slice with what the step has left.

        All ranks of a group call it together; `before_step` does it, too.

        Args:
            used: Whether passes have been run since that step.
        """
        current = self._round
        if current is not None and current.hashes is not None:
            self._round = None
            self._end(current, current.hashes, used)

    @torch.no_grad()
    def has_left(self, step: int) -> bool | None:
        """Return whether the watched slice is as the step that led to `step` has left it.

        None where it is not known: another step was watched last, or a program has written.
        """
        left = self._left
        if left is None or left.step != step:
            return None
        now = hashes_of([block.views() for block in left.blocks])
        return bool(torch.equal(torch.stack(now), torch.stack(left.hashes)))

    def go_back(self, earlier: Scrubber) -> None:
        """Know no more of the state, which is an earlier one, than `earlier` knew of it."""
        if len(earlier._verified) == len(self._verified):
            self._verified = [
                min(pair) for pair in zip(earlier._verified, self._verified, strict=True)
            ]

    @torch.no_grad()
    def has_moved(self) -> bool:
        """Return whether the watched slice is wrong on this rank, or not what the step has left."""
        current = self._round
        if current is None or current.hashes is None:
            return False
        started = self._clock()
        views = current.views()
        moved = any(int(item.exceeded) for _, item in current.judged) or (
            current.writes == writes_of(views)
            and bool(torch.any(torch.stack(hashes_of(views)) != torch.stack(current.hashes)))
        )
        self._charge(started, current)
        return moved

    @torch.no_grad()
    def _end(self, current: Round, after: tuple[Tensor, Tensor], used: bool) -> None:
        started = self._clock()
        views = current.views()
        now = hashes_of(views)
        if current.writes != writes_of(views):
            # The program has written to the tensors, which is no fault.
            after, self._left = now, None
        checked = range(self._cursor, self._cursor + len(current.pieces))
        before = min(self._verified[number] for number in checked)
        # An update that was wrong, or a slice of which nobody knows since when it has been wrong.
        older = dict.fromkeys(LASTING - {"weight"}, min(before, current.step - 1))
        self.watch.intact_steps |= {**older, "rest": current.step}
        found = self.watch.intact
        site = self.watch.ledger.site("optimizer", "rest")
        current.judged.append((site, equality_test(torch.stack(now), torch.stack(after))))
        self._cursor = (self._cursor + len(current.pieces)) % len(self._blocks)
        if self._cursor == 0:
            self._last_period, self._begun = self.steps - self._begun, self.steps
        waited = 0.0
        if self._replicas is None:
            for pair in current.judged:
                self.watch.judge(*pair)
            self._due, self._until = self._next_round()
        else:
            waited = self._compare(self._replicas, current, views, (*after, *now), used)
        self._report_not_finite(current)
        if self.watch.intact == found:
            self._verified[checked.start : checked.stop] = [current.step] * len(checked)
        self._charge(started + waited, current)
        if self._learning:
            numbers = sum(piece.block.end - piece.block.start for piece in current.pieces)
            self._budget.learn(len(current.pieces), numbers, current.seconds)
        # The first round is paid for, but takes longer than any other will.
        self._learning = True

    def _charge(self, started: float, current: Round) -> None:
        seconds = self._clock() - started
        self.seconds += seconds
        self._budget.spend(seconds)
        current.seconds += seconds

    def _next_round(self) -> tuple[int, int]:
        """In which step the next round should be, and the block that it should end before."""
        if self._whole:
            return self.steps, len(self._blocks)
        gap, until = self._budget.plan(self._sizes, self._cursor)
        return self.steps + gap, until

    def _enter(self, parameters: Iterable[tuple[str, Tensor]]) -> list[ScrubbedParameter]:
        homes = {
            id(parameter): group for group in self._groups for parameter in group.options["params"]
        }
        entries = []
        for name, parameter in parameters:
            if flat(local(parameter)) is None:
                self.uncovered.append(name)
            elif local(parameter).numel():
                entries.append(ScrubbedParameter(name, parameter, homes.get(id(parameter))))
        return entries

    def _examine(self, piece: BlockPiece, views: Views, current: Round) -> None:
        entry, new, state = piece.block.entry, views.parameter, views.state
        if entry.kind == "adam" and {"exp_avg", "exp_avg_sq", "step"} <= entry.state.keys():
            self._examine_adam(piece, views, current)
        elif entry.kind == "muon" and "momentum_buffer" in state:
            self._examine_muon(piece, views, current)
        else:
            gradient = piece.block.gradient()
            for tensor in (new, *state.values()):
                if tensor.is_floating_point():
                    finite = bounds.check_finite(tensor, piece.old, gradient)
                    self._note(current, entry, "optimizer.finite", finite)
        found = piece.range_since_last_round(new, self.steps)
        if found is not None:
            current.judged.append((self.watch.ledger.site(entry.name, "weight.range"), found))

    def _examine_adam(self, piece: BlockPiece, views: Views, current: Round) -> None:
        entry, group = piece.block.entry, piece.block.entry.group
        new, state = views.parameter, views.state
        first, second = state.get("exp_avg"), state.get("exp_avg_sq")
        steps = steps_of(entry.state)
        assert group is not None
        if first is None or second is None or piece.steps is None or steps is None:
            return
        site = self.watch.ledger.site(entry.name, "optimizer.moments")
        current.judged.append((site, bounds.check_count(piece.steps, steps, new.device)))
        decay = group.decay(first.dtype)
        if decay is None or (not isinstance(steps, torch.Tensor) and not steps >= 1.0):
            return
        found = bounds.check_moments(first, second, decay.squared(steps), decay.floor)
        self._note(current, entry, "optimizer.moments", found)
        # A step that was left out, as after an overflow under a gradient scaler, moves nothing.
        bound = group.adam_bound(decay, first.dtype, steps, steps - piece.steps)
        if bound is not None:
            moments = (first, state.get("max_exp_avg_sq", second))
            update = bounds.check_update(new, piece.old, *bound, moments)
            self._note(current, entry, "optimizer.update", update)

    def _examine_muon(self, piece: BlockPiece, views: Views, current: Round) -> None:
        block, entry, group = piece.block, piece.block.entry, piece.block.entry.group
        assert group is not None
        gradient, momentum = block.gradient(), views.state["momentum_buffer"]
        found = bounds.check_finite(momentum, piece.old, gradient)
        self._note(current, entry, "optimizer.finite", found)
        bound = group.muon_bound(entry.parameter, moved=float(gradient is not None))
        if bound is None:
            return
        keep, limit = bound
        part = local(entry.parameter)
        rank = min(part.shape)
        if part.is_contiguous():
            rank = bounds.matrix_rank_limit(part.shape, block.start, block.end - block.start)
        length = bounds.check_norm(views.parameter, piece.old, keep, limit * math.sqrt(rank))
        current.judged.append((self.watch.ledger.site(entry.name, "optimizer.update"), length))

    def _note(
        self, current: Round, entry: ScrubbedParameter, operation: str, found: bounds.Examined
    ) -> None:
        current.judged.append((self.watch.ledger.site(entry.name, operation), found.judged))
        current.not_finite.append((entry.name, found.not_finite))

    def _report_not_finite(self, current: Round) -> None:
        """Say once of every parameter that its data have diverged."""
        for name, count in current.not_finite:
            if name not in self._reported and int(count):
                self._reported.add(name)
                site = self.watch.ledger.site(name, "optimizer.finite")
                self.watch.find(site, current.device, int(count), math.inf, "not_finite")

    def _compare(
        self,
        replicas: Replicas,
        current: Round,
        views: list[Views],
        hashes: tuple[Tensor, ...],
        used: bool,
    ) -> float:
        """Compare the slice over its replicas, and agree on the next one.

        Args:
            replicas: The ranks that have it.
            current: What this rank's checks of it have said; the last one is `rest`.
            views: Its memory.
            hashes: Of parameters and of state after the step, and of both now.
            used: Whether passes have been run since that step.

        Returns:
            Seconds of waiting for other ranks.
        """
        judged = [
            (site, ResidualTest(item.flags.cpu(), int(item.exceeded), float(item.worst), 0.0, 0.0))
            for site, item in current.judged
        ]
        # The last one is whether it has changed at rest, which the hashes tell.
        suspect = any(item.exceeded for _, item in judged[:-1])
        fields = [*map(int, hashes), int(suspect), *self._next_round()]
        rows, waited = replicas.exchange(fields, self._clock)
        self._due, self._until = max(row[5] for row in rows), min(row[6] for row in rows)
        repaired = False
        for part, tensors in enumerate(([view.parameter for view in views], state_of(views))):
            comparison = compare([Replica(row[part], row[2 + part], bool(row[4])) for row in rows])
            wrong = comparison.good is None or replicas.rank in comparison.bad
            outcome: Outcome = "detected"
            if comparison.bad and comparison.good is not None and self.watch.policy.correct:
                fixed = replicas.repair(tensors, comparison.good) == rows[comparison.good][2 + part]
                outcome = "corrected" if fixed else "persistent"
                # Of a slice whose last round was long ago, the steps since may have used it.
                older = not self._whole and any(
                    rows[rank][part] != rows[comparison.good][part] for rank in comparison.bad
                )
                if fixed and older:
                    outcome = "detected"
                elif fixed and wrong:
                    repaired = True
                    # With wrong parameters, this step's passes are wrong, too.
                    if part == 0 and used:
                        self.watch.spoil(current.step)
            site = self.watch.ledger.site("optimizer", "replicas")
            if self.watch.wants(site, exact_test([wrong])):
                self.watch.find(site, current.device, 1, math.inf, outcome)
        for site, item in judged:
            if self.watch.wants(site, item):
                self.watch.note(site, item, "corrected" if repaired else "detected")
        return waited


def _rehearse(policy: Policy, kind: bounds.Kind, like: Tensor) -> None:
    """Scrub spare numbers of this type, which loads all code and makes the allocators' memory."""
    spare = nn.Parameter(torch.zeros((256, 256), dtype=like.dtype, device=like.device))
    spare.grad = torch.zeros_like(spare)
    optimizer = bounds.idle_optimizer(kind, spare)
    scrubber = Scrubber(Watch(policy, None), [("spare", spare)], [optimizer], whole=True)
    for _ in range(2):
        scrubber.before_step()
        # The optimizer's own step would call hooks that a program may have put on all of them.
        optimizer.state[spare]["step"] += 1.0
        scrubber.after_step()
    scrubber.finish()
