"""Element types and memory of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from outlast.errors import CheckpointError
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types as which the elements of a tensor of any type can be moved, by their bytes."""


class Facts(Protocol):
    """Facts of a saved tensor: its element type, without ``torch.``, and global shape."""

    @property
    def dtype(self) -> str:
        """Torch's name of the element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of the element type, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(facts: Facts) -> torch.dtype:
    """The element type of a stored tensor; raises CheckpointError when this torch has none."""
    dtype = getattr(torch, facts.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no type {facts.dtype}; use the one that saved it")
    return dtype


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in row-major order without gaps."""
    # One element counts as contiguous whatever its stride is.
    return tensor.is_contiguous() and tensor.reshape(-1).stride() == (1,)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that two tensors share if and only if they are the same memory read alike."""
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def opaque_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a host tensor as an array of opaque elements.

    The tensor must be contiguous where its elements are not of 1, 2, 4 or 8 bytes.
    """
    itemsize = tensor.element_size()
    if itemsize in OPAQUE:
        found: NDArray[Any] = tensor.detach().view(OPAQUE[itemsize]).numpy()
        return found
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"V{itemsize}").reshape(tuple(tensor.shape))


_SIGNED = {**OPAQUE, 1: torch.int8}
# A chunk and its squares stay in a core's cache, or fill a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 16}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 22


def sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """(2,) int64: the wrapping sums of the local elements' bits as integers, and of the squares."""
    with torch.no_grad():
        local = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        bits = local.view(_SIGNED[local.element_size()]).reshape(-1)
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        size = _CHUNK_ELEMENTS.get(bits.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
        for chunk in torch.split(bits, size):
            wide = chunk.to(torch.int64, copy=True)
            total[0] += wide.sum()
            total[1] += wide.mul_(wide).sum()
        return total
