"""Prices: seconds of single operations, from a table of measured points. No torch.

Sizes and seconds are interpolated as logarithms, for between two points of a product's size its
time is nearly a power. A tensor in another order of its indices is copied in pieces, if at all.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

AXIS = (1, 4, 16, 64, 256, 1024, 4096)

BYTES_AXIS = tuple(4**power for power in range(6, 13))

RUN_AXIS = (4, 16, 64, 256, 1024)

STRETCH_AXIS = (4, 16, 64, 256, 1024)

STRIDED_ELEMENTS = 1 << 18

LAYOUTS = ("nn", "nt", "tn", "tt")

VERSION = 2


@dataclass(frozen=True)
class PriceTable:
    """Seconds of the operations of one device with one dtype and number of threads.

    Attributes:
        machine: The device's name.
        dtype: E.g. ``float32``.
        threads: Threads of a CPU's operations; 0 on other devices.
        torch: The version of torch.
        measured: Whether this machine measured it; otherwise it stands in for one that did.
        item_bytes: Bytes of a number.
        matrix: By layout of the factors (n: as it lies, t: transposed), log2 of the seconds of a
            product of (m, k) with (k, n), for m, n, k of `AXIS`, m the slowest.
        batched: Likewise of one product of many in a batch, without the start.
        copy: log2 of the seconds of a permuting copy, for the bytes of `BYTES_AXIS` and the bytes
            that stay together of `RUN_AXIS`.
        strided: log2 of the seconds of a permuting copy of STRIDED_ELEMENTS without runs, for the
            length of a stretch and the stride of its sources, of `STRETCH_AXIS`.
        transpose: log2 of the seconds of (m, n) -> (n, m), for m, n of `AXIS`.
        element: log2 of the seconds to add two tensors, for the bytes of `BYTES_AXIS` of one.
        launch: Seconds to start things: an ``operation``, a ``product`` of a merging and what
            autograd adds to it (``noted``), a ``path`` per stage; of one chunk (``chunk``), of a
            ``stage`` and its way ``back``, of an order of indices (``arrange``) and of the
            feature-major layout (``turn``); of a layer without gradients (``chain``), with its own
            autograd ``function``, by ``autograd`` per stage and for all (``plain``), and of a dense
            layer (``linear``).
        fault_seconds_per_byte: The price of memory that was never used: zeroing its pages.
        fault_bytes: Tensors of this size or more always get such memory.
    """

    machine: str
    dtype: str
    threads: int
    torch: str
    measured: bool
    item_bytes: int
    matrix: dict[str, list[float]]
    batched: dict[str, list[float]]
    copy: list[float]
    strided: list[float]
    transpose: list[float]
    element: list[float]
    launch: dict[str, float]
    fault_seconds_per_byte: float
    fault_bytes: float

    @property
    def cached(self) -> bool:
        """True for a CPU, whose cache holds what a chunk of tokens needs."""
        return self.threads > 0

    def to_json(self) -> dict[str, Any]:
        """As what `from_json` reads."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> PriceTable:
        """Of what `to_json` gives.

        Raises:
            KeyError: Something is missing.
            ValueError: Something has another size, or the file is of another version.
            TypeError: Something is of another kind.
        """
        content = dict(content)
        if content.pop("version") != VERSION:
            raise ValueError("a table of another version")
        table = PriceTable(**content)
        cube = len(AXIS) ** 3
        sizes = [len(points[layout]) - cube for points in (table.matrix, table.batched)
                 for layout in LAYOUTS]  # fmt: skip
        sizes.append(len(table.copy) - len(BYTES_AXIS) * len(RUN_AXIS))
        sizes.append(len(table.strided) - len(STRETCH_AXIS) ** 2)
        sizes.append(len(table.transpose) - len(AXIS) ** 2)
        sizes.append(len(table.element) - len(BYTES_AXIS))
        numbers = [
            *table.copy,
            *table.strided,
            *table.transpose,
            *table.element,
            *table.launch.values(),
        ]
        for points in (table.matrix, table.batched):
            numbers += [number for layout in LAYOUTS for number in points[layout]]
        if any(sizes) or not all(math.isfinite(number) for number in numbers):
            raise ValueError("a table with other points")
        return table


def interpolate(
    points: list[float], axes: tuple[tuple[int, ...], ...], at: tuple[float, ...]
) -> float:
    """2 ** the multilinear interpolation of `points` over log2 of `at`.

    Beyond the end of an axis the value grows in proportion to the coordinate; before its start it
    is that of the start.
    """
    corners = [(0, 1.0)]
    beyond = 0.0
    for axis, value in zip(axes, at, strict=True):
        # The axes are powers of 4 of a constant.
        place = (math.log2(value) - math.log2(axis[0])) / 2 if value > axis[0] else 0.0
        top = len(axis) - 1
        if place >= top:
            beyond += 2 * (place - top)
            low, share = top, 0.0
        else:
            low = int(place)
            share = place - low
        found = []
        for index, weight in corners:
            base = index * len(axis) + low
            found.append((base, weight * (1 - share)))
            if share:
                found.append((base + 1, weight * share))
        corners = found
    power: float = sum(points[index] * weight for index, weight in corners) + beyond
    return math.exp2(power)


