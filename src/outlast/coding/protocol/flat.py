"""All gradients of a model in a few flat tensors, one for each type and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FlatGradients:
    """A sum of gradients, apart from the parameters' own ``grad``.

    Args:
        parameters: The trained parameters, in an order that is equal on all processes; the local
            shards of distributed ones.

    Attributes:
        buffers: Flat tensors with everything; collectives work on these.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(number)
        self.buffers: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(self.parameters)
        for (dtype, device), numbers in groups.items():
            sizes = [local(self.parameters[number]).numel() for number in numbers]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.buffers.append(buffer)
            for number, piece in zip(numbers, torch.split(buffer, sizes), strict=True):
                self.views[number] = piece.view_as(local(self.parameters[number]))

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def zero_(self) -> None:
        """Set everything to 0."""
        for buffer in self.buffers:
            buffer.zero_()

    def copy_(self, other: FlatGradients) -> None:
        """Take over the numbers of `other`, made from the same parameters."""
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            buffer.copy_(theirs)

    def plus_(self, other: FlatGradients) -> None:
        """Add the numbers of `other`, made from the same parameters."""
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            buffer.add_(theirs)

    def add_(self, weight: float = 1.0) -> None:
        """Add `weight` times the parameters' gradients, where they have any."""
        pairs = [
            (view, local(parameter.grad))
            for view, parameter in zip(self.views, self.parameters, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            views, gradients = zip(*pairs, strict=True)
            torch._foreach_add_(list(views), list(gradients), alpha=weight)

    def mul_(self, factor: float) -> None:
        """Multiply everything."""
        if factor != 1.0:
            for buffer in self.buffers:
                buffer.mul_(factor)

    @torch.no_grad()
    def write_back(self) -> None:
        """Make these sums the parameters' gradients; they share memory until the next `zero_`."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if isinstance(parameter, DTensor):
                parameter.grad = DTensor.from_local(
                    view,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            else:
                parameter.grad = view
