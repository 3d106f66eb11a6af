"""Seconds of a training step as a sum of parts: blocks, collectives, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outlast.plan.batch import (
    Array,
    Cases,
    Part,
    most_blocks,
    routed_parameters,
    stage_parameters,
    texts,
    total_of,
)
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


def forward_seconds(cases: Cases, constants: Constants) -> tuple[Array, Array, Array]:
    """An average block of the model, so that mixtures and dense blocks count by their share.

    Returns:
        Forward, (cases,) each: matrix products of projections and feed-forward parts; scores,
        softmax and their use; and norms, activations, residuals and casts.
    """
    ranks, tokens = cases.tensor, cases.rank_tokens
    qkv = (cases.query_width + 2.0 * cases.kv_width) / ranks
    products = product_seconds(cases, constants, tokens, cases.hidden, qkv) + product_seconds(
        cases, constants, tokens, cases.query_width / ranks, cases.hidden
    )
    # Projections that are not four plain matrices (multi-head latent attention) cost by their size.
    plain = cases.hidden * (2.0 * cases.query_width + 2.0 * cases.kv_width)
    products = products * cases.attention_parameters / plain
    mixture = cases.mixture
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
    wide = cases.active_width
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
    return products, attention, elementwise


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
    return np.asarray(slow * heads * blocks * SCORE_KERNELS * constants.kernel_seconds)


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


@dataclass(frozen=True, slots=True)
class Stages:
    """Of each case, of shape (cases,); without a pipeline all blocks are one stage.

    Attributes:
        most: Blocks of the stage that has most.
        even: Blocks of the mean stage.
        uneven: Seconds by which the slowest stage is slower than the mean one, each micro-batch.
        bubble: Seconds of a step in which stages wait for the first and the last micro-batches.
        transfers: Seconds of a step in which activations go from stage to stage and nothing hides
            them.
    """

    most: Array
    even: Array
    uneven: Array
    bubble: Array
    transfers: Array


def stages(cases: Cases, constants: Constants, block_seconds: Array, head: Array) -> Stages:
    """The stages of some runs.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        block_seconds: Of one block and micro-batch, forward and backward.
        head: Seconds of head and loss of one micro-batch.
    """
    piped = cases.pipeline > 1.0
    most = np.where(piped, most_blocks(cases, head / block_seconds), cases.layers)
    even = cases.layers / cases.pipeline

    # In the steady state all wait for the slowest stage: that with most blocks or that with the
    # head. The mean stage has `even` blocks and its share of the head.
    with_head = np.where(
        cases.by_cost > 0.0,
        np.maximum(head, most * block_seconds),
        np.maximum(np.floor(even) * block_seconds + head, most * block_seconds),
    )
    slowest = np.where(piped, with_head, cases.layers * block_seconds + head)
    mean = even * block_seconds + head / cases.pipeline
    zero_bubble = np.where(cases.zero_bubble > 0.0, 1.0 / 3.0, 1.0)
    bubble = (cases.pipeline - 1.0) / cases.stages_per_rank * zero_bubble * mean

    stride = cases.tensor * cases.context * cases.data
    transfer_group = group(cases, constants, cases.pipeline, stride)
    along = np.where(cases.sequence_parallel > 0.0, cases.tensor, 1.0)
    handed = 2.0 * cases.rank_tokens * cases.hidden * cases.value_bytes / along
    hop = np.where(piped, hop_seconds(cases, constants, transfer_group, handed), 0.0)
    hops = cases.micro_batches * cases.stages_per_rank + cases.pipeline - 1.0
    transfers = constants.transfer_exposed * hop * hops
    return Stages(most, even, np.maximum(slowest - mean, 0.0), bubble, transfers)


HIDDEN_SHARE = 0.9
"""Of the computing time, behind which gathering and scattering can hide at most."""
GATHERS = 2.0
"""Of a block's weights in a pass of fully sharded parameters: forward and backward, where they do
not stay (`Cases.gathers_once`)."""


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """Parameters of one rank of the fullest stage, of shape (cases,).

    Attributes:
        others: Of which every data-parallel rank has the same.
        routed: Of experts, which only one in `cases.expert` ranks has.
        blocks: Of the stage.
    """

    others: Array
    routed: Array
    blocks: Array

    @property
    def all(self) -> Array:
        """Both kinds."""
        return self.others + self.routed


def shard_sizes(cases: Cases, blocks: Array, ends: Array) -> ShardSizes:
    """Both kinds of a stage's parameters.

    Args:
        cases: (cases,).
        blocks: (cases,) of the stage.
        ends: (cases,) how many of embedding and head it has.
    """
    parameters = stage_parameters(cases, blocks, ends)
    routed = blocks * routed_parameters(cases) / cases.expert / cases.tensor
    return ShardSizes(parameters - routed, routed, blocks)


def owned(cases: Cases, held: ShardSizes) -> Array:
    """(cases,): parameters that one rank's optimizer updates."""
    experts = np.maximum(cases.shards / cases.expert, 1.0)
    divided = held.others / cases.shards + held.routed / experts
    return np.where(cases.sharding > 0.0, divided, held.all)