def roofline(
    *,
    machine: str,
    dtype: str,
    item_bytes: int,
    flops_per_s: float,
    bytes_per_s: float,
    start_seconds: float,
    overhead_seconds: float,
) -> PriceTable:
    """A table of what the peaks of a device allow, for one that was not measured.

    Args:
        machine: What it stands for.
        dtype: Of the numbers.
        item_bytes: Bytes of one.
        flops_per_s: Rate of matrix products.
        bytes_per_s: Rate of memory.
        start_seconds: Time to start an operation of the device.
        overhead_seconds: Python's time around an operation.
    """

    def product(m: int, n: int, k: int) -> float:
        # Below a tile's size the rate falls in proportion.
        tiles = min(1.0, m / 64) * min(1.0, n / 64)
        moved = item_bytes * (m * n + m * k + n * k) / bytes_per_s
        return max(2 * m * n * k / (flops_per_s * tiles), moved)

    cube = [(m, n, k) for m in AXIS for n in AXIS for k in AXIS]
    single = [math.log2(start_seconds + product(*at)) for at in cube]
    # A batch fills the device even with products that would not alone.
    batched = [math.log2(product(*at)) for at in cube]
    copies = [
        math.log2(start_seconds + 2 * size / bytes_per_s * max(1.0, 32 / run))
        for size in BYTES_AXIS
        for run in RUN_AXIS
    ]
    turned = [
        math.log2(start_seconds + 4 * item_bytes * m * n / bytes_per_s) for m in AXIS for n in AXIS
    ]
    added = [math.log2(start_seconds + 3 * size / bytes_per_s) for size in BYTES_AXIS]
    strided = [math.log2(8 * item_bytes * STRIDED_ELEMENTS / bytes_per_s)] * len(STRETCH_AXIS) ** 2
    names = {
        "operation": 1, "product": 1, "noted": 2, "path": 1, "stage": 1, "back": 1, "chunk": 2,
        "arrange": 2, "turn": 2, "chain": 2, "function": 16, "autograd": 3, "plain": 8, "linear": 8,
    }  # fmt: skip
    launch = {name: overhead_seconds * times for name, times in names.items()}
    return PriceTable(
        machine, dtype, 0, "any", False, item_bytes,
        dict.fromkeys(LAYOUTS, single), dict.fromkeys(LAYOUTS, batched),
        copies, strided, turned, added, launch, 0.0, math.inf,
    )  # fmt: skip


@functools.cache
def default_table(device: str, dtype: str) -> PriceTable:
    """The table of an ordinary machine.

    A CPU's was measured on one core of an Intel Xeon (Ice Lake class, AVX-512) with float32;
    another dtype's products take as long in proportion to its bytes. A GPU's comes from the peaks
    of an A100 (NVIDIA's data sheet), of which two thirds are taken.
    """
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    item = sizes.get(dtype, 4)
    if device != "cpu":
        peak = {8: 13e12, 4: 80e12, 2: 200e12}[item]
        return roofline(machine="an A100 by its data sheet", dtype=dtype, item_bytes=item,
                        flops_per_s=peak, bytes_per_s=1.3e12, start_seconds=5e-6,
                        overhead_seconds=4e-6)  # fmt: skip
    content = json.loads(Path(__file__).with_name("prices.json").read_text())
    content.update(dtype=dtype, item_bytes=item, measured=False)
    if item == 8:
        for kind in ("matrix", "batched"):
            content[kind] = {
                layout: [point + 1 for point in points] for layout, points in content[kind].items()
            }
    return PriceTable.from_json(content)


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


class OperationPrices:
    """The seconds of operations on one device; remembers what it was asked.

    Args:
        table: What the device's operations cost.
    """

    def __init__(self, table: PriceTable) -> None:
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
        """Return the slowdown of copying one number of a tensor over one of STRIDED_ELEMENTS."""
        if elements <= STRIDED_ELEMENTS:
            return 1.0
        item = self.table.item_bytes
        small = interpolate(self.table.copy, _COPIES, (STRIDED_ELEMENTS * item, 64))
        large = interpolate(self.table.copy, _COPIES, (elements * item, 64))
        # Far strides miss the first caches whatever the size.
        return min(max(large / elements / (small / STRIDED_ELEMENTS), 1.0), 1.5)

    def cold(self, elements: int, whole: int, run: int) -> float:
        """Return the extra seconds of reading or writing a part of a large tensor over a small one.

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


def _without_ones(letters: str, sizes: Mapping[str, int]) -> str:
    return "".join(letter for letter in letters if sizes[letter] > 1)


def is_view(
    given: str, groups: tuple[str, ...], sizes: Mapping[str, int], *, product: bool = True
) -> bool:
    """Return whether a contiguous tensor can be taken in another order without a copy.

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
    """Return whether two orders are the same in memory."""
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
    """Return the copy that gets one order from another."""
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
