"""Merging the cores of a group into one matrix, and the way back for gradients.

Cores are small, so what is merged is computed again in the backward pass and never kept.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import opt_einsum
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network, Stage


@functools.lru_cache(maxsize=16384)
def _steps(
    terms: tuple[str, ...], result: str, sizes: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Pairwise contractions, cheapest first, by opt_einsum: (places of operands, equation)."""
    size = dict(sizes)
    shapes = [tuple(size[letter] for letter in term) for term in terms]
    equation = ",".join(terms) + "->" + result
    how = "optimal" if len(terms) <= 7 else "dp"
    _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=how)
    return tuple((tuple(step[0]), step[2]) for step in info.contraction_list)


def contract(
    terms: tuple[str, ...], result: str, sizes: tuple[tuple[str, int], ...], operands: list[Tensor]
) -> Tensor:
    """An einsum of several small tensors along the path with the fewest operations."""
    if terms == (result,):
        return operands[0]
    operands = list(operands)
    for places, equation in _steps(terms, result, sizes):
        taken = [operands.pop(place) for place in places]
        operands.append(torch.einsum(equation, *taken))
    return operands[0]


def _unfolded(network: Network, stage: Stage) -> str:
    return stage.batch + stage.new + stage.contracted


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that products of these tensors are made in."""
    return functools.reduce(torch.promote_types, (each.dtype for each in tensors))


def merge(network: Network, stage: Stage, cores: Sequence[Tensor]) -> Tensor:
    """The matrix of a stage, of shape (b, m, k); differentiable.

    Args:
        network: What the cores are those of.
        stage: A stage of one of its routes.
        cores: All cores of the network.
    """
    terms = tuple(network.cores[core] for core in stage.cores)
    dtype = widest(cores)
    operands = [cores[core].to(dtype) for core in stage.cores]
    merged = contract(terms, _unfolded(network, stage), network.sizes, operands)
    new, contracted = network.size(stage.new), network.size(stage.contracted)
    matrix = merged.reshape(stage.b, new, contracted)
    return matrix[:, : stage.m, : stage.k]


def unmerge(
    network: Network, stage: Stage, cores: Sequence[Tensor], gradient: Tensor, core: int
) -> Tensor:
    """The gradient of one core of a stage from that of the stage's matrix.

    Args:
        network: What the cores are those of.
        stage: A stage of one of its routes.
        cores: All cores of the network.
        gradient: That of the matrix that `merge` gives, of shape (b, m, k).
        core: Which of the stage's cores.
    """
    new, contracted = network.size(stage.new), network.size(stage.contracted)
    if gradient.shape[1:] != (new, contracted):
        pad = (0, contracted - stage.k, 0, new - stage.m)
        gradient = torch.nn.functional.pad(gradient, pad)
    unfolded = _unfolded(network, stage)
    gradient = gradient.reshape([network.size(letter) for letter in unfolded])
    others = [other for other in stage.cores if other != core]
    terms = (unfolded, *(network.cores[other] for other in others))
    dtype = widest(cores)
    operands = [gradient.to(dtype), *(cores[other].to(dtype) for other in others)]
    if len(terms) == 1:
        return operands[0].permute([unfolded.index(letter) for letter in network.cores[core]])
    return contract(terms, network.cores[core], network.sizes, operands)
