"""Two factors with a nonlinearity between them, as one differentiable operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "tanh": torch.tanh,
}
# Below this many numbers in x, what is kept does not matter and the function's overhead does.
_FEW = 1 << 14


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast wants products of x to be computed in; None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def bottleneck(
    x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """Give act(x down^T) up^T + bias, of which x and x down^T are kept, and act(...) is not.

    Args:
        x: (..., in_features).
        down: (rank, in_features).
        up: (out_features, rank).
        bias: (out_features,).
        activation: A key of `ACTIVATIONS`.

    Returns:
        (..., out_features)
    """
    act = ACTIVATIONS[activation]
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if plain or x.numel() <= _FEW:
        return functional.linear(act(functional.linear(x, down)), up, bias)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, down, up = x.to(dtype), down.to(dtype), up.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return bottleneck(x, down, up, bias, activation)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Bottleneck.apply(rows, down, up, bias, activation)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], up.shape[0])


class _Bottleneck(Function):
    """See `bottleneck`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, down, up, bias, activation = inputs
        h = torch.mm(x, down.t())
        ctx.save_for_backward(x, h, down, up)
        ctx.activation, ctx.biased = activation, bias is not None
        return functional.linear(ACTIVATIONS[activation](h), up, bias)

    @staticmethod
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
            return given.get(0), given.get(1), given.get(2), dbias, None
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            a = act(h)
        dup = torch.mm(dy.t(), a.detach()) if needs[2] else None
        dx = ddown = None
        if needs[0] or needs[1]:
            (dh,) = torch.autograd.grad(a, h, torch.mm(dy, up))
            ddown = torch.mm(dh.t(), x) if needs[1] else None
            dx = torch.mm(dh, down) if needs[0] else None
        dbias = dy.sum(0) if ctx.biased and needs[3] else None
        return dx, ddown, dup, dbias, None
