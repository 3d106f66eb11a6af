"""Parameters, operations, kept bytes, joules and collectives of a model with structured layers.

Operations are counted as `torch.utils.flop_counter.FlopCounterMode` counts them: two for each
multiplication and addition of a matrix product, none for what is done element by element. The
formulas follow the routes of a `Plan`, with what is computed again in the backward pass.

Bytes that collectives carry, counted as they are called.

Works forward and backward, for functional and for in-place collectives, and below DTensor. What is
counted is what the caller hands over, not what a library puts on the wire; `Traffic.ring_bytes`
is what a bandwidth-optimal ring would send from every rank (Thakur et al. 2005).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable
from outlast.tensorize import operator as _operators  # noqa: F401  (defines outlast::chain)
from outlast.tensorize.contraction import LayerPlan, execution_plan, keeps
from outlast.tensorize.network import Network, Route, RouteStage, lower
from outlast.tensorize.planner.choose import plan_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def route_flops(network: Network, route: Route, tokens: int) -> int:
    """Operations of going forward along a route, without merging its groups."""
    stages = lower(network, route).stages
    return sum(_stage_flops(stage) for stage in stages) * tokens


def _stage_flops(stage: RouteStage) -> int:
    return 2 * stage.b * stage.m * stage.k * stage.f


def merge_flops(network: Network, route: Route) -> int:
    """Operations of merging the groups of a route, once; outer products count as well."""
    planned_stages = execution_plan(network, route).stages
    return sum(
        making.product.flops for planned in planned_stages for making in planned.merging.ahead
    )


def forward_flops(network: Network, plan: LayerPlan, tokens: int) -> int:
    """Operations of a forward pass."""
    return route_flops(network, plan.forward, tokens) + merge_flops(network, plan.forward)


def backward_flops(
    network: Network,
    plan: LayerPlan,
    tokens: int,
    *,
    want_x: bool = True,
    wanted: Sequence[int] | None = None,
) -> int:
    """Operations of a backward pass, as `operator.gradients_of` does it.

    Args:
        network: The chain.
        plan: Its routes.
        tokens: Number of tokens.
        want_x: Whether the gradient of x is asked for.
        wanted: Cores whose gradients are; None: all.
    """
    cores = range(len(network.cores)) if wanted is None else wanted
    if plan.plain:
        return 2 * forward_flops(network, plan, tokens)
    kept = keeps(network, plan, tokens)
    routes = [plan.input_gradient] if want_x else []
    routes += [plan.core_gradients[core] for core in cores]
    total = 0
    for route in dict.fromkeys(routes):
        stages = lower(network, route).stages
        mine = [core for core in cores if plan.core_gradients[core] == route]
        for_x = want_x and route == plan.input_gradient
        asked = [any(core in mine for core in stage.cores) for stage in stages]
        first = asked.index(True) if any(asked) else len(stages)
        products = 0
        if any(asked) and not (kept and route == plan.forward):
            products += sum(_stage_flops(stage) for stage in stages[:-1])
        products += sum(_stage_flops(stage) for stage in (stages if for_x else stages[first + 1 :]))
        products += sum(
            _stage_flops(stage) for stage, is_asked in zip(stages, asked, strict=True) if is_asked
        )
        total += products * tokens + merge_flops(network, route)
        for planned in execution_plan(network, route).stages:
            if back := planned.merging.back_to(frozenset(mine)):
                # All but the matrix is made again.
                again = [*planned.merging.ahead[:-1], *back]
                total += sum(making.product.flops for making in again)
    return total


@register_flop_formula(torch.ops.outlast.chain, get_raw=True)
def _chain_flops(x: Tensor, cores: list[Tensor], network: str, **_: Any) -> int:
    description = Network.parse(network)
    plan = plan_for(description, x.shape[0], x.dtype, x.device, True)
    return forward_flops(description, plan, x.shape[0])


@register_flop_formula(torch.ops.outlast.chain_backward, get_raw=True)
def _chain_backward_flops(
    dy: Tensor, x: Tensor, cores: list[Tensor], network: str, **_: Any
) -> int:
    description = Network.parse(network)
    plan = plan_for(description, x.shape[0], x.dtype, x.device, True)
    return backward_flops(description, plan, x.shape[0])


def _in_place_flops(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any
) -> int:
    return 2 * math.prod(left) * right[-1]


def counted_flops(run: Callable[[], object]) -> int:
    """Operations that torch's own counter sees while `run` runs.

    Products that are added in place, as gradients of chunks are, are counted as well; torch's
    counter leaves them out.
    """
    own = {torch.ops.aten.addmm_: _in_place_flops, torch.ops.aten.baddbmm_: _in_place_flops}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        run()
    return int(counter.get_total_flops())


def kept_bytes(run: Callable[[], object], besides: Sequence[Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of what `run` computes.

    Memory that several kept tensors share counts once.

    Args:
        run: The forward pass.
        besides: Tensors whose memory is not counted: parameters, usually, and x.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    held: dict[int, int] = {}
    tensors: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
            # As long as it is held here, no other tensor gets its address.
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(held.values())


@dataclass(frozen=True)
class Account:
    """Parameters, operations and memory of a model.

    Attributes:
        parameters: All, tied ones once.
        factor_parameters: Of the structured layers.
        tokens: Of one run.
        flops_per_token: Forward and backward, counted by torch; includes attention.
        kept_bytes: Measured, of one forward pass, without parameters.
        tokens_per_s: Measured, forward and backward, the best of the repeats.
        joules_per_token: Measured by the caller's meter over all repeats.
    """

    parameters: int
    factor_parameters: int
    tokens: int
    flops_per_token: float
    kept_bytes: int
    tokens_per_s: float
    joules_per_token: float | Unavailable

    def __str__(self) -> str:
        joules = self.joules_per_token
        energy = str(joules) if isinstance(joules, Unavailable) else f"{joules:.4g} J (measured)"
        return (
            f"{self.parameters} parameters, {self.factor_parameters} of them in factors; per token "
            f"{self.flops_per_token:.4g} FLOPs forward and backward (counted), "
            f"{self.kept_bytes / self.tokens:.4g} bytes kept (measured), energy {energy}; "
            f"{self.tokens_per_s:.4g} tokens/s (measured)"
        )


def account(
    model: nn.Module,
    forward: Callable[[], Tensor],
    tokens: int,
    *,
    repeats: int = 3,
    joules: Callable[[], float] | None = None,
) -> Account:
    """Measure a model's forward and backward pass.

    Gradients of the parameters are as they were afterwards.

    Args:
        model: Any; the structured layers in it are told apart.
        forward: Runs the model and gives a scalar loss.
        tokens: Tokens in one run.
        repeats: Timed runs, after two that are not.
        joules: Reads the energy that the device has used since some moment, in joules.

    Raises:
        TensorizeError: For numbers below 1, or a loss that is no scalar.
    """
    if tokens < 1 or repeats < 1:
        raise TensorizeError(f"tokens = {tokens} and repeats = {repeats} must be at least 1")
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    def once() -> None:
        loss = forward()
        if loss.numel() != 1:
            raise TensorizeError(
                f"forward gave a tensor of shape {tuple(loss.shape)}, no loss: let it give .sum()"
            )
        loss.backward()  # type: ignore[no-untyped-call]

    try:
        kept = kept_bytes(forward, parameters)
        flops = counted_flops(once)
        begun = joules() if joules is not None else 0.0
        on_gpu = any(parameter.is_cuda for parameter in parameters)
        seconds = []
        for _ in range(repeats):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            once()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        used: float | Unavailable = Unavailable("no meter", "pass joules=")
        if joules is not None:
            used = (joules() - begun) / repeats / tokens
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return Account(
        sum(parameter.numel() for parameter in parameters),
        factor_numbers(model),
        tokens,
        flops / tokens,
        kept,
        tokens / min(seconds),
        used,
    )


def factor_numbers(model: nn.Module) -> int:
    """Numbers in the factors of a model's structured layers, tied ones once."""
    from outlast.tensorize.parameters import structured_layers

    factors = {
        id(parameter): parameter.numel()
        for part in structured_layers(model)
        for parameter in part.parameters
    }
    return sum(factors.values())


