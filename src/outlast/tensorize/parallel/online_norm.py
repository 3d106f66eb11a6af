"""Online RMSNorm: a norm over split features and the projections that follow, one all-reduce.

Every rank holds some features of x. The mean square needs all of them, so a plain RMSNorm would
wait for a collective before its projection can begin. But the norm's divisor is one number per
token, and a projection is linear: every rank projects what it has, sends (partial projections, sum
of squares) together, and divides afterwards (BOOST, arXiv 2512.12131, section on online RMSNorm).
The result is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from outlast.tensorize.parallel.collectives import Gradient, all_reduced, sum_over

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_PIECES = 3
"""bfloat16 numbers of 8 bits that hold the 24 bits of a float32."""


def normalized_projection(
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    features: int,
    group: ProcessGroup | None = None,
    gradient: Gradient = "partial",
) -> Tensor:
    """Projections of an RMSNorm, with x, scale and weight split over features.

    h = (sum_i W_i (scale_i x_i)) / sqrt(sum_i |x_i|^2 / features + epsilon), i over ranks; alone,
    weight @ (scale * x / rms(x)).
    Statistics are float32 at least. Saves x, h and one number per token.

    Args:
        x: (..., features / p), this rank's features.
        scale: (features / p), the norm's weight.
        weight: (rows, features / p).
        epsilon: Added to the mean square.
        features: Features on all ranks together.
        group: Ranks that hold the other features; None: there are none.
        gradient: Whether the gradients of h that come back are parts of a sum over ranks.

    Returns:
        (..., rows), the same on all ranks.
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    settings = (epsilon, features, group, gradient, dtype)
    latent: Tensor = _Projection.apply(x, scale, weight, settings)  # type: ignore[no-untyped-call]
    return latent


def normalized(
    x: Tensor, scale: Tensor, *, epsilon: float, features: int, group: ProcessGroup | None
) -> Tensor:
    """RMSNorm with x and scale split over features; one column is summed forward and backward.

    Args:
        x: (..., features / p).
        scale: (features / p).
        epsilon: Added to the mean square.
        features: Features on all ranks together.
        group: Ranks that hold the other features.

    Returns:
        (..., features / p), in the dtype of x.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = sum_over(exact.square().sum(-1, keepdim=True), group, "partial")
    return scale * (exact * torch.rsqrt(squares / features + epsilon)).to(x.dtype)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, settings: Any) -> Tensor:
        epsilon, features, group, _, dtype = settings
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = x.to(wide).square().sum(-1, keepdim=True)
        own = _root_mean(squares, x.shape[-1], epsilon)
        unit = _normalized(x, own.reciprocal(), scale, dtype)
        # Products of order 1 do not overflow in half precision; the scale comes back afterwards.
        partial = (unit @ weight.to(dtype).t()).to(wide) * own
        total, squares = _sum_with_statistic(partial, squares, group, dtype)
        inverse = _root_mean(squares, features, epsilon).reciprocal()
        latent = (total * inverse).to(dtype)
        ctx.save_for_backward(x, scale, weight, latent, inverse)
        ctx.settings = settings
        return latent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale, weight, latent, inverse = ctx.saved_tensors
        _, features, group, gradient, dtype = ctx.settings
        upstream = gradients[0].to(dtype)
        if gradient == "partial":
            upstream = all_reduced(upstream, group)
        wide = inverse.dtype
        needs_x, needs_scale, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_scale = grad_weight = None
        if needs_x or needs_scale:
            back = (upstream @ weight.to(dtype)).to(wide) * inverse
            if needs_scale:
                flat = (back * x.to(wide)).reshape(-1, x.shape[-1])
                grad_scale = flat.sum(0).to(scale.dtype)
            if needs_x:
                # h is P R with R = (S / d + eps)^(-1/2), so dS = -1/2 <g, h> R^2 / d.
                inner = (upstream.to(wide) * latent.to(wide)).sum(-1, keepdim=True)
                correction = x.to(wide) * (inner * inverse.square() / features)
                grad_x = (back * scale.to(wide) - correction).to(x.dtype)
        if needs_weight:
            # Not from this rank's own norm: when a compiled graph computes that again, it reads
            # the sum of squares where the all-reduce was done in place (torch 2.13, Inductor).
            unit = _normalized(x, inverse, scale, dtype).reshape(-1, x.shape[-1])
            product = upstream.reshape(-1, upstream.shape[-1]).t() @ unit
            grad_weight = product.to(weight.dtype)
        return grad_x, grad_scale, grad_weight, None


def _root_mean(squares: Tensor, features: int, epsilon: float) -> Tensor:
    """sqrt(squares / features + epsilon), never 0: a shard or token of zeros is divided too."""
    return (squares / features + epsilon).clamp_min(torch.finfo(squares.dtype).tiny).sqrt()


def _normalized(x: Tensor, inverse: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Features over a root mean square, times scale, for a product."""
    return (x.to(inverse.dtype) * inverse).to(dtype) * scale.to(dtype)


def _sum_with_statistic(
    partial: Tensor, squares: Tensor, group: ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum (..., rows) and (..., 1) over ranks in one all-reduce.

    In bfloat16 the statistic would lose 16 of its 24 bits, and its error would be common to all of
    a token's features. So every rank has three columns of its own, where the others send zeros: no
    sum rounds there. Other types travel in float32 at least.
    """
    if group is None:
        return partial, squares
    rows = partial.shape[-1]
    if dtype != torch.bfloat16:
        summed = all_reduced(torch.cat([partial, squares], dim=-1), group)
        return summed[..., :rows], summed[..., rows:]
    slots = partial.new_zeros(*partial.shape[:-1], group.size(), _PIECES, dtype=dtype)
    rest = squares.squeeze(-1)
    for piece in range(_PIECES):
        slots[..., group.rank(), piece] = rest.to(dtype)
        rest = rest - rest.to(dtype)
    summed = all_reduced(torch.cat([partial.to(dtype), slots.flatten(-2)], dim=-1), group)
    summed = summed.to(partial.dtype)
    return summed[..., :rows], summed[..., rows:].sum(-1, keepdim=True)
