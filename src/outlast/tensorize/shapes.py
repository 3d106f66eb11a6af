"""Forms by name, splitting of feature sizes into modes, and the ranks that those modes allow.

A tensorized layer reads its input features as a small tensor: 768 features as (8, 8, 12). Modes of
similar size give the fewest parameters for a rank, so sizes that have no balanced factorization
into the modes asked for (in three: LLaMA's 5461 = 43 x 127 and 1376 = 2^5 x 43; any prime) are
padded with zeros to the next size that has one. No torch here: planners import this module.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outlast.errors import TensorizeError

LARGEST_IMBALANCE = 3.0
"""Largest over smallest mode up to which a size needs no padding."""

LARGEST_PADDING = 0.04
"""Share of a size that may be added as zeros; they cost parameters and a copy of the input."""

MULTIPLE_OF_PRECISION = {"float8": 16, "bfloat16": 8, "float16": 8, "float32": 4}
"""Multiples that matrix units want of a rank: 16 bytes a row (cuBLAS alignment)."""


@lru_cache(maxsize=4096)
def balanced_modes(size: int, count: int) -> tuple[int, ...]:
    """Modes for a feature size, as even as possible, in ascending order.

    The rule, in this order:

    1. the smallest padded size ``n`` of at most `LARGEST_PADDING` more than `size` that factors
       into `count` modes with largest / smallest <= `LARGEST_IMBALANCE`; so nothing is padded where
       `size` itself does;
    2. where there is none (sizes below about 100 in many modes), the ``n`` of that range with the
       smallest largest / smallest, and of those the smallest ``n``.

    Of the factorizations of ``n``, the one with the smallest largest / smallest is taken, and of
    those the one with the smallest sum. A mode can be 1 where `size` < 2 ** `count`.

    Args:
        size: Features to split.
        count: Number of modes.

    Returns:
        (count,) modes whose product is between `size` and ``(1 + LARGEST_PADDING) size``.

    Raises:
        TensorizeError: For a size or count below 1.
    """
    if size < 1 or count < 1:
        raise TensorizeError(
            f"{size} features cannot be split in {count} modes: both must be 1 or more"
        )
    best = most_even_factorization(size, count)
    for padded in range(size, math.floor(size * (1.0 + LARGEST_PADDING)) + 1):
        modes = most_even_factorization(padded, count)
        if modes[-1] <= LARGEST_IMBALANCE * modes[0]:
            return modes
        if modes[-1] * best[0] < best[-1] * modes[0]:
            best = modes
    return best


@lru_cache(maxsize=65536)
def most_even_factorization(size: int, count: int) -> tuple[int, ...]:
    """The exact factorization with the smallest largest / smallest factor, then smallest sum.

    Args:
        size: Number to factor, at least 1.
        count: Number of factors, at least 1.

    Returns:
        (count,) factors in ascending order; their product is `size`.
    """
    small = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
    divisors = small + [size // divisor for divisor in reversed(small) if divisor * divisor != size]
    best: tuple[int, ...] = (1,) * (count - 1) + (size,)

    def extend(chosen: tuple[int, ...], rest: int, left: int) -> None:
        nonlocal best
        if left == 1:
            best = min(best, (*chosen, rest), key=lambda modes: (modes[-1] / modes[0], sum(modes)))
            return
        smallest_next = chosen[-1] if chosen else 1
        for divisor in divisors:
            if divisor < smallest_next or rest % divisor:
                continue
            if divisor**left > rest:
                break
            # The largest factor is at least the geometric mean of what is left, so a branch that
            # starts too small is cut before it is walked.
            smallest = chosen[0] if chosen else divisor
            largest = (rest / divisor) ** (1.0 / (left - 1))
            if largest * best[0] <= best[-1] * smallest * (1.0 + 1e-9):
                extend((*chosen, divisor), rest // divisor, left - 1)

    extend((), size, count)
    return best


def block_modes(in_features: int, out_features: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Mode pairs of a two-core block tensor train, near the square roots.

    A block tensor train of rank r has ``r (in n0 + out m1)`` parameters ("Compute Better Spent",
    arXiv 2406.06248), so the smaller mode of each pair is the one that counts.

    Returns:
        ``(m1, m0), (n0, n1)``: input features are row-major (m1, m0) with m1 <= m0, output features
        row-major (n0, n1) with n0 <= n1.
    """
    (m1, m0), (n0, n1) = balanced_modes(in_features, 2), balanced_modes(out_features, 2)
    return (m1, m0), (n0, n1)


