"""What DeepSpeed writes, as tensors and plain values, and back: a store holds no pickles."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from outlast.errors import CheckpointError

_CLASS = "outlast.class"
_KNOWN = {
    f"{module}.{name}": (module, name)
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    )
}
"""The classes of DeepSpeed's that are made again; nothing else is."""


def plain(value: Any) -> Any:
    """`value` with objects of DeepSpeed's and torch's small types as dictionaries."""
    if isinstance(value, Enum):
        return {_CLASS: _name_of(value), "value": plain(value.value)}
    if isinstance(value, torch.Size):
        return {_CLASS: "torch.Size", "value": list(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        kind = type(value).__name__
        return {_CLASS: f"torch.{kind}", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, set, frozenset)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if _name_of(value) in _KNOWN:
        return {_CLASS: _name_of(value), "value": plain(vars(value))}
    return value


def rebuilt(value: Any) -> Any:
    """What `plain` was given; ordered dictionaries come back as plain ones.

    Raises:
        CheckpointError: For a class that is not one of those that are known.
    """
    if isinstance(value, (list, set, frozenset, tuple)):
        return type(value)(rebuilt(item) for item in value)
    if not isinstance(value, dict):
        return value
    if _CLASS not in value:
        return {key: rebuilt(item) for key, item in value.items()}
    name, content = value[_CLASS], rebuilt(value["value"])
    if name == "torch.Size":
        return torch.Size(content)
    if name == "torch.dtype":
        return getattr(torch, content)
    if name == "torch.device":
        return torch.device(content)
    if name not in _KNOWN:
        raise CheckpointError(f"the checkpoint holds a {name}, which is not made from a file")
    module, own = _KNOWN[name]
    made = getattr(importlib.import_module(module), own)
    if issubclass(made, Enum):
        return made(content)
    found = made.__new__(made)
    vars(found).update(content)
    return found


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
