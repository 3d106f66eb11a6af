"""Costs and savings of structured layers, as pure functions of their settings; needs no torch.

The planner of the whole system composes these: parameters, floating-point operations, bytes that
are kept and sent, and how a training step shrinks. What a rank costs in quality is in
`outlast.tensorize.quality`. Operations count a multiplication and an addition as two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import TensorizeError
from outlast.tensorize.network import (
    Route,
    block_network,
    chosen_modes,
    cp_network,
    lower,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.shapes import block_modes, monarch_modes, monarch_rank

if TYPE_CHECKING:
    from outlast.tensorize.network import Network

TWO_FACTOR_FORMS = ("low_rank", "cola", "lax")
"""Two matrices with `rank` features between them; what is put between differs."""

FORMS = ("dense", *TWO_FACTOR_FORMS, "tt", "ttm", "btt", "monarch", "cp", "tucker", "sltrain")
"""Forms of which the cost is known."""

SLTRAIN_DENSITY = 0.03
"""Share of entries in the sparse part of low rank + sparse (arXiv 2406.02214, section 5)."""

_NEVER = 1 << 200
"""Operations of what cannot be done."""


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Attributes:
        parameters: Numbers that are learned, without the bias.
        forward_flops_per_token: Of the cheapest way through the chain: all ways to merge neighbours
            and both directions, the rebuilt dense weight among them. Merging, which does not
            depend on the tokens, is left out.
        training_flops_per_token: Forward and backward, on the way that is cheapest for both.
        kept_values_per_token: What is kept for the backward pass beyond x.
    """

    parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    kept_values_per_token: int

    def kept_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> float:
        """Return the bytes that `tokens` tokens keep beyond x."""
        return self.kept_values_per_token * tokens * bytes_per_value


def layer_cost(
    form: str,
    in_features: int,
    out_features: int,
    rank: int = 0,
    *,
    cores: int = 3,
    density: float = SLTRAIN_DENSITY,
) -> LayerCost:
    """Return the cost of a layer.

    Args:
        form: One of `FORMS`.
        in_features: Features of x.
        out_features: Features of y.
        rank: Of low-rank factors, of all bonds, of blocks, or the number of terms (``cp``); the
            number of blocks of ``monarch``. ``dense`` needs none.
        cores: Modes on each side of ``tt`` and ``ttm``, ``cp`` and ``tucker``.
        density: Share of entries in the sparse part of ``sltrain``.

    Raises:
        TensorizeError: For an unknown form or numbers below 1.
    """
    if form not in FORMS:
        raise TensorizeError(f"form = {form!r} is not one of {', '.join(FORMS)}")
    if min(in_features, out_features, cores) < 1 or (form != "dense" and rank < 1):
        raise TensorizeError(
            f"a {form} layer of {in_features} x {out_features} features, rank = {rank} and "
            f"cores = {cores} is none: all of them must be at least 1"
        )
    dense = in_features * out_features
    if form == "dense":
        return LayerCost(dense, 2 * dense, 6 * dense, 0)
    factors = rank * (in_features + out_features)
    if form == "sltrain":
        # Its weight is rebuilt at each use.
        return LayerCost(factors + max(1, round(density * dense)), 2 * dense, 6 * dense, 0)
    if form in TWO_FACTOR_FORMS:
        # With something between the factors what is there is kept whatever it takes.
        kept = form != "low_rank" or 2 * rank <= in_features
        again = 0 if kept else 2 * in_features * rank
        return LayerCost(factors, 2 * factors, 6 * factors + again, rank if kept else 0)
    return _cheapest(_network(form, in_features, out_features, rank, cores))


