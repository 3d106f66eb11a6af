"""Two factors with a nonlinearity between them, as one differentiable operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.execute import (
    folds,
    transformed,
    unfolded,
    with_bias,
    with_ones,
    without_autocast,
)
from outlast.tensorize.planner import LowRankPair, bottleneck_pays

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "tanh": torch.tanh,
}


def check_activation(name: str) -> None:
    """Refuse the name of an activation that is none.

    Raises:
        TensorizeError: Naming those that are.
    """
    if name not in ACTIVATIONS:
        raise TensorizeError(f"activation = {name!r} is not one of {', '.join(ACTIVATIONS)}")


# Below this many numbers in x, what is kept does not matter and the function's overhead does.
FEW = 1 << 14


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products of x; None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    if not x.is_floating_point() or x.dtype is torch.float64:
        # As `nn.Linear` has it.
        return None
    return torch.get_autocast_dtype(device)


def bottleneck(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    fused: bool | None = None,
) -> Tensor:
    """Give act(x down^T) up^T + bias, of which x and x down^T are kept, and act(...) is not.

    Products are made in the dtype of x, as those of chains are, or in that of autocast.

    Args:
        x: (..., in_features).
        down: (rank, in_features).
        up: (out_features, rank).
        bias: (out_features,).
        activation: A key of `ACTIVATIONS`.
        fused: Take the Triton kernel, which needs x in one dtype with the factors and has not run
            on a GPU yet; None: on CUDA devices if `planner.measure.warm` was called for it and it
            is predicted to be faster. Not where plain operations are taken anyway.

    Returns:
        (..., out_features)
    """
    act = ACTIVATIONS[activation]
    plain = torch.compiler.is_compiling() or transformed()
    dtype = autocast_dtype(x)
    if dtype is None:
        down, up = down.to(x.dtype), up.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    if plain or x.numel() <= FEW:
        return functional.linear(act(functional.linear(x, down)), up, bias)
    if dtype is not None:
        x, down, up = x.to(dtype), down.to(dtype), up.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return bottleneck(x, down, up, bias, activation, fused=fused)
    rows = x.reshape(-1, x.shape[-1])
    if fused is None and x.is_cuda:
        given = [item for item in (rows, down, up, bias) if item is not None]
        # A subclass may have no memory that a kernel could read.
        fused = all(
            type(item) in (torch.Tensor, torch.nn.Parameter) and item.dtype == x.dtype
            for item in given
        )
        pair = LowRankPair(x.shape[-1], up.shape[1], up.shape[0], activation)
        fused = fused and bottleneck_pays(pair, len(rows), x.dtype, x.device)
    y: Tensor = _Bottleneck.apply(rows, down, up, bias, activation, bool(fused))  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], up.shape[0])


def through_activation(
    h: Tensor,
    weight: Tensor,
    dy: Tensor,
    activation: str,
    *,
    wanted: tuple[bool, bool],
    fold: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of y = act(h) weight^T, computing act(h) again.

    Args:
        h: (tokens, rank).
        weight: (out_features, rank).
        dy: (tokens, out_features).
        activation: A key of `ACTIVATIONS`.
        wanted: Whether that of h, and that of the weight.
        fold: Whether that of the weight shall have that of the bias as one more column.

    Returns:
        That of h (tokens, rank) and that of the weight (out_features, rank), each None where it is
        not wanted.
    """
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        a = ACTIVATIONS[activation](h)
    known = with_ones(a.detach()) if fold else a.detach()
    dweight = torch.mm(dy.t(), known) if wanted[1] else None
    dh = torch.autograd.grad(a, h, torch.mm(dy, weight))[0] if wanted[0] else None
    return dh, dweight


class _Bottleneck(Function):
    """See `bottleneck`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, down, up, bias, activation, ctx.fused = inputs
        if ctx.fused:
            from outlast.tensorize.kernels.bottleneck import bottleneck_forward

            y, h = bottleneck_forward(x, down, up, bias, activation=activation, save=True)
        else:
            h = torch.mm(x, down.t())
            a = ACTIVATIONS[activation](h)
            if bias is not None and folds(x.shape[0], up.shape[0]):
                y = functional.linear(with_ones(a), with_bias(up, bias))
            else:
                y = functional.linear(a, up, bias)
        ctx.save_for_backward(x, h, down, up)
        ctx.activation, ctx.biased = activation, bias is not None
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, h, down, up = ctx.saved_tensors
        act = ACTIVATIONS[ctx.activation]
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # Views, so that a factor which depends on x does not count twice.
            x, down, up = x.view_as(x), down.view_as(down), up.view_as(up)
            y = functional.linear(act(functional.linear(x, down)), up)
            places = [place for place in range(3) if needs[place]]
            targets = [(x, down, up)[place] for place in places]
            found = torch.autograd.grad(y, targets, dy, create_graph=True, allow_unused=True)
            given: dict[int, Tensor] = dict(zip(places, found, strict=True))
            dbias = dy.sum(0) if ctx.biased and needs[3] else None
            return given.get(0), given.get(1), given.get(2), dbias, None, None
        if ctx.fused and needs[0]:
            from outlast.tensorize.kernels.bottleneck import bottleneck_backward

            back = bottleneck_backward(dy, h, down, up, activation=ctx.activation)
            gradient, a = back[1:]
            dup = None if a is None or not needs[2] else torch.mm(dy.t(), a)
            ddown = torch.mm(gradient.t(), x) if needs[1] else None
            dbias = dy.sum(0) if ctx.biased and needs[3] else None
            return back[0], ddown, dup, dbias, None, None
        biased = ctx.biased and needs[3]
        fold = biased and needs[2] and folds(x.shape[0], up.shape[0])
        dh, dup = through_activation(
            h, up, dy, ctx.activation, wanted=(needs[0] or needs[1], needs[2]), fold=fold
        )
        dx = None if dh is None or not needs[0] else torch.mm(dh, down)
        ddown = None if dh is None or not needs[1] else torch.mm(dh.t(), x)
        dbias = dy.sum(0) if biased and not fold else None
        if fold and dup is not None:
            dup, dbias = unfolded(dup)
        return dx, ddown, dup, dbias, None, None
