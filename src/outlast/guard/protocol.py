"""How layers of other kinds get their matrix products checked.

A layer that is made of several products, such as a low-rank or tensor-train one, names them and
makes each by the function that stands in its `product` attribute. The guard puts a checked one
there::

    class LowRank(nn.Module):
        product_names = ("down", "up")

        def __init__(self, inputs, rank, outputs):
            super().__init__()
            self.product = plain_product
            self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
            self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)

        def forward(self, x):
            return self.product("up", self.product("down", x, self.down), self.up)

Every product is then checked forward and backward like that of an `nn.Linear`, with thresholds of
its own size, and what lies between them is not.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn
from torch.nn import functional

from outlast.guard.linear import LinearChecks
from outlast.guard.standin import trains

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.guard.watch import Watch


class ProductFunction(Protocol):
    """Makes one of a layer's products."""

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Give x W^T + b; x: (..., inputs), weight: (outputs, inputs), bias: (outputs,)."""


@runtime_checkable
class ProductLayer(Protocol):
    """A module whose parameters are used by `product` alone.

    Attributes:
        product_names: What the products are called, in any order.
        product: Makes them.
    """

    product_names: tuple[str, ...]
    product: Any


def plain_product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The `ProductFunction` of a layer that is not guarded."""
    return functional.linear(x, weight, bias)


class CheckedProducts:
    """The `ProductFunction` of a guarded layer.

    Args:
        watch: What all checks of the guard share.
        module: A `ProductLayer`.
        name: Its name in the model.

    Attributes:
        away: As of a `StandIn`.
    """

    def __init__(self, watch: Watch, module: nn.Module, name: str) -> None:
        assert isinstance(module, ProductLayer)
        self._module = module
        self.away = False
        # Of no layer: what is multiplied may be a view of a parameter, or made of several.
        self._checks = {
            product_name: LinearChecks(watch, nn.Module(), f"{name}.{product_name}")
            for product_name in module.product_names
        }

    def __reduce__(self) -> tuple[object, ...]:
        """A copied or pickled layer is one without a guard."""
        return operator.itemgetter(0), ((plain_product,),)

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `ProductFunction`."""
        if self.away or not trains(self._module, x, weight, bias):
            return functional.linear(x, weight, bias)
        return self._checks[name].multiply(x, weight, bias)