def _network(form: str, in_features: int, out_features: int, rank: int, cores: int) -> Network:
    sizes = in_features, out_features
    if form == "monarch":
        modes = monarch_modes(*sizes, rank)
        rank = monarch_rank(*sizes, rank)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    if form == "btt":
        modes = block_modes(*sizes)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    build = {
        "tt": train_network,
        "ttm": train_matrix_network,
        "tucker": tucker_network,
        "cp": cp_network,
    }[form]
    into = chosen_modes(None, in_features, cores, name="cores")
    out = chosen_modes(None, out_features, cores, name="cores")
    return build(*sizes, rank, in_modes=into, out_modes=out)


@functools.lru_cache(maxsize=4096)
def _cheapest(network: Network) -> LayerCost:
    """The cheapest ways through a chain forward, and forward and backward."""
    ways = [_products(network, backwards) for backwards in (False, True)]
    forward = min(_shortest(way, first=2, last=2, keeping=False)[0] for way in ways)
    # The gradients of the factors and of x take as much as going forward each, and what goes into
    # a stage after the first comes again where it is not kept: all but the last product.
    kept = min(_shortest(way, first=6, last=6, keeping=True) for way in ways)
    again = min(_shortest(way, first=8, last=6, keeping=False)[0] for way in ways)
    if kept[0] <= again:
        return LayerCost(network.parameters, forward, kept[0], kept[1])
    return LayerCost(network.parameters, forward, again, 0)


@dataclass(frozen=True)
class _Product:
    """One stage of a route: some neighbouring cores merged.

    Attributes:
        size: Its multiplications per token.
        width: Features per token that go in.
        narrow: Whether these are kept for the backward pass (see `operator._Chain`): all that are
            no wider than half of x, and none of a route that has others.
    """

    size: int
    width: int
    narrow: bool


def _products(network: Network, backwards: bool) -> dict[tuple[int, int], _Product]:
    """The stage of every run of cores [begin, end), which is the same in all routes with it."""
    count = len(network.cores)
    found = {}
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            groups = tuple(size for size in (begin, end - begin, count - end) if size)
            stage = lower(network, Route(groups, backwards)).stages[1 if begin else 0]
            size = stage.b * stage.m * stage.k * stage.f
            narrow = not begin or 2 * stage.width <= network.in_features
            found[begin, end] = _Product(size, stage.width, narrow)
    return found


def _shortest(
    products: dict[tuple[int, int], _Product], *, first: int, last: int, keeping: bool
) -> tuple[int, int]:
    """The least weighted multiplications of all ways to group the cores, and what is kept then.

    Args:
        products: Of every run of cores.
        first: What a multiplication of all products but the last counts.
        last: Likewise of the last product.
        keeping: Go only through products whose inputs are kept.

    Returns:
        Operations and kept values per token.
    """
    count = max(end for _, end in products)
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, count + 1):
        weight = last if end == count else first
        ways = []
        for begin in range(end):
            product = products[begin, end]
            if keeping and not product.narrow:
                continue
            operations, values = best[begin]
            width = product.width if begin else 0
            ways.append((operations + weight * product.size, values + width))
        best.append(min(ways, default=(_NEVER, 0)))
    return best[count]


def step_ratio(*, linear_share: float, flops_ratio: float, efficiency: float = 1.0) -> float:
    """Time of a training step over that of the dense model (Amdahl's law).

    Args:
        linear_share: Of the dense step, what the replaced layers take.
        flops_ratio: Their operations over those of the dense layers.
        efficiency: Operations per second that the narrower products reach, over those of the dense
            ones: 1 at d = 2048 and ranks down to d / 8, 0.73 to 0.9 at d <= 1024 (measured on one
            CPU thread).

    Raises:
        TensorizeError: For numbers out of range.
    """
    if not (0.0 <= linear_share <= 1.0 and flops_ratio >= 0.0 and efficiency > 0.0):
        raise TensorizeError(
            f"linear_share = {linear_share} must be in [0, 1], flops_ratio = {flops_ratio} at "
            f"least 0 and efficiency = {efficiency} above 0"
        )
    return 1.0 - linear_share + linear_share * flops_ratio / efficiency
