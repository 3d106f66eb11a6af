"""Norm of a chain's product, and its gradients, from the cores alone.

The chain's cores meet their own copies one after the other, as in the norm of a matrix product
state (Schollwoeck 2011, section 4.2.1): ``||W||_F^2`` is a sweep of two small contractions per
core, and the weight is never built. For two factors it is tr((B^T B)(A A^T)) with r x r matrices.
"""

from __future__ import annotations

import functools
import string
from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network


def squared_norm(factors: Sequence[Tensor], network: Network) -> Tensor:
    """``||W||_F^2`` of the product of all cores, differentiable.

    Columns and rows of padding, where modes multiply to more than the features, count as well:
    cores make them like all others.

    Args:
        factors: The cores, with the shapes of `network`; in float32 or float64, since squares of
            small numbers leave the range of shorter types.
        network: How the cores hang together.

    Returns:
        A scalar.

    Raises:
        TensorizeError: The factors are not those of the network.
    """
    check_factors(factors, network)
    between: Tensor | None = None
    for core, (with_core, with_copy) in zip(factors, _sweep(network), strict=True):
        if between is not None:
            half = torch.einsum(with_core, between, core)
            between = torch.einsum(with_copy, half, core)
        else:
            between = torch.einsum(with_copy, core, core)
    assert between is not None
    return between


def norm_gradients(
    factors: Sequence[Tensor], network: Network
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of ``||W||_F^2 / 2`` by the cores.

    For two factors W = B A they are (B^T B) A and B (A A^T).

    Args:
        factors: As for `squared_norm`; not changed, and nothing is accumulated into their ``grad``.
        network: As for `squared_norm`.

    Returns:
        ``||W||_F^2``, and per core its gradient.
    """
    leaves = [factor.detach().requires_grad_(True) for factor in factors]
    with torch.enable_grad():
        norm = squared_norm(leaves, network)
        gradients = torch.autograd.grad(norm / 2.0, leaves)
    return norm.detach(), gradients


def check_factors(factors: Sequence[Tensor], network: Network) -> None:
    """Refuse cores that are not those of a network.

    Raises:
        TensorizeError: Their number or shapes differ.
    """
    given = [tuple(factor.shape) for factor in factors]
    wanted = [network.shape(core) for core in range(len(network.cores))]
    if given != wanted:
        raise TensorizeError(f"factors of shapes {given} were given, but {network} has {wanted}")


@functools.lru_cache(maxsize=4096)
def _sweep(network: Network) -> tuple[tuple[str, str], ...]:
    """The einsum equations that add each core and then its copy to what is between them."""
    copies = _copied_letters(network)
    between = ""
    equations: list[tuple[str, str]] = []
    for place, core in enumerate(network.cores):
        copy = core.translate(copies)
        later = "".join(network.cores[place + 1 :])
        later += later.translate(copies)
        half = _needed(between + core, copy + later) if place else core
        kept = _needed(half + copy, later)
        equations.append((f"{between},{core}->{half}", f"{half},{copy}->{kept}"))
        between = kept
    return tuple(equations)


def _copied_letters(network: Network) -> dict[int, str]:
    """Other letters for the bonds of the copies; features are shared with the cores."""
    used = {letter for letter, _ in network.sizes}
    spare = [letter for letter in string.ascii_letters if letter not in used]
    if len(spare) < len(network.bonds):
        raise TensorizeError(f"the network {network} has too many indices for one sweep")
    return {ord(bond): letter for bond, letter in zip(network.bonds, spare, strict=False)}


def _needed(letters: str, later: str) -> str:
    return "".join(letter for letter in dict.fromkeys(letters) if letter in later)
