"""Merging the cores of a group into one matrix, and the way back for gradients.

Cores are small, so what is merged is computed again in the backward pass and never kept.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from outlast.tensorize.contraction import steps

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from outlast.tensorize.contraction import Making, Merging, Product


Sizes = tuple[tuple[str, int], ...]


def contract(terms: tuple[str, ...], result: str, sizes: Sizes, operands: list[Tensor]) -> Tensor:
    """An einsum of several small tensors along the path with the fewest operations."""
    if terms == (result,):
        return operands[0]
    operands = list(operands)
    for step in steps(terms, result, sizes):
        taken = [operands.pop(place) for place in step.places]
        operands.append(torch.einsum(step.equation, *taken))
    return operands[0]


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that products of these tensors are made in."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _alike(cores: Sequence[Tensor], members: Sequence[int]) -> list[Tensor]:
    """Some cores in the dtype that products of all are made in."""
    first = cores[0].dtype
    if all(core.dtype is first for core in cores):
        return [cores[core] for core in members]
    dtype = widest(cores)
    return [cores[core].to(dtype) for core in members]


def merge(merging: Merging, cores: Sequence[Tensor]) -> Tensor:
    """The matrix of a stage, of shape (b, m, k), or (m, k) where b is one; differentiable.

    Args:
        merging: Of which stage, and how.
        cores: All cores of the network.
    """
    tensors = _alike(cores, merging.cores)
    _make(merging.ahead, tensors)
    matrix = tensors[-1] if merging.last is None else merging.last(tensors[-1])
    columns, rows = merging.padding
    if columns or rows:
        matrix = matrix[..., : matrix.shape[-2] - rows, : matrix.shape[-1] - columns]
    return matrix


def unmerge(
    merging: Merging, cores: Sequence[Tensor], gradient: Tensor, wanted: Collection[int]
) -> dict[int, Tensor]:
    """The gradients of a stage's cores from that of its matrix: the merging backwards.

    Args:
        merging: Of which stage, and how.
        cores: All cores of the network.
        gradient: That of the matrix that `merge` gives, of its shape.
        wanted: Of which cores gradients are asked for.

    Returns:
        Those of the wanted cores of the stage, in the cores' own dtypes.
    """
    if any(merging.padding):
        columns, rows = merging.padding
        gradient = torch.nn.functional.pad(gradient, (0, columns, 0, rows))
    back = merging.back_to(frozenset(wanted))
    tensors = _alike(cores, merging.cores) if back else []
    # The matrix itself is not needed.
    _make(merging.ahead[:-1], tensors)
    gradients = {len(merging.cores) + len(merging.ahead) - 1: gradient}
    if back:
        gradients = {
            number: gradient.to(tensors[0].dtype) for number, gradient in gradients.items()
        }
    for making in back:
        if making.of == 0:
            left, right = gradients[making.first], tensors[making.second]
        else:
            left, right = tensors[making.first], gradients[making.second]
        gradients[making.result] = _multiplied(making.product, left, right)
    found = {}
    for number, (core, closing) in enumerate(zip(merging.cores, merging.closing, strict=True)):
        if core in wanted:
            mine = gradients[number]
            mine = mine if closing is None else closing(mine)
            found[core] = mine.to(cores[core].dtype)
    return found


def _make(ahead: Sequence[Making], tensors: list[Tensor]) -> None:
    """Append what is made of the tensors, one after the other."""
    for making in ahead:
        left, right = tensors[making.first], tensors[making.second]
        tensors.append(_multiplied(making.product, left, right))


def _multiplied(product: Product, left: Tensor, right: Tensor) -> Tensor:
    left = left if product.left is None else product.left(left)
    right = right if product.right is None else product.right(right)
    return torch.bmm(left, right) if len(product.gives) == 3 else torch.mm(left, right)
