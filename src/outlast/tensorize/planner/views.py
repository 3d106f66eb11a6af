"""Whether a tensor in another order of its indices must be copied, and in which pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


def _without_ones(letters: str, sizes: Mapping[str, int]) -> str:
    return "".join(letter for letter in letters if sizes[letter] > 1)


def is_view(
    given: str, groups: tuple[str, ...], sizes: Mapping[str, int], *, product: bool = True
) -> bool:
    """Whether a contiguous tensor can be taken in another order without a copy.

    Args:
        given: Its indices as they lie in memory, the slowest first.
        groups: The dimensions of the view, each a number of indices that become one.
        sizes: Of every index.
        product: The view goes into a matrix product, which needs neighbours in one of the last
            two dimensions.
    """
    stride, strides = 1, {}
    for letter in reversed(given):
        strides[letter] = stride
        stride *= sizes[letter]
    groups = tuple(_without_ones(group, sizes) for group in groups)
    for group in groups:
        for left, right in pairwise(group):
            if strides[left] != strides[right] * sizes[right]:
                return False
    if not product:
        return True
    # A dimension of size one has any stride.
    return any(not group or strides[group[-1]] == 1 for group in groups[-2:])


def same_order(given: str, wanted: str, sizes: Mapping[str, int]) -> bool:
    """Whether two orders are the same in memory."""
    return _without_ones(given, sizes) == _without_ones(wanted, sizes)


@dataclass(frozen=True)
class Move:
    """A copy of a tensor into another order of its indices.

    Attributes:
        elements: How many numbers.
        run: Neighbours that stay neighbours.
        inner: Numbers of one stretch of the result whose sources lie `stride` apart.
        stride: See `inner`; 1 if there are runs.
    """

    elements: int
    run: int
    inner: int
    stride: int


def move(given: str, wanted: str, sizes: Mapping[str, int]) -> Move:
    """What is to be copied to get one order from another."""
    left, right = _without_ones(given, sizes), _without_ones(wanted, sizes)
    elements = math.prod(sizes[letter] for letter in right)
    common = 0
    while common < min(len(left), len(right)) and left[-1 - common] == right[-1 - common]:
        common += 1
    run = math.prod(sizes[letter] for letter in right[len(right) - common :])
    if common or not right:
        return Move(elements, run, run, 1)
    place = left.index(right[-1])
    stride = math.prod(sizes[letter] for letter in left[place + 1 :])
    inner, length = sizes[right[-1]], 1
    while length < len(right) and place >= length and left[place - length] == right[-1 - length]:
        inner *= sizes[right[-1 - length]]
        length += 1
    return Move(elements, 1, inner, stride)
