"""The global gradient norm and clipping, across sharded, split and staged parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.distributed import ProcessGroup

_BUCKET_ELEMENTS = 25 << 20


def global_norm(
    parameters: Iterable[nn.Parameter], pipeline_group: ProcessGroup | None = None
) -> torch.Tensor:
    """The 2-norm of all gradients of the model, a float32 scalar equal on all ranks.

    Args:
        parameters: This rank's parameters: plain tensors are whole, DTensors are distributed.
        pipeline_group: Ranks that hold the other stages' parameters, if any.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            # By value: equal meshes may be several objects, as after ranks have changed, and the
            # order of the sum must not depend on that.
            layout = (
                (gradient.device_mesh, gradient.placements)
                if isinstance(gradient, DTensor)
                else None
            )
            groups.setdefault(layout, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack([norm.square() for norm in whole]).sum()
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    return total.sqrt()


def average_over(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Replace every gradient by its mean over the ranks of `group`, in buckets, in fixed order.

    For pipeline stages: DDP's reducer cannot follow their several backward passes per step (torch
    2.13: "params_.size() == rebuilt_param_indices_.size()").
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, up to `_BUCKET_ELEMENTS` together."""
    bucket: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        full = elements + tensor.numel() > _BUCKET_ELEMENTS
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, largest: float) -> None:
    """Scale all gradients by min(1, largest / norm), in place.

    No branch on the norm's value, so no rank waits for the device; a norm that is not finite makes
    the gradients not finite, as torch's own clipping does.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    plain = [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients
    ]
    torch._foreach_mul_(plain, factor.to(plain[0].device))
