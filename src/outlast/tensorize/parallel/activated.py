"""The second half of a layer with a nonlinearity in the middle, keeping nothing but its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from outlast.tensorize.bottleneck import ACTIVATIONS, through_activation

if TYPE_CHECKING:
    from torch import Tensor


def activated_linear(
    latent: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """act(latent) weight^T + bias; backward, act(latent) is computed again.

    Compiled graphs decide themselves what they compute again.

    Args:
        latent: (..., rank), maybe a view of some columns.
        weight: (out_features, rank).
        bias: (out_features,).
        activation: A key of `ACTIVATIONS`.

    Returns:
        (..., out_features)
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(latent.device.type):
        return functional.linear(ACTIVATIONS[activation](latent), weight, bias)
    result: Tensor = _ActivatedLinear.apply(latent, weight, bias, activation)  # type: ignore[no-untyped-call]
    return result


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latent: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        ctx.save_for_backward(latent, weight)
        ctx.activation = activation
        return functional.linear(ACTIVATIONS[activation](latent), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        latent, weight = ctx.saved_tensors
        upstream = gradients[0]
        needs_latent, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = upstream.reshape(-1, upstream.shape[-1])
        flat = latent.reshape(-1, latent.shape[-1])
        found, grad_weight = through_activation(
            flat, weight, rows, ctx.activation, wanted=(needs_latent, needs_weight)
        )
        grad_latent = None if found is None else found.view(latent.shape)
        return grad_latent, grad_weight, rows.sum(0) if needs_bias else None, None
