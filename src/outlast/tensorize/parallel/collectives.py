"""Collectives with the backward pass that their consumer needs.

A tensor that all ranks hold is used in one of two ways. Where every rank computes a part of what
follows (a column-split matrix), the gradients that come back are parts of a sum, ``partial``. Where
every rank computes all of what follows (the loss of replicated logits), every rank gets the whole
gradient, ``whole``, and adding them up would count it p times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed._functional_collectives  # registers the operators

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Gradient = Literal["partial", "whole"]

_OPERATORS = torch.ops._c10d_functional
"""The names of their Python wrappers change between torch 2.11 and 2.13; theirs do not."""


def all_reduced(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of `group`, outside autograd; None: of this rank alone."""
    if group is None:
        return tensor
    return _waited(_OPERATORS.all_reduce(tensor.contiguous(), "sum", group.group_name))


def _waited(tensor: Tensor) -> Tensor:
    result: Tensor = _OPERATORS.wait_tensor(tensor)
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
        ctx.group = group if gradient == "partial" else None
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_reduced(gradients[0], ctx.group), None, None


def sum_over(tensor: Tensor, group: ProcessGroup | None, gradient: Gradient) -> Tensor:
    """All-reduce of `tensor` (any shape); backward another one if gradients are partial."""
    if group is None:
        return tensor
    result: Tensor = _Sum.apply(tensor, group, gradient)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
        ctx.group, ctx.gradient = group, gradient
        size, name = group.size(), group.group_name
        gathered = _OPERATORS.all_gather_into_tensor(tensor.contiguous(), size, name)
        pieces = _waited(gathered).chunk(size)
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pieces = gradients[0].chunk(ctx.group.size(), dim=-1)
        if ctx.gradient == "whole":
            return pieces[ctx.group.rank()].contiguous(), None, None
        stacked = torch.cat(pieces)
        size, name = ctx.group.size(), ctx.group.group_name
        piece = _OPERATORS.reduce_scatter_tensor(stacked, "sum", size, name)
        return _waited(piece), None, None


def gather_features(tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
    """Concatenate the ranks' features: (..., features / p) -> (..., features).

    Backward a reduce-scatter if gradients are partial, else this rank's slice.
    """
    lead = tensor.shape[:-1]
    # A plain matrix, so that pieces of ranks follow each other also without leading dimensions.
    flat = tensor.reshape(-1, tensor.shape[-1])
    gathered: Tensor = _Gather.apply(flat, group, gradient)  # type: ignore[no-untyped-call]
    return gathered.reshape(*lead, -1)
