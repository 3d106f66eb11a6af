"""Predicted seconds of single operations, from a table. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.tensorize.planner.table import (
    AXIS,
    BYTES_AXIS,
    RUN_AXIS,
    STRETCH_AXIS,
    STRIDED_ELEMENTS,
    interpolate,
)

if TYPE_CHECKING:
    from outlast.tensorize.planner.table import Table
    from outlast.tensorize.planner.views import Move

# A core's own cache, and a tensor that is surely in it.
_CACHE_BYTES = 2 << 20
_NEAR_BYTES = 1 << 18
_CUBE = (AXIS, AXIS, AXIS)
_SQUARE = (AXIS, AXIS)
_STRETCHES = (STRETCH_AXIS, STRETCH_AXIS)
_COPIES = (BYTES_AXIS, RUN_AXIS)


def _whole(size: int) -> int:
    """A dimension as a small product computes it: in whole 16s, as those that were measured."""
    return -(-size // 16) * 16 if 16 < size < 256 else size


class Prices:
    """The seconds of operations on one device; remembers what it was asked.

    Args:
        table: What the device's operations cost.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.launch = table.launch
        self._known: dict[tuple[object, ...], float] = {}

    def fresh(self, elements: int) -> float:
        """A new tensor: nothing, unless it is so large that its memory is always new."""
        size = elements * self.table.item_bytes
        return size * self.table.fault_seconds_per_byte if size >= self.table.fault_bytes else 0.0

    def product(self, batch: int, m: int, n: int, k: int, layout: str) -> float:
        """A batch of products of (m, k) with (k, n).

        Args:
            batch: How many.
            m: Rows of the result.
            n: Columns of the result.
            k: Terms of every sum.
            layout: ``nn``, ``nt``, ``tn`` or ``tt``: which factors lie transposed in memory.
        """
        key = (batch, m, n, k, layout)
        known = self._known.get(key)
        if known is None:
            if not batch * m * n * k:
                known = self.launch["operation"]
            elif batch == 1:
                known = interpolate(self.table.matrix[layout], _CUBE, (m, n, k))
            else:
                at = (_whole(m), _whole(n), _whole(k))
                item = interpolate(self.table.batched[layout], _CUBE, at)
                known = self.launch["operation"] + batch * item
            known += self.fresh(batch * m * n)
            self._known[key] = known
        return known

    def copy(self, elements: int, run: int) -> float:
        """A copy in another order.

        Args:
            elements: How many numbers.
            run: How many neighbours stay neighbours.
        """
        item = self.table.item_bytes
        key = ("copy", elements, run)
        known = self._known.get(key)
        if known is None:
            at = (max(elements * item, 1), min(run * item, RUN_AXIS[-1]))
            known = interpolate(self.table.copy, _COPIES, at) + self.fresh(elements)
            self._known[key] = known
        return known

    def move(self, move: Move) -> float:
        """A copy in another order of indices."""
        if move.run > 1:
            return self.copy(move.elements, move.run)
        key = ("move", move)
        known = self._known.get(key)
        if known is None:
            # What it costs more than a copy of runs is for the stretches; they were measured on
            # a tensor of STRIDED_ELEMENTS.
            most = STRETCH_AXIS[-1]
            at = (min(move.inner, most), min(move.stride, most))
            stretch = interpolate(self.table.strided, _STRETCHES, at)
            share = move.elements / STRIDED_ELEMENTS
            known = self.launch["operation"] + stretch * share * self._growth(move.elements)
            known += self.fresh(move.elements)
            self._known[key] = known
        return known

    def _growth(self, elements: int) -> float:
        """How much slower each number of a tensor is copied than one of STRIDED_ELEMENTS."""
        if elements <= STRIDED_ELEMENTS:
            return 1.0
        item = self.table.item_bytes
        small = interpolate(self.table.copy, _COPIES, (STRIDED_ELEMENTS * item, 64))
        large = interpolate(self.table.copy, _COPIES, (elements * item, 64))
        # Far strides miss the first caches whatever the size.
        return min(max(large / elements / (small / STRIDED_ELEMENTS), 1.0), 1.5)

    def cold(self, elements: int, whole: int, run: int) -> float:
        """What reading or writing a part of a large tensor costs more than of a small one.

        Args:
            elements: Numbers in the part.
            whole: Numbers in the tensor; what fits a core's cache may be there.
            run: How many neighbours are taken at a time.
        """
        item = self.table.item_bytes
        share = min(whole * item / _CACHE_BYTES - 1, 1.0)
        if share <= 0:
            return 0.0
        key = ("cold", elements, run)
        known = self._known.get(key)
        if known is None:
            width = min(run * item, RUN_AXIS[-1])
            far = interpolate(self.table.copy, _COPIES, (BYTES_AXIS[-1], width))
            near = interpolate(self.table.copy, _COPIES, (_NEAR_BYTES, width))
            each = far / BYTES_AXIS[-1] - near / _NEAR_BYTES
            known = self._known[key] = max(each, 0.0) * elements * item
        return known * share

    def transpose(self, rows: int, columns: int, *, fresh: bool = True) -> float:
        """(rows, columns) -> (columns, rows), into a new tensor or one that is there."""
        key = ("transpose", rows, columns, fresh)
        known = self._known.get(key)
        if known is None:
            known = interpolate(self.table.transpose, _SQUARE, (rows, columns))
            known += self.fresh(rows * columns) if fresh else 0.0
            self._known[key] = known
        return known

    def element(self, elements: int, *, fresh: bool = True) -> float:
        """A pass over all elements: adding a bias, a sum, a copy as it lies."""
        at = (max(elements * self.table.item_bytes, 1),)
        seconds = interpolate(self.table.element, (BYTES_AXIS,), at)
        return seconds + (self.fresh(elements) if fresh else 0.0)
