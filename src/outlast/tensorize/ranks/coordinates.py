"""New coordinates of a bond: what they keep, and how the cores and their gradients map to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outlast.tensorize.initialize import fans
from outlast.tensorize.ranks.spectrum import Cut, decompose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from outlast.tensorize.network import Network

# Below this a singular value of any weight counts as zero: moments divide by it, in float32.
_NOTHING = 1e-30


@dataclass(frozen=True)
class Coordinates:
    """The new coordinates of a bond, for the core that meets x first and for the other.

    Attributes:
        ways: (batch..., r, r') each; what the cores are multiplied with.
        backs: Likewise, what gradients are multiplied with.
        fresh: (batch..., r') of bools; coordinates that are to be drawn anew in the first core. The
            maps are zero there, so that the other core is.
        dropped: Relative norm of what is lost.
    """

    ways: tuple[Tensor, Tensor]
    backs: tuple[Tensor, Tensor]
    fresh: Tensor
    dropped: float

    def scaled(self, factor: float) -> Coordinates:
        """The same where the product of the cores is multiplied by `factor` more than before."""
        (left, right), (of_left, of_right), root = self.ways, self.backs, factor**0.5
        ways, backs = (left / root, right / root), (of_left * root, of_right * root)
        return replace(self, ways=ways, backs=backs)


def narrower(network: Network, cores: Sequence[Tensor], at: Cut, rank: int) -> Coordinates:
    """The largest singular values, evenly shared by both cores.

    Directions that carry nothing are drawn anew on one side and zero on the other, so that they
    learn again; with zeros on both they never would.
    """
    u, s, v = decompose(network, cores, at)
    rounding = s.shape[-1] * torch.finfo(s.dtype).eps * s.amax(-1, keepdim=True)
    alive = (s > rounding.clamp_min(_NOTHING))[..., :rank]
    scale = torch.where(alive, s[..., :rank].rsqrt(), 0.0)
    left, right = v[..., :rank] * scale.unsqueeze(-2), u[..., :rank, :] * scale.unsqueeze(-1)
    lost = s[..., rank:].square().sum() / s.square().sum().clamp_min(_NOTHING**2)
    return Coordinates((left, right.mT), (right.mT, left), ~alive, float(lost.sqrt()))


def chosen(network: Network, at: Cut, units: Tensor) -> Coordinates:
    """Some of the coordinates as they are; units: (r',) their indices."""
    return _selected(network, at, units, len(units), float("nan"))


def wider(network: Network, at: Cut, rank: int, device: torch.device) -> Coordinates:
    """The old coordinates, followed by new ones that nothing comes out of."""
    return _selected(network, at, torch.arange(network.size(at.bond), device=device), rank, 0.0)


def _selected(network: Network, at: Cut, units: Tensor, rank: int, dropped: float) -> Coordinates:
    batch = [network.size(letter) for letter in at.batch]
    size, places = network.size(at.bond), torch.arange(rank, device=units.device)
    same = torch.zeros(size, rank, dtype=torch.float64, device=units.device)
    same[units, places[: len(units)]] = 1.0
    same = same.expand(*batch, size, rank)
    fresh = (places >= len(units)).expand(*batch, rank)
    return Coordinates((same, same), (same, same), fresh, dropped)


def importance(network: Network, cores: Sequence[Tensor], at: Cut) -> Tensor:
    """The product of norms of what leads into and out of every unit of a bond; (r,)."""
    norms = []
    for core in (at.left, at.right):
        place = network.cores[core].index(at.bond)
        norms.append(cores[core].double().movedim(place, 0).flatten(1).norm(dim=1))
    product: Tensor = norms[0] * norms[1]
    return product


def with_fresh_entries(
    value: Tensor,
    old: Tensor,
    fresh: Tensor,
    where: tuple[Network, Cut],
    generator: torch.Generator | None,
) -> Tensor:
    """The first core with its fresh coordinates drawn, as large as its entries were on average."""
    network, at = where
    deviation = float(old.double().square().mean().sqrt()) or fans(network)[at.left][0] ** -0.5
    named, letters = at.batch + at.bond, network.cores[at.left]
    order = sorted(range(len(named)), key=lambda place: letters.index(named[place]))
    shape = [
        size if letter in named else 1 for letter, size in zip(letters, value.shape, strict=True)
    ]
    drawn = torch.empty_like(value).normal_(0.0, deviation, generator=generator)
    return torch.where(fresh.permute(order).reshape(shape), drawn, value)


def along(tensor: Tensor, letters: str, at: Cut, way: Tensor) -> Tensor:
    """Map a core's bond by (batch..., r, r')."""
    result = letters.replace(at.bond, "_")
    names = dict.fromkeys(letters + at.batch + "_")
    plain = {letter: chr(ord("a") + place) for place, letter in enumerate(names)}
    equation = (
        f"{_named(letters, plain)},{_named(at.batch + at.bond + '_', plain)}"
        f"->{_named(result, plain)}"
    )
    mapped: Tensor = torch.einsum(equation, tensor.double(), way)
    return mapped.to(tensor.dtype).contiguous()


def _named(letters: str, names: Mapping[str, str]) -> str:
    return "".join(names[letter] for letter in letters)
