"""Changing the ranks of a model that is sharded over ranks: gather, change on one, shard again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from outlast.tensorize.ranks.match import match_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_ALONE = StateDictOptions(full_state_dict=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def change_sharded(
    model: nn.Module,
    optimizer: Optimizer,
    change: Callable[[nn.Module, Optimizer], object],
    *,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Optimizer],
    plain: Callable[[nn.Module], Optimizer],
) -> tuple[nn.Module, Optimizer]:
    """Change the ranks of a sharded model and its optimizer's moments, between two steps.

    The first rank gathers both, changes them and sends them to all: ranks that each decompose by
    themselves could choose other signs and even other ranks. All ranks call this together::

        model, optimizer = change_sharded(
            model, optimizer, lambda whole, own: shrink(whole, 0.99, optimizers=[own]),
            build=build, shard=shard, plain=lambda whole: AdamW(whole.parameters(), lr=1e-3),
        )

    The model is a new object, and so are its hooks, compiled graphs and whatever else was put on
    the old one.

    Args:
        model: Sharded by FSDP2 or not.
        optimizer: Its one.
        change: What to do with the whole model and an optimizer of the same state; on rank 0.
        build: A new model that is not sharded, of any ranks.
        shard: Shards a model in place and gives its optimizer.
        plain: The same optimizer for a model that is not sharded, with the same groups.

    Returns:
        The model and its optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer holds shards, which a forward pass may have replaced
    weights: dict[str, Any] = get_model_state_dict(model, options=_GATHERED)
    moments = get_optimizer_state_dict(model, optimizer, options=_GATHERED)
    whole = build()
    if dist.get_rank() == 0:
        match_ranks(whole, weights)
        whole.load_state_dict(weights)
        own = plain(whole)
        set_optimizer_state_dict(whole, own, moments, options=_ALONE)
        change(whole, own)
        weights = {name: item.detach().clone() for name, item in whole.state_dict().items()}
        moments = get_optimizer_state_dict(whole, own, options=_ALONE)
    sent: list[Any] = [{name: tuple(weight.shape) for name, weight in weights.items()}]
    dist.broadcast_object_list(sent)
    match_ranks(whole, {n: torch.empty(shape, device="meta") for n, shape in sent[0].items()})
    fresh = shard(whole)
    set_model_state_dict(whole, weights, options=_SPREAD)
    set_optimizer_state_dict(whole, fresh, moments, options=_SPREAD)
    return whole, fresh
