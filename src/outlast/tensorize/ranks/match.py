"""Giving a model the ranks of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.layers import Layer, check_free
from outlast.tensorize.ranks.resize import RankChange, resize
from outlast.tensorize.ranks.spectrum import cut
from outlast.tensorize.ranks.states import check_states
from outlast.tensorize.rules.layers import factor_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


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
