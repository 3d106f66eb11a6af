"""The layer y = x W^T + b whose W is a chain of cores, as one differentiable operation.

Four ways of one computation:

* eager: one autograd function, which keeps x and what is rank-wide, and nothing else;
* where a plan says so, plain torch operations, which have less overhead for a few tokens;
* under ``torch.compile``: the custom operator ``outlast::chain``, opaque to the compiler, which
  chooses its plan when it runs, for then it knows the number of tokens;
* under ``torch.func`` transforms, in forward mode and for second derivatives: plain operations
  again. (An operator that takes a list of tensors has no derivative there.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import autocast_dtype
from outlast.tensorize.contraction import LayerPlan, keeps
from outlast.tensorize.execute import (
    BIAS,
    MergedPath,
    apply,
    differentiate,
    folds,
    transformed,
    widest,
    without_autocast,
)
from outlast.tensorize.network import Network, Route, dense_route, lower
from outlast.tensorize.planner import plan_for

if TYPE_CHECKING:
    from collections.abc import Sequence


class Merged:
    """Merged cores that are kept from call to call, until the cores change.

    A change is another tensor, another version of it, or another storage. Writing through
    ``core.data`` is none of these, so whoever keeps an object of this class must not do that
    meanwhile.
    """

    def __init__(self) -> None:
        self._paths: dict[
            tuple[Route, torch.dtype], tuple[list[Tensor], list[Any], MergedPath]
        ] = {}

    def path(
        self, network: Network, route: Route, cores: Sequence[Tensor], dtype: torch.dtype
    ) -> MergedPath:
        """The route with its groups merged."""
        stamp: list[Any] = [id(network)]
        for core in cores:
            version = 0 if core.is_inference() else core._version
            stamp += id(core), version, core.data_ptr(), core.dtype
        known = self._paths.get((route, dtype))
        if known is None or known[1] != stamp:
            # With the cores, whose identities nothing else can get while they are held.
            known = list(cores), stamp, MergedPath(network, route, cores, dtype)
            self._paths[route, dtype] = known
        return known[2]


def chain(
    x: Tensor,
    cores: Sequence[Tensor],
    network: Network,
    bias: Tensor | None = None,
    plan: LayerPlan | None = None,
    *,
    merged: Merged | None = None,
) -> Tensor:
    """Multiply x with the matrix that a network makes of its cores.

    The cores are merged in the widest of their dtypes, and the products are made in that of x, or
    of autocast. So is y.

    Args:
        x: (..., in_features).
        cores: The network's cores.
        network: What they are the cores of.
        bias: (out_features,).
        plan: How; None: what the planner says.
        merged: Where to keep the merged cores for the next call, of use without gradients alone.

    Returns:
        (..., out_features)

    Raises:
        TensorizeError: x has another number of features, or is not of floating point.
    """
    if x.shape[-1] != network.in_features:
        raise TensorizeError(
            f"x of shape {tuple(x.shape)} must end in the layer's {network.in_features} features"
        )
    if not x.is_floating_point():
        raise TensorizeError(f"x of {x.dtype} is not of floating point: convert it first")
    dtype = autocast_dtype(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return chain(x, cores, network, bias, plan, merged=merged)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    if x.dim() == 2:
        return _chain(x, tuple(cores), network, bias, plan, merged=merged)
    rows = x.reshape(-1, network.in_features)
    y = _chain(rows, tuple(cores), network, bias, plan, merged=merged)
    return y.view(*x.shape[:-1], network.out_features)


def _chain(
    x: Tensor,
    cores: tuple[Tensor, ...],
    network: Network,
    bias: Tensor | None,
    plan: LayerPlan | None,
    *,
    merged: Merged | None,
) -> Tensor:
    plainly = transformed()
    if torch.compiler.is_compiling():
        if plainly:
            return functional.linear(x, by_einsum(cores, network).to(x.dtype), bias)
        y: Tensor = torch.ops.outlast.chain(x, list(cores), str(network))
        return y if bias is None else y + bias
    if plainly or x.is_meta:
        return MergedPath(network, two_products(network), cores, x.dtype).forward(x, bias)
    learns = torch.is_grad_enabled() and (
        x.requires_grad or any(core.requires_grad for core in cores)
    )
    if plan is None:
        plan = plan_for(network, x.shape[0], x.dtype, x.device, learns)
    if plan.fused and any(type(tensor) not in _READABLE for tensor in (x, *cores)):
        plan = replace(plan, fused=False)
    if not learns:
        if plan.fused:
            return _fused(x, cores, bias)[0]
        if merged is None:
            return apply(MergedPath(network, plan.forward, cores, x.dtype), x, bias)[0]
        return apply(merged.path(network, plan.forward, cores, x.dtype), x, bias)[0]
    # The function folds a bias in only where it keeps what autograd would.
    folded = bias is not None and folds(x.shape[0], network.out_features)
    if plan.plain and not (folded and keeps(network, plan, x.shape[0])):
        return MergedPath(network, plan.forward, cores, x.dtype).forward(x, bias)
    result: Tensor = _Chain.apply(x, bias, network, plan, *cores)  # type: ignore[no-untyped-call]
    return result


# A subclass may have no memory that a kernel could read.
_READABLE = (Tensor, torch.nn.Parameter)


def by_einsum(cores: tuple[Tensor, ...], network: Network) -> Tensor:
    """The dense weight by one operation, all that the compiler can trace under a transform."""
    equation = ",".join(network.cores) + "->" + network.outputs + network.inputs
    dtype = widest(cores)
    weight = (
        torch.einsum(equation, *(core.to(dtype) for core in cores))
        .flatten(0, len(network.outputs) - 1)
        .flatten(1)
    )
    return weight[: network.out_features, : network.in_features]


def two_products(network: Network) -> Route:
    """Cut the chain into two groups, so that what is between them is narrowest.

    A route that is right for any number of tokens; the planner knows better ones.
    """
    count = len(network.cores)
    if count == 1:
        return dense_route(network)
    cuts = [Route((left, count - left)) for left in range(1, count)]
    return min(cuts, key=lambda route: lower(network, route).stages[1].width)


class _Chain(Function):
    """See the module; keeps x, the cores and inputs of stages that are narrower than half of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, network: Network, plan: LayerPlan, *cores: Tensor
    ) -> Tensor:
        if plan.fused:
            y, kept = _fused(x, cores, bias, learns=True)
        else:
            path = MergedPath(network, plan.forward, cores, x.dtype)
            keep = keeps(network, plan, x.shape[0])
            fold = keep and folds(x.shape[0], network.out_features)
            y, inputs = apply(path, x, bias, fold=fold)
            kept = inputs[1:] if keep else []
        ctx.network, ctx.plan, ctx.biased = network, plan, bias is not None
        ctx.save_for_backward(x, *cores, *kept)
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        network: Network = ctx.network
        count = len(network.cores)
        x, *saved = ctx.saved_tensors
        cores, kept = saved[:count], saved[count:]
        needs = ctx.needs_input_grad
        wanted = [core for core in range(count) if needs[4 + core]]
        found: dict[int, Tensor]
        if torch.is_grad_enabled():
            dx, found = _differentiable(network, x, dy, cores, (needs[0], wanted))
        else:
            dx, found = gradients_of(
                network, ctx.plan, x, dy, cores, wanted=wanted, want_x=needs[0], kept=kept
            )
        dbias = None
        if ctx.biased and needs[1]:
            dbias = found[BIAS] if BIAS in found else dy.sum(0)
        return dx, dbias, None, None, *(found.get(core) for core in range(count))


