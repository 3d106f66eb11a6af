"""From live objects to a flat state that any number of ranks can load, and back.

Modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which names every
tensor by its fully qualified name, whatever wraps or shards it; that is what makes a checkpoint
independent of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from outlast.errors import CheckpointError

State = Mapping[str, Any]
"""Name -> nn.Module, Optimizer (or a sequence of them) or an object with a ``state_dict``."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state of its own, e.g. a data sampler."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state over."""


def gather(state: State) -> dict[str, Any]:
    """The nested dictionary of tensors and plain values that `state` stands for."""
    model = _model(state)
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            found[name] = get_model_state_dict(value)
        elif (optimizers := _optimizers(value)) is not None:
            found[name] = get_optimizer_state_dict(_owner(model, name), optimizers, options=_FLAT)
        else:
            found[name] = value.state_dict()
    return found


def scatter(state: State, loaded: dict[str, Any]) -> None:
    """Put `loaded`, shaped like the result of `gather`, into the live objects of `state`."""
    model = _model(state)
    for name, value in state.items():
        if isinstance(value, nn.Module):
            set_model_state_dict(value, loaded[name])
        elif (optimizers := _optimizers(value)) is not None:
            owner = _owner(model, name)
            set_optimizer_state_dict(owner, optimizers, loaded[name], options=_FLAT)
        else:
            value.load_state_dict(loaded[name])


def _optimizers(value: Any) -> list[torch.optim.Optimizer] | None:
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(v, torch.optim.Optimizer) for v in value):
        return list(value)
    if isinstance(value, Stateful):
        return None
    raise CheckpointError(
        f"a state of type {type(value).__name__} cannot be saved: it is neither a module, nor an "
        "optimizer, nor has it state_dict() and load_state_dict()"
    )


def _model(state: State) -> nn.Module | None:
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(modules) > 1:
        raise CheckpointError(
            f"the state holds {len(modules)} modules; wrap them in one module, so that the "
            "optimizer's owner is clear"
        )
    return modules[0] if modules else None


def _owner(model: nn.Module | None, name: str) -> nn.Module:
    if model is None:
        raise CheckpointError(
            f"the optimizer `{name}` needs its model in the same state: its tensors are named "
            "after the model's parameters"
        )
    return model
