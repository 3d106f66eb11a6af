"""What the elements of a tensor are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """A type's name as `outlast.guard.threshold` knows it."""
    return str(dtype).removeprefix("torch.")


def bits(values: Tensor) -> Tensor:
    """`values` as integers of the same size, so that NaN equals itself and -0.0 is not 0.0."""
    return values.view(_INTEGERS[values.element_size()])


def rows_contiguous(matrix: Tensor) -> Tensor:
    """`matrix`, or a copy whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
