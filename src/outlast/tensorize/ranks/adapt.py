"""Adaptation of ranks: shrink by the spectrum's energy, grow where training asks for more.

`match_ranks` gives a model the ranks of a checkpoint; `change_sharded` gathers a model that is
sharded over ranks, changes it on one, and shards it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from outlast.errors import TensorizeError
from outlast.tensorize.parameters import factor_parameters
from outlast.tensorize.ranks.resize import (
    Layer,
    RankChange,
    bonds_of,
    check_free,
    check_states,
    cut,
    importance,
    is_linear,
    resize,
    singular_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.layer import StructuredLinear


def energy_rank(values: Tensor, energy: float) -> int:
    """Return how many of the largest singular values hold a share of the sum of squares.

    Args:
        values: (r,) descending.
        energy: The share, in (0, 1].
    """
    squares = values.double().square()
    total = float(squares.sum())
    if total == 0.0:
        return 1
    lost = squares.flip(0).cumsum(0).flip(0)  # lost[k]: what goes if k stay
    return max(int((lost > (1.0 - energy) * total).sum()), 1)


def shrink(
    model: nn.Module,
    energy: float = 0.99,
    *,
    minimum: int = 1,
    multiple: int = 1,
    optimizers: Sequence[Optimizer] = (),
    on_change: Callable[[RankChange], None] | None = None,
) -> list[RankChange]:
    """Give every bond the smallest rank that keeps a share of its spectrum's energy.

    The relative error of a layer's weight is at most sqrt(number of bonds (1 - energy))
    (Oseledets 2011, corollary 2.4). Ranks only go down. (Cuttlefish, Wang et al. 2023, chooses
    ranks by the spectrum in the same way, once.)

    Layers that must keep the rank of another one are passed over with a warning.

    Args:
        model: Its structured linear layers are changed in place, between two steps.
        energy: The share, in (0, 1].
        minimum: No rank goes below.
        multiple: Ranks are rounded up to multiples of it, for the hardware's sake.
        optimizers: Those of the model.
        on_change: Told of every change.

    Raises:
        TensorizeError: The energy is no share, or see `resize`; nothing is changed then.
    """
    if not 0.0 < energy <= 1.0:
        raise TensorizeError(f"energy = {energy} must be above 0 and at most 1")
    changes = []
    for name, layer, bond in checked_bonds(model, optimizers, multiple):
        values = values_of(layer, bond)
        rank = max(energy_rank(values, energy), minimum)
        rank = -(-rank // multiple) * multiple
        if rank < len(values):
            changes.append(
                resize(layer, rank, bond=bond, model=model, optimizers=optimizers, name=name,
                       on_change=on_change)
            )  # fmt: skip
    return changes


def checked_bonds(
    model: nn.Module, optimizers: Sequence[Optimizer], multiple: int = 1
) -> list[tuple[str, StructuredLinear, str]]:
    """All of `bonds_of`, none of which will be refused after another was changed.

    Raises:
        TensorizeError: See `bonds_of` and `check_states`, or the multiple is not positive.
    """
    if multiple < 1:
        raise TensorizeError(f"multiple = {multiple} of ranks must be at least 1")
    bonds = list(bonds_of(model))
    check_states(optimizers, (factor for _, layer, _ in bonds for factor in layer.factors()))
    return bonds


def values_of(layer: StructuredLinear, bond: str) -> Tensor:
    """The singular values over a bond; with a nonlinearity in the middle, its units' importance."""
    if is_linear(layer):
        return singular_values(layer.network, layer.factors(), bond)
    with torch.no_grad():
        units = importance(layer.network, layer.factors(), cut(layer.network, bond))
        return units.sort(descending=True).values


def explained_rank(values: Tensor, share: float = 0.9) -> float:
    """Return the share of its rank that a spectrum uses: the rank that explains a share, over all.

    Near `share` the spectrum is flat and the layer wants more; near zero it has more than it needs
    (the explained variance of InRank, Zhao et al. 2023, arXiv 2306.11250).

    Args:
        values: (r,) descending.
        share: Of the sum of squares.
    """
    return energy_rank(values, share) / len(values)