def communication_seconds(
    cases: Cases, constants: Constants, held: ShardSizes, computing: Array
) -> tuple[Array, Array]:
    """Exposed seconds of the gradients' sum and of the weights' gathering (ZeRO: 1910.02054).

    Args:
        cases: (cases,).
        constants: Efficiencies and exposed shares.
        held: Of a rank.
        computing: (cases,) seconds of a step's kernels, behind which transfers hide.
    """
    one, room = np.ones(1), HIDDEN_SHARE * computing
    gradients, gathers, hidden = _kind(cases, constants, (held.others, held.blocks, one), room)
    if (held.routed > 0.0).any():
        experts = held.routed, held.blocks * 0.0, cases.expert
        more = _kind(cases, constants, experts, room - hidden)
        some = held.routed > 0.0
        gradients, gathers = gradients + some * more[0], gathers + some * more[1]
    return gradients, gathers


def _kind(
    cases: Cases, constants: Constants, held: tuple[Array, Array, Array], room: Array
) -> tuple[Array, Array, Array]:
    """Of parameters that one in `apart` of the data-parallel ranks has; and what was hidden."""
    parameters, blocks, apart = held
    shards = np.maximum(cases.shards / apart, 1.0)
    ranks = np.maximum(cases.data * cases.context / apart, 1.0)
    stride = cases.tensor * apart
    everyone = group(cases, constants, ranks, stride)
    shard = group(cases, constants, shards, stride)
    others = group(cases, constants, ranks / shards, stride * shards)
    gradient_bytes = parameters * cases.gradient_bytes
    weight_bytes = parameters * cases.value_bytes
    scatter = all_gather_seconds(everyone, gradient_bytes)
    gather = all_gather_seconds(everyone, weight_bytes)
    whole = np.where(
        cases.sharding == 0.0, all_reduce_seconds(everyone, gradient_bytes), scatter + gather
    )
    # Sharded gradients are scattered after every pass; all but the last hide behind the next one.
    passes = np.where(cases.gathers_once, 1.0, cases.micro_batches)
    again = np.where(cases.sharding == 2.0, passes - 1.0, 0.0) * scatter
    full = cases.sharding == 3.0
    among = all_reduce_seconds(others, gradient_bytes / shards)
    gradients = constants.gradient_exposed * np.where(full, among, whole)

    weights = all_gather_seconds(shard, weight_bytes)
    # Outlast, the only framework here that trains on processors, scatters gradients once per step.
    scatters = np.where(cases.processor > 0.0, 1.0, passes)
    gathers = np.where(cases.gathers_once, 1.0, GATHERS * passes)
    # Each block is gathered by itself, so that a pass waits for the latency as often.
    latency = np.maximum(blocks - 1.0, 0.0) * shard.latency_seconds * (shards > 1.0)
    moved = gathers * (weights + latency) + scatters * (
        all_gather_seconds(shard, gradient_bytes) + latency
    )
    moved = np.where(full, moved, again)
    hidden = np.minimum(moved, room)
    return gradients, moved - hidden + constants.gather_exposed * hidden, hidden


