"""Whether a pair of factors goes through the Triton kernels, by their bytes and operations.

A kernel's time is that of what it is bound by: of its operations, at a share of the rate of the
device's matrix products, or of the bytes that it moves. Neither has been measured: **no kernel has
run on a GPU yet**, so the shares below are guesses on the cautious side, and nothing here is ever
chosen before `warm` was called for it, which a CPU refuses.

For a few tokens, as in decoding, the kernels are not for: of 64 tokens a bottleneck is one program,
and all but one of the device's processors would wait for it.

No torch at import.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.planner.cache import PLANS
from outlast.tensorize.planner.table import AXIS, BYTES_AXIS
from outlast.tensorize.planner.walk import bias_gradient

if TYPE_CHECKING:
    import torch
    from torch import nn

    from outlast.tensorize.network import Network
    from outlast.tensorize.plan import Plan
    from outlast.tensorize.planner.price import Prices

_SHARE = 0.6
"""Of the rate of large products that the kernels reach; a guess."""

_CACHE_SPEED = 3.0
"""Bytes that the L2 cache gives while the memory gives one; from data sheets and tests of others'
kernels, a guess for these."""

_START = 5
"""Starts of an operation that starting a kernel takes as long as: Triton's launcher is Python."""

_PROCESSORS = 128
"""Multiprocessors of the devices that the kernels are for have: 108 to 132."""

_FEWEST = 128
"""Tokens below which no kernel is taken: they fill no tile."""

_TILE = 64
"""Tokens to a program of a bottleneck; those of blocks take twice as many, and as many columns."""


@dataclass(frozen=True)
class LowRank:
    """act(x A^T) B^T: `outlast.tensorize.kernels.bottleneck`.

    Attributes:
        inputs: Features of x.
        rank: Features between.
        outputs: Features of y.
        activation: ``identity`` or a key of `outlast.tensorize.bottleneck.ACTIVATIONS`.
    """

    inputs: int
    rank: int
    outputs: int
    activation: str = "identity"

    def forward(self, tokens: int, prices: Prices, *, keep: bool) -> float:
        """Predicted seconds of y, and of writing h if it is kept."""
        return self._launch(tokens, prices, int(keep))

    def backward(self, tokens: int, prices: Prices) -> float:
        """Predicted seconds of the gradients of x and of both factors."""
        seconds = self._launch(tokens, prices, 1 if self.activation == "identity" else 3)
        seconds += prices.product(1, self.rank, self.inputs, tokens, "tn")
        return seconds + prices.product(1, self.outputs, self.rank, tokens, "tn")

    def _launch(self, tokens: int, prices: Prices, narrow: int) -> float:
        """One kernel that reads or writes so many tensors as wide as the rank beside x and y."""
        ends = self.inputs + self.outputs
        padded = max(16, 1 << (self.rank - 1).bit_length())
        programs = math.ceil(tokens / _TILE)
        return _kernel(
            prices,
            flops=2 * tokens * ends * padded,
            moved=tokens * (ends + narrow * self.rank) + ends * self.rank,
            cached=programs * ends * padded,
            programs=programs,
        )

    def products(self, tokens: int, prices: Prices) -> float:
        """Predicted seconds of all that `forward` and `backward` do, by products of torch."""
        forth = prices.product(1, tokens, self.rank, self.inputs, "nt")
        forth += prices.product(1, tokens, self.outputs, self.rank, "nt")
        back = prices.product(1, tokens, self.rank, self.outputs, "nn")
        back += prices.product(1, tokens, self.inputs, self.rank, "nn")
        back += prices.product(1, self.rank, self.inputs, tokens, "tn")
        back += prices.product(1, self.outputs, self.rank, tokens, "tn")
        # The activation, once more on the way back, and its slope.
        return forth + back + 3 * prices.element(tokens * self.rank)


@dataclass(frozen=True)
class Blocks:
    """Block tensor-trains and Monarch: `outlast.tensorize.kernels.blocks`.

    Attributes:
        in_modes: m1, m0.
        out_modes: n0, n1.
        rank: r.
    """

    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    rank: int

    def forward(self, tokens: int, prices: Prices, *, keep: bool) -> float:
        """Predicted seconds of y; what is between the halves stays in the L2 cache."""
        (m1, m0), (n0, n1) = self.in_modes, self.out_modes
        wide = float(keep)
        first = _half(tokens, prices, (m1, n0 * self.rank, m0), (1.0, wide))
        return first + _half(tokens, prices, (n0, n1, m1 * self.rank), (wide, 1.0))

    def backward(self, tokens: int, prices: Prices) -> float:
        """Predicted seconds of h again, and of the gradients of x and of both cores."""
        (m1, m0), (n0, n1), rank = self.in_modes, self.out_modes, self.rank
        first = (m1, n0 * rank, m0), (n0, m1 * rank, n1), (m1, m0, n0 * rank)
        seconds = sum(_half(tokens, prices, sizes, (1.0, 1.0)) for sizes in first)
        seconds += prices.product(m1, n0 * rank, m0, tokens, "nn")
        return seconds + prices.product(n0, n1, m1 * rank, tokens, "tt")


