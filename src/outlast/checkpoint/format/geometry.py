"""The grid that cuts boxes of global tensors into tiles.

A rank holds a box of a global tensor: an offset and a shape. Every box is cut at the lines of one
grid that belongs to the *global* tensor, so that a tile has the same content whatever mesh saved
it, and a reader with another mesh fetches the tiles that it touches and little else.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from outlast.state.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE_BYTES = 128 << 10
"""A tile is at most this large, so that a partial read wastes little."""

# Smaller tiles would cost more for their code tables and manifests than partial reads gain; the
# more so, the better their elements can be coded.
_SMALL_TILE_BYTES = {4: 20 << 10, 8: 20 << 10}
_SMALL_TILE_BYTES_ELSE = 40 << 10
_INNER_ELEMENTS = 64


def grid(shape: tuple[int, ...], itemsize: int, tile_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """Distance of the grid lines in every dimension, in elements.

    Each dimension is cut into a power of two of equal parts, in turn, until a tile has at most
    `tile_bytes`: readers that split any dimension into 2, 4, 8, ... then find their borders on the
    grid. The first two dimensions are cut into four also where tiles get smaller than that, down
    to 20 KiB (40 KiB for 16-bit numbers), for the sake of readers that split the other dimension
    than the writers did. Rows are not cut below 64 elements (32 for small tiles) while another
    dimension can still be cut, because short runs are slow to copy. At the end, a step may be made
    a little smaller, so that thirds, quarters and the like of the extent lie on the grid.

    Args:
        shape: Global shape.
        itemsize: Bytes of an element.
        tile_bytes: Largest tile, in bytes; one element may exceed it.
    """
    cuts = [1] * len(shape)

    def step(dimension: int) -> int:
        return max(-(-shape[dimension] // cuts[dimension]), 1)

    def size() -> int:
        return math.prod(map(step, range(len(shape)))) * itemsize

    def cuttable(inner: int) -> list[int]:
        last = len(shape) - 1 if len(shape) > 1 else -1
        return [
            index
            for index in range(len(shape))
            if step(index) >= (2 * inner if index == last else 2)
        ]

    while size() > tile_bytes and (found := cuttable(_INNER_ELEMENTS) or cuttable(1)):
        cuts[min(found, key=lambda dimension: cuts[dimension])] *= 2
    if len(shape) > 1:
        smallest = _SMALL_TILE_BYTES.get(itemsize, _SMALL_TILE_BYTES_ELSE)
        while size() >= 2 * smallest and (
            found := [
                number
                for number in cuttable(_INNER_ELEMENTS // 2)
                if number < 2 and cuts[number] < 4
            ]
        ):
            cuts[min(found, key=lambda dimension: cuts[dimension])] *= 2
    return tuple(_even(extent, step(item)) for item, extent in enumerate(shape))


def _even(extent: int, step: int) -> int:
    """A step of at most `step`, and more than half of it, on whose multiples readers' borders lie.

    These are at the halves, thirds, quarters, ... of the extent.
    """
    for parts in (24, 12, 8, 6, 4, 3, 2):
        if extent % parts == 0:
            unit = extent // parts
            for index in range(min(step, unit), step // 2, -1):
                if unit % index == 0:
                    return index
    return step


def tiles(box: Box, steps: tuple[int, ...]) -> Iterator[Box]:
    """The pieces of `box` between the grid lines, in row-major order; none for an empty box."""
    if box.elements == 0:
        return
    spans = [
        _spans(first, extent, step)
        for first, extent, step in zip(box.offset, box.shape, steps, strict=True)
    ]
    for spans_of_tile in itertools.product(*spans):
        # Without dimensions there is one tile, of no extents.
        yield Box(*zip(*spans_of_tile, strict=True)) if spans_of_tile else Box((), ())


def tile_count(box: Box, steps: tuple[int, ...]) -> int:
    """How many pieces `tiles` gives, without making them."""
    if box.elements == 0:
        return 0
    return math.prod(
        (end - 1) // step - first // step + 1
        for first, end, step in zip(box.offset, box.end, steps, strict=True)
    )


def _spans(first: int, extent: int, step: int) -> list[tuple[int, int]]:
    end = first + extent
    found = []
    while first < end:
        last = min((first // step + 1) * step, end)
        found.append((first, last - first))
        first = last
    return found


def tiles_within(box: Box, steps: tuple[int, ...], part: Box) -> Iterator[tuple[int, Box]]:
    """The tiles of `box` that `part`, which lies in it, touches, each with its number in `tiles`.

    It takes time for these tiles alone, so that a small part of a large box is found at once.
    """
    if part.elements == 0:
        return
    lines = [
        range(first // step, (end - 1) // step + 1)
        for first, end, step in zip(part.offset, part.end, steps, strict=True)
    ]
    for cells in itertools.product(*lines):
        number, offset, shape = 0, [], []
        for cell, step, first, end in zip(cells, steps, box.offset, box.end, strict=True):
            number = number * ((end - 1) // step + 1 - first // step) + cell - first // step
            offset.append(max(cell * step, first))
            shape.append(min((cell + 1) * step, end) - offset[-1])
        yield number, Box(tuple(offset), tuple(shape))
