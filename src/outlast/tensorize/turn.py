"""Another order of a tensor's indices, worked out before there is a tensor. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

# In the letters of a network; stands for the tokens.
TOKENS = "."
Groups = tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """A reordering of a tensor; None stands for none at all.

    Attributes:
        given: The tensor's dimensions, each the letters of some indices.
        wanted: The dimensions that it shall have.
        sizes: Its indices as dimensions, to permute them; empty: it has these dimensions.
        order: Of the indices; empty: they stay in their order.
        shape: The sizes of the wanted dimensions; empty: those of the indices.
    """

    given: Groups
    wanted: Groups
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor with the wanted dimensions; a view of it where that can be."""
        if self.sizes:
            tensor = tensor.reshape(self.sizes)
        if self.order:
            tensor = tensor.permute(self.order)
        return tensor.reshape(self.shape) if self.shape else tensor


def turn(given: Groups, wanted: Groups, sizes: Mapping[str, int]) -> Turn | None:
    """The reordering of the same indices from some dimensions into others.

    Indices of size one are nowhere in memory, so their places do not matter.

    Args:
        given: The dimensions of the tensor.
        wanted: Those that it shall have.
        sizes: Of every index but that of the tokens.
    """

    def size(group: str) -> int:
        return -1 if TOKENS in group else math.prod(sizes[letter] for letter in group)

    def long(group: str) -> str:
        return "".join(letter for letter in group if letter == TOKENS or sizes[letter] > 1)

    given, wanted = tuple(map(long, given)), tuple(map(long, wanted))
    if given == wanted:
        return None
    shape = tuple(map(size, wanted))
    before, after = "".join(given), "".join(wanted)
    if before == after:
        return Turn(given, wanted, (), (), shape)
    split = () if given == tuple(before) else tuple(map(size, before))
    order = tuple(before.index(letter) for letter in after)
    return Turn(given, wanted, split, order, () if wanted == tuple(after) else shape)
