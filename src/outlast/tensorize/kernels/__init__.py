"""Structured layers in fewer passes over the memory of CUDA devices, written in Triton.

`bottleneck` keeps the rank-wide tensor of two products on the chip; `blocks` spares block
tensor-trains and Monarch the permutation between their products; `pairs` is how plans of layers
take them, once `outlast.tensorize.planner.measure.warm` has tuned them. Importing this package
imports no Triton.

The kernels have been compiled for compute capability 9.0 and run in Triton's interpreter; they have
not run on a GPU yet, so what is said of their speed is derived from bytes and peaks.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the activations and factors that the kernels take."""

_OLDEST = (8, 0)
"""Compute capability: the first with units for bf16."""


def available(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether the kernels are of use on `device`.

    They are on CUDA devices of capability 8.0 or more with Triton installed; in fp32 only where
    torch may read it as TF32, since the matrix units read nothing finer. Triton's interpreter on
    the CPU is for tests, so a CPU is never one.

    Args:
        device: Where the activations are.
        dtype: Their type.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    return dtype in TYPES and _available(torch.device(device))


@functools.cache
def _available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    return importlib.util.find_spec("triton") is not None
