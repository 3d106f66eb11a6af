"""Ranks from what a user says: a number, a fraction, or a budget of one layer or of all.

A budget is solved on the closed forms of `outlast.tensorize.cost`, which grow with the rank, by
bisection; an error budget on the spectrum of the weight itself. Ranks are rounded to multiples that
matrix units want: fractions up, budgets down, so that they are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import TensorizeError
from outlast.tensorize.catalogue import Form, Ranks
from outlast.tensorize.cost import SLTRAIN_DENSITY, layer_cost
from outlast.tensorize.shapes import (
    balanced_modes,
    block_modes,
    largest_block_rank,
    rounded_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

QUANTITIES = ("parameters", "flops", "error")
"""What a budget can be of."""

_WORTH_ROUNDING = 2
"""A rank below so many multiples is left as it is: rounding would change it by much."""


@dataclass(frozen=True)
class Budget:
    """A budget of all layers together, for `tensorize`.

    Dense weights that are kept (``init="from_dense"``) have spectra, by which the budget is shared
    out: each step of rank goes to the layer where it recovers the largest share of the layer's
    energy per parameter. Without, every layer gets the same share.

    Attributes:
        parameters: Share of the dense layers' parameters; or
        flops: of their operations.
    """

    parameters: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        given = [share for share in (self.parameters, self.flops) if share is not None]
        if len(given) != 1 or not 0.0 < given[0] < 1.0:
            raise TensorizeError(
                f"Budget(parameters={self.parameters}, flops={self.flops}): give one of them, a "
                "share above 0 and below 1"
            )

    @property
    def share(self) -> float:
        """Of the dense layers."""
        return self.parameters if self.parameters is not None else self.flops  # type: ignore[return-value]

    def per_layer(self) -> str:
        """The same budget for every layer, as `resolved_rank` takes it."""
        name = "parameters" if self.parameters is not None else "flops"
        return f"{name}={self.share}"


Rank = int | float | str | tuple[int, ...]
"""``64``, ``0.25``, ``"parameters=0.3"``, ``"flops=0.3"``, ``"error=0.1"``, or one per bond."""


@dataclass(frozen=True)
class Shape:
    """What a rank is wanted for.

    Attributes:
        form: The form.
        in_features: Features of x.
        out_features: Features of y.
        cores: Modes on each side; None: the form's own number.
        multiple: See `shapes.MULTIPLE_OF_PRECISION`; 1: no rounding.
        density: Share of entries in the sparse part; None: the form's own.
    """

    form: Form
    in_features: int
    out_features: int
    cores: int | None = None
    multiple: int = 1
    density: float | None = None

    @property
    def modes(self) -> int:
        """Modes on each side."""
        return self.cores or self.form.modes or 1

    @property
    def most(self) -> int:
        """The largest useful rank."""
        return self.form.largest_rank(self.in_features, self.out_features, self.modes)

    def used(self, quantity: str, rank: int) -> float:
        """Parameters or forward operations at a rank, over those of the dense layer."""
        sizes = (self.in_features, self.out_features)
        density = SLTRAIN_DENSITY if self.density is None else self.density
        cost = layer_cost(self.form.name, *sizes, rank, cores=self.modes, density=density)
        dense = math.prod(sizes)
        if quantity == "parameters":
            return cost.parameters / dense
        return cost.forward_flops_per_token / (2 * dense)

    def __str__(self) -> str:
        return f"a {self.form.name} layer of {self.in_features} x {self.out_features} features"


def resolved_rank(rank: Rank, shape: Shape, weight: Tensor | None = None) -> Ranks:
    """The rank or ranks that a user means.

    Args:
        rank: See `Rank`. A fraction is one of the narrower side for forms of two factors, and of
            the dense parameters for others; of ``monarch`` an integer is the number of blocks.
        shape: Of which layer.
        weight: (out, in) dense weight, for error budgets.

    Raises:
        TensorizeError: The rank is none of these, or too small a budget for rank 1.
    """
    if isinstance(rank, bool) or not isinstance(rank, int | float | str | tuple):
        raise TensorizeError(f"rank = {rank!r}: {_MEANT}")
    if isinstance(rank, tuple):
        return rank
    if isinstance(rank, int):
        if rank < 1:
            raise TensorizeError(f"rank = {rank} must be at least 1")
        return rank
    if isinstance(rank, float):
        if not 0.0 < rank <= 1.0:
            raise TensorizeError(
                f"rank = {rank} is no fraction above 0 and at most 1: for that many features write "
                f"an integer, rank = {max(1, round(rank)) if math.isfinite(rank) else 64}"
            )
        if not shape.form.two_factor:
            return _within(shape, "parameters", rank)
        wanted = max(1, round(rank * min(shape.in_features, shape.out_features)))
        return _rounded_up(wanted, shape)
    quantity, limit = parsed_budget(rank)
    if quantity == "error":
        return _for_error(shape, limit, weight)
    return _within(shape, quantity, limit)


_MEANT = (
    "give an integer, a fraction such as 0.25, or a budget such as 'parameters=0.3', 'flops=0.3' "
    "or 'error=0.1'"
)


def parsed_budget(text: str) -> tuple[str, float]:
    """("parameters", 0.3) from "parameters=0.3".

    Raises:
        TensorizeError: It is no budget.
    """
    name, _, number = text.partition("=")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if name.strip() not in QUANTITIES or not 0.0 < limit < 1.0:
        raise TensorizeError(f"rank = {text!r}: {_MEANT}")
    return name.strip(), limit


def _rounded_up(rank: int, shape: Shape) -> int:
    if not shape.form.aligned or rank < _WORTH_ROUNDING * shape.multiple:
        return rank
    return rounded_rank(rank, shape.multiple, largest=shape.most)


def _rounded_down(rank: int, shape: Shape) -> int:
    if not shape.form.aligned or rank < _WORTH_ROUNDING * shape.multiple:
        return rank
    return rank // shape.multiple * shape.multiple


def _within(shape: Shape, quantity: str, limit: float) -> int:
    """The largest rank (fewest blocks) that keeps to a budget."""
    if shape.form.blocks:
        best = 1
        for blocks in range(1, shape.most + 1):
            used = shape.used(quantity, blocks)
            if used <= limit:
                return blocks
            # Neither end: from the square root of the width on, more blocks are more again.
            best = blocks if used < shape.used(quantity, best) else best
        raise _too_small(shape, quantity, limit, best)
    if shape.used(quantity, 1) > limit:
        raise _too_small(shape, quantity, limit, 1)
    rank = _last(lambda rank: shape.used(quantity, rank) <= limit, shape.most)
    return _rounded_down(rank, shape)


def _too_small(shape: Shape, quantity: str, limit: float, rank: int) -> TensorizeError:
    least = shape.used(quantity, rank)
    return TensorizeError(
        f"rank = '{quantity}={limit}' is too little for {shape}, which takes at least {least:.4g} "
        f"of the dense {quantity} (at {'blocks' if shape.form.blocks else 'rank'} = {rank}): allow "
        "more, or choose another form"
    )


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number in [1, most] that fits, where all below one that fits do."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _for_error(shape: Shape, error: float, weight: Tensor | None) -> Ranks:
    """The smallest rank whose conversion keeps to a relative error in the Frobenius norm."""
    name = shape.form.name
    if weight is None:
        raise TensorizeError(
            f"rank = 'error={error}' needs the dense weight to compare with: set "
            "init = 'from_dense', or give a rank"
        )
    if name == "low_rank":
        from outlast.tensorize.convert.svd import discarded_shares

        fitting = int((discarded_shares(weight) > error).sum())
        return _rounded_up(max(1, fitting), shape)
    if name in ("tt", "ttm"):
        from outlast.tensorize.convert import tensor_train

        to = tensor_train.to_tensor_train if name == "tt" else tensor_train.to_tensor_train_matrix
        into = balanced_modes(shape.in_features, shape.modes)
        out = balanced_modes(shape.out_features, shape.modes)
        found = to(weight, in_modes=into, out_modes=out, error=error)
        return tuple(core.shape[-1] for core in found.cores[:-1]) or 1
    if name == "btt":
        from outlast.tensorize.convert.blocks import to_blocks

        in_modes, out_modes = block_modes(shape.in_features, shape.out_features)
        found = to_blocks(weight, in_modes=in_modes, out_modes=out_modes, error=error)
        return min(found.cores[0].shape[2], largest_block_rank(in_modes, out_modes))
    if name == "tucker":
        from outlast.tensorize.convert.tucker import to_tucker

        into = balanced_modes(shape.in_features, shape.modes)
        out = balanced_modes(shape.out_features, shape.modes)
        found = to_tucker(weight, in_modes=into, out_modes=out, error=error)
        return tuple(found.cores[len(into)].shape)
    raise TensorizeError(
        f"rank = 'error={error}' is for low_rank, tt, ttm, btt and tucker, not {name}: "
        "give it a rank or a budget of parameters"
    )


def shared_ranks(
    weights: Mapping[str, Tensor], share: float, multiples: Mapping[str, int]
) -> dict[str, int]:
    """Ranks of low-rank layers that recover the most energy within a budget (water filling).

    A step of rank in a layer recovers the squares of the next singular values, as a share of the
    sum of all of that layer. Since they fall with the rank, taking the step with the largest gain
    per parameter first is optimal up to the last step. Every layer gets one step, and none so many
    that it would have as many parameters as the dense one.

    Args:
        weights: (out, in) of every layer.
        share: Of the layers' dense parameters, which is that of their operations as well.
        multiples: Size of a step in every layer.

    Returns:
        A rank for every layer.

    Raises:
        TensorizeError: The budget is too small for one step per layer.
    """
    from outlast.tensorize.convert.svd import spectrum

    budget = share * sum(weight.numel() for weight in weights.values())
    ranks: dict[str, int] = {}
    steps: list[tuple[float, str, int]] = []
    spent = 0
    for name, weight in weights.items():
        energies = spectrum(weight).square().tolist()
        whole = sum(energies) or 1.0
        size = sum(weight.shape)
        most = max(1, (weight.numel() - 1) // size)
        step = min(multiples[name], most)
        ranks[name] = step
        spent += step * size
        for begin in range(step, most - step + 1, step):
            gain = sum(energies[begin : begin + step]) / whole / (step * size)
            steps.append((-gain, name, step))
    if spent > budget:
        raise TensorizeError(
            f"a budget of {share} is too little for {len(weights)} layers, which take "
            f"{spent / sum(weight.numel() for weight in weights.values()):.4g} at the smallest "
            "ranks: allow more, or set multiple = 1"
        )
    full: set[str] = set()
    for _, name, step in sorted(steps, key=lambda one: one[0]):
        cost = step * sum(weights[name].shape)
        if name in full or spent + cost > budget:
            full.add(name)
            continue
        ranks[name] += step
        spent += cost
    return ranks
