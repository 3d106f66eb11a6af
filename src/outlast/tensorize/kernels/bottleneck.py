"""Two products with a narrow tensor between them, in one launch: y = act(x A^T) B^T + bias.

A program takes a block of tokens. It reads its rows of x once, keeps ``h = x A^T`` (tokens, rank)
in registers, applies the activation to the fp32 sums, rounds once, and writes its rows of y. Two
products and an activation move ``tokens (in + 4 rank + out)`` numbers through the memory, this
kernel ``tokens (in + out)``, and ``tokens rank`` more where h is to be saved. Every block of tokens
reads A and B again, from the L2 cache: ``(in + out) rank / block`` numbers a token, which for rank
128 and blocks of 128 is as much as x and y themselves. Smaller blocks starve the matrix units.

The gain is in launches and at small ranks: from rank 256 the products are bound by arithmetic
whose sums already fill the registers, and two cuBLAS products are as good. Rank is padded to a
power of two (`outlast.tensorize.kernels.padded`): rank 192 costs as much as 256.

The input's gradient is the same chain read backwards, ``dx = (dy B * act'(h)) A``, so the same
kernel computes it with the factors exchanged and transposed by their strides. The factors'
gradients are plain products, ``dA = dh^T x`` and ``dB = dy^T act(h)``, left to cuBLAS.

Compiled for compute capability 9.0 and tested in Triton's interpreter; not yet run on a GPU.
"""

# ruff: noqa: PLR0917 -- a kernel's parameters are what its launch names

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from outlast.errors import TensorizeError
from outlast.tensorize.kernels import (
    SHARED_BYTES,
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

ACTIVATIONS = ("identity", "silu", "relu", "tanh", "gelu")
"""`gelu` is the exact one (erf); all are 0 at 0."""

_WIDEST_RANK = 256
"""Of 2-byte numbers, after padding: 64 tokens' fp32 sums then fill half the registers."""


def fits(rank: int, dtype: torch.dtype) -> bool:
    """Return whether h stays on the chip: up to rank 256 for 2-byte types, 128 for fp32."""
    return dtype in TYPES and rank >= 1 and padded(rank) * dtype.itemsize <= 2 * _WIDEST_RANK


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **launched: Any) -> Any:
    """Configurations whose tiles fit in shared memory and whose sums fit in registers."""
    size, rank = arguments["x"].element_size(), (arguments | launched)["tile_rank"]
    fitting = []
    for config in configs:
        tokens, terms, outputs, _ = (config.kwargs[name] for name in _TILES)
        first = config.num_stages * (tokens + rank) * terms * size
        second = (config.num_stages * rank * outputs + tokens * max(rank, outputs)) * size
        sums_per_thread = tokens * (rank + outputs) // (32 * config.num_warps)
        if max(first, second) <= SHARED_BYTES and sums_per_thread <= 192:
            fitting.append(config)
    return fitting or configs[-1:]


_TILES = ("tile_tokens", "tile_terms", "tile_outputs", "splits")