def _half(
    tokens: int, prices: Prices, sizes: tuple[int, int, int], memory: tuple[float, float]
) -> float:
    """One launch: so many blocks of products of (tokens, terms) with (terms, columns).

    Args:
        tokens: Rows.
        prices: Of the device.
        sizes: Blocks, columns, terms.
        memory: Which part of what is read, and of what is written, the memory sees.
    """
    blocks, columns, terms = sizes
    read, written = (blocks * tokens * item for item in (terms, columns))
    # Products are in tiles of at least 32 columns and terms.
    tiled = math.ceil(columns / 32) * math.ceil(terms / 32) * 1024
    rows = math.ceil(tokens / (2 * _TILE))
    across = math.ceil(columns / (2 * _TILE))
    weight = blocks * columns * terms
    return _kernel(
        prices,
        flops=2 * blocks * tokens * tiled,
        moved=read * memory[0] + written * memory[1] + weight,
        cached=read * across + written + weight * rows,
        programs=blocks * rows * across,
    )


def _kernel(prices: Prices, *, flops: float, moved: float, cached: float, programs: int) -> float:
    """Predicted seconds of one launch, from numbers moved in memory and through the L2 cache."""
    by_flops, by_number = _rates(prices)
    bound = max(flops * by_flops / _SHARE, moved * by_number, cached * by_number / _CACHE_SPEED)
    busy = min(programs / _PROCESSORS, 1.0)
    return _START * prices.launch["operation"] + bound / busy


