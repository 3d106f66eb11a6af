"""The structured layers of a model, as the rules see them: a network and its factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.network import Network
from outlast.tensorize.sharded import as_stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class StructuredPart:
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
    def parameters(self) -> tuple[Tensor, ...]:
        """What the cores are stored as, in their order; see `factor_parameters`."""
        return factor_parameters(self.module)

    @property
    def is_gated(self) -> bool:
        """Whether cores are computed from parameters, such as gates of rank control."""
        return any(parametrize.is_parametrized(module) for module in self.module.modules())

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


def structured_layers(model: nn.Module) -> Iterator[StructuredPart]:
    """All modules that are made of factors: those with a `Network` and a method ``factors``.

    Modules that share all their factors with an earlier one (tied weights) are left out.
    """
    # Parameters, which live on: what is computed at every look has identities that come again.
    seen: set[tuple[int, ...]] = set()
    for name, module in model.named_modules():
        network = getattr(module, "network", None)
        if isinstance(network, Network) and callable(getattr(module, "factors", None)):
            layer = StructuredPart(name, module)
            identity = tuple(map(id, layer.parameters))
            if identity not in seen:
                seen.add(identity)
                yield layer


def factor_parameters(layer: nn.Module) -> tuple[Tensor, ...]:
    """The parameters that the factors of a structured layer are stored in, one per factor.

    A factor usually is its parameter. Two kinds are tensors of their own at every look: cores that
    are shown in another dtype (`outlast.tensorize.parallel.fsdp`), and cores with a parametrization
    of torch, such as the gates of rank control, whose parameter is ``original``.

    Args:
        layer: With a method ``factors``.
    """
    # Within `cached` a parametrized core is the same tensor at every look.
    with as_stored(), parametrize.cached():
        factors: tuple[Tensor, ...] = layer.factors()  # type: ignore[operator]
        originals = {
            id(getattr(owner, leaf)): _original(owner, leaf)
            for owner in layer.modules()
            if parametrize.is_parametrized(owner)
            for leaf in owner.parametrizations  # type: ignore[union-attr]
        }
        return tuple(originals.get(id(factor), factor) for factor in factors)


def _original(owner: nn.Module, leaf: str) -> Tensor:
    """The stored tensor; a parametrization of several, as of weight norm, counts as none."""
    stored = owner.parametrizations[leaf]  # type: ignore[index]
    original: Tensor = getattr(stored, "original", None)  # type: ignore[assignment]
    return getattr(owner, leaf) if original is None else original


def some_layers(layers: list[StructuredPart], wanted: str) -> list[StructuredPart]:
    """The layers, of which there must be at least one.

    Raises:
        TensorizeError: There are none.
    """
    if not layers:
        raise TensorizeError(f"the model has no {wanted}: call tensorize before this rule")
    return layers
