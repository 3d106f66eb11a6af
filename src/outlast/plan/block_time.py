"""Seconds of one block for one micro-batch on one rank, and of collectives on its links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.batch import Array, Cases
from outlast.plan.constants import Constants

HOST_KERNELS = 12.0
"""Kernels of a block forward; twice as many backward."""
AUTOCAST_KERNELS = 20.0
"""More of them on processors in bf16, where each cast is an operation of its own."""
EAGER_PASSES = 3.5
"""Elementwise traffic where no compiler joins operations, over that of fused kernels."""
EXPONENTIALS = 32.0
"""Features of a head whose products take as long as the softmax of their scores (processors).

Own prior, as the next two: torch's fused attention alone, one thread of a Xeon with AMX, reached
0.31, 0.58 and 0.8 of the fp32 rate with 32, 64 and 128 features."""
HALF_ATTENTION = 2.0
"""Rate of fused attention in bf16 over that in fp32 on processors, forward (1.6 to 3.7 there);
neither comes near the rate of large products."""
SCORE_KEYS = 512.0
"""Keys that processors' fused attention takes at a time."""
SCORE_KERNELS = 3.0
"""Kernels of such a block in bf16, where each of its five products packs its operands anew (70 to
100 us there)."""
PROCESSOR_SIDE = 0.1
"""Of `matmul_half_side`, for fp32 on processors: no kernel fills hundreds of units."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block, forward, in seconds of shape (cases,).

    Attributes:
        products: Matrix products of projections and feed-forward parts.
        attention: Scores, softmax and their use.
        elementwise: Norms, activations, residuals, casts.
        tokens: Of one micro-batch on one rank.
    """

    products: Array
    attention: Array
    elementwise: Array
    tokens: Array


def product_seconds(
    cases: Cases, constants: Constants, rows: Array, inner: Array, columns: Array
) -> Array:
    """A matrix product of (rows, inner) and (inner, columns).

    Its rate saturates with the shortest side s as `s / (s + s_half)`, and its operands are moved
    once: `2 m k n (1 + s_half / s) / F + b (m k + k n + m n) / 2 B` (a smooth roofline: Williams
    et al. 2009; half of the traffic is hidden behind the products).

    Args:
        cases: Rates of the device.
        constants: Efficiencies.
        rows: (cases,) tokens.
        inner: (cases,) features that are summed over.
        columns: (cases,) features that come out.
    """
    flops = 2.0 * rows * inner * columns
    shortest = np.minimum(np.minimum(rows, inner), columns)
    rate = cases.matmul_flop_per_s * constants.matmul_efficiency
    moved = cases.value_bytes * (rows * inner + inner * columns + rows * columns)
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    half = half_side(cases, constants, cases.matmul_flop_per_s)
    saturation = 1.0 + half / np.maximum(shortest, 1.0)
    return flops / rate * saturation + moved / (2.0 * bandwidth)


def half_side(cases: Cases, constants: Constants, flop_per_s: Array) -> Array:
    """Shortest side at which a product reaches half of a rate.

    On processors it grows with the rate: what a small product loses is the time to pack its
    operands, which is the same for the faster multiplications of a lower precision.

    Args:
        cases: (cases,).
        constants: `matmul_half_side`, of fp32 on processors.
        flop_per_s: (cases,) the best product's.
    """
    factor = np.where(
        cases.processor > 0.0, PROCESSOR_SIDE * flop_per_s / cases.fp32_flop_per_s, 1.0
    )
    return constants.matmul_half_side * factor


def _feed_forward(cases: Cases, constants: Constants, rows: Array, width: Array) -> Array:
    into = (cases.matrices - 1.0) * width
    return np.where(
        width > 0.0,
        product_seconds(cases, constants, rows, cases.hidden, np.maximum(into, 1.0))
        + product_seconds(cases, constants, rows, np.maximum(width, 1.0), cases.hidden),
        0.0,
    )