def grow(
    model: nn.Module,
    *,
    factor: float = 1.5,
    used: float = 0.7,
    maximum: int | None = None,
    multiple: int = 1,
    optimizers: Sequence[Optimizer] = (),
    on_change: Callable[[RankChange], None] | None = None,
    generator: torch.Generator | None = None,
) -> list[RankChange]:
    """Widen the bonds whose spectrum uses most of their rank; the function stays as it is.

    Layers that must keep the rank of another one are passed over with a warning.

    Args:
        model: Its structured linear layers are changed in place, between two steps.
        factor: How much wider.
        used: Bonds with an `explained_rank` of at least this much grow.
        maximum: No rank goes above; None: the largest that its sides can use.
        multiple: Ranks are rounded up to multiples of it; the largest one is rounded down.
        optimizers: Those of the model.
        on_change: Told of every change.
        generator: For the entries that are new.

    Raises:
        TensorizeError: The factor is not above 1, or see `resize`; nothing is changed then.
    """
    if factor <= 1.0:
        raise TensorizeError(f"factor = {factor} must be above 1 for ranks to grow")
    changes = []
    for name, layer, bond in checked_bonds(model, optimizers, multiple):
        values = values_of(layer, bond)
        if explained_rank(values) < used:
            continue
        network = layer.network
        at = cut(network, bond)
        # A bond that is wider than either core's other side carries nothing more.
        sides = [network.size(network.cores[core]) // network.size(at.batch + bond)
                 for core in (at.left, at.right)]  # fmt: skip
        largest = min(sides) if maximum is None else min(*sides, maximum)
        largest = largest // multiple * multiple
        rank = min(-(-int(len(values) * factor + 0.5) // multiple) * multiple, largest)
        if rank > len(values):
            changes.append(
                resize(layer, rank, bond=bond, model=model, optimizers=optimizers, name=name,
                       on_change=on_change, generator=generator)
            )  # fmt: skip
    return changes


def match_ranks(
    model: nn.Module,
    state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer] = (),
    *,
    on_change: Callable[[RankChange], None] | None = None,
) -> list[RankChange]:
    """Give every structured layer and embedding the ranks that a state dict of other ranks has.

    After that `load_state_dict` fits. Only shapes are looked at, so tensors on the meta device do.

    Args:
        model: Its layers are changed in place.
        state: Of the same model with other ranks; prefixes as in ``model.state_dict()``.
        optimizers: Those of the model; their state is resized as well.
        on_change: Told of every change.

    Raises:
        TensorizeError: A shape differs in something that is no rank, or see `resize`; nothing is
            changed then.
    """
    wanted = []
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        ranks = _checked_ranks(state, name, layer)
        changed = {bond: rank for bond, rank in ranks.items() if rank != layer.network.size(bond)}
        for bond in changed:
            cut(layer.network, bond)
        if changed:
            check_free(layer, name, model=model)
            check_states(optimizers, factor_parameters(layer))
            wanted.append((name, layer, changed))
    changes = []
    for name, layer, changed in wanted:
        for bond, rank in changed.items():
            if rank != layer.network.size(bond):  # not changed with a layer that it shares with
                changes.append(
                    resize(layer, rank, bond=bond, model=model, optimizers=optimizers, name=name,
                           on_change=on_change)
                )  # fmt: skip
    return changes


def _checked_ranks(state: Mapping[str, Tensor], name: str, layer: Layer) -> dict[str, int]:
    """The sizes of a layer's bonds in a state dict, as far as that has them."""
    keys = {id(parameter): key for key, parameter in layer.named_parameters(prefix=name)}
    network, places = (
        layer.network,
        [keys.get(id(parameter), "") for parameter in factor_parameters(layer)],
    )
    ranks: dict[str, int] = {}
    for letters, key in zip(network.cores, places, strict=True):
        if key in state and state[key].ndim == len(letters):
            sizes = zip(letters, state[key].shape, strict=True)
            ranks |= {letter: size for letter, size in sizes if letter in network.bonds}
    size = dict(network.sizes) | ranks
    shapes = {
        key: tuple(size[letter] for letter in letters)
        for letters, key in zip(network.cores, places, strict=True)
    }
    for key, parameter in layer.named_parameters(prefix=name):
        expected = shapes.get(key, tuple(parameter.shape))
        if key in state and tuple(state[key].shape) != expected:
            raise TensorizeError(
                f"{key} has the shape {tuple(state[key].shape)} in the checkpoint and "
                f"{tuple(parameter.shape)} here, which other ranks do not explain: build the "
                "layer with the modes of the checkpoint"
            )
    return ranks


_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)

_ALONE = StateDictOptions(full_state_dict=True)

_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def change_sharded(
    model: nn.Module,
    optimizer: Optimizer,
    change: Callable[[nn.Module, Optimizer], object],
    *,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Optimizer],
    plain: Callable[[nn.Module], Optimizer],
) -> tuple[nn.Module, Optimizer]:
    """Change the ranks of a sharded model and its optimizer's moments, between two steps.

    The first rank gathers both, changes them and sends them to all: ranks that each decompose by
    themselves could choose other signs and even other ranks. All ranks call this together::

        model, optimizer = change_sharded(
            model, optimizer, lambda whole, own: shrink(whole, 0.99, optimizers=[own]),
            build=build, shard=shard, plain=lambda whole: AdamW(whole.parameters(), lr=1e-3),
        )

    The model is a new object, and so are its hooks, compiled graphs and whatever else was put on
    the old one.

    Args:
        model: Sharded by FSDP2 or not.
        optimizer: Its one.
        change: What to do with the whole model and an optimizer of the same state; on rank 0.
        build: A new model that is not sharded, of any ranks.
        shard: Shards a model in place and gives its optimizer.
        plain: The same optimizer for a model that is not sharded, with the same groups.

    Returns:
        The model and its optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer holds shards, which a forward pass may have replaced
    weights: dict[str, Any] = get_model_state_dict(model, options=_GATHERED)
    moments = get_optimizer_state_dict(model, optimizer, options=_GATHERED)
    whole = build()
    if dist.get_rank() == 0:
        match_ranks(whole, weights)
        whole.load_state_dict(weights)
        own = plain(whole)
        set_optimizer_state_dict(whole, own, moments, options=_ALONE)
        change(whole, own)
        weights = {name: item.detach().clone() for name, item in whole.state_dict().items()}
        moments = get_optimizer_state_dict(whole, own, options=_ALONE)
    sent: list[Any] = [{name: tuple(weight.shape) for name, weight in weights.items()}]
    dist.broadcast_object_list(sent)
    match_ranks(whole, {n: torch.empty(shape, device="meta") for n, shape in sent[0].items()})
    fresh = shard(whole)
    set_model_state_dict(whole, weights, options=_SPREAD)
    set_optimizer_state_dict(whole, fresh, moments, options=_SPREAD)
    return whole, fresh
