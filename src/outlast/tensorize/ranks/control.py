"""Rank control as a second objective: CoMERA's gates, in two stages.

Every bond gets a gate, a vector d that multiplies it and starts at one. The loss is helped by a
term that makes gates small; a bond's entries whose gates have died are removed (Yang et al. 2024,
arXiv 2405.14377, section 4). In the early stage the term has a fixed weight; in the late one the
run aims at a target loss and a target size at once, by the achievement scalarisation: whichever
of the two is farther from its target is what is worked on.

The gates live in the cores as parametrizations, so layers, plans and the optimizer need not know;
`RankControl.finish` multiplies them in for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.parameters import factor_parameters
from outlast.tensorize.ranks.resize import (
    Gate,
    ParameterPlace,
    RankChange,
    bonds_of,
    check_here,
    check_states,
    cut,
    forget,
    is_linear,
    places_of,
    put_on,
    resize,
    take_off,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.tensorize.layer import StructuredLinear

_ALIVE = 1e-2


@dataclass(frozen=True)
class _Bond:
    name: str
    layer: StructuredLinear
    bond: str
    places: list[ParameterPlace]
    gate: nn.Parameter

    @property
    def saved(self) -> int:
        """Parameters that go with one entry of the bond."""
        network = self.layer.network
        held = sum(network.size(core) for core in network.cores if self.bond in core)
        return held // network.size(self.bond)


class RankControl:
    """Gates on all bonds of a model, and the terms that make them small.

    ::

        control = RankControl(model, weight=0.01)
        optimizer.add_param_group({"params": control.parameters(), "lr": 1e-3, "weight_decay": 0.0})
        loss = control.objective(loss)       # every step
        control.finish([optimizer])          # once: dead entries go, gates are multiplied in

    Args:
        model: With structured layers.
        weight: Of the rank term in the early stage (0.01 in the paper).
        target_loss: For the late stage, above 0; None: early stage throughout.
        target_share: Parameters to reach in the late stage, as a share of the gated ones at start.

    Raises:
        TensorizeError: The model has no bond to control, one target is given without the other, or
            is out of range; or see `bonds_of`: a sharded model, for example.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.01,
        target_loss: float | None = None,
        target_share: float | None = None,
    ) -> None:
        if (target_loss is None) != (target_share is None):
            raise TensorizeError(
                f"target_loss = {target_loss} and target_share = {target_share} go together: give "
                "both or neither"
            )
        if target_loss is not None and not target_loss > 0.0:
            raise TensorizeError(f"target_loss = {target_loss} must be above 0")
        if target_share is not None and not 0.0 < target_share <= 1.0:
            raise TensorizeError(f"target_share = {target_share} must be above 0 and at most 1")
        self.weight = weight
        self.target_loss = target_loss
        self.target_share = target_share
        self._model = model
        self._bonds = _gated(list(bonds_of(model)), model)
        if not self._bonds:
            raise TensorizeError("the model has no structured layer whose rank could be controlled")
        self._whole = self._size(alive_only=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates, for an optimizer."""
        return (bond.gate for bond in self._bonds)

    def _size(self, *, alive_only: bool) -> float:
        total = 0.0
        for bond in self._bonds:
            alive = int((bond.gate.detach().abs() > _ALIVE).sum()) if alive_only else len(bond.gate)
            total += alive * bond.saved
        return total

    @property
    def share(self) -> float:
        """Parameters behind living gates, as a share of those at the start."""
        return self._size(alive_only=True) / self._whole

    def rank_term(self) -> Tensor:
        """The mean size of the living gates, each weighted by the parameters that it stands for."""
        total = torch.zeros((), device=self._bonds[0].gate.device)
        for bond in self._bonds:
            size = bond.gate.abs()
            living = (size.detach() > _ALIVE).to(size.dtype)
            total = total + (size * living).sum() * bond.saved
        return total / self._whole

    def objective(self, loss: Tensor, *, loss_for_choice: float | None = None) -> Tensor:
        """The loss with the rank term.

        Early: loss + weight x rank term. Late, with targets: a tenth of the loss and the weight
        times the rank term keep everything moving, and the objective that is relatively farther
        from its target is added in full.

        Args:
            loss: Of this rank and micro-batch.
            loss_for_choice: What is compared with the target in the late stage: the mean over all
                ranks (and micro-batches), where there are several. They would choose differently
                by their own losses, and the gradients of both objectives would be mixed. None: the
                number of `loss`.
        """
        term = self.rank_term().to(loss.device)
        if self.target_loss is None or self.target_share is None:
            return loss + self.weight * term
        reached = float(loss.detach()) if loss_for_choice is None else loss_for_choice
        loss_gap = (reached - self.target_loss) / self.target_loss
        size_gap = (self.share - self.target_share) / self.target_share
        worse = term if loss_gap < size_gap else loss
        return 0.1 * loss + self.weight * term + worse

    def finish(
        self,
        optimizers: Sequence[Optimizer] = (),
        *,
        minimum: int = 1,
        on_change: Callable[[RankChange], None] | None = None,
    ) -> list[RankChange]:
        """Multiply the gates in, remove them, and shrink the bonds.

        Layers with a nonlinearity in the middle keep the units whose gates live. Linear ones get as
        many directions as gates live, and these are the best by the spectrum.

        Args:
            optimizers: Those of the model; the gates leave them.
            minimum: No rank goes below.
            on_change: Told of every change.

        Raises:
            TensorizeError: The model was sharded or grouped, or an optimizer's state cannot follow;
                nothing is changed then.
        """
        for bond in self._bonds:
            check_here(bond.layer, bond.name, model=self._model)
            check_states(optimizers, factor_parameters(bond.layer))
        living = [_living(bond.gate, minimum) for bond in self._bonds]
        take_off(place for bond in self._bonds for place in bond.places)
        changes = []
        for bond, units in zip(self._bonds, living, strict=True):
            forget(bond.gate, optimizers)
            if len(units) < bond.layer.network.size(bond.bond):
                changes.append(
                    resize(bond.layer, len(units), bond=bond.bond, model=self._model,
                           units=None if is_linear(bond.layer) else units, optimizers=optimizers,
                           name=bond.name, on_change=on_change)
                )  # fmt: skip
        self._bonds = []
        return changes


def _living(gate: Tensor, minimum: int) -> Tensor:
    """The places of a gate's living entries, or of its largest ones if those are too few."""
    size = gate.detach().abs()
    count = max(int((size > _ALIVE).sum()), min(minimum, len(size)))
    return size.topk(count).indices


def _gated(bonds: Sequence[tuple[str, StructuredLinear, str]], model: nn.Module) -> list[_Bond]:
    """Put a gate on every bond, in the core that meets x last."""
    # All are found first: a gated core is no parameter any more.
    found = []
    for name, layer, bond in bonds:
        core = cut(layer.network, bond).right
        tensor = layer.factors()[core]
        gate = Gate(layer.network.size(bond), layer.network.cores[core].index(bond), tensor)
        found.append((_Bond(name, layer, bond, places_of(tensor, model), gate.gate), gate))
    for item, gate in found:
        put_on(gate, item.places)
    return [item for item, _ in found]
