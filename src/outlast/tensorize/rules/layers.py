"""The structured layers of a model, as the rules see them: a network and its factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import TensorizeError
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.network import Network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Factored:
    """A structured layer.

    Attributes:
        name: Its name in the model.
        module: The layer.
    """

    name: str
    module: nn.Module

    @property
    def network(self) -> Network:
        """How its factors hang together now; ranks can change between steps."""
        network: Network = self.module.network  # type: ignore[assignment]
        return network

    @property
    def looks_up(self) -> bool:
        """Whether it is an embedding, whose input modes are picked from and not summed over."""
        return not isinstance(self.module, StructuredLinear)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The cores as they are now; wrappers such as FSDP2 exchange parameters."""
        factors: tuple[Tensor, ...] = self.module.factors()  # type: ignore[operator]
        return factors

    @property
    def is_two_factor(self) -> bool:
        """Whether it is linear with two matrices, A of (rank, in) and B of (out, rank)."""
        network = self.network
        first, last = network.inputs, network.outputs
        bonds = network.bonds
        return len(first) == len(last) == len(bonds) == 1 and network.cores == (
            bonds + first,
            last + bonds,
        )


def structured_layers(model: nn.Module) -> Iterator[Factored]:
    """All modules that are made of factors: those with a `Network` and a method ``factors``.

    Modules that share all their factors with an earlier one (tied weights) are left out.
    """
    seen: set[tuple[int, ...]] = set()
    for name, module in model.named_modules():
        network = getattr(module, "network", None)
        if isinstance(network, Network) and callable(getattr(module, "factors", None)):
            layer = Factored(name, module)
            identity = tuple(map(id, layer.factors))
            if identity not in seen:
                seen.add(identity)
                yield layer


def some_layers(layers: list[Factored], wanted: str) -> list[Factored]:
    """The layers, of which there must be at least one.

    Raises:
        TensorizeError: There are none.
    """
    if not layers:
        raise TensorizeError(f"the model has no {wanted}: call tensorize before this rule")
    return layers
