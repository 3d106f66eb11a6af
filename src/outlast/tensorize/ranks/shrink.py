"""Shrinking by the energy of the spectrum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.coordinates import importance
from outlast.tensorize.ranks.layers import bonds_of, is_linear
from outlast.tensorize.ranks.resize import RankChange, resize
from outlast.tensorize.ranks.spectrum import cut, singular_values
from outlast.tensorize.ranks.states import check_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.layer import StructuredLinear


def energy_rank(values: Tensor, energy: float) -> int:
    """How many of the largest singular values hold a share of the sum of squares.

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
