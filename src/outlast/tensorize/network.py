"""A linear layer as a chain of cores, and the routes by which it can be computed.

The entries of the weight are sums of products of small tensors, the cores. A `Network` names the
index of every dimension by a letter, as in einsum: a tensor-train layer of 2 + 2 cores is ::

    Network("ab", "cd", ("ap", "pbq", "qcr", "rd"), sizes)
    # y[t, c, d] = sum x[t, a, b] G1[a, p] G2[p, b, q] G3[q, c, r] G4[r, d]

The cores stand in the order in which they meet x. Neighbours can be merged before they do, and the
choice of groups gives every way to compute the layer: one group rebuilds the dense weight, two are
two matrix products, one group per core is the plain chain. A `Route` is such a choice with the
order in memory and the number of tokens that go through the chain at a time; `lower` turns it into
stages, each one batched matrix product. What a route costs is for `outlast.tensorize.planner`.

No torch here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.errors import TensorizeError

if TYPE_CHECKING:
    from collections.abc import Iterable

Layout = Literal["tokens", "features"]


@dataclass(frozen=True)
class Network:
    """A linear map as a chain of cores.

    Attributes:
        inputs: Letters of the modes of the input features, the slowest first.
        outputs: Those of the output features.
        cores: Letters of every core's dimensions, in the order in which the cores meet x.
        sizes: (letter, size) of every index.
        in_features: Features of x; the product of the input modes or less (the rest is padding).
        out_features: Features of y; the product of the output modes or less.

    Raises:
        TensorizeError: The letters do not describe a map from inputs to outputs.
    """

    inputs: str
    outputs: str
    cores: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        small = [(letter, size) for letter, size in self.sizes if size < 1]
        if small or min(self.in_features, self.out_features) < 1:
            raise TensorizeError(
                f"a layer of {self.in_features} x {self.out_features} features with modes and "
                f"ranks {tuple(size for _, size in self.sizes)} is none: all must be at least 1"
            )
        used = set("".join(self.cores))
        missing = [letter for letter in self.inputs + self.outputs if letter not in used]
        shared = set(self.inputs) & set(self.outputs)
        if missing or shared or used - {letter for letter, _ in self.sizes}:
            raise TensorizeError(
                f"the network {self} is no map: every index of inputs and outputs must be on a "
                "core and have a size, and none may be on both sides"
            )
        for bond in self.bonds:
            if sum(bond in core for core in self.cores) < 2:
                raise TensorizeError(
                    f"the index {bond!r} of the network {self} is on one core alone and on neither "
                    "side: sum it away"
                )
        if self.in_features > self.size(self.inputs) or self.out_features > self.size(self.outputs):
            raise TensorizeError(
                f"the modes of {self} multiply to {self.size(self.inputs)} and "
                f"{self.size(self.outputs)}, less than the features: choose larger modes"
            )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.sizes)

    def size(self, letters: str) -> int:
        """The product of the sizes of some indices."""
        return math.prod(self._sizes[letter] for letter in letters)

    def shape(self, core: int) -> tuple[int, ...]:
        """The shape of a core."""
        return tuple(self._sizes[letter] for letter in self.cores[core])

    @property
    def parameters(self) -> int:
        """Entries of all cores."""
        return sum(self.size(core) for core in self.cores)

    @property
    def bonds(self) -> str:
        """The indices that are summed over: neither of x nor of y."""
        ends = self.inputs + self.outputs
        return "".join(letter for letter, _ in self.sizes if letter not in ends)

    def backwards(self) -> Network:
        """The same map, whose last core meets x first."""
        return Network(
            self.inputs,
            self.outputs,
            self.cores[::-1],
            self.sizes,
            self.in_features,
            self.out_features,
        )

    def __str__(self) -> str:
        """Everything in one line, which `parse` reads."""
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes)
        cores = ",".join(self.cores)
        features = f"{self.in_features}->{self.out_features}"
        return f"{self.inputs}->{self.outputs}; {cores}; {sizes}; {features}"

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> Network:
        """The network that `str` gave `text` for."""
        ends, cores, sizes, features = text.split("; ")
        inputs, outputs = ends.split("->")
        in_features, out_features = features.split("->")
        pairs = (pair.split("=") for pair in sizes.split())
        return Network(
            inputs,
            outputs,
            tuple(cores.split(",")),
            tuple((letter, int(size)) for letter, size in pairs),
            int(in_features),
            int(out_features),
        )


@dataclass(frozen=True)
class Route:
    """A way through the chain.

    Attributes:
        groups: How many neighbouring cores are merged into each group, in the order of the chain.
        backwards: The last core meets x first.
        layout: Order in memory of what is between the groups: ``tokens`` keeps a token's features
            together, ``features`` a feature's tokens.
        chunk: Tokens that go through the whole chain at a time, so that what is between the groups
            stays in the cache; 0: all.
    """

    groups: tuple[int, ...]
    backwards: bool = False
    layout: Layout = "tokens"
    chunk: int = 0

    def __str__(self) -> str:
        if len(self.groups) == 1:
            return "rebuild dense"
        name = "two products" if len(self.groups) == 2 else f"{len(self.groups)} products"
        merged = "+".join(map(str, self.groups))
        notes = [f"cores {merged}"]
        if self.backwards:
            notes.append("last core first")
        if self.layout == "features":
            notes.append("feature-major")
        if self.chunk:
            notes.append(f"{self.chunk} tokens at a time")
        return f"{name} ({', '.join(notes)})"


@dataclass(frozen=True)
class Stage:
    """One group of a route: y (b, m, f t) = matrix (b, m, k) x (b, k, f t).

    Attributes:
        cores: The cores of the group, by their places in the network.
        batch: Indices that x and the group share and that are needed later.
        new: Indices that the group brings.
        contracted: Indices that are summed over.
        free: Indices of x that the group does not have.
        before: Indices of x in the order in which the stage before gives them.
        b: The product of the sizes of `batch`; `m`, `k`, `f`: likewise.
        m: See `b`.
        k: See `b`; less for a first stage that contracts all of a padded x at once.
        f: See `b`.
    """

    cores: tuple[int, ...]
    batch: str
    new: str
    contracted: str
    free: str
    before: str
    b: int
    m: int
    k: int
    f: int

    @property
    def is_plain(self) -> bool:
        """Whether the stage is one matrix product of x as it is."""
        return self.b == self.f == 1

    @property
    def width(self) -> int:
        """Features per token that go in."""
        return self.b * self.k * self.f

    @property
    def out_width(self) -> int:
        """Features per token that come out."""
        return self.b * self.m * self.f


@dataclass(frozen=True)
class Lowered:
    """The stages of a route, and the order of the indices of what the last one gives."""

    stages: tuple[Stage, ...]
    after: str


@functools.lru_cache(maxsize=16384)
def lower(network: Network, route: Route) -> Lowered:
    """The stages of a route.

    The order of indices between stages is batch, new, free; tokens come last in the feature-major
    layout, and after the batch in the other, where the new ones come last.

    Raises:
        TensorizeError: The groups are not those of this many cores.
    """
    count = len(network.cores)
    if sum(route.groups) != count or min(route.groups) < 1:
        raise TensorizeError(f"groups {route.groups} do not add up to the {count} cores")
    order = range(count)[::-1] if route.backwards else range(count)
    places = iter(order)
    groups = [tuple(next(places) for _ in range(size)) for size in route.groups]
    act = network.inputs
    stages: list[Stage] = []
    for position, group in enumerate(groups):
        own = _letters(network.cores[core] for core in group)
        later = set(network.outputs).union(
            *(network.cores[core] for rest in groups[position + 1 :] for core in rest)
        )
        batch = "".join(letter for letter in act if letter in own and letter in later)
        contracted = "".join(letter for letter in act if letter in own and letter not in later)
        free = "".join(letter for letter in act if letter not in own)
        new = "".join(letter for letter in own if letter not in act and letter in later)
        if set(new) == set(network.outputs):
            new = network.outputs
        k, m = network.size(contracted), network.size(new)
        if not batch + free:
            # Without the columns and rows of the padding there is nothing to pad.
            k = network.in_features if position == 0 and contracted == network.inputs else k
            last = position == len(groups) - 1
            m = network.out_features if last and new == network.outputs else m
        stages.append(
            Stage(group, batch, new, contracted, free, act, network.size(batch), m, k,
                  network.size(free))
        )  # fmt: skip
        act = batch + new + free if route.layout == "features" else batch + free + new
    return Lowered(tuple(stages), act)


def _letters(cores: Iterable[str]) -> str:
    """The letters of some cores, each once, in order."""
    return "".join(dict.fromkeys("".join(cores)))


def dense_route(network: Network) -> Route:
    """The route that rebuilds the dense weight."""
    return Route((len(network.cores),))
