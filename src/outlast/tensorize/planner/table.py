"""What a machine's operations cost: measured points, and the times between them.

Sizes and seconds are interpolated as logarithms, for between two points of a product's size its
time is nearly a power. No torch.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass
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
class Table:
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
        """Whether it is a CPU's: its cache holds what a chunk of tokens needs."""
        return self.threads > 0

    def to_json(self) -> dict[str, Any]:
        """As what `from_json` reads."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Table:
        """Of what `to_json` gives.

        Raises:
            KeyError: Something is missing.
            ValueError: Something has another size, or the file is of another version.
            TypeError: Something is of another kind.
        """
        content = dict(content)
        if content.pop("version") != VERSION:
            raise ValueError("a table of another version")
        table = Table(**content)
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
) -> Table:
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
    return Table(
        machine, dtype, 0, "any", False, item_bytes,
        dict.fromkeys(LAYOUTS, single), dict.fromkeys(LAYOUTS, batched),
        copies, strided, turned, added, launch, 0.0, math.inf,
    )  # fmt: skip


@functools.cache
def default_table(device: str, dtype: str) -> Table:
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
    content = json.loads(Path(__file__).with_name("default.json").read_text())
    content.update(dtype=dtype, item_bytes=item, measured=False)
    if item == 8:
        for kind in ("matrix", "batched"):
            content[kind] = {
                layout: [point + 1 for point in points] for layout, points in content[kind].items()
            }
    return Table.from_json(content)
