"""Checks of matrix products on CUDA devices.

`TritonProduct` sums next to cuBLAS, whose numbers stay as they are; `FusedChecks` sum inside of a
product of their own, whose last bits are not cuBLAS's. Without Triton, `CompiledProduct` has
Inductor fuse the torch operations. Importing this package imports neither.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.guard.product import Product

_OLDEST = (8, 0)
"""Compute capability: the first with units for bf16."""


def product_on(x: Tensor) -> Product:
    """The fastest checks for tensors like `x` on their device, which is no CPU."""
    return _product(x.device, x.dtype)


@functools.cache
def _product(device: torch.device, dtype: torch.dtype) -> Product:
    if device.type == "cuda" and dtype.itemsize <= 4 and has_triton():
        from outlast.guard.kernels.product import TYPES, TritonProduct

        if dtype in TYPES and torch.cuda.get_device_capability(device) >= _OLDEST:
            return TritonProduct()
    from outlast.guard.kernels.compiled import CompiledProduct

    return CompiledProduct()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
