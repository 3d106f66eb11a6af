"""Growing: more rank where the training asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.resize import RankChange, resize
from outlast.tensorize.ranks.shrink import checked_bonds, energy_rank, values_of
from outlast.tensorize.ranks.spectrum import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


def explained_rank(values: Tensor, share: float = 0.9) -> float:
    """How much of its rank a spectrum uses: the rank that explains a share, over the whole rank.

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
