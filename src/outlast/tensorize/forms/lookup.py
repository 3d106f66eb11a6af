"""Rows of a table that is made of cores: the cores of each half of the row's index are merged once.

A row number i = i1 V2 + i2 picks a slice of what the first cores make of the V1 values of i1 and
one of what the others make of the V2 values of i2; the row is the product of the two. Both halves
have about sqrt(V) slices, so merging them costs little, and the cores never meet a vector as long
as the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.nn import functional

from outlast.tensorize.merge import contract
from outlast.tensorize.surroundings import autocasts, transformed, without_autocast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network


@dataclass(frozen=True)
class Part:
    """Cores that are merged, and the indices of what they make.

    Attributes:
        terms: The letters of each core.
        cores: Their places in the network.
        rows: Letters of the row's index, which come first.
        rest: The other letters of the merged cores.
        count: The product of the sizes of `rows`.
        shape: The sizes of `rest`.
    """

    terms: tuple[str, ...]
    cores: tuple[int, ...]
    rows: str
    rest: str
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Halves:
    """A network cut for looking up rows.

    Attributes:
        network: The map from rows to columns.
        parts: The halves, one where there is a single core with rows, and what has no rows.
        products: The einsum equation that adds each part after the first.
        shape: (rows of padding and all, columns of padding and all).
    """

    network: Network
    parts: tuple[Part, ...]
    products: tuple[str, ...]
    shape: tuple[int, int]


def halves(network: Network) -> Halves:
    """Cut a chain whose cores have the modes of the row in order, and all of them before the last.

    The cut is where the merged halves are smallest.
    """
    ends = [core for core, term in enumerate(network.cores) if set(term) & set(network.inputs)]
    last = ends[-1] + 1
    cuts = [_parts(network, (0, cut, last, len(network.cores))) for cut in range(1, last)]
    cuts = cuts or [_parts(network, (0, last, len(network.cores)))]
    parts = min(cuts, key=lambda cut: sum(network.size(part.rows + part.rest) for part in cut))
    products = []
    have = parts[0].rest
    for place, part in enumerate(parts[1:], start=1):
        later = "".join(after.rest for after in parts[place + 1 :]) + network.outputs
        both = dict.fromkeys(have + part.rest)
        wanted = "".join(letter for letter in both if letter in later)
        wanted = network.outputs if place == len(parts) - 1 else wanted
        of_row = "..." if part.rows else ""
        products.append(f"...{have},{of_row}{part.rest}->...{wanted}")
        have = wanted
    shape = network.size(network.inputs), network.size(network.outputs)
    return Halves(network, parts, tuple(products), shape)


def _parts(network: Network, bounds: tuple[int, ...]) -> tuple[Part, ...]:
    parts = []
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        terms = network.cores[begin:end]
        others = "".join(network.cores[:begin] + network.cores[end:]) + network.outputs
        own = dict.fromkeys("".join(terms))
        rows = "".join(letter for letter in network.inputs if letter in own)
        rest = "".join(letter for letter in own if letter in others and letter not in rows)
        if len(terms) == len(network.cores):
            rest = network.outputs
        shape = tuple(network.size(letter) for letter in rest)
        parts.append(Part(terms, tuple(range(begin, end)), rows, rest, network.size(rows), shape))
    return tuple(parts)


def look_up(index: Tensor, cores: Sequence[Tensor], halved: Halves) -> Tensor:
    """Rows of a table; keeps the indices and the cores alone for the backward pass.

    Args:
        index: (n,) row numbers.
        cores: The cores of the network.
        halved: The network.

    Returns:
        (n, columns)
    """
    plain = torch.compiler.is_compiling() or transformed()
    if autocasts(index.device):
        # An nn.Embedding gives its own dtype under autocast as well.
        with torch.autocast(index.device.type, enabled=False):
            return look_up(index, cores, halved)
    if plain or index.is_meta:
        return _rows(index, cores, halved)
    rows: Tensor = _LookUp.apply(index, halved, *cores)  # type: ignore[no-untyped-call]
    return rows


def _rows(index: Tensor, cores: Sequence[Tensor], halved: Halves) -> Tensor:
    rows, left = None, index
    stride = halved.shape[0]
    products = iter(halved.products)
    for part in halved.parts:
        merged = _merged(part, [cores[core] for core in part.cores], halved.network)
        if part.rows:
            stride //= part.count
            place = torch.div(left, stride, rounding_mode="floor")
            left = left - place * stride
            merged = functional.embedding(place, merged.reshape(part.count, -1))
            merged = merged.view(-1, *part.shape)
        rows = merged if rows is None else torch.einsum(next(products), rows, merged)
    assert rows is not None
    return rows.reshape(-1, halved.shape[1])[:, : halved.network.out_features]


def _merged(part: Part, cores: list[Tensor], network: Network) -> Tensor:
    if torch.compiler.is_compiling():
        # The search for a path cannot be traced, and torch.einsum has its own.
        return torch.einsum(",".join(part.terms) + "->" + part.rows + part.rest, *cores)
    if len(cores) == 1:
        term = part.terms[0]
        return cores[0].permute([term.index(letter) for letter in part.rows + part.rest])
    return contract(part.terms, part.rows + part.rest, network.sizes, cores)


class _LookUp(Function):
    """See `look_up`."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, halved: Halves, *cores: Tensor) -> Tensor:
        ctx.halved = halved
        ctx.save_for_backward(index, *cores)
        return _rows(index, cores, halved).contiguous()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, *cores = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that a core that is used twice does not count twice.
            cores = [
                core.view_as(core) if again else core.detach().requires_grad_() for core in cores
            ]
            rows = _rows(index, cores, ctx.halved)
        needs = ctx.needs_input_grad[2:]
        wanted = [core for core, need in zip(cores, needs, strict=True) if need]
        found = iter(torch.autograd.grad(rows, wanted, gradients, create_graph=again))
        return None, None, *(next(found) if need else None for need in needs)