ITERATIONS = 5.0
"""Of Newton and Schulz, as torch.optim.Muon does by default."""
KERNELS = 15.0
"""Of the update of one matrix."""
SHARDED_KERNELS = 700.0
"""In kernel starts: what dispatching and collectives on a sharded matrix cost the host.

Own prior: 14 ms for a small matrix of two gloo ranks on two cores, 0.4 ms for a whole one."""
_BYTES = 2.0


def orthogonal_seconds(cases: Cases, constants: Constants, blocks: Array) -> Array:
    """Of the matrices of some blocks on one rank, once per step.

    An iteration on a matrix of k rows and l >= k columns multiplies it by its transpose, squares
    the product and multiplies the matrix by the result: `4 k^2 l + 2 k^3` FLOPs, in bf16 whatever
    the run's precision (Jordan et al. 2024, "Muon", section "Newton-Schulz"). Replicas all do it;
    ranks that have shards of the matrices also gather them.

    Args:
        cases: (cases,).
        constants: Efficiencies of products and of memory.
        blocks: (cases,) of the rank.

    Returns:
        (cases,), 0 where another optimizer is used.
    """
    if not (cases.muon > 0.0).any():
        return np.zeros(1)
    hidden = cases.hidden
    plain = _iterations(cases, constants, hidden, cases.query_width) * 2.0
    plain = plain + _iterations(cases, constants, hidden, cases.kv_width) * 2.0
    plain = plain + _gathered(cases, constants, hidden, cases.query_width) * 2.0
    plain = plain + _gathered(cases, constants, hidden, cases.kv_width) * 2.0
    mixture = cases.mixture
    dense = cases.matrices * _iterations(cases, constants, hidden, cases.intermediate)
    # The last matrix of a feed-forward layer is the one with fewer rows than columns.
    dense = dense + _gathered(cases, constants, hidden, cases.intermediate)
    experts = cases.experts * cases.matrices
    routed = experts * _iterations(cases, constants, hidden, cases.expert_intermediate)
    shared = cases.matrices * _iterations(cases, constants, hidden, cases.shared_intermediate)
    own = plain + (1.0 - mixture) * dense + mixture * (routed / cases.expert + shared)
    return np.where(cases.muon > 0.0, blocks * own / cases.tensor, 0.0)


def _gathered(cases: Cases, constants: Constants, rows: Array, columns: Array) -> Array:
    """Of the collectives on one matrix whose rows are divided among ranks; 0 where it is whole.

    A product of two divided matrices wants one of them whole: in each iteration the matrix twice,
    and its square once.
    """
    shard = group(cases, constants, cases.shards, cases.tensor)
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    sent = _BYTES * (2.0 * short * long + short**2)
    seconds = ITERATIONS * all_gather_seconds(shard, sent)
    return np.where(cases.sharding == 3.0, seconds, 0.0)


def _iterations(cases: Cases, constants: Constants, one: Array, other: Array) -> Array:
    """Of one matrix; 0 where it has no columns."""
    short, long = np.minimum(one, other), np.maximum(one, other)
    flops = 4.0 * short**2 * long + 2.0 * short**3
    rate = cases.newton_flop_per_s * constants.matmul_efficiency
    half = half_side(cases, constants, cases.newton_flop_per_s)
    moved = _BYTES * (4.0 * short * long + 4.0 * short**2)
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    each = flops / rate * (1.0 + half / np.maximum(short, 1.0)) + moved / (2.0 * bandwidth)
    # Its operations are started one by one, and so are those of other optimizers' many tensors.
    kernels = np.where(cases.sharding == 3.0, SHARDED_KERNELS, KERNELS)
    host = constants.kernel_seconds * np.where(cases.processor > 0.0, kernels, KERNELS)
    # Scaling, momentum and the update itself: about ten passes over the fp32 matrix.
    return np.where(short > 0.0, ITERATIONS * each + 40.0 * short * long / bandwidth + host, 0.0)


STEP = texts("step")

