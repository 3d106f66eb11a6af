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
        return np.frombuffer(buffer, np.uint8)
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise RecoverError(
            f"parity is kept of contiguous tensors in CPU memory, not of one on {buffer.device} "
            f"with shape {tuple(buffer.shape)} and strides {buffer.stride()}: copy it first"
        )
    return buffer.detach().reshape(-1).view(torch.uint8).numpy()