def block(cases: Cases, constants: Constants) -> Block:
    """An average block of the model, so that mixtures and dense blocks count by their share."""
    ranks = cases.tensor
    tokens = cases.micro_batch * cases.sequence / cases.context
    qkv = (cases.query_width + 2.0 * cases.kv_width) / ranks
    products = product_seconds(cases, constants, tokens, cases.hidden, qkv) + product_seconds(
        cases, constants, tokens, cases.query_width / ranks, cases.hidden
    )
    # Projections that are not four plain matrices (multi-head latent attention) cost by their size.
    plain = cases.hidden * (2.0 * cases.query_width + 2.0 * cases.kv_width)
    products = products * cases.attention_parameters / plain
    mixture = cases.mixture_layers / cases.layers
    # Each expert of the busiest rank gets its share of all that the group routes.
    routed = tokens * cases.experts_per_token * constants.expert_imbalance
    per_expert = routed * cases.expert / np.maximum(cases.experts, 1.0)
    held = cases.experts / cases.expert
    experts = held * _feed_forward(cases, constants, per_expert, cases.expert_intermediate / ranks)
    shared = _feed_forward(cases, constants, tokens, cases.shared_intermediate / ranks)
    dense = _feed_forward(cases, constants, tokens, cases.intermediate / ranks)
    products = products + (1.0 - mixture) * dense + mixture * (experts + shared)

    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    score_flops = 4.0 * tokens * cases.sequence * cases.query_width / ranks
    # Of fused attention at an efficiency of 1: the peak, and on processors what softmax leaves.
    softmax = 1.0 + EXPONENTIALS * cases.heads / cases.query_width
    processor = cases.fp32_flop_per_s * np.where(cases.half > 0.0, HALF_ATTENTION, 1.0) / softmax
    accelerator = cases.peak_flop_per_s / (1.0 + cases.quantized)
    fused = score_flops / 2.0 / np.where(cases.processor > 0.0, processor, accelerator)
    scores = tokens * cases.sequence * cases.heads / ranks
    unfused = score_flops / (cases.matmul_flop_per_s * constants.matmul_efficiency)
    moved = scores * cases.value_bytes * constants.score_passes
    attention = np.where(
        cases.fused_attention > 0.0,
        fused / constants.attention_efficiency,
        1.2 * unfused + moved / bandwidth,
    )

    along = np.where(cases.sequence_parallel > 0.0, ranks, 1.0)
    wide = (1.0 - mixture) * cases.intermediate + mixture * (
        cases.experts_per_token * cases.expert_intermediate + cases.shared_intermediate
    )
    values = 8.0 * cases.hidden / along + (4.0 * cases.query_width + cases.matrices * wide) / ranks
    # A processor's norms, rotations and activations are an operation each, on fp32 values.
    values = np.where(cases.processor > 0.0, EAGER_PASSES * values, values)
    value_bytes = np.where(cases.processor > 0.0, 4.0, cases.value_bytes)
    casts = (
        np.maximum(cases.quantized, cases.processor * cases.half)
        * constants.cast_passes
        * (2.0 * cases.hidden + cases.query_width + wide)
        / ranks
    )
    elementwise = tokens * value_bytes * (values + casts) / bandwidth
    return Block(products, attention, elementwise, tokens)


def score_blocks_seconds(cases: Cases, constants: Constants) -> Array:
    """Seconds of fused attention's backward pass on processors beside its products.

    Each thread takes its blocks of scores in turn, of one head after the other.

    Args:
        cases: (cases,).
        constants: `kernel_seconds`.
    """
    if not cases.processor.any():
        return np.zeros(1)
    # As aten/native/cpu/FlashAttentionKernel.cpp divides them.
    longer = np.where(cases.sequence < 768.0, 64.0, 256.0)
    queries = np.where(cases.sequence < 192.0, 32.0, longer)
    blocks = np.ceil(cases.sequence / SCORE_KEYS) * np.ceil(cases.sequence / queries)
    heads = cases.micro_batch * cases.heads / cases.tensor / cases.cores
    slow = cases.processor * cases.half * (cases.fused_attention > 0.0)
    seconds: Array = slow * heads * blocks * SCORE_KERNELS * constants.kernel_seconds
    return seconds


