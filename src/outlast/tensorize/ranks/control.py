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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from outlast.errors import TensorizeError
from outlast.tensorize.ranks.resize import RankChange, resize
from outlast.tensorize.ranks.shrink import bonds_of
from outlast.tensorize.ranks.spectrum import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.tensorize.layer import StructuredLinear

_ALIVE = 1e-2


class _Gate(nn.Module):
    """Multiply one dimension of a core by the gate."""

    def __init__(self, size: int, place: int, like: Tensor) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(size, device=like.device, dtype=like.dtype))
        self.place = place

    def forward(self, core: Tensor) -> Tensor:
        """The core with its bond gated."""
        shape = [-1 if place == self.place else 1 for place in range(core.ndim)]
        return core * self.gate.view(shape)


@dataclass
class _Bond:
    name: str
    layer: StructuredLinear
    bond: str
    owner: nn.Module
    attribute: str
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
        target_loss: For the late stage; None: early stage throughout.
        target_share: Parameters to reach in the late stage, as a share of the gated ones at start.

    Raises:
        TensorizeError: The model has no bond to control, or only one target is given.
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
        self.weight = weight
        self.target_loss = target_loss
        self.target_share = target_share
        self._bonds = [_gated(*each) for each in list(bonds_of(model))]
        if not self._bonds:
            raise TensorizeError("the model has no structured layer whose rank could be controlled")
        self._whole = self._size(alive_only=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates, for an optimizer."""
        return (each.gate for each in self._bonds)

    def _size(self, *, alive_only: bool) -> float:
        total = 0.0
        for each in self._bonds:
            alive = int((each.gate.detach().abs() > _ALIVE).sum()) if alive_only else len(each.gate)
            total += alive * each.saved
        return total

    @property
    def share(self) -> float:
        """Parameters behind living gates, as a share of those at the start."""
        return self._size(alive_only=True) / self._whole

    def rank_term(self) -> Tensor:
        """The mean size of the living gates, each weighted by the parameters that it stands for."""
        total = torch.zeros((), device=self._bonds[0].gate.device)
        for each in self._bonds:
            size = each.gate.abs()
            living = (size.detach() > _ALIVE).to(size.dtype)
            total = total + (size * living).sum() * each.saved
        return total / self._whole

    def objective(self, loss: Tensor) -> Tensor:
        """The loss with the rank term.

        Early: loss + weight x rank term. Late, with targets: a tenth of the loss and the weight
        times the rank term keep everything moving, and the objective that is relatively farther
        from its target is added in full.
        """
        term = self.rank_term().to(loss.device)
        if self.target_loss is None or self.target_share is None:
            return loss + self.weight * term
        loss_gap = (float(loss.detach()) - self.target_loss) / self.target_loss
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
        """Multiply the gates in, remove them, and shrink the bonds to their living entries.

        Args:
            optimizers: Those of the model; the gates leave them.
            minimum: No rank goes below.
            on_change: Told of every change.
        """
        living = [int((each.gate.detach().abs() > _ALIVE).sum()) for each in self._bonds]
        for each in self._bonds:
            _ungate(each)
            _forget(each.gate, optimizers)
        changes = []
        for each, alive in zip(self._bonds, living, strict=True):
            rank = max(alive, minimum)
            if rank < each.layer.network.size(each.bond):
                changes.append(
                    resize(each.layer, rank, bond=each.bond, optimizers=optimizers,
                           name=each.name, on_change=on_change)
                )  # fmt: skip
        self._bonds = []
        return changes


def _gated(name: str, layer: StructuredLinear, bond: str) -> _Bond:
    """Put a gate on a bond, in the core that meets x last."""
    core = cut(layer.network, bond).right
    tensor = layer.factors()[core]
    owner, attribute = next(
        (module, key)
        for module in layer.modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter is tensor
    )
    gate = _Gate(layer.network.size(bond), layer.network.cores[core].index(bond), tensor)
    parametrize.register_parametrization(owner, attribute, gate)
    return _Bond(name, layer, bond, owner, attribute, gate.gate)


def _ungate(each: _Bond) -> None:
    """Multiply a gate in; the core keeps its place and its moments in the optimizers."""
    if not parametrize.is_parametrized(each.owner, each.attribute):
        return  # another gate of the same core was multiplied in together with this one
    held: Any = each.owner.parametrizations[each.attribute]  # type: ignore[index]
    value = getattr(each.owner, each.attribute).detach().clone()
    parametrize.remove_parametrizations(each.owner, each.attribute, leave_parametrized=False)
    with torch.no_grad():
        held.original.copy_(value)


def _forget(gate: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [kept for kept in group["params"] if kept is not gate]
        optimizer.state.pop(gate, None)