OVERLAP_POWER = 4.0
"""Of the norm that joins device and host time: a sum would be 1, the larger one infinity."""
CAST_BYTES = 6.0
"""Of a weight's cast to bf16, or of its gradient's to fp32 (autocast): 4 and 2 are moved."""
PASS_KERNELS = 150.0
"""Of a pass outside of its blocks, both ways: embedding, masks, head, loss (on processors)."""
UPDATE_KERNELS = 40.0
"""Of the parameters of a block, where the optimizer takes them one by one (on processors)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block for one micro-batch, forward and backward, in seconds of shape (cases,).

    Attributes:
        products: Matrix products, those that are computed again included.
        attention: Likewise.
        elementwise: Likewise.
        tensor: Collectives among the tensor ranks.
        context: Keys and values that the context ranks pass on, as far as attention does not
            hide them.
        expert: Tokens that are sent to experts and back.
        host: What starting kernels and waiting in pipelines adds.
    """

    products: Array
    attention: Array
    elementwise: Array
    tensor: Array
    context: Array
    expert: Array
    host: Array

    @property
    def seconds(self) -> Array:
        """All together."""
        device = self.products + self.attention + self.elementwise
        return device + self.tensor + self.context + self.expert + self.host


def layer(cases: Cases, constants: Constants) -> Layer:
    """An average block, forward and backward."""
    tokens = cases.rank_tokens
    products, attention, elementwise = forward_seconds(cases, constants)
    again = (cases.recompute == 2.0) * 1.0
    # The backward pass of fused attention computes the scores again: 5 products against 2.
    backward = np.where(cases.fused_attention > 0.0, 2.5, 2.0)
    products = products * (3.0 + again)
    attention = attention * (1.0 + backward + (cases.recompute > 0.0))
    attention = attention + score_blocks_seconds(cases, constants)
    elementwise = elementwise * (3.0 + again)

    one = np.ones(1)
    tensor_group = group(cases, constants, cases.tensor, one)
    message = tokens * cases.hidden * cases.value_bytes
    collectives = 4.0 + 2.0 * again
    tensor = constants.tensor_exposed * collectives * all_reduce_seconds(tensor_group, message)

    context_group = group(cases, constants, cases.context, cases.tensor)
    pairs = 2.0 * tokens * cases.kv_width / cases.tensor * cases.value_bytes
    # Keys and values go from neighbour to neighbour: a hop over the network has one adapter.
    passed = 3.0 * (cases.context - 1.0) * hop_seconds(cases, constants, context_group, pairs)
    context = np.where(cases.context > 1.0, np.maximum(passed - 0.5 * attention, 0.1 * passed), 0.0)

    expert_group = group(cases, constants, cases.expert, cases.tensor * cases.context)
    sent = constants.expert_imbalance * message / cases.tensor
    # To experts and back, forward and backward.
    expert = cases.mixture * np.where(
        cases.expert > 1.0,
        (4.0 + 2.0 * again) * routing_seconds(cases, constants, expert_group, sent),
        0.0,
    )

    device = products + attention + elementwise + tensor + context + expert
    crossing = (cases.pipeline > 1.0) & (cases.tensor > 1.0) & (cases.devices > cases.fast_domain)
    waits = crossing * constants.pipelined_wait_seconds * cases.tensor * collectives
    host = host_seconds(cases, constants) + waits
    joined = (device**OVERLAP_POWER + host**OVERLAP_POWER) ** (1.0 / OVERLAP_POWER)
    # A processor's threads start kernels and compute them in turn.
    joined = np.where(cases.processor > 0.0, device + host, joined)
    collective = tensor, context, expert
    return Layer(products, attention, elementwise, *collective, host=joined - device)


def head_seconds(cases: Cases, constants: Constants) -> Array:
    """Head and loss of one micro-batch, forward and backward."""
    tokens = cases.rank_tokens
    columns = cases.vocabulary / cases.tensor
    # Frameworks that compute blocks in fp8 leave the head in bf16.
    rate = np.where(cases.quantized > 0.0, cases.newton_flop_per_s, cases.matmul_flop_per_s)
    plain = replace(cases, matmul_flop_per_s=rate)
    products = 3.0 * product_seconds(plain, constants, tokens, cases.hidden, columns)
    # Softmax and its gradient read and write fp32 logits about six times.
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    return products + 6.0 * cases.loss_bytes * tokens * columns / bandwidth


