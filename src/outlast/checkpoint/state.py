"""From live objects to a flat state that any number of ranks can load, and back.

Modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which names every
tensor by its fully qualified name, whatever wraps or shards it; that is what makes a checkpoint
independent of the number of ranks. Objects with a ``state_dict`` of their own are saved whole.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

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
            with contextlib.ExitStack() as completed:
                for optimizer in optimizers:
                    completed.enter_context(_completed(optimizer))
                owner = _owner(model, name)
                found[name] = get_optimizer_state_dict(owner, optimizers, options=_FLAT)
        else:
            found[name] = _as_bytes(name, value.state_dict())
    return found


def scatter(state: State, loaded: dict[str, Any]) -> None:
    """Put `loaded`, shaped like the result of `gather`, into the live objects of `state`."""
    model = _model(state)
    for name, value in state.items():
        if isinstance(value, nn.Module):
            set_model_state_dict(value, loaded[name])
        elif (optimizers := _optimizers(value)) is not None:
            for optimizer in optimizers:
                _complete(optimizer)
            owner = _owner(model, name)
            set_optimizer_state_dict(owner, optimizers, loaded[name], options=_FLAT)
        else:
            value.load_state_dict(_from_bytes(loaded[name]))


@contextlib.contextmanager
def _completed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """`optimizer` with a state for every parameter; what was added is taken out at the end.

    Only what every live state has can be restored into a new optimizer, and training must go on
    as if nothing had been saved.
    """
    added = _complete(optimizer)
    try:
        yield
    finally:
        for parameter in added:
            del optimizer.state[parameter]


@torch.no_grad()
def _complete(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give the parameters that have had no gradient yet the state of an optimizer before step 1.

    PyTorch's own initialisation counts it as a step, which changes Adam's bias correction, and
    leaves out parameters without a gradient when others have had one.

    Returns:
        The parameters that had no state.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    missing = [each for each in parameters if each.requires_grad and not optimizer.state.get(each)]
    if not missing:
        return []
    gradients = [each.grad for each in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    added = [each for each in missing if each in optimizer.state]
    for parameter in added:
        steps = optimizer.state[parameter].get("step")
        if steps is not None:
            optimizer.state[parameter]["step"] = steps * 0
    return added


def _as_bytes(name: str, state: dict[str, Any]) -> bytes:
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(state)):
        raise CheckpointError(
            f"`{name}` holds sharded tensors, of which each rank has a part only; save them as "
            "parameters or buffers of the module"
        )
    # As nested keys, DCP would restore only those that the new object has too, and turn integer
    # keys into strings.
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _from_bytes(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    return state


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
