"""Which tensors of a state's objects only an optimizer's step changes.

`outlast.recover` copies a module's parameters and an optimizer's states while the next step runs,
until it is told that they are about to change, and whatever else an object hands out at once. A
framework's checkpoint is such an object. Here the parameters in it are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch.optim import Optimizer


def places_of(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> set[int]:
    """Where the parameters of `modules`, and those and the states of `optimizers`, lie."""
    found = {_place(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        found.update(
            _place(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        found.update(
            _place(tensor)
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor)
        )
    return found - {0}


def settled(value: Any, places: Collection[int]) -> Any:
    """`value` with its tensors that lie at `places` as parameters on the same memory.

    Args:
        value: Nested dictionaries, lists and tuples of tensors and anything else.
        places: Of `places_of`, seen in the same step.
    """
    if isinstance(value, torch.Tensor):
        if _place(value) not in places:
            return value
        return nn.Parameter(value.detach(), requires_grad=False)
    if isinstance(value, Mapping):
        return {key: settled(item, places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(settled(item, places) for item in value)
    return value


def only_settled(value: Any) -> Any:
    """What of `value`, as `settled` gives it, are parameters, under the same keys."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Mapping):
        return {key: only_settled(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(only_settled(item) for item in value)
    return None


def _place(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element; 0 for one without any, or with no single one."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # It consists of other tensors, which whoever keeps it refuses by name.
        return 0
