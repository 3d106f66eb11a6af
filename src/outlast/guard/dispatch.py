"""The fastest implementation of a product's checks for a device and a type.

Compiled code on the CPU; on CUDA devices the kernels of `outlast.guard.checksum_kernels`, which sum
next to cuBLAS and leave its numbers as they are. Elsewhere, and without Triton, Inductor fuses the
torch operations of `TorchProduct`. Importing this module imports neither Triton nor Inductor.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from outlast.guard.product import NATIVE_TYPES, NativeProduct, TorchProduct, library

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outlast.guard.product import Encoding, Gradients, Product, Projections
    from outlast.guard.residual import ResidualTest

_OLDEST = (8, 0)
"""Compute capability: the first with units for bf16."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def product_for(x: Tensor) -> Product:
    """Return the fastest checks for tensors like `x`."""
    return _product(x.device, x.dtype)


@functools.cache
def _product(device: torch.device, dtype: torch.dtype) -> Product:
    if device.type == "cpu":
        compiled = library() if dtype in NATIVE_TYPES else None
        if compiled is None or not compiled.knows(NATIVE_TYPES[dtype]):
            return TorchProduct()
        return NativeProduct(compiled)
    if device.type == "cuda" and dtype.itemsize <= 4 and has_triton():
        from outlast.guard.checksum_kernels import TYPES, TritonProduct

        if dtype in TYPES and torch.cuda.get_device_capability(device) >= _OLDEST:
            return TritonProduct()
    return CompiledProduct()


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class CompiledProduct(TorchProduct):
    """`TorchProduct` with its passes compiled, or as it is where they cannot be."""

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, ResidualTest]:
        """See `Product`."""
        return _forward(x, y, encoding)

    def backward(
        self, dy: Tensor, gradients: Gradients, encoding: Encoding, projections: Projections
    ) -> tuple[ResidualTest | None, ResidualTest | None]:
        """See `Product`."""
        return _backward(dy, gradients, encoding, projections)


def or_eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function` compiled at its first call; if that fails, once a warning, and as it is."""
    chosen: Callable[_Arguments, _Result] | None = None

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        nonlocal chosen
        if chosen is None:
            chosen = torch.compile(function)
        try:
            return chosen(*args, **kwargs)
        except Exception as error:  # whatever the compiler meets, training goes on
            if chosen is function:
                raise
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"the guard's checks are not compiled and cost more time: {reason}", stacklevel=3
            )
            chosen = function
            return function(*args, **kwargs)

    return call


_forward = or_eager(TorchProduct().forward)
_backward = or_eager(TorchProduct().backward)
