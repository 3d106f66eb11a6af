"""The checks in torch operations, fused by Inductor: where the Triton kernels do not serve."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from outlast.guard.product import TorchProduct

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outlast.guard.judged import Judged
    from outlast.guard.product import Encoding, Gradients, Projections

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class CompiledProduct(TorchProduct):
    """`TorchProduct` with its passes compiled, or as it is where they cannot be."""

    def forward(self, x: Tensor, y: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """See `Product`."""
        return _forward(x, y, encoding)

    def backward(
        self,
        dy: Tensor,
        gradients: Gradients,
        encoding: Encoding,
        projections: Projections,
    ) -> tuple[Judged | None, Judged | None]:
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
