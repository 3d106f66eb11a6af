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
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import balanced_modes, bond_ranks

MemoryLayout = Literal["tokens", "features"]


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
    layout: MemoryLayout = "tokens"
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
class RouteStage:
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
        """True if the stage is one matrix product of x as it is."""
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

    stages: tuple[RouteStage, ...]
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
    stages: list[RouteStage] = []
    for position, group in enumerate(groups):
        own = "".join(dict.fromkeys("".join(network.cores[core] for core in group)))
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
            RouteStage(group, batch, new, contracted, free, act, network.size(batch), m, k,
                  network.size(free))
        )  # fmt: skip
        act = batch + new + free if route.layout == "features" else batch + free + new
    return Lowered(tuple(stages), act)


def dense_route(network: Network) -> Route:
    """The route that rebuilds the dense weight."""
    return Route((len(network.cores),))


_MODES = "abcdefghijkl"

_OUT_MODES = "ABCDEFGHIJKL"

_BONDS = "pqrstuvwxyzPQRSTUVWXYZmno"

_RANKS = "mnopqrstuvwxyzMNOPQRSTUVWXYZ"

MOST_MODES = len(_MODES)
"""On each side: 4096 features are 12 modes of 2."""

Ranks = int | tuple[int, ...]


def one_rank(rank: object, form: str) -> int:
    """A rank that is one number.

    Raises:
        TensorizeError: It is none, or below 1.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TensorizeError(f"rank = {rank!r} of a {form} layer must be an integer of at least 1")
    return rank


def some_ranks(rank: object, form: str) -> Ranks:
    """A rank for all bonds, or one for each.

    Raises:
        TensorizeError: It is neither, or one is below 1.
    """
    if isinstance(rank, tuple | list):
        return tuple(one_rank(item, form) for item in rank)
    return one_rank(rank, form)


def chosen_modes(
    given: Sequence[int] | None, features: int, count: object, *, name: str
) -> tuple[int, ...]:
    """The factors of a number of features.

    Args:
        given: What the user gave; None: as even as possible.
        features: What they multiply to, or a little more.
        count: How many, where none are given.
        name: What the user calls `count`.

    Raises:
        TensorizeError: There are too many or none, or one is below 1.
    """
    if given is None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_MODES:
            raise TensorizeError(f"{name} = {count!r} must be an integer from 1 to {MOST_MODES}")
        return balanced_modes(features, count)
    modes = tuple(given)
    sound = all(isinstance(mode, int) and mode >= 1 for mode in modes)
    if not sound or not 1 <= len(modes) <= MOST_MODES:
        raise TensorizeError(
            f"modes = {modes} of {features} features must be 1 to {MOST_MODES} integers of at "
            "least 1"
        )
    return modes


def _check_letters(modes: int, bonds: int, form: str) -> None:
    """Refuse more indices than there are letters for, with those of a copy of the bonds.

    (`outlast.tensorize.initialize` multiplies a network with itself.)

    Raises:
        TensorizeError: There are more.
    """
    if modes + 2 * bonds > len(string.ascii_letters):
        raise TensorizeError(
            f"a {form} layer of {modes} modes has too many indices: ask for fewer cores or modes"
        )


def train_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per mode, those of the inputs before those of the outputs (Yang et al. 2024).

    Raises:
        TensorizeError: A rank below 1, or the wrong number of ranks.
    """
    rank = some_ranks(rank, "tt")
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    modes = inputs + outputs
    _check_letters(len(modes), len(modes) - 1, "tt")
    bonds = _BONDS[: len(modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + mode + right for mode, (left, right) in zip(modes, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(modes, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, (*in_modes, *out_modes)), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def train_matrix_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per pair of modes, (r, out, in, r') (Novikov et al. 2015, arXiv 1509.06569).

    Raises:
        TensorizeError: There are not as many modes on one side as on the other, or a rank is none.
    """
    rank = some_ranks(rank, "ttm")
    if len(in_modes) != len(out_modes):
        raise TensorizeError(
            f"in_modes = {in_modes} and out_modes = {out_modes} of a ttm layer must be as many"
        )
    pairs = [into * out for into, out in zip(in_modes, out_modes, strict=True)]
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(in_modes)]
    bonds = _BONDS[: len(in_modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + out + into + right
        for out, into, (left, right) in zip(outputs, inputs, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(inputs + outputs, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, pairs), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def block_network(
    in_features: int,
    out_features: int,
    rank: int,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
) -> Network:
    """h[m, n, r] = sum_i R[m, n, r, i] x[m, i]; y[n, o] = sum_{m, r} L[n, o, m, r] h[m, n, r].

    (Qiu et al., 2024, arXiv 2406.06248.)

    Raises:
        TensorizeError: A rank below 1, or not two modes on each side.
    """
    rank = one_rank(rank, "btt")
    if len(in_modes) != 2 or len(out_modes) != 2:
        raise TensorizeError(
            f"in_modes = {in_modes} and out_modes = {out_modes} of a btt layer must be two on each "
            "side"
        )
    sizes = (
        ("m", in_modes[0]),
        ("i", in_modes[1]),
        ("n", out_modes[0]),
        ("o", out_modes[1]),
        ("r", rank),
    )
    return Network("mi", "no", ("mnri", "nomr"), sizes, in_features, out_features)


def tucker_network(
    in_features: int,
    out_features: int,
    rank: int | tuple[int, ...],
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum U[a, p] V[b, q] C[p, q, r, s] Y[r, A] Z[s, B] (Tucker 1966).

    A rank above its mode adds nothing and is cut to it.

    Raises:
        TensorizeError: A rank below 1, or not one number and not one per mode.
    """
    modes = (*in_modes, *out_modes)
    rank = some_ranks(rank, "tucker")
    _check_letters(len(modes), len(modes), "tucker")
    asked = (rank,) * len(modes) if isinstance(rank, int) else rank
    if len(asked) != len(modes):
        raise TensorizeError(
            f"rank = {rank} of a tucker layer must be one number of at least 1, or one for each "
            f"of the {len(modes)} modes"
        )
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    ranks = _RANKS[: len(modes)]
    into, out = ranks[: len(in_modes)], ranks[len(in_modes) :]
    cores = (
        *(mode + bond for mode, bond in zip(inputs, into, strict=True)),
        ranks,
        *(bond + mode for mode, bond in zip(outputs, out, strict=True)),
    )
    cut = (min(one, mode) for one, mode in zip(asked, modes, strict=True))
    sizes = (*zip(inputs + outputs, modes, strict=True), *zip(ranks, cut, strict=True))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def cp_network(
    in_features: int,
    out_features: int,
    rank: int,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum_r U[a, r] V[b, r] Y[r, A] Z[r, B] (Lebedev et al. 2015, arXiv 1412.6553).

    Raises:
        TensorizeError: A rank below 1.
    """
    rank = one_rank(rank, "cp")
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    cores = (*(mode + "r" for mode in inputs), *("r" + mode for mode in outputs))
    sizes = (*zip(inputs + outputs, (*in_modes, *out_modes), strict=True), ("r", rank))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)
