"""Batched products that store their columns with two strides, so that no permutation follows.

A program computes one tile of one block's product, like any product of matrices; only the addresses
differ: a column c is the pair (q, s) = (c // inner, c % inner), and q and s have strides of their
own, so that one launch writes what the next reads in its order. Every operand's strides are given,
hence one kernel serves both halves of a block tensor-train and of its gradient. Triton compiles a
version for each stride that is 1, which is what it needs to load and store vectors.

Compiled for compute capability 9.0 and tested in Triton's interpreter; not yet run on a GPU.
"""

# ruff: noqa: PLR0917 -- a kernel's parameters are what its launch names

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from outlast.tensorize.kernels.launch import (
    INTERPRETED,
    SHARED_BYTES,
    on_device_of,
    padded,
    precision_of,
)

if TYPE_CHECKING:
    from torch import Tensor


def _configurations() -> list[triton.Config]:
    names = ("tile_tokens", "tile_columns", "tile_terms")
    if INTERPRETED:
        # It cannot choose by measuring.
        return [triton.Config(dict(zip(names, (32, 32, 16), strict=True)))]
    return [
        triton.Config(dict(zip(names, tile, strict=True)), num_warps=warps, num_stages=stages)
        for tile, warps, stages in (
            ((128, 256, 64), 8, 3),
            ((128, 128, 64), 8, 3),
            ((128, 128, 32), 4, 4),
            ((128, 64, 64), 4, 3),
            ((128, 32, 32), 4, 4),
            ((64, 64, 32), 4, 4),
        )
    ]


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> Any:
    """Configurations that fit in shared memory and are not wider than the matrix."""
    size, widest = arguments["x"].element_size(), max(padded(arguments["columns"]), 32)
    fitting = [
        config
        for config in configs
        if _shared_bytes(config, size) <= SHARED_BYTES and config.kwargs["tile_columns"] <= widest
    ]
    return fitting or configs[-1:]


def _shared_bytes(config: triton.Config, size: int) -> int:
    tile = config.kwargs
    stages: int = config.num_stages
    operands = stages * (tile["tile_tokens"] + tile["tile_columns"]) * tile["tile_terms"]
    stored = tile["tile_tokens"] * tile["tile_columns"]
    return size * int(max(operands, stored))


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=_configurations(),
    key=["size", "half", "blocks", "columns", "terms"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["size", "half"])  # type: ignore[untyped-decorator]
def block_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    half: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    columns: tl.tensor,
    terms: tl.tensor,
    inner: tl.tensor,
    x_token_stride: tl.tensor,
    x_block_stride: tl.tensor,
    x_term_stride: tl.tensor,
    weight_block_stride: tl.tensor,
    weight_column_stride: tl.tensor,
    weight_term_stride: tl.tensor,
    y_token_stride: tl.tensor,
    y_block_stride: tl.tensor,
    y_outer_stride: tl.tensor,
    y_inner_stride: tl.tensor,
    precision: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_terms: tl.constexpr,
) -> None:
    """Store y[t, p, c // inner, c % inner] = sum over k of x[t, p, k] weight[p, c, k], plus bias.

    t are tokens, p blocks, c columns and k terms; y's strides are of t, p, and of the two parts of
    c. `size` and `half` only tell apart what is measured apart.
    """
    column_tiles = tl.cdiv(columns, tile_columns)
    token_tiles = tl.cdiv(tokens, tile_tokens)
    # Programs that run together share a block's weight, and neighbours among them rows of x.
    program = tl.program_id(0)
    column = program % column_tiles * tile_columns + tl.arange(0, tile_columns)
    program = program // column_tiles
    token = program % token_tiles * tile_tokens + tl.arange(0, tile_tokens)
    block = (program // token_tiles).to(tl.int64)
    inside, used = token < tokens, column < columns
    token = token.to(tl.int64)

    x_start = x + block * x_block_stride + token[:, None] * x_token_stride
    w_start = weight + block * weight_block_stride + column[None, :] * weight_column_stride
    total = tl.zeros((tile_tokens, tile_columns), tl.float32)
    for start in range(0, terms, tile_terms):
        term = start + tl.arange(0, tile_terms)
        read = term < terms
        term = term.to(tl.int64)
        left = tl.load(
            x_start + term[None, :] * x_term_stride,
            mask=inside[:, None] & read[None, :],
            other=0.0,
        )
        right = tl.load(
            w_start + term[:, None] * weight_term_stride,
            mask=used[None, :] & read[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=precision)
    if bias is not None:
        offsets = tl.load(bias + block * columns + column, mask=used, other=0.0)
        total += offsets.to(tl.float32)[None, :]

    outer = (column // inner).to(tl.int64) * y_outer_stride
    place = outer + (column % inner).to(tl.int64) * y_inner_stride
    place = y + block * y_block_stride + token[:, None] * y_token_stride + place[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=inside[:, None] & used[None, :])


def block_product(
    x: Tensor,
    x_strides: tuple[int, int, int],
    weight: Tensor,
    y: Tensor,
    y_strides: tuple[int, int, int, int],
    *,
    tokens: int,
    inner: int,
    half: int,
    bias: Tensor | None = None,
    of: int | None = None,
) -> None:
    """Store ``y[t, p, q, s] = sum over k of x[t, p, k] weight[p, (q, s), k] + bias[p, (q, s)]``.

    The operands are taken as they are: who calls has checked them.

    Args:
        x: In fp32, bf16 or fp16.
        x_strides: Of its tokens t, blocks p and terms k, in numbers.
        weight: (blocks, columns, terms), with any strides.
        y: Where the product goes.
        y_strides: Of its t, p, q and s.
        tokens: Number of t.
        inner: Number of s; it divides the columns.
        half: 0 to 3: products of the same sizes in other layouts, which are measured apart.
        bias: (blocks columns,) or None.
        of: Number of all tokens, if these are some of them: one measurement serves all parts.
    """
    if tokens == 0:
        return
    blocks, columns, terms = weight.shape

    def grid(tile: dict[str, int]) -> tuple[int]:
        tiles = triton.cdiv(tokens, tile["tile_tokens"]) * triton.cdiv(
            columns, tile["tile_columns"]
        )
        return (blocks * tiles,)

    with on_device_of(x):
        block_kernel[grid](
            x,
            weight,
            None if bias is None else bias.contiguous(),
            y,
            # A choice of configuration serves all numbers of tokens up to a power of two.
            triton.next_power_of_2(of or tokens),
            half,
            tokens,
            blocks,
            columns,
            terms,
            inner,
            *x_strides,
            *weight.stride(),
            *y_strides,
            precision=precision_of(x),
        )
