"""Structured layers in fewer passes over the memory of CUDA devices, written in Triton.

`bottleneck` keeps the rank-wide tensor of two products on the chip; `blocks` spares block
tensor-trains and Monarch the permutation between their products. Plans of layers take them once
`outlast.tensorize.measure.warm` has tuned them. Here is what both need of tensors and devices;
importing this package imports no Triton.

The kernels have been compiled for compute capability 9.0 and run in Triton's interpreter; they have
not run on a GPU yet, so what is said of their speed is derived from bytes and peaks.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

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


SHARED_BYTES = 200 * 1024
"""A little less shared memory than a block may have on compute capability 9.0."""

SMALLEST_DOT = 16
"""The least size of each dimension of a product of matrix units; less is padded with zeros."""


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def configurations(
    names: Sequence[str],
    in_interpreter: Sequence[int],
    tiles: Sequence[tuple[tuple[int, ...], int, int]],
) -> list[Any]:
    """The configurations of a kernel, each a `triton.Config`.

    Args:
        names: Of the sizes of its tiles.
        in_interpreter: These sizes in the interpreter, which cannot choose by measuring.
        tiles: These sizes, warps and stages of each configuration to measure.
    """
    import triton

    if interpreted():
        return [triton.Config(dict(zip(names, in_interpreter, strict=True)))]
    return [
        triton.Config(dict(zip(names, tile, strict=True)), num_warps=warps, num_stages=stages)
        for tile, warps, stages in tiles
    ]


def check_operands(first: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that the kernels cannot read.

    Args:
        first: The activations, whose type and device all others must have.
        others: By name; None where there is none.

    Raises:
        TensorizeError: For a type without a kernel, bf16 in Triton's interpreter, a device that
            is none of CUDA, or operands of several types or devices.
    """
    if first.dtype not in TYPES:
        names = "float32, bfloat16 or float16"
        raise TensorizeError(f"dtype = {first.dtype} has no fused kernel; convert it to {names}.")
    if interpreted() and first.dtype == torch.bfloat16:
        # Its tl.dot reads the bits of bf16 as integers and says nothing (triton#11584).
        raise TensorizeError(
            "dtype = torch.bfloat16 is computed wrongly by Triton's interpreter; use float32 or "
            "float16 there, or unset TRITON_INTERPRET."
        )
    if first.device.type != "cuda" and not interpreted():
        raise TensorizeError(
            f"device = {first.device} cannot run fused kernels, which need CUDA; choose a plan of "
            "plain products."
        )
    for name, other in others.items():
        if other is not None and (other.dtype, other.device) != (first.dtype, first.device):
            raise TensorizeError(
                f"{name} is {other.dtype} on {other.device} beside activations in {first.dtype} on "
                f"{first.device}; convert all operands to one type on one device."
            )


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape.

    Raises:
        TensorizeError: Naming both shapes.
    """
    if tuple(tensor.shape) != expected:
        raise TensorizeError(
            f"{name} has shape {tuple(tensor.shape)} where the other operands fit {expected}; "
            "pass matching factors."
        )


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension held in one tile takes."""
    return max(SMALLEST_DOT, 1 << (size - 1).bit_length())


def rows_contiguous(matrix: Tensor) -> Tensor:
    """A matrix (rows, columns) itself, or a copy whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def precision_of(x: Tensor) -> str:
    """Return how products read fp32 operands: as torch's own products on the device do."""
    tf32 = x.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current, since kernels start on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
