"""The memory of whatever holds a member's data, as bytes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outlast.errors import RecoverError
from outlast.recover.parity.combine import Bytes

Buffer = torch.Tensor | NDArray[Any] | mmap.mmap | memoryview | bytearray


def as_bytes(buffer: Buffer) -> Bytes:
    """(bytes,) uint8: the memory of a buffer of any type.

    Raises:
        RecoverError: Where it is not contiguous memory of the CPU.
    """
    if not isinstance(buffer, torch.Tensor):
        return _Shared(np.frombuffer(buffer, np.uint8)).array
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise RecoverError(
            f"parity is kept of contiguous tensors in CPU memory, not of one on {buffer.device} "
            f"with shape {tuple(buffer.shape)} and strides {buffer.stride()}: copy it first"
        )
    return buffer.detach().reshape(-1).view(torch.uint8).numpy()


class _Shared:
    """Memory that torch takes without a warning also where it is read-only: it is only sent."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = {
            **memory.__array_interface__,
            "data": (memory.ctypes.data, False),
        }

    @property
    def array(self) -> Bytes:
        """(bytes,): the memory, which lives as long as the array does."""
        return np.asarray(self)
