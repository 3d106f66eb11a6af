"""The singular values of a weight over one of the bonds that hold its cores together.

Cutting a bond of size r leaves two sides, W = L R with L of shape (p, r) and R of shape (r, q).
With the Gram matrices L^T L = C_L^T C_L and R R^T = C_R^T C_R, the singular values of W are those
of the r x r matrix C_L C_R^T (Oseledets 2011, section 3, with Gram matrices in place of QR):
nothing of the size of W is ever built. Where features are shared by both sides, as in block tensor
trains, there is one such problem per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.errors import TensorizeError
from outlast.tensorize.merge import contract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network

_SPARE = "ZYXWVUTSRQPONMLKJIHGFEDCBA"


@dataclass(frozen=True)
class Cut:
    """A bond of a network and the two cores that it joins.

    Attributes:
        bond: Its letter.
        left: The core on one side, which meets x first.
        right: The one on the other.
        batch: Features that both sides have: one cut per value of these.
        sides: All cores of either side.
    """

    bond: str
    left: int
    right: int
    batch: str
    sides: tuple[tuple[int, ...], tuple[int, ...]]


def cut(network: Network, bond: str) -> Cut:
    """Cut a network at a bond.

    Raises:
        TensorizeError: The bond does not join exactly two sides (as in CP, whose one index is on
            all cores).
    """
    ends = [core for core, letters in enumerate(network.cores) if bond in letters]
    sides = [_reachable(network, end, bond) for end in ends]
    if len(ends) != 2 or set(sides[0]) & set(sides[1]):
        raise TensorizeError(
            f"the bond {bond!r} of {network} does not hold two sides together: its rank can be "
            "changed by building the layer anew only"
        )
    letters = ["".join(network.cores[core] for core in side) for side in sides]
    batch = "".join(
        letter for letter in dict.fromkeys(letters[0]) if letter != bond and letter in letters[1]
    )
    if any(set(batch) - set(network.cores[end]) for end in ends):
        raise TensorizeError(
            f"the bond {bond!r} of {network} joins cores that have not all of the features that "
            "its sides share: its rank can be changed by building the layer anew only"
        )
    return Cut(bond, ends[0], ends[1], batch, (sides[0], sides[1]))


def _reachable(network: Network, start: int, bond: str) -> tuple[int, ...]:
    """The cores that are held together with one when a bond is cut."""
    links = set(network.bonds) - {bond}
    found, waiting = {start}, [start]
    while waiting:
        held = links & set(network.cores[waiting.pop()])
        for core, letters in enumerate(network.cores):
            if core not in found and held & set(letters):
                found.add(core)
                waiting.append(core)
    return tuple(sorted(found))


def _gram(network: Network, cores: Sequence[Tensor], at: Cut, side: int) -> Tensor:
    """The side's entries multiplied with themselves: (batch..., bond, bond)."""
    members = at.sides[side]
    used = set("".join(network.cores)) | {letter for letter, _ in network.sizes}
    spare = iter(letter for letter in _SPARE if letter not in used)
    twins = {bond: next(spare) for bond in network.bonds}
    sizes = dict(network.sizes) | {twins[bond]: network.size(bond) for bond in twins}
    terms, operands = [], []
    for core in members:
        letters = network.cores[core]
        terms += [letters, "".join(twins.get(letter, letter) for letter in letters)]
        operands += [cores[core].detach().double()] * 2
    result = at.batch + at.bond + twins[at.bond]
    return contract(tuple(terms), result, tuple(sizes.items()), operands)


def _root(gram: Tensor) -> Tensor:
    """C with C^T C = gram; what is rounding alone becomes zero.

    Scaled to a diagonal of ones, so that units of any size keep their digits.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    inverse = torch.where(norms > 0.0, norms.reciprocal(), 0.0)
    values, vectors = torch.linalg.eigh(gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2))
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
    values = torch.where(values > rounding, values, 0.0)
    root: Tensor = values.sqrt().unsqueeze(-1) * vectors.mT * norms.unsqueeze(-2)
    return root


@torch.no_grad()
def decompose(network: Network, cores: Sequence[Tensor], at: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition over a bond, in the coordinates of the bond.

    Returns:
        u: (batch..., r, r) with U^T C_L, so that ``S^(-1/2) u`` maps the right core's bond to the
            singular directions; s: (batch..., r) descending; v: (batch..., r, r) with C_R^T V, so
            that ``v S^(-1/2)`` maps the left core's. All float64.
    """
    left, right = (_root(_gram(network, cores, at, side)) for side in (0, 1))
    u, s, vh = torch.linalg.svd(left @ right.mT)
    return u.mT @ left, s, right.mT @ vh.mT


def singular_values(network: Network, cores: Sequence[Tensor], bond: str) -> Tensor:
    """The singular values of the weight over a bond, descending; (r,), float64.

    With one problem per block the values of the same place are joined as the root of their sum of
    squares, so that the squares always add up to those of the weight.
    """
    _, s, _ = decompose(network, cores, cut(network, bond))
    return s.reshape(-1, s.shape[-1]).square().sum(0).sqrt()
