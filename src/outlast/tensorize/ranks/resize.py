"""Changing the rank of one layer, with its optimizer's moments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.coordinates import (
    Coordinates,
    chosen,
    importance,
    narrower,
    wider,
    with_fresh_entries,
)
from outlast.tensorize.ranks.layers import Layer, check_free, is_linear, sharers
from outlast.tensorize.ranks.spectrum import Cut, cut
from outlast.tensorize.ranks.states import Moved, check_states, exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.tensorize.network import Network


@dataclass(frozen=True)
class RankChange:
    """What happened to a layer.

    Attributes:
        name: The layer's name in the model.
        bond: The bond's letter in the layer's network.
        before: Its size before.
        after: Its size after.
        error: Relative change of the factors' product in the Frobenius norm; nan where units were
            chosen.
        parameters: (old, new) parameter objects, which whoever holds the old ones must exchange.
    """

    name: str
    bond: str
    before: int
    after: int
    error: float
    parameters: tuple[tuple[nn.Parameter, nn.Parameter], ...]

    def __str__(self) -> str:
        return f"{self.name}: rank {self.before} -> {self.after}"


@torch.no_grad()
def resize(
    layer: Layer,
    rank: int,
    *,
    bond: str | None = None,
    units: Tensor | None = None,
    model: nn.Module | None = None,
    optimizers: Sequence[Optimizer] = (),
    name: str = "",
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> RankChange:
    """Give a bond of a layer another size, in place.

    A smaller one keeps the largest singular values of the weight over the bond, which is the best
    that this rank can do (Eckart and Young); with a nonlinearity in the middle, the units with the
    largest products of norms. A larger one leaves the function as it is: what is new meets zeros
    in the core after it, and learns from there. So does what carries nothing and yet is kept.

    Moments follow: a gradient of the old coordinates is mapped to the new ones, m -> m P^T, and a
    mean of squares by the squares of the map, as if entries were independent. Steps are kept. What
    an optimizer holds of the shape of the factor under a name that is not known is taken for a
    gradient.

    Where factors are scaled by alpha / rank, alpha stays and the factors take up the difference.

    Args:
        layer: What to change.
        rank: The new size.
        bond: Which; None: the only one.
        units: (rank,) the places of the bond that stay; None: the best ones.
        model: That the layer belongs to: all layers that share its factors change with it. None: no
            other does.
        optimizers: Those that may hold the layer's parameters.
        name: The layer's name in the model, for the change.
        on_change: Told about the change at its end.
        generator: For the entries that are new.

    Raises:
        TensorizeError: The rank is not positive, the units are not so many different ones, the
            bond is not one that can be changed, something holds the layer to its rank (see
            `outlast.tensorize.ranks.layers.check_free`), or an optimizer's state cannot follow;
            nothing is changed then.
    """
    network, named = layer.network, name or layer.form
    at = cut(network, bond or _only_bond(layer))
    before = network.size(at.bond)
    if rank < 1:
        raise TensorizeError(f"rank = {rank} of {named} must be at least 1")
    if rank == before:
        return RankChange(name, at.bond, before, rank, 0.0, ())
    check_free(layer, named, model=model)
    cores = layer.factors()
    check_states(optimizers, (cores[at.left], cores[at.right]))
    new = _coordinates(layer, at, rank, units)
    if getattr(layer, "alpha", None) is not None:
        new = new.scaled(before / rank)
    exchanged = []
    for core, way, back in zip((at.left, at.right), new.ways, new.backs, strict=True):
        old = cores[core]
        assert isinstance(old, nn.Parameter)
        moved = Moved(network.cores[core], at, way, back)
        value = moved.value(old)
        if core == at.left and bool(new.fresh.any()):
            value = with_fresh_entries(value, old, new.fresh, (network, at), generator)
        fresh = nn.Parameter(value, requires_grad=old.requires_grad)
        exchange(optimizers, old, fresh, moved)
        exchanged.append((old, fresh))
    sizes = tuple((letter, rank if letter == at.bond else size) for letter, size in network.sizes)
    for sharer in sharers(layer, model):
        _install(sharer, replace(network, sizes=sizes), dict(exchanged))
    change = RankChange(name, at.bond, before, rank, new.dropped, tuple(exchanged))
    if on_change is not None:
        on_change(change)
    return change


def _only_bond(layer: Layer) -> str:
    bonds = layer.network.bonds
    if len(bonds) != 1:
        raise TensorizeError(f"a {layer.form} layer has the bonds {', '.join(bonds)}: name one")
    return bonds


def _coordinates(layer: Layer, at: Cut, rank: int, units: Tensor | None) -> Coordinates:
    network, cores = layer.network, layer.factors()
    before, device = network.size(at.bond), cores[at.left].device
    if units is not None:
        kept = {int(unit) for unit in units}
        if len(kept) != rank or not kept <= set(range(before)):
            raise TensorizeError(
                f"units = {sorted(kept)} are not {rank} different ones of {before}"
            )
        return chosen(network, at, torch.tensor(sorted(kept), device=device))
    if rank > before:
        return wider(network, at, rank, device)
    if is_linear(layer):
        return narrower(network, cores, at, rank)
    best = importance(network, cores, at).topk(rank).indices
    return chosen(network, at, best.sort().values)


def _install(layer: Layer, network: Network, new_of: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put the new parameters and the new network into a layer."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in new_of:
                setattr(module, name, new_of[parameter])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = module.weight.shape
    layer.network = network
