"""Parameters, operations, kept bytes and joules of a model with structured layers.

Operations are counted as `torch.utils.flop_counter.FlopCounterMode` counts them: two for each
multiplication and addition of a matrix product, none for what is done element by element. The
formulas follow the routes of a `Plan`, with what is computed again in the backward pass.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable
from outlast.tensorize import operator as _operators  # noqa: F401  (defines outlast::chain)
from outlast.tensorize.contraction import LayerPlan, execution_plan, keeps
from outlast.tensorize.network import Network, Route, lower
from outlast.tensorize.parameters import structured_layers
from outlast.tensorize.planner import plan_for
from outlast.tensorize.route_search import route_flops

if TYPE_CHECKING:
    from torch import Tensor


def merge_flops(network: Network, route: Route) -> int:
    """Operations of merging the groups of a route, once; outer products count as well."""
    planned_stages = execution_plan(network, route).stages
    return sum(
        making.product.flops for planned in planned_stages for making in planned.merging.ahead
    )


def forward_flops(network: Network, plan: LayerPlan, tokens: int) -> int:
    """Operations of a forward pass."""
    return route_flops(network, plan.forward) * tokens + merge_flops(network, plan.forward)


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
        flops = [2 * stage.b * stage.m * stage.k * stage.f for stage in stages]
        mine = [core for core in cores if plan.core_gradients[core] == route]
        for_x = want_x and route == plan.input_gradient
        asked = [any(core in mine for core in stage.cores) for stage in stages]
        first = asked.index(True) if any(asked) else len(stages)
        products = sum(flops if for_x else flops[first + 1 :])
        products += sum(itertools.compress(flops, asked))
        if any(asked) and not (kept and route == plan.forward):
            products += sum(flops[:-1])
        total += products * tokens + merge_flops(network, route)
        for planned in execution_plan(network, route).stages:
            if back := planned.merging.back_to(frozenset(mine)):
                # All but the matrix is made again.
                again = [*planned.merging.ahead[:-1], *back]
                total += sum(making.product.flops for making in again)
    return total


def _described(x: Tensor, network: str) -> tuple[Network, LayerPlan, int]:
    """Work of the operators for compiled code: network, plan and tokens."""
    description, tokens = Network.parse(network), x.shape[0]
    return description, plan_for(description, tokens, x.dtype, x.device, True), tokens


@register_flop_formula(torch.ops.outlast.chain, get_raw=True)
def _chain_flops(x: Tensor, cores: list[Tensor], network: str, **_: Any) -> int:
    return forward_flops(*_described(x, network))


@register_flop_formula(torch.ops.outlast.chain_backward, get_raw=True)
def _chain_backward_flops(
    dy: Tensor, x: Tensor, cores: list[Tensor], network: str, **_: Any
) -> int:
    return backward_flops(*_described(x, network))


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
    factors = {
        id(parameter): parameter.numel()
        for part in structured_layers(model)
        for parameter in part.parameters
    }
    return sum(factors.values())