@functools.lru_cache(maxsize=64)
def _rates(prices: Prices) -> tuple[float, float]:
    """Seconds of an operation of a large product, and of moving a number."""
    side, size = AXIS[-1], BYTES_AXIS[-1]
    item = prices.table.item_bytes
    product = prices.product(1, side, side, side, "nt") / (2 * side**3)
    # The measured addition reads two numbers and writes one.
    return product, prices.element(size // item, fresh=False) / (3 * size / item)


@functools.lru_cache(maxsize=4096)
def pair_of(network: Network, activation: str = "identity") -> LowRank | Blocks | None:
    """What the kernels see in a network; None if they have nothing for it.

    Args:
        network: Of two cores.
        activation: What is between them.
    """
    inputs, outputs = network.inputs, network.outputs
    whole = network.size(inputs), network.size(outputs)
    bonds, plain = network.bonds, activation == "identity"
    if len(bonds) != 1 or whole != (network.in_features, network.out_features):
        return None
    rank = network.size(bonds)
    if (len(inputs), len(outputs)) == (1, 1) and network.cores == (bonds + inputs, outputs + bonds):
        return LowRank(whole[0], rank, whole[1], activation)
    if not plain or (len(inputs), len(outputs)) != (2, 2):
        return None
    m1, m0, n0, n1 = (*inputs, *outputs)
    if network.cores != (m1 + n0 + bonds + m0, n0 + n1 + m1 + bonds):
        return None
    sizes = dict(network.sizes)
    return Blocks((sizes[m1], sizes[m0]), (sizes[n0], sizes[n1]), rank)


# Pairs, buckets of tokens and dtypes for which the kernels have been compiled and tuned.
READY: set[tuple[LowRank | Blocks | None, int, torch.dtype]] = set()


def warm(
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activation: str = "identity",
) -> bool:
    """Compile and tune the kernels for a layer; from then on its plans may take them.

    Triton finds a kernel's fastest tiles at its first call by running them all, which waits for
    the device and takes seconds: neither a training step nor the capture of a CUDA graph may do
    that. Hence the planner takes no kernel that has not been warmed, and this is to be called
    before, with the numbers of tokens that will come, in every process. What is found serves all
    numbers of tokens up to the next power of two, from more than half of that.

    Which tiles are fastest is a matter of noise among equals, and other tiles round differently: a
    run that was resumed may differ in the last bits from one that was not.

    Args:
        network: That of the layer.
        tokens: Rows of x.
        dtype: Of x; that of autocast where it is on.
        device: Where the layer runs.
        activation: Between the factors of a low-rank layer.

    Returns:
        Whether there are kernels for it: not on a CPU, nor without Triton, nor for other networks,
        nor for a few tokens.
    """
    from outlast.tensorize.kernels import available

    pair = pair_of(network, activation)
    if pair is None or tokens < _FEWEST or not available(device, dtype):
        return False
    from outlast.tensorize.kernels import pairs

    if not pairs.fits(pair, dtype):
        return False
    if (pair, _bucket(tokens), dtype) not in READY:
        pairs.tune(pair, tokens, dtype, device)
        READY.add((pair, _bucket(tokens), dtype))
        PLANS.clear()
    return True


def warm_model(
    model: nn.Module,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> int:
    """`warm` for all layers of a model.

    Args:
        model: With tensorized layers.
        tokens: In one pass.
        dtype: Of activations; None: that of each layer's factors.
        device: Where the model will run; None: where its factors lie.

    Returns:
        The number of layers for which there are kernels.
    """
    from outlast.tensorize.forms.latent import LatentLinear
    from outlast.tensorize.forms.sparse import SparseLowRankLinear
    from outlast.tensorize.layer import StructuredLinear

    count = 0
    for layer in model.modules():
        own = isinstance(layer, LatentLinear | SparseLowRankLinear)
        if isinstance(layer, StructuredLinear) and not own:
            first = layer.factors()[0]
            activation = getattr(layer, "activation", "identity")
            where = device or first.device
            count += warm(layer.network, tokens, dtype or first.dtype, where, activation=activation)
    return count


def _bucket(tokens: int) -> int:
    return (tokens - 1).bit_length()


def is_ready(network: Network, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels have been warmed for a layer, a number of tokens and a dtype."""
    return device.type == "cuda" and (pair_of(network), _bucket(tokens), dtype) in READY


def kernel_seconds(network: Network, tokens: int, prices: Prices, learns: bool) -> float:
    """Predicted seconds of a layer's forward and backward by kernels; infinite without kernels.

    Counts what `outlast.tensorize.planner.search.Search.price` counts for other plans.

    Args:
        network: That of the layer.
        tokens: Rows of x.
        prices: What operations cost.
        learns: Whether there is a way back; forward alone if not.
    """
    pair = pair_of(network)
    if pair is None:
        return math.inf
    if not learns:
        return pair.forward(tokens, prices, keep=False) + prices.launch["chain"]
    keep = isinstance(pair, LowRank)
    seconds = pair.forward(tokens, prices, keep=keep) + pair.backward(tokens, prices)
    return seconds + bias_gradient(network, tokens, prices) + prices.launch["function"]


def with_kernel(
    plan: Plan,
    network: Network,
    tokens: int,
    prices: Prices,
    *,
    dtype: torch.dtype,
    device: torch.device,
    learns: bool,
) -> Plan:
    """The plan by kernels if they are ready and predicted to be faster, else the plan itself.

    Its routes stay, for tensors that no kernel can read.
    """
    if not is_ready(network, tokens, dtype, device):
        return plan
    seconds = kernel_seconds(network, tokens, prices, learns)
    if seconds >= plan.seconds:
        return plan
    share = seconds / plan.dense_seconds
    reason = f"{share:.2f} x the dense layer's time by a fused kernel, derived and not measured"
    return replace(plan, fused=True, plain=False, seconds=seconds, reason=reason)


def bottleneck_pays(
    inputs: int,
    rank: int,
    outputs: int,
    *,
    activation: str,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether two factors with an activation between them should go through the kernel.

    Args:
        inputs: Features of x.
        rank: Features between.
        outputs: Features of y.
        activation: Between the factors.
        tokens: Rows of x.
        dtype: Of x and the factors.
        device: Where they are.
    """
    pair = LowRank(inputs, rank, outputs, activation)
    if device.type != "cuda" or (pair, _bucket(tokens), dtype) not in READY:
        return False
    from outlast.tensorize.planner.choose import prices_of

    return _pays(pair, 1 << _bucket(tokens), prices_of(dtype, device))


@functools.lru_cache(maxsize=1024)
def _pays(pair: LowRank, tokens: int, prices: Prices) -> bool:
    fused = pair.forward(tokens, prices, keep=True) + pair.backward(tokens, prices)
    return fused < pair.products(tokens, prices)
