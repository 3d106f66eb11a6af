"""Parameters that may be sharded (FSDP2's DTensor) or shown in another dtype, and what they are.

A layer sees a parameter in another dtype than it is stored in by a property of its class, which is
found before the parameter (`shown_in`); inside of `as_stored` it sees the parameter itself.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on this rank; a collective where it is sharded.

    Args:
        tensor: Of any shape; a DTensor is gathered, any other tensor is returned as it is.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def precise(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All of some tensors, in float32, or float64 if one of them is."""
    kinds = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    return [whole(tensor).to(dtype) for tensor in tensors]


def sharded_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks have alike; no communication.

    Args:
        tensor: The whole tensor, with the shape of `reference`.
        reference: Says how to shard; a plain tensor means not at all.
    """
    if not isinstance(reference, DTensor):
        return tensor
    mesh, placements = reference.device_mesh, reference.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


class _Look:
    """State of `as_stored`."""

    stored: ClassVar[int] = 0
    """Number of `as_stored` that are open."""


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Within this context layers see parameters as they are stored, whatever `shown_in` says."""
    _Look.stored += 1
    try:
        yield
    finally:
        _Look.stored -= 1


def shown_in(leaf: str, dtype: torch.dtype) -> property:
    """A property by which a module sees its parameter `leaf` in another dtype."""

    def get(layer: nn.Module) -> Tensor | None:
        parameter = layer._parameters[leaf]
        return parameter if parameter is None or _Look.stored else parameter.to(dtype)

    return property(get)
