"""Which objects are looked into, and which are left as set-up makes them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range, slice,
    types.BuiltinFunctionType, types.ModuleType, np.dtype, np.generic,
)  # fmt: skip
"""What has no state of its own, or none that a program could change."""

PLAIN_ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
"""The types of most atoms, to pass over many at once."""

_CLOSED = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.distributed",
    "torch._C", "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio",
    "socket", "_socket", "ssl", "subprocess", "queue", "_queue", "weakref", "importlib", "typing",
    "tqdm", "outlast.autosave",
    # Services that are told how training goes.
    "wandb", "tensorboard", "tensorboardX", "torch.utils.tensorboard", "mlflow", "comet_ml",
    "neptune", "clearml", "aim", "rich", "requests", "urllib3", "http", "grpc", "boto3", "botocore",
    "fsspec", "s3fs", "huggingface_hub",
)  # fmt: skip
"""Modules whose objects are not looked into: their state is that of a process, not of training."""

_OPEN: tuple[type, ...] = (
    nn.Module, torch.Tensor, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler,
    Dataset, Sampler, DataLoader,
)  # fmt: skip
"""What is looked into wherever it was defined."""


def is_closed(kind: type) -> bool:
    """Whether objects of a class are left as set-up makes them."""
    if kind.__name__ == "DTensorSpec":
        return False
    return in_closed_module(kind.__module__) and not issubclass(kind, _OPEN)


def is_of_process(value: Any) -> bool:
    """Whether a hook, wrapped as it may be, belongs to a library that is not looked into."""
    match value:
        case functools.partial():
            return is_of_process(value.func)
        case types.MethodType():
            return is_closed(type(value.__self__))
        case types.FunctionType():
            return in_closed_module(value.__module__)
    # Asked for an attribute, some objects of torch raise errors of their own.
    own = getattr(value, "__dict__", None)
    hook = own.get("hook") if isinstance(own, dict) else None
    return hook is not None and is_of_process(hook)


def in_closed_module(name: Any) -> bool:
    """Whether a module of this name is one whose objects are not looked into."""
    return f"{name}.".startswith(tuple(f"{item}." for item in _CLOSED))


def is_builtin_iterator(kind: type) -> bool:
    """Whether a class is that of an iterator of Python's own, which is written by value."""
    return (
        issubclass(kind, Iterator)
        and kind.__module__ in ("builtins", "itertools")
        and kind is not types.GeneratorType
    )
