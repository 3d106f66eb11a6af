"""Block tensor-trains and Monarch in two launches, with no permutation between them.

For x (tokens, m1 m0) and cores R (m1, n0, r, m0), L (n0, n1, m1, r) the layer is::

    h[t, m1, n0, r] = sum over m0 of R[m1, n0, r, m0] x[t, m1, m0]        m1 products of (t, m0)
    y[t, n0, n1]    = sum over m1, r of L[n0, n1, m1, r] h[t, m1, n0, r]  n0 products of (t, m1 r)

Batched products of cuBLAS cannot write h in the order in which they read it, so they need a pass
that permutes it: where h is as wide as x, the memory sees that width six times (x, four times h,
y), which at d = 1024 is longer than a dense product takes. One kernel,
`outlast.tensorize.kernels.blocks`, does both halves without that pass. h lies feature-major,
(n0, m1, r, tokens): whatever r is, neighbouring tokens are neighbours in memory, both when the
first half stores and when the second loads; token-major, r = 2 would write 4 bytes of every 32-byte
sector at a time.

Why h does leave the chip: a program that owned it would hold either all of it, which is as wide as
x (64 tokens of 2048 features do not fit in shared memory beside their operands), or one n0 of it,
and then x is read n0 times and the second product sums only r terms at a time, of which matrix
units need 16. At d = 2048 with 8 blocks in bf16 that moves 52 KiB per token through the L2 cache
(tiles of 128 tokens and 256 features), against 32 here. Instead, tokens are taken in chunks whose h
stays in the L2 cache between the halves, so that the memory sees little more than x and y.

The input's gradient has the same structure with the cores exchanged and transposed, by strides
alone: dh (m1, n0, r, tokens) from dy and L, then dx from dh and R. In these layouts both cores'
gradients are batched products that cuBLAS does without copies (`blocks_weight_gradients`).

A program computes one tile of one block's product, like any product of matrices; only the addresses
differ: a column c is the pair (q, s) = (c // inner, c % inner), and q and s have strides of their
own, so that one launch writes what the next reads in its order. Every operand's strides are given,
hence one kernel serves both halves of a block tensor-train and of its gradient. Triton compiles a
version for each stride that is 1, which is what it needs to load and store vectors.

Compiled for compute capability 9.0 and tested in Triton's interpreter; not yet run on a GPU.
"""

# ruff: noqa: PLR0917 -- a kernel's parameters are what its launch names

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from outlast.errors import TensorizeError
from outlast.tensorize.kernels import (
    SHARED_BYTES,
    SMALLEST_DOT,
    TYPES,
    check_operands,
    check_shape,
    configurations,
    on_device_of,
    padded,
    precision_of,
    rows_contiguous,
)

if TYPE_CHECKING:
    from torch import Tensor


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> Any:
    """Configurations that fit in shared memory and are not wider than the matrix."""
    size, widest = arguments["x"].element_size(), max(padded(arguments["columns"]), 32)
    fitting = []
    for config in configs:
        tokens, columns, terms = (config.kwargs[name] for name in _TILES)
        operands, stored = config.num_stages * (tokens + columns) * terms, tokens * columns
        if size * max(operands, stored) <= SHARED_BYTES and columns <= widest:
            fitting.append(config)
    return fitting or configs[-1:]


_TILES = ("tile_tokens", "tile_columns", "tile_terms")


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=configurations(
        _TILES,
        (32, 32, 16),
        (
            ((128, 256, 64), 8, 3),
            ((128, 128, 64), 8, 3),
            ((128, 128, 32), 4, 4),
            ((128, 64, 64), 4, 3),
            ((128, 32, 32), 4, 4),
            ((64, 64, 32), 4, 4),
        ),
    ),
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
            x_start + term[None, :] * x_term_stride, mask=inside[:, None] & read[None, :], other=0.0
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


_ALIGNMENT = 16
"""Tokens: rows of h begin at multiples of as many numbers, so that loads are vectors."""

_CHUNK_MULTIPLE = 128
"""Tokens: the highest tile, so that only the last chunk has an incomplete one."""


def fits(
    in_modes: tuple[int, int], out_modes: tuple[int, int], rank: int, dtype: torch.dtype
) -> bool:
    """Return whether the kernel serves these sizes well, not only correctly.

    Both products must have at least 16 terms and columns in either direction; below, most of what
    the matrix units do is padding.

    Args:
        in_modes: m1, m0.
        out_modes: n0, n1.
        rank: r.
        dtype: Of the activations and cores.
    """
    (m1, m0), (n0, n1) = in_modes, out_modes
    return dtype in TYPES and min(m0, n1, n0 * rank, m1 * rank) >= SMALLEST_DOT