def step_parts(cases: Cases, constants: Constants) -> tuple[Part, ...]:
    """The terms of a step's time; their sum is the step.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.

    Returns:
        Parts in seconds, each of shape (cases,) or (1,), finite and not negative.
    """
    one = layer(cases, constants)
    head = head_seconds(cases, constants)
    split = stages(cases, constants, one.seconds, head)
    # Parameters of the rank that holds most.
    piped = cases.pipeline > 1.0
    ends = np.where(piped, 1.0, np.where(cases.tied > 0.0, 1.0, 2.0))
    held = shard_sizes(cases, np.where(piped, split.most, cases.layers), ends)
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    embedding = 8.0 * cases.rank_tokens * cases.hidden * cases.value_bytes / bandwidth

    # Transfers hide behind kernels and their starts, not behind other transfers, nor behind the
    # half of attention that hides the context ranks' keys and values.
    free = one.attention * np.where(cases.context > 1.0, 0.5, 1.0)
    kernels = split.even * (one.products + free + one.elementwise + one.host)
    kernels = kernels + head / cases.pipeline
    batches = cases.micro_batches
    gradients, gathers = communication_seconds(cases, constants, held, batches * kernels)
    # Adam reads weight, gradient and two moments and writes three of them, in fp32.
    seconds = (
        owned(cases, held)
        * (28.0 + 2.0 * cases.half)
        / (cases.memory_bytes_per_s * constants.optimizer_efficiency)
    )
    optimizer = seconds + UPDATE_KERNELS * constants.kernel_seconds * cases.processor * split.most
    passing = PASS_KERNELS * constants.kernel_seconds * cases.processor
    fixed = constants.step_seconds * np.ones_like(optimizer) + batches * passing
    passes = batches * split.even
    plain = (
        ("matrix products", passes * one.products),
        ("attention", passes * one.attention),
        ("memory-bound operations", passes * one.elementwise + batches * embedding),
        ("host and kernel starts", passes * one.host),
        ("tensor-parallel collectives", passes * one.tensor),
        ("context-parallel transfers", passes * one.context),
        ("expert all-to-all", passes * one.expert),
        ("head and loss", batches * head / cases.pipeline),
        ("gradient accumulation", _accumulation_seconds(cases, held, bandwidth)),
        ("uneven stages", batches * split.uneven),
        ("pipeline bubble", split.bubble),
        ("pipeline transfers", split.transfers),
        ("gradient sum", gradients),
        ("gathering of weights", gathers),
        ("optimizer", optimizer),
        ("orthogonal updates", orthogonal_seconds(cases, constants, split.most)),
        ("fixed", fixed),
    )
    total = np.zeros(1)
    for _, values in plain:
        total = total + values
    nodes = np.maximum(cases.devices / cases.devices_per_node, 1.0)
    tail = total * constants.tail_per_doubling * np.log2(nodes)
    inputs = {
        "micro-batches": batches,
        "blocks per stage": split.even,
        "tokens": cases.rank_tokens,
        "block seconds": one.seconds,
        "head seconds": head,
        "parameters per rank": held.all,
        "tensor": cases.tensor,
        "pipeline": cases.pipeline,
        "data": cases.data,
    }
    return tuple(
        STEP[name].part(name, values, inputs) for name, values in (*plain, ("slowest node", tail))
    )


def _accumulation_seconds(cases: Cases, held: ShardSizes, bandwidth: Array) -> Array:
    """Of adding the gradients of all micro-batches up."""
    # Forward, backward, and again where blocks are computed again.
    casts: Array = (2.0 + (cases.recompute == 2.0)) * cases.processor * cases.half
    divided = (cases.sharding > 1.0) & ~cases.gathers_once
    summed = np.where(divided, owned(cases, held), held.all)
    added = 2.0 * cases.gradient_bytes + cases.value_bytes + casts * CAST_BYTES
    return np.asarray(cases.micro_batches * summed * added / bandwidth)


def step_seconds(cases: Cases, constants: Constants) -> Array:
    """The sum of `step_parts`, of shape (cases,)."""
    return total_of(step_parts(cases, constants), len(cases))