@triton.jit  # type: ignore[untyped-decorator]
def _activated(h: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    if activation == "silu":
        h = h * tl.sigmoid(h)
    elif activation == "relu":
        h = tl.maximum(h, 0.0)
    elif activation == "tanh":
        h = 2.0 * tl.sigmoid(2.0 * h) - 1.0
    elif activation == "gelu":
        h = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    return h


@triton.jit  # type: ignore[untyped-decorator]
def _slope(h: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    if activation == "silu":
        s = tl.sigmoid(h)
        slope = s * (1.0 + h * (1.0 - s))
    elif activation == "relu":
        slope = tl.where(h > 0.0, 1.0, 0.0)
    elif activation == "tanh":
        s = tl.sigmoid(2.0 * h)
        slope = 4.0 * s * (1.0 - s)
    elif activation == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * h * h)
        slope = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476)) + h * density
    else:
        slope = h * 0.0 + 1.0
    return slope


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=configurations(
        _TILES,
        (32, 32, 32, 2),
        (
            ((64, 64, 64, 1), 4, 3),
            # The only one whose sums leave registers for the slope at rank 256.
            ((64, 64, 64, 1), 8, 3),
            ((64, 64, 128, 1), 8, 3),
            ((128, 64, 64, 1), 8, 3),
            ((128, 64, 128, 1), 8, 3),
            # Few tokens leave multiprocessors idle: several programs share a block of tokens, each
            # writes a part of y, and all compute h.
            ((128, 64, 64, 2), 8, 3),
            ((64, 64, 64, 4), 4, 3),
            ((64, 32, 32, 1), 4, 3),
        ),
    ),
    key=["size", "inputs", "rank", "outputs", "backward"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def bottleneck_kernel(
    x: tl.tensor,
    down: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    hidden: tl.tensor,
    gradient: tl.tensor,
    activated: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    rank: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    down_rank_stride: tl.tensor,
    down_term_stride: tl.tensor,
    up_output_stride: tl.tensor,
    up_rank_stride: tl.tensor,
    y_stride: tl.tensor,
    activation: tl.constexpr,
    backward: tl.constexpr,
    precision: tl.constexpr,
    tile_rank: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_terms: tl.constexpr,
    tile_outputs: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """Store y = middle(x down^T) up^T + bias, where middle is `activation` or its derivative.

    Forward, `hidden` (tokens, rank) is written if it is given. Backward, it is read, x is the
    output's gradient, y the input's, and `gradient` and `activated` (tokens, rank) are written.
    """
    token = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    split = tl.program_id(1)
    inside = token < tokens
    token = token.to(tl.int64)
    column = tl.arange(0, tile_rank)
    used = column < rank

    total = tl.zeros((tile_tokens, tile_rank), tl.float32)
    for start in range(0, inputs, tile_terms):
        term = start + tl.arange(0, tile_terms)
        read = term < inputs
        left = tl.load(
            x + token[:, None] * x_stride + term[None, :],
            mask=inside[:, None] & read[None, :],
            other=0.0,
        )
        right = tl.load(
            down + column[None, :] * down_rank_stride + term[:, None] * down_term_stride,
            mask=used[None, :] & read[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=precision)

    narrow = token[:, None] * rank + column[None, :]
    present = inside[:, None] & used[None, :]
    # All splits compute h; the first writes it.
    written = present & (split == 0)
    if backward:
        if activation != "identity":
            h = tl.load(hidden + narrow, mask=present, other=0.0).to(tl.float32)
            total *= _slope(h, activation)
            if activated is not None:
                again = _activated(h, activation).to(activated.dtype.element_ty)
                tl.store(activated + narrow, again, mask=written)
        if gradient is not None:
            tl.store(gradient + narrow, total.to(gradient.dtype.element_ty), mask=written)
    else:
        if hidden is not None:
            tl.store(hidden + narrow, total.to(hidden.dtype.element_ty), mask=written)
        total = _activated(total, activation)

    middle = total.to(x.dtype.element_ty)
    share = tl.cdiv(tl.cdiv(outputs, tile_outputs), splits) * tile_outputs
    for start in range(split * share, tl.minimum((split + 1) * share, outputs), tile_outputs):
        output = start + tl.arange(0, tile_outputs)
        existing = output < outputs
        right = tl.load(
            up + output[None, :] * up_output_stride + column[:, None] * up_rank_stride,
            mask=used[:, None] & existing[None, :],
            other=0.0,
        )
        part = tl.dot(middle, right, input_precision=precision)
        if bias is not None:
            part += tl.load(bias + output, mask=existing, other=0.0).to(tl.float32)[None, :]
        place = y + token[:, None] * y_stride + output[None, :]
        tl.store(place, part.to(y.dtype.element_ty), mask=inside[:, None] & existing[None, :])


def bottleneck_forward(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
    save: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``act(x down^T) up^T + bias``.

    The activation is of the fp32 sums, before they are rounded to the type of `x`. The first call
    of a size (and of all token counts up to the next power of two) measures which configuration is
    fastest, and waits for the device.

    Args:
        x: (tokens, in_features), in fp32, bf16 or fp16.
        down: A (rank, in_features).
        up: B (out_features, rank).
        bias: (out_features,) or None.
        activation: One of `ACTIVATIONS`.
        save: Also write h = x A^T, before the activation, for `bottleneck_backward`.

    Returns:
        y (tokens, out_features); h (tokens, rank) if it is to be saved, else None.

    Raises:
        TensorizeError: For a rank that does not fit, an unknown activation, or operands of
            different sizes, types or devices; bf16 in Triton's interpreter.
    """
    check_operands(x, down=down, up=up, bias=bias)
    tokens, rank, outputs = x.shape[0], down.shape[0], up.shape[0]
    check_shape("down", down, (rank, x.shape[1]))
    check_shape("up", up, (outputs, rank))
    if bias is not None:
        check_shape("bias", bias, (outputs,))
    y = x.new_empty(tokens, outputs)
    hidden = x.new_empty(tokens, rank) if save else None
    _launch(x, down, up, y, bias=bias, hidden=hidden, activation=activation)
    return y, hidden


def bottleneck_backward(
    dy: Tensor, hidden: Tensor | None, down: Tensor, up: Tensor, *, activation: str = "identity"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``dx = (dy up * act'(h)) down`` and what the factors' gradients need.

    ``dA = dh^T x``, ``dB = dy^T act(h)`` and ``dbias = dy.sum(0)`` are left to plain products.

    Args:
        dy: (tokens, out_features).
        hidden: h (tokens, rank) as `bottleneck_forward` has saved it; may be None for `identity`.
        down: A (rank, in_features).
        up: B (out_features, rank).
        activation: That of the forward pass.

    Returns:
        dx (tokens, in_features); dh (tokens, rank), the gradient of h; act(h) (tokens, rank), which
        for `identity` is `hidden` itself.

    Raises:
        TensorizeError: As `bottleneck_forward`, and for an h that is missing.
    """
    check_operands(dy, hidden=hidden, down=down, up=up)
    tokens, rank, inputs = dy.shape[0], *down.shape
    check_shape("up", up, (dy.shape[1], rank))
    activated = hidden
    if hidden is not None:
        check_shape("hidden", hidden, (tokens, rank))
        hidden = hidden.contiguous()
    elif activation != "identity":
        raise TensorizeError(
            f"hidden = None has no slope of activation = {activation}; call bottleneck_forward "
            "with save=True."
        )
    if activation != "identity":
        activated = dy.new_empty(tokens, rank)
    dx, gradient = dy.new_empty(tokens, inputs), dy.new_empty(tokens, rank)
    middle = {"hidden": hidden, "gradient": gradient, "activated": activated}
    _launch(dy, up.t(), down.t(), dx, **middle, activation=activation, backward=True)
    return dx, gradient, activated


def _launch(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    y: Tensor,
    *,
    activation: str,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    gradient: Tensor | None = None,
    activated: Tensor | None = None,
    backward: bool = False,
) -> None:
    (tokens, inputs), (outputs, rank) = x.shape, up.shape
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise TensorizeError(f"activation = {activation} has no fused kernel; use one of {known}.")
    if not fits(rank, x.dtype):
        raise TensorizeError(
            f"rank = {rank} does not fit on the chip in {x.dtype}; choose a plan of two products."
        )
    if tokens == 0:
        return
    x = rows_contiguous(x)

    def grid(tile: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(tokens, tile["tile_tokens"]), tile["splits"]

    with on_device_of(x):
        bottleneck_kernel[grid](
            x,
            down,
            up,
            None if bias is None else bias.contiguous(),
            hidden,
            gradient,
            activated,
            y,
            # A choice of configuration serves all numbers of tokens up to a power of two.
            triton.next_power_of_2(tokens),
            tokens,
            inputs,
            rank,
            outputs,
            x.stride(0),
            *down.stride(),
            *up.stride(),
            y.stride(0),
            activation=activation,
            backward=backward,
            precision=precision_of(x),
            tile_rank=padded(rank),
        )