def host_seconds(cases: Cases, constants: Constants) -> Array:
    """Host time to start the kernels of one block, forward and backward, with collectives.

    Args:
        cases: (cases,).
        constants: `kernel_seconds`.
    """
    kernels: Array = (
        HOST_KERNELS
        + 6.0 * (cases.tensor > 1.0)
        + 5.0 * (cases.fused_attention == 0.0)
        + 12.0 * (cases.mixture_layers > 0.0)
        + 6.0 * cases.quantized
        + AUTOCAST_KERNELS * cases.processor * cases.half
    )
    passes: Array = 3.0 + (cases.recompute == 2.0)
    return constants.kernel_seconds * kernels * passes


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk to each other.

    Attributes:
        size: (cases,) ranks.
        inside: (cases,) of them in one fast domain.
        crosses: (cases,) of bool: some of them are in different fast domains.
        bytes_per_s: (cases,) bus bandwidth of a ring over them.
        latency_seconds: (cases,) of one collective.
    """

    size: Array
    inside: Array
    crosses: np.ndarray
    bytes_per_s: Array
    latency_seconds: Array


def group(cases: Cases, constants: Constants, size: Array, stride: Array) -> Group:
    """A group of every `stride`-th rank.

    A ring over domains with m members each crosses every border on m adapters at once, so its rate
    is the smaller of the fast link's and m times a device's share of the network (NCCL's rings).

    Args:
        cases: (cases,).
        constants: Efficiencies and latency.
        size: (cases,) ranks of the group.
        stride: (cases,) distance of neighbours in rank order.
    """
    inside = np.clip(cases.fast_domain / stride, 1.0, size)
    crosses = size * stride > cases.fast_domain
    fast = cases.fast_bytes_per_s * constants.fast_efficiency
    network = cases.fabric_bytes_per_s * constants.fabric_efficiency * inside
    rate = np.where(crosses, np.minimum(fast, network), fast)
    # A hop over the network counts three on the fast link: adapter, switch, adapter.
    latency = constants.collective_seconds * np.log2(np.maximum(size, 1.0)) * (1.0 + 2.0 * crosses)
    return Group(size, inside, crosses, rate, latency + cases.fabric_latency_seconds * crosses)


def all_reduce_seconds(ranks: Group, sent_bytes: Array) -> Array:
    """Ring all-reduce, `2 (n - 1) / n` of the message per rank; half of it is one all-gather.

    Source: Thakur et al. 2005, section 4.4, with a latency per doubling in place of one per rank.

    Args:
        ranks: The group.
        sent_bytes: (cases,) size of the message.
    """
    share = 2.0 * (ranks.size - 1.0) / ranks.size
    return np.where(
        ranks.size > 1.0, share * sent_bytes / ranks.bytes_per_s + 2.0 * ranks.latency_seconds, 0.0
    )


def all_gather_seconds(ranks: Group, whole_bytes: Array) -> Array:
    """All-gather or reduce-scatter of `whole_bytes` in all."""
    return all_reduce_seconds(ranks, whole_bytes) / 2.0


def routing_seconds(
    cases: Cases, constants: Constants, ranks: Group, message_bytes: Array
) -> Array:
    """Tokens on their way to the ranks of their experts, or back.

    A token goes once to each fast domain that has some of its k experts, `M (1 - (1 - 1/M)^k)` of M
    domains on average, over its rank's own share of the network, and on from there to each of
    them over the fast link (two stages, as DeepSeek-V3 does it: 2412.19437, section 3.2.2).

    Args:
        cases: (cases,).
        constants: Efficiencies.
        ranks: The group.
        message_bytes: (cases,) of the rank's tokens, each counted once.
    """
    domains = ranks.size / ranks.inside
    chosen = cases.experts_per_token
    reached = domains * (1.0 - (1.0 - 1.0 / domains) ** chosen)
    far = reached * (domains - 1.0) / domains
    near = chosen * (ranks.size - 1.0) / ranks.size - far * (domains > 1.0)
    fast = cases.fast_bytes_per_s * constants.fast_efficiency
    network = cases.fabric_bytes_per_s * constants.fabric_efficiency
    seconds = message_bytes * (np.maximum(near, 0.0) / fast + far / network)
    return np.where(ranks.size > 1.0, seconds + ranks.latency_seconds, 0.0)


def hop_seconds(cases: Cases, constants: Constants, ranks: Group, sent_bytes: Array) -> Array:
    """From a rank to the next one; over the network where the group crosses a border.

    Args:
        cases: (cases,).
        constants: Efficiencies.
        ranks: The group; all of them hand on at once, so that the slowest hop counts.
        sent_bytes: (cases,) size of the message.
    """
    network = cases.fabric_bytes_per_s * constants.fabric_efficiency
    wire = np.where(ranks.crosses, network, ranks.bytes_per_s)
    return sent_bytes / wire + 2.0 * ranks.latency_seconds / np.maximum(np.log2(ranks.size), 1.0)