_REDUCING = {"all_reduce", "all_reduce_", "allreduce_"}
"""Counted: the tensor; a ring sends 2 (p - 1) / p of it."""

_GATHERING = {"all_gather_into_tensor", "_allgather_base_", "allgather_"}
"""Counted: the result of all ranks; a ring sends (p - 1) / p of it."""

_SCATTERING = {"reduce_scatter_tensor", "_reduce_scatter_base_", "reduce_scatter_"}
"""Counted: the input of all ranks; a ring sends (p - 1) / p of it."""

_MOVING = {"broadcast", "broadcast_", "all_to_all_single", "alltoall_base_", "scatter_"}
"""Counted: the tensor, and as much on the wire."""


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        name: The operator, such as ``all_reduce``.
        payload_bytes: Bytes of the whole tensor.
        ranks: Size of the process group.
    """

    name: str
    payload_bytes: int
    ranks: int

    @property
    def ring_bytes(self) -> float:
        """Bytes that a ring sends from every rank."""
        share = (self.ranks - 1) / self.ranks
        if self.name in _REDUCING:
            return 2 * share * self.payload_bytes
        return share * self.payload_bytes if self.name not in _MOVING else self.payload_bytes


@dataclass
class Traffic:
    """Collectives that have been called so far, in order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors handed to collectives."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def ring_bytes(self) -> float:
        """Bytes that rings would send from every rank."""
        return sum(call.ring_bytes for call in self.calls)


class CountedCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of this process inside a ``with`` block.

    The reducer of DistributedDataParallel is outside: its collectives come from C++.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and note it if it is a collective."""
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # DTensor turns itself into local operators, which come back here
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace in ("_c10d_functional", "c10d"):
            carried = _carried_bytes(name, args, result)
            if carried is not None:
                self.traffic.calls.append(Call(name, carried, _ranks(args)))
        return result


def _carried_bytes(name: str, args: tuple[Any, ...], result: Any) -> int | None:
    if name in _REDUCING or name in _MOVING:
        return sum(map(_size, _tensors(args[0])))
    if name in _GATHERING:
        # In place the result is the first argument, else what is returned.
        functional = name == "all_gather_into_tensor"
        return sum(map(_size, _tensors(result if functional else args[0])))
    if name in _SCATTERING:
        functional = name == "reduce_scatter_tensor"
        return sum(map(_size, _tensors(args[0] if functional else args[1])))
    return None


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _ranks(args: tuple[Any, ...]) -> int:
    """Size of the group among a collective's arguments: a name, or a boxed group."""
    for argument in args:
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(argument).size()  # type: ignore[arg-type]
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(dist.ProcessGroup.unbox(argument).size())
    raise AssertionError("a collective without a process group")
