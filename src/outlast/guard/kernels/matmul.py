"""A matrix product that sums its output while it is still in registers.

``Y = X W^T + b`` in tiles; every tile leaves the sums of its rows behind: with signs v, and of
4^floor(log2 |y|). They are of the numbers as stored or, finer, of the fp32 accumulator before it is
rounded; then rounding and storing are not covered. Tiles' sums are kept by place and added in a
fixed order.
"""

# ruff: noqa: PLR0917 -- a kernel's parameters are what its launch names

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from outlast.guard.elements import rows_contiguous
from outlast.guard.kernels.product import on_device_of
from outlast.guard.kernels.sweeps import square_of_power

if TYPE_CHECKING:
    from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU, for tests."""


def _configurations() -> list[triton.Config]:
    if INTERPRETED:
        # It cannot choose by measuring.
        tiles = {"tile_rows": 32, "tile_outputs": 32, "tile_terms": 32, "group": 2}
        return [triton.Config(tiles)]
    names = ("tile_rows", "tile_outputs", "tile_terms")
    return [
        triton.Config(
            dict(zip(names, tile, strict=True)) | {"group": 8}, num_warps=warps, num_stages=stages
        )
        for tile, warps, stages in (
            ((128, 256, 64), 8, 3),
            ((128, 256, 64), 8, 4),
            ((256, 128, 64), 8, 3),
            ((128, 128, 64), 4, 4),
            ((128, 128, 64), 8, 3),
            ((128, 128, 32), 4, 4),
            ((128, 64, 64), 4, 4),
            ((64, 128, 64), 4, 4),
            ((64, 64, 32), 4, 5),
        )
    ]


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> Any:
    """Configurations whose tiles fit in shared memory; 4-byte operands take twice the room."""
    size = arguments["x"].element_size()
    return [
        config for config in configs if _shared_bytes(config, size) <= _SHARED_BYTES
    ] or configs[-1:]


_SHARED_BYTES = 200 * 1024
"""A little less than what a block may have on compute capability 9.0."""


def _shared_bytes(config: triton.Config, size: int) -> int:
    tile = config.kwargs
    stages: int = config.num_stages
    return stages * size * int((tile["tile_rows"] + tile["tile_outputs"]) * tile["tile_terms"])


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=_configurations(),
    key=["size", "outputs", "terms"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit  # type: ignore[untyped-decorator]
def matmul_kernel(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    signs: tl.tensor,
    dots: tl.tensor,
    powers: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    terms: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    y_stride: tl.tensor,
    size: tl.constexpr,
    unrounded: tl.constexpr,
    precision: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_terms: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Store y = x @ w^T + bias, and its rows' sums in dots and powers (tiles of outputs, rows)."""
    # Programs that run together share rows of x and w in the cache.
    row_tiles, output_tiles = tl.cdiv(rows, tile_rows), tl.cdiv(outputs, tile_outputs)
    program = tl.program_id(0)
    per_group = group * output_tiles
    first = program // per_group * group
    height = tl.minimum(row_tiles - first, group)
    row_tile = first + program % per_group % height
    output_tile = program % per_group // height

    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    output = output_tile * tile_outputs + tl.arange(0, tile_outputs)
    inside, used = row < rows, output < outputs
    # Rows beyond the last are read from the beginning again, and never stored.
    x_start = x + (row % rows).to(tl.int64)[:, None] * x_stride
    w_start = w + (output % outputs).to(tl.int64)[None, :] * w_stride
    total = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for start in range(0, terms, tile_terms):
        term = start + tl.arange(0, tile_terms)
        left = tl.load(x_start + term[None, :], mask=(term < terms)[None, :], other=0.0)
        right = tl.load(w_start + term[:, None], mask=(term < terms)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
    if bias is not None:
        total += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)[None, :]

    stored = total.to(y.dtype.element_ty)
    place = y + row.to(tl.int64)[:, None] * y_stride + output[None, :]
    tl.store(place, stored, mask=inside[:, None] & used[None, :])
    checked = total if unrounded else stored.to(tl.float32)
    checked = tl.where(used[None, :], checked, 0.0)
    sign = tl.load(signs + output, mask=used, other=0.0)
    place = output_tile.to(tl.int64) * rows + row
    tl.store(dots + place, tl.sum(checked * sign[None, :], axis=1), mask=inside)
    tl.store(powers + place, tl.sum(square_of_power(checked), axis=1), mask=inside)


def matmul_checked(
    x: Tensor, w: Tensor, bias: Tensor | None, signs: Tensor, *, unrounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``x w^T + bias``, and the sums of its rows.

    The first product of a size measures which configuration is fastest, and waits for the device.

    Args:
        x: (rows, terms), in fp32, bf16 or fp16.
        w: (outputs, terms), of the same type.
        bias: (outputs,) or None.
        signs: (outputs,) fp32.
        unrounded: Sum the accumulator instead of what is stored.

    Returns:
        y (rows, outputs) in the type of `x`; sums with `signs` and of powers, both (parts, rows)
        fp32, to be added over parts.
    """
    x, w = rows_contiguous(x), rows_contiguous(w)
    (rows, terms), outputs = x.shape, len(w)
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    fewest = min(config.kwargs["tile_outputs"] for config in matmul_kernel.configs)
    dots, powers = torch.empty((2, triton.cdiv(outputs, fewest), rows), device=x.device)

    def programs(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(rows, tile["tile_rows"]) * triton.cdiv(outputs, tile["tile_outputs"]),)

    with on_device_of(x):
        matmul_kernel[programs](
            x,
            w,
            bias,
            y,
            signs,
            dots,
            powers,
            rows,
            outputs,
            terms,
            x.stride(0),
            w.stride(0),
            y.stride(0),
            # A choice of configuration serves all numbers of rows up to a power of two.
            size=triton.next_power_of_2(rows),
            unrounded=unrounded,
            precision=precision_of(x),
        )
    parts = triton.cdiv(outputs, matmul_kernel.best_config.kwargs["tile_outputs"])
    return y, dots[:parts], powers[:parts]


def precision_of(x: Tensor) -> str:
    """How the product reads fp32 operands: as torch's own products on the device do."""
    tf32 = x.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
