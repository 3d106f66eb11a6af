"""Gates on bonds: parametrizations of the cores, which layers and plans need not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

Place = tuple[nn.Module, str]
"""A module and the name of a parameter of its own."""


class Gate(nn.Module):
    """Multiply one dimension of a core by the gate."""

    def __init__(self, size: int, place: int, like: Tensor) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(size, device=like.device, dtype=like.dtype))
        self.place = place

    def forward(self, core: Tensor) -> Tensor:
        """The core with its bond gated."""
        shape = [-1 if place == self.place else 1 for place in range(core.ndim)]
        return core * self.gate.view(shape)


def places_of(parameter: Tensor, model: nn.Module) -> list[Place]:
    """Where a model holds a parameter; more than one place where layers are tied."""
    return [
        (module, name)
        for module in model.modules()
        for name, held in module._parameters.items()
        if held is parameter
    ]


def put_on(gate: Gate, places: Iterable[Place]) -> None:
    """Let a core be seen through a gate, wherever it is held."""
    for owner, name in places:
        parametrize.register_parametrization(owner, name, gate)


@torch.no_grad()
def take_off(places: Iterable[Place]) -> None:
    """Multiply gates in; the cores keep their places and their moments in the optimizers."""
    originals, values = {}, {}
    # Another gate of the same core is multiplied in together with the first.
    for owner, name in dict.fromkeys(places):
        held: Any = owner.parametrizations[name]  # type: ignore[index]
        original = held.original
        if id(original) not in values:
            originals[id(original)] = original
            values[id(original)] = getattr(owner, name).clone()
        parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
    for key, original in originals.items():
        original.copy_(values[key])


def forget(gate: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
    """Take a gate out of optimizers, with its name and its state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept = [
                place for place, parameter in enumerate(group["params"]) if parameter is not gate
            ]
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][place] for place in kept]
        optimizer.state.pop(gate, None)
