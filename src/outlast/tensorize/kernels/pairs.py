"""A layer's way forward and backward through the kernels, for plans that say so.

What `outlast.tensorize.execute` does along routes, for networks of two cores that the kernels know
(`outlast.tensorize.planner.choose.pair_of`): low-rank, block tensor-train and Monarch layers.

Tested in Triton's interpreter; not yet run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.tensorize.kernels import blocks, bottleneck
from outlast.tensorize.planner.choose import BlockPair, LowRankPair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def fits(pair: LowRankPair | BlockPair, dtype: torch.dtype) -> bool:
    """Return whether the kernels serve these sizes well."""
    if isinstance(pair, LowRankPair):
        return pair.activation in bottleneck.ACTIVATIONS and bottleneck.fits(pair.rank, dtype)
    return blocks.fits(pair.in_modes, pair.out_modes, pair.rank, dtype)


def forward(
    x: Tensor, cores: Sequence[Tensor], bias: Tensor | None = None, *, learns: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Multiply x with the pair's matrix.

    Args:
        x: (tokens, in_features).
        cores: A and B of a low-rank layer, or R and L of blocks; they get the type of x.
        bias: (out_features,).
        learns: Keep what `backward` can use and is narrow: the h of a low-rank layer.

    Returns:
        y (tokens, out_features), and what to keep.
    """
    first, second = (core.to(x.dtype) for core in cores)
    bias = None if bias is None else bias.to(x.dtype)
    if first.ndim == 4:
        return blocks.blocks_forward(x, first, second, bias)[0], []
    y, hidden = bottleneck.bottleneck_forward(x, first, second, bias, save=learns)
    return y, [] if hidden is None else [hidden]


def backward(
    x: Tensor,
    dy: Tensor,
    cores: Sequence[Tensor],
    *,
    wanted: Sequence[int],
    want_x: bool,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """Go backward.

    Args:
        x: (tokens, in_features).
        dy: (tokens, out_features).
        cores: Both.
        wanted: Cores whose gradients are asked for.
        want_x: Whether that of x is.
        kept: What `forward` kept, if that is still there.

    Returns:
        The gradient of x or None, and those of the wanted cores in the types of the cores.
    """
    first, second = (core.to(x.dtype) for core in cores)
    dy = dy.contiguous()
    found: dict[int, Tensor] = {}
    dx: Tensor | None = None
    if first.ndim == 4:
        if want_x or wanted:
            dx, gradient = blocks.blocks_backward(dy, first, second)
        if wanted:
            hidden = blocks.blocks_hidden(x, first)
            found = dict(enumerate(blocks.blocks_weight_gradients(x, dy, hidden, gradient)))
    else:
        if want_x:
            dx, dh, _ = bottleneck.bottleneck_backward(dy, None, first, second)
        elif 0 in wanted:
            dh = torch.mm(dy, second)
        if 0 in wanted:
            found[0] = torch.mm(dh.t(), x)
        if 1 in wanted:
            found[1] = torch.mm(dy.t(), kept[0] if kept else torch.mm(x, first.t()))
    found = {core: found[core].to(cores[core].dtype) for core in wanted}
    return (dx if want_x else None), found


def tune(
    pair: LowRankPair | BlockPair, tokens: int, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Call every kernel that a layer of this pair can take, so that none is tuned later.

    Args:
        pair: Which kernels, and of which sizes.
        tokens: Rows of x.
        dtype: Of everything.
        device: Where.
    """

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    if isinstance(pair, BlockPair):
        (m1, m0), (n0, n1) = pair.in_modes, pair.out_modes
        x = zeros(tokens, m1 * m0)
        right, left = zeros(m1, n0, pair.rank, m0), zeros(n0, n1, m1, pair.rank)
        for bias in (None, zeros(n0 * n1)):
            y, _ = blocks.blocks_forward(x, right, left, bias)
        backward(x, y, (right, left), wanted=(0, 1), want_x=True)
        return
    x = zeros(tokens, pair.inputs)
    down, up = zeros(pair.rank, pair.inputs), zeros(pair.outputs, pair.rank)
    act = pair.activation
    for bias in (None, zeros(pair.outputs)):
        for save in (False, True):
            # Triton tunes anew for other tensors that are given, the last is that of training.
            y, hidden = bottleneck.bottleneck_forward(x, down, up, bias, activation=act, save=save)
    hidden = None if act == "identity" else hidden
    bottleneck.bottleneck_backward(y, hidden, down, up, activation=act)
