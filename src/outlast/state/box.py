"""Boxes of global tensors: which part of a tensor a rank holds, and whether parts are the whole."""

from __future__ import annotations

import itertools
import math
from operator import add, sub
from typing import NamedTuple

import numpy as np

from outlast.errors import CheckpointError

_MOST_CELLS = 4 << 20


class Box(NamedTuple):
    """A rectangular part of a global tensor; both tuples have one entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a box without dimensions."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor; None when they share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(sub, map(min, self.end, other.end), offset))
        return Box(offset, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that pick this box out of an array that holds `outer`."""
        first = tuple(map(sub, self.offset, outer.offset))
        return tuple(map(slice, first, map(add, first, self.shape)))

    @property
    def end(self) -> tuple[int, ...]:
        """The first index behind the box in every dimension."""
        return tuple(map(add, self.offset, self.shape))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


def covers(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether `boxes` together hold every element of a tensor of `shape`.

    Shards along one dimension after the other are decided in the time of sorting them; only boxes
    that overlap in part, in every dimension, are compared with each other.
    """
    boxes = [box for box in boxes if box.elements]
    if math.prod(shape) == 0 or any(box.shape == shape for box in boxes):
        return True
    return _fills(shape, boxes, tuple(range(len(shape))))


def _fills(shape: tuple[int, ...], boxes: list[Box], dimensions: tuple[int, ...]) -> bool:
    """Return whether `boxes`, which agree in the other dimensions, fill these."""
    if not dimensions:
        return bool(boxes)
    for dimension in dimensions:
        spans: dict[tuple[int, int], list[Box]] = {}
        for box in boxes:
            first = box.offset[dimension]
            spans.setdefault((first, first + box.shape[dimension]), []).append(box)
        reached, overlapping = 0, False
        for first, last in sorted(spans):
            if first > reached:
                return False
            overlapping = overlapping or first < reached
            reached = max(reached, last)
        if reached < shape[dimension]:
            return False
        if not overlapping:
            # Each slab has owners of its own, and is decided alone.
            rest = tuple(number for number in dimensions if number != dimension)
            return all(_fills(shape, slab, rest) for slab in spans.values())
    return len(dimensions) == 1 or _fills_cells(shape, boxes, dimensions)


def _fills_cells(shape: tuple[int, ...], boxes: list[Box], dimensions: tuple[int, ...]) -> bool:
    """As `_fills`, by the cells between neighbouring borders: each has the same owners all over.

    How many boxes hold each cell is the running sum, along every dimension, of what begins and ends
    at its corner: the time is that of the cells, however many boxes overlap.
    """
    boxes = [*set(boxes)]
    spans = [[(box.offset[d], box.offset[d] + box.shape[d]) for d in dimensions] for box in boxes]
    borders = [
        sorted({0, shape[d], *(border for span in spans for border in span[number])})
        for number, d in enumerate(dimensions)
    ]
    corners = 2 ** len(dimensions) * len(boxes)
    if max(math.prod(map(len, borders)), corners) > _MOST_CELLS:
        raise CheckpointError(
            f"{len(boxes)} boxes of a tensor overlap in so many ways that no save can have made "
            "them"
        )
    places = [{border: place for place, border in enumerate(line)} for line in borders]
    owners = np.zeros([len(line) for line in borders], np.int32)
    for span in spans:
        ends = [
            ((place[first], 1), (place[last], -1))
            for place, (first, last) in zip(places, span, strict=True)
        ]
        for corner in itertools.product(*ends):
            owners[tuple(at for at, _ in corner)] += math.prod(sign for _, sign in corner)
    for axis in range(owners.ndim):
        np.cumsum(owners, axis=axis, out=owners)
    return bool((owners[(slice(-1),) * owners.ndim] > 0).all())


_ALIGNMENT_BYTES = 64


def aligned(size: int) -> int:
    """`size` in bytes, rounded up so that what follows begins where any element may lie."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
