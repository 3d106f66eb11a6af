"""Launches of kernels: the tensors that they take, and the device and precision of products."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.kernels import TYPES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU, for tests."""

SHARED_BYTES = 200 * 1024
"""A little less shared memory than a block may have on compute capability 9.0."""

SMALLEST_DOT = 16
"""The least size of each dimension of a product of matrix units; less is padded with zeros."""


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
    if INTERPRETED and first.dtype == torch.bfloat16:
        # Its tl.dot reads the bits of bf16 as integers and says nothing (triton#11584).
        raise TensorizeError(
            "dtype = torch.bfloat16 is computed wrongly by Triton's interpreter; use float32 or "
            "float16 there, or unset TRITON_INTERPRET."
        )
    if first.device.type != "cuda" and not INTERPRETED:
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


def check_not_empty(**sizes: int) -> None:
    """Refuse dimensions of a layer that are 0; only tokens may be.

    Raises:
        TensorizeError: Naming the dimension.
    """
    for name, size in sizes.items():
        if size < 1:
            raise TensorizeError(f"{name} = {size} leaves nothing to multiply; make it at least 1.")


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