def gradients_of(
    network: Network,
    plan: LayerPlan,
    x: Tensor,
    dy: Tensor,
    cores: Sequence[Tensor],
    *,
    wanted: Sequence[int],
    want_x: bool,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Go backward along a plan's routes.

    Args:
        network: What the cores are those of.
        plan: Which routes.
        x: (tokens, in_features).
        dy: (tokens, out_features).
        cores: All cores.
        wanted: Cores whose gradients are asked for.
        want_x: Whether that of x is.
        kept: Inputs of the forward route's stages after the first, if they were kept.

    Returns:
        The gradient of x or None, and those of the wanted cores.
    """
    if plan.fused:
        return _fused_gradients(x, dy, cores, wanted=wanted, want_x=want_x, kept=kept)
    dx: Tensor | None = None
    found: dict[int, Tensor] = {}
    routes = [plan.input_gradient] if want_x else []
    routes += [plan.core_gradients[core] for core in wanted]
    for route in dict.fromkeys(routes):
        path = MergedPath(network, route, cores, x.dtype)
        inputs: list[Tensor] = []
        if kept and route == plan.forward:
            inputs = [path.entered(x), *kept]
        mine = [core for core in wanted if plan.core_gradients[core] == route]
        for_x = want_x and route == plan.input_gradient
        part, cores_found = differentiate(
            path, x, dy, cores=cores, wanted=mine, want_x=for_x, inputs=inputs
        )
        dx = part if for_x else dx
        found.update(cores_found)
    return dx, found


def _fused(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None = None, *, learns: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Multiply by the Triton kernels; see `outlast.tensorize.planner.pair_of`.

    Args:
        x: (tokens, in_features).
        cores: A and B of a low-rank layer, or R and L of blocks; they get the type of x.
        bias: (out_features,).
        learns: Keep what is narrow and of use in the backward pass: the h of a low-rank layer.

    Returns:
        y (tokens, out_features), and what to keep.
    """
    from outlast.tensorize.kernels.blocks import blocks_forward
    from outlast.tensorize.kernels.bottleneck import bottleneck_forward

    first, second = (core.to(x.dtype) for core in cores)
    bias = None if bias is None else bias.to(x.dtype)
    if first.ndim == 4:
        return blocks_forward(x, first, second, bias), []
    y, hidden = bottleneck_forward(x, first, second, bias, save=learns)
    return y, [] if hidden is None else [hidden]


def _fused_gradients(
    x: Tensor,
    dy: Tensor,
    cores: Sequence[Tensor],
    *,
    wanted: Sequence[int],
    want_x: bool,
    kept: Sequence[Tensor],
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """`gradients_of` by the Triton kernels."""
    from outlast.tensorize.kernels.blocks import (
        blocks_backward,
        blocks_hidden,
        blocks_weight_gradients,
    )
    from outlast.tensorize.kernels.bottleneck import bottleneck_backward

    first, second = (core.to(x.dtype) for core in cores)
    dy = dy.contiguous()
    found: dict[int, Tensor] = {}
    dx: Tensor | None = None
    if first.ndim == 4:
        if want_x or wanted:
            dx, gradient = blocks_backward(dy, first, second)
        if wanted:
            hidden = blocks_hidden(x, first)
            found = dict(enumerate(blocks_weight_gradients(x, dy, hidden, gradient)))
    else:
        if want_x:
            dx, dh, _ = bottleneck_backward(dy, None, first, second)
        elif 0 in wanted:
            dh = torch.mm(dy, second)
        if 0 in wanted:
            found[0] = torch.mm(dh.t(), x)
        if 1 in wanted:
            found[1] = torch.mm(dy.t(), kept[0] if kept else torch.mm(x, first.t()))
    found = {core: found[core].to(cores[core].dtype) for core in wanted}
    return (dx if want_x else None), found


def _differentiable(
    network: Network, x: Tensor, dy: Tensor, cores: Sequence[Tensor], asked: tuple[bool, list[int]]
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Gradients that have gradients themselves, by plain operations."""
    want_x, wanted = asked
    # Views, so that neither a core that is used twice nor one that depends on x counts twice.
    x, cores = x.view_as(x), [core.view_as(core) for core in cores]
    y = MergedPath(network, two_products(network), cores, x.dtype).forward(x)
    targets = ([x] if want_x else []) + [cores[core] for core in wanted]
    found = list(torch.autograd.grad(y, targets, dy, create_graph=True, allow_unused=True))
    dx = found.pop(0) if want_x else None
    return dx, dict(zip(wanted, found, strict=True))


@torch.library.custom_op("outlast::chain", mutates_args=())
def _chain_op(x: Tensor, cores: list[Tensor], network: str) -> Tensor:
    description = Network.parse(network)
    plan = plan_for(description, x.shape[0], x.dtype, x.device, True)
    if plan.fused:
        return _fused(x, cores)[0]
    return apply(MergedPath(description, plan.forward, cores, x.dtype), x)[0]


@_chain_op.register_fake
def _(x: Tensor, cores: list[Tensor], network: str) -> Tensor:
    return x.new_empty(x.shape[0], Network.parse(network).out_features)


@torch.library.custom_op("outlast::chain_backward", mutates_args=())
def _chain_backward_op(dy: Tensor, x: Tensor, cores: list[Tensor], network: str) -> list[Tensor]:
    description = Network.parse(network)
    plan = plan_for(description, x.shape[0], x.dtype, x.device, True)
    everything = range(len(cores))
    with torch.autocast(x.device.type, enabled=False):
        dx, found = gradients_of(description, plan, x, dy, cores, wanted=everything, want_x=True)
    assert dx is not None
    return [dx, *(found[core].contiguous() for core in everything)]


@_chain_backward_op.register_fake
def _(dy: Tensor, x: Tensor, cores: list[Tensor], network: str) -> list[Tensor]:
    return [x.new_empty(x.shape), *(core.new_empty(core.shape) for core in cores)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cores, ctx.network = inputs
    ctx.save_for_backward(x, *cores)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *cores = ctx.saved_tensors
    dx, *found = torch.ops.outlast.chain_backward(dy.contiguous(), x, cores, ctx.network)
    return dx, found, None


_chain_op.register_autograd(_backward, setup_context=_keep)
