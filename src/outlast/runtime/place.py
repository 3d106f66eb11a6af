"""The processes, devices and wrappers of a loop that is not ours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast.distributed.ranks import Ranks, ranks_from
from outlast.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Iterable


def ranks_here() -> Ranks:
    """This process among those of the default process group.

    Raises:
        IntegrationError: When several processes were started, and have no group yet.
    """
    known = ranks_from(os.environ)
    if not dist.is_initialized():
        if known.world_size > 1:
            raise IntegrationError(
                f"{known.launch} has started {known.world_size} processes, but there is no process "
                "group yet: call torch.distributed.init_process_group() before"
            )
        return known
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (known.rank, known.world_size):
        return known
    return Ranks(rank, size, rank, size, "alone")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within what DDP and torch.compile put around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def trained_part(model: nn.Module) -> nn.Module:
    """A module of the trained parameters of `model` alone, under the names that they have there.

    They are the same tensors: what is loaded into one is in the other.
    """
    root = nn.Module()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner, _, name = path.rpartition(".")
            made_submodule(root, owner).register_parameter(name, parameter)
    return root


def made_submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` below `root`; what is missing on the way is made, and empty."""
    owner = root
    for name in path.split(".") if path else ():
        if name not in owner._modules:
            owner.add_module(name, nn.Module())
        owner = owner.get_submodule(name)
    return owner


def device_of(models: Iterable[nn.Module]) -> torch.device:
    """Device of the models; the CPU for such without parameters."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def parameters_in(models: Iterable[nn.Module]) -> int:
    """Number of parameters of the models, shared ones once."""
    found = {id(parameter): parameter for model in models for parameter in model.parameters()}
    return sum(parameter.numel() for parameter in found.values())
