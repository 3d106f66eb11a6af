"""Parameters that are split over the ranks of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_of(tensor: Tensor) -> ProcessGroup | None:
    """The ranks that hold the other parts; None for a plain tensor."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) else None


def split_parameter(owner: nn.Module, name: str, mesh: DeviceMesh, dimension: int | None) -> None:
    """Distribute a parameter over the mesh along a dimension; None: whole on every rank.

    Rank 0's numbers are taken, as torch's own tensor parallelism does.
    """
    parameter = owner.get_parameter(name)
    placement = Replicate() if dimension is None else Shard(dimension)
    split = distribute_tensor(parameter.detach(), mesh, [placement])
    owner.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