def monarch_modes(
    in_features: int, out_features: int, blocks: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Mode pairs of a Monarch matrix: `blocks` blocks on both sides, padded where they divide not.

    Returns:
        ``(blocks, ceil(in / blocks)), (blocks, ceil(out / blocks))``, read as in `block_modes`.

    Raises:
        TensorizeError: For fewer than 1 block or more than there are features.
    """
    if not 1 <= blocks <= min(in_features, out_features):
        raise TensorizeError(
            f"blocks = {blocks} must be between 1 and the {min(in_features, out_features)} "
            f"features of the narrower side"
        )
    return (blocks, -(-in_features // blocks)), (blocks, -(-out_features // blocks))


def monarch_rank(in_features: int, out_features: int, blocks: int) -> int:
    """Rank that makes a block tensor train with `monarch_modes` a Monarch matrix.

    Monarch (arXiv 2204.00595) is a block-diagonal matrix of b blocks, a permutation
    and another block-diagonal matrix of b blocks, with an intermediate as wide as the narrower
    side w = min(in, out). In the block tensor train the intermediate is (m1, n0, r) = (b, b, r), so
    r = w / b^2, rounded up: ``(in + out) w / b`` parameters.
    """
    monarch_modes(in_features, out_features, blocks)
    rank = -(-min(in_features, out_features) // blocks**2)
    return min(rank, largest_block_rank(*monarch_modes(in_features, out_features, blocks)))


def largest_block_rank(in_modes: tuple[int, int], out_modes: tuple[int, int]) -> int:
    """Rank at which a two-core block tensor train holds any matrix: min(n1, m0)."""
    return min(in_modes[1], out_modes[1])


def largest_train_ranks(modes: Sequence[int]) -> tuple[int, ...]:
    """Largest useful tensor-train rank of every bond: min(product left, product right).

    A train with these ranks holds any tensor (Oseledets 2011, theorem 2.1).

    Args:
        modes: Sizes along the train: for a TT layer in_1..in_d, out_1..out_d; for a TTM layer the
            products in_k x out_k.

    Returns:
        (len(modes) - 1,) ranks.
    """
    return tuple(
        min(math.prod(modes[:bond]), math.prod(modes[bond:])) for bond in range(1, len(modes))
    )


def bond_ranks(rank: int | Sequence[int], modes: Sequence[int]) -> tuple[int, ...]:
    """Ranks of every bond, cut to what the modes and the neighbouring bonds can use.

    Args:
        rank: One rank for all bonds, or one per bond.
        modes: Sizes along the train.

    Returns:
        (len(modes) - 1,) ranks, each at most the largest useful one and at most the neighbouring
        rank times the mode between them.

    Raises:
        TensorizeError: For a rank below 1 or the wrong number of ranks.
    """
    bonds = len(modes) - 1
    asked = [rank] * bonds if isinstance(rank, int) else list(rank)
    if len(asked) != bonds:
        raise TensorizeError(f"rank = {tuple(asked)} must be one number or one per bond ({bonds})")
    if any(one < 1 for one in asked):
        raise TensorizeError(f"rank = {rank} must be 1 or more")
    ranks = [min(one, most) for one, most in zip(asked, largest_train_ranks(modes), strict=True)]
    for bond in range(1, bonds):
        ranks[bond] = min(ranks[bond], ranks[bond - 1] * modes[bond])
    for bond in range(bonds - 2, -1, -1):
        ranks[bond] = min(ranks[bond], ranks[bond + 1] * modes[bond + 1])
    return tuple(ranks)


def rounded_rank(rank: int, multiple: int, *, largest: int | None = None) -> int:
    """A rank rounded up to what matrix units want.

    Args:
        rank: Rank asked for.
        multiple: See `MULTIPLE_OF_PRECISION`: 16 for float8, 8 for bfloat16.
        largest: Largest useful rank; where rounding up passes it, the rank is rounded down, and
            where no multiple is left, it is `largest` itself.

    Raises:
        TensorizeError: For numbers below 1.
    """
    if rank < 1 or multiple < 1 or (largest is not None and largest < 1):
        raise TensorizeError(
            f"rank = {rank}, multiple = {multiple} and largest = {largest} must be 1 or more"
        )
    up = -(-rank // multiple) * multiple
    if largest is None or up <= largest:
        return up
    down = largest // multiple * multiple
    return down if down else largest


Ranks = int | tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """A form.

    Attributes:
        name: What `tensorize` and `cost.layer_cost` know it by.
        linear: Class of `outlast.tensorize` that stands in for `nn.Linear`.
        embedding: Likewise for `nn.Embedding`; empty: none.
        two_factor: Whether a rank is the number of features between two factors, so that a fraction
            is one of the narrower side.
        aligned: Whether the rank is a side of the matrix products, so that matrix units want
            multiples of it.
        modes: Modes on each side unless the user says so; 0: they are none to choose.
        modes_name: What the class calls their number.
        blocks: Whether the "rank" is a number of blocks: more of them are fewer parameters.
    """

    name: str
    linear: str
    embedding: str = ""
    two_factor: bool = False
    aligned: bool = False
    modes: int = 0
    modes_name: str = "cores"
    blocks: bool = False

    def build(
        self, in_features: int, out_features: int, rank: Ranks, settings: dict[str, Any]
    ) -> Any:
        """A new linear layer; `settings` are keywords of its class that it may not know."""
        return class_named(self.linear)(in_features, out_features, rank, **self._known(settings))

    def build_embedding(
        self, rows: int, features: int, rank: Ranks, settings: dict[str, Any]
    ) -> Any:
        """A new embedding, an `nn.Module`.

        Raises:
            TensorizeError: There is none of this form.
        """
        if not self.embedding:
            some = ", ".join(form.name for form in FORMS.values() if form.embedding)
            raise TensorizeError(f"form = {self.name!r} has no embedding: use one of {some}")
        known = {key: value for key, value in self._known(settings).items() if key != "bias"}
        known["padding_idx"] = settings.get("padding_idx")
        return class_named(self.embedding)(rows, features, rank, **known)

    def _known(self, settings: dict[str, Any]) -> dict[str, Any]:
        names = ["bias", "device", "dtype"]
        names += ["activation"] if self.name in ("cola", "lax") else []
        names += ["density"] if self.name == "sltrain" else []
        known = {name: settings[name] for name in names if settings.get(name) is not None}
        if self.modes:
            known[self.modes_name] = settings.get("cores") or self.modes
        return known

    def largest_rank(self, in_features: int, out_features: int, cores: int) -> int:
        """The rank above which the form holds nothing more; of blocks, their largest number."""
        narrow = min(in_features, out_features)
        if self.two_factor or self.blocks:
            return narrow
        if self.name == "btt":
            return largest_block_rank(*block_modes(in_features, out_features))
        into, out = balanced_modes(in_features, cores), balanced_modes(out_features, cores)
        if self.name == "tt":
            return max(largest_train_ranks((*into, *out)))
        if self.name == "ttm":
            pairs = [a * b for a, b in zip(into, out, strict=True)]
            return max(largest_train_ranks(pairs), default=1)
        if self.name == "tucker":
            return max(*into, *out)
        return in_features * out_features // max(*into, *out)


def class_named(name: str) -> Any:
    """The class of layers of this name in `outlast.tensorize`."""
    return getattr(importlib.import_module("outlast.tensorize"), name)


FORMS = {
    form.name: form
    for form in (
        Form("low_rank", "LowRankLinear", "LowRankEmbedding", True, aligned=True),
        Form("cola", "BottleneckLinear", two_factor=True, aligned=True),
        Form("lax", "LatentLinear", two_factor=True, aligned=True),
        Form("sltrain", "SparseLowRankLinear", two_factor=True, aligned=True),
        Form("tt", "TTLinear", "TTEmbedding", aligned=True, modes=3),
        Form("ttm", "TTMLinear", "TTMEmbedding", modes=3),
        Form("btt", "BTTLinear"),
        Form("monarch", "MonarchLinear", blocks=True),
        Form("tucker", "TuckerLinear", modes=2, modes_name="modes"),
        Form("cp", "CPLinear", aligned=True, modes=2, modes_name="modes"),
    )
}
"""All forms."""


def form_named(name: str) -> Form:
    """A form by its name.

    Raises:
        TensorizeError: There is none of that name.
    """
    if name in FORMS:
        return FORMS[name]
    close = difflib.get_close_matches(str(name), FORMS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else ""
    raise TensorizeError(f"form = {name!r} is not one of {', '.join(FORMS)}{hint}")
