"""Shrinking by the energy of the spectrum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.ranks.resize import RankChange, importance, is_linear, resize
from outlast.tensorize.ranks.spectrum import cut, spectrum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


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

    Args:
        model: Its structured layers are changed in place, between two steps.
        energy: The share, in (0, 1].
        minimum: No rank goes below.
        multiple: Ranks are rounded up to multiples of it, for the hardware's sake.
        optimizers: Those of the model.
        on_change: Told of every change.

    Raises:
        TensorizeError: The energy is no share.
    """
    if not 0.0 < energy <= 1.0:
        raise TensorizeError(f"energy = {energy} must be above 0 and at most 1")
    changes = []
    for name, layer, bond in bonds_of(model):
        values = values_of(layer, bond)
        rank = max(energy_rank(values, energy), minimum)
        rank = -(-rank // multiple) * multiple
        if rank < len(values):
            changes.append(
                resize(layer, rank, bond=bond, optimizers=optimizers, name=name,
                       on_change=on_change)
            )  # fmt: skip
    return changes


def bonds_of(model: nn.Module) -> Iterator[tuple[str, StructuredLinear, str]]:
    """Every bond of a model that can be resized: (name of the layer, layer, bond)."""
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            for bond in layer.network.bonds:
                try:
                    cut(layer.network, bond)
                except TensorizeError:
                    continue
                yield name, layer, bond


def values_of(layer: StructuredLinear, bond: str) -> Tensor:
    """The singular values over a bond; with a nonlinearity in the middle, its units' importance."""
    if is_linear(layer):
        return spectrum(layer.network, layer.factors(), bond)
    with torch.no_grad():
        units = importance(layer.factors(), layer.network, cut(layer.network, bond))
        return units.sort(descending=True).values