def blocks_forward(x: Tensor, right: Tensor, left: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y[t, n0, n1] = sum of left[n0, n1, m1, r] right[m1, n0, r, m0] x[t, m1, m0]``, plus bias.

    The first call of a size (and of all token counts up to the next power of two) measures which
    configuration is fastest, and waits for the device. As many tokens go at a time as keep h in
    half of the L2 cache.

    Args:
        x: (tokens, m1 m0), in fp32, bf16 or fp16.
        right: R (m1, n0, r, m0).
        left: L (n0, n1, m1, r).
        bias: (n0 n1,) or None.

    Returns:
        y (tokens, n0 n1).

    Raises:
        TensorizeError: For operands of different sizes, types or devices, or bf16 in Triton's
            interpreter.
    """
    check_operands(x, right=right, left=left, bias=bias)
    m1, m0, n0, n1, rank = _sizes(right, left)
    tokens = x.shape[0]
    check_shape("x", x, (tokens, m1 * m0))
    if bias is not None:
        check_shape("bias", bias, (n0 * n1,))
    y = x.new_empty(tokens, n0 * n1)
    chunk = chunk_of(tokens, n0 * m1 * rank * x.element_size(), x.device)
    for start in range(0, tokens, chunk):
        # The same memory every time: torch's allocator hands it out again.
        hidden = _first_half(x[start : start + chunk], right, of=tokens)
        _second_half(hidden, left, y[start : start + chunk], bias, of=tokens)
    return y


def blocks_hidden(x: Tensor, right: Tensor) -> Tensor:
    """The first half alone, to recompute h (n0, m1, r, tokens) of x (tokens, m1 m0).

    Raises:
        TensorizeError: As `blocks_forward`.
    """
    check_operands(x, right=right)
    check_shape("x", x, (x.shape[0], right.shape[0] * right.shape[3]))
    return _first_half(x, right)


def blocks_backward(dy: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """The input's gradient, and that of h for `blocks_weight_gradients`.

    Args:
        dy: (tokens, n0 n1).
        right: R (m1, n0, r, m0).
        left: L (n0, n1, m1, r).

    Returns:
        dx (tokens, m1 m0); dh (m1, n0, r, tokens), whose last stride is 1.

    Raises:
        TensorizeError: As `blocks_forward`.
    """
    check_operands(dy, right=right, left=left)
    m1, m0, n0, n1, _ = _sizes(right, left)
    check_shape("dy", dy, (dy.shape[0], n0 * n1))
    dx = dy.new_empty(dy.shape[0], m1 * m0)
    # With the roles of the modes exchanged, L (n0, m1, r, n1) is the first core and R
    # (m1, m0, n0, r) the second.
    gradient = _first_half(dy, left.permute(0, 2, 3, 1), half=2)
    _second_half(gradient, right.permute(0, 3, 1, 2), dx, None, half=3)
    return dx, gradient


def blocks_weight_gradients(
    x: Tensor, dy: Tensor, hidden: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The cores' gradients, by batched products of torch that copy nothing.

    Args:
        x: (tokens, m1 m0).
        dy: (tokens, n0 n1).
        hidden: h (n0, m1, r, tokens), of `blocks_hidden`.
        gradient: dh (m1, n0, r, tokens), of `blocks_backward`.

    Returns:
        dR (m1, n0, r, m0) and dL (n0, n1, m1, r), in the type of `x`.
    """
    n0, m1, rank, tokens = hidden.shape
    x_blocks = x.view(tokens, m1, x.shape[1] // m1)
    dy_blocks = dy.view(tokens, n0, dy.shape[1] // n0)
    d_right = torch.bmm(gradient.flatten(1, 2), x_blocks.transpose(0, 1))
    d_left = torch.bmm(dy_blocks.permute(1, 2, 0), hidden.flatten(1, 2).transpose(1, 2))
    return d_right.view(m1, n0, rank, -1), d_left.view(n0, -1, m1, rank)


def _first_half(x: Tensor, core: Tensor, *, half: int = 0, of: int | None = None) -> Tensor:
    """The h (q, p, s, tokens) of x (tokens, p k) and a core (p, q, s, k) with any strides."""
    blocks, outer, rank, terms = core.shape
    # A copy only where (q, s) is not one axis.
    weight = core.reshape(blocks, outer * rank, terms)
    x = rows_contiguous(x)
    tokens = x.shape[0]
    length = math.ceil(tokens / _ALIGNMENT) * _ALIGNMENT
    hidden = x.new_empty(outer, blocks, rank, length)[..., :tokens]
    strides = 1, hidden.stride(1), hidden.stride(0), length
    block_product(
        x,
        (x.stride(0), terms, 1),
        weight,
        hidden,
        strides,
        tokens=tokens,
        inner=rank,
        half=half,
        of=of,
    )
    return hidden


def _second_half(
    hidden: Tensor,
    core: Tensor,
    y: Tensor,
    bias: Tensor | None,
    *,
    half: int = 1,
    of: int | None = None,
) -> None:
    """Store y (tokens, q n) of h (q, p, s, tokens) and a core (q, n, p, s) with any strides."""
    blocks, columns, outer, rank = core.shape
    weight = core.reshape(blocks, columns, outer * rank)
    x_strides = 1, hidden.stride(0), hidden.stride(2)
    strides = y.stride(0), columns, 0, 1
    block_product(
        hidden,
        x_strides,
        weight,
        y,
        strides,
        bias=bias,
        tokens=hidden.shape[-1],
        inner=columns,
        half=half,
        of=of,
    )


def _sizes(right: Tensor, left: Tensor) -> tuple[int, int, int, int, int]:
    """m1, m0, n0, n1, r of cores that fit each other."""
    if right.ndim != 4:
        raise TensorizeError(
            f"right has {right.ndim} dimensions; a core of two blocks has 4, see blocks_forward."
        )
    m1, n0, rank, m0 = right.shape
    n1 = left.shape[1]
    check_shape("left", left, (n0, n1, m1, rank))
    return m1, m0, n0, n1, rank


@functools.cache
def chunk_of(tokens: int, bytes_per_token: int, device: torch.device) -> int:
    """Tokens to a chunk, all about equal, whose h fills at most half of the L2 cache."""
    cache = 50 * 2**20
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    limit = max(cache // 2 // bytes_per_token, _CHUNK_MULTIPLE)
    chunks = max(math.ceil(tokens / limit), 1)
    return max(math.ceil(tokens / chunks / _CHUNK_MULTIPLE), 1) * _CHUNK_MULTIPLE
