"""Seconds of a training step as a sum of parts: the composition of all terms of time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.constants import Constants
from outlast.plan.terms.block import (
    Block,
    block,
    host_seconds,
    product_seconds,
    score_blocks_seconds,
)
from outlast.plan.terms.links import (
    Group,
    all_reduce_seconds,
    group,
    hop_seconds,
    routing_seconds,
)
from outlast.plan.terms.muon import orthogonal_seconds
from outlast.plan.terms.part import Part
from outlast.plan.terms.sharding import Held, communication_seconds, held_by, owned
from outlast.plan.terms.stages import Stages, stages
from outlast.plan.terms.texts import STEP

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
        block: Its forward pass.
        tensor_group: Ranks that divide its matrices.
        products: Matrix products, those that are computed again included.
        attention: Likewise.
        elementwise: Likewise.
        tensor: Collectives among the tensor ranks.
        context: Keys and values that the context ranks pass on, as far as attention does not
            hide them.
        expert: Tokens that are sent to experts and back.
        host: What starting kernels and waiting in pipelines adds.
    """

    block: Block
    tensor_group: Group
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
    forward = block(cases, constants)
    again = (cases.recompute == 2.0) * 1.0
    # The backward pass of fused attention computes the scores again: 5 products against 2.
    backward = np.where(cases.fused_attention > 0.0, 2.5, 2.0)
    products = forward.products * (3.0 + again)
    attention = forward.attention * (1.0 + backward + (cases.recompute > 0.0))
    attention = attention + score_blocks_seconds(cases, constants)
    elementwise = forward.elementwise * (3.0 + again)

    one = np.ones(1)
    tensor_group = group(cases, constants, cases.tensor, one)
    message = forward.tokens * cases.hidden * cases.value_bytes
    collectives = 4.0 + 2.0 * again
    tensor = constants.tensor_exposed * collectives * all_reduce_seconds(tensor_group, message)

    context_group = group(cases, constants, cases.context, cases.tensor)
    pairs = 2.0 * forward.tokens * cases.kv_width / cases.tensor * cases.value_bytes
    # Keys and values go from neighbour to neighbour: a hop over the network has one adapter.
    passed = 3.0 * (cases.context - 1.0) * hop_seconds(cases, constants, context_group, pairs)
    context = np.where(cases.context > 1.0, np.maximum(passed - 0.5 * attention, 0.1 * passed), 0.0)

    expert_group = group(cases, constants, cases.expert, cases.tensor * cases.context)
    sent = constants.expert_imbalance * message / cases.tensor
    # To experts and back, forward and backward.
    expert = (cases.mixture_layers / cases.layers) * np.where(
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
    return Layer(
        forward,
        tensor_group,
        products,
        attention,
        elementwise,
        tensor,
        context,
        expert,
        joined - device,
    )


def head_seconds(cases: Cases, constants: Constants) -> Array:
    """Head and loss of one micro-batch, forward and backward."""
    tokens = cases.micro_batch * cases.sequence / cases.context
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
    split = stages(cases, constants, one.seconds, head, one.block.tokens)
    held = _held(cases, split)
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    embedding = 8.0 * one.block.tokens * cases.hidden * cases.value_bytes / bandwidth

    # Transfers hide behind kernels and their starts, not behind other transfers, nor behind the
    # half of attention that hides the context ranks' keys and values.
    free = one.attention * np.where(cases.context > 1.0, 0.5, 1.0)
    kernels = split.even * (one.products + free + one.elementwise + one.host)
    kernels = kernels + head / cases.pipeline
    batches = cases.micro_batches
    gradients, gathers = communication_seconds(cases, constants, held, batches * kernels)
    optimizer = _optimizer_seconds(cases, constants, held, split)
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
        "tokens": one.block.tokens,
        "block seconds": one.seconds,
        "head seconds": head,
        "parameters per rank": held.all,
        "tensor": cases.tensor,
        "pipeline": cases.pipeline,
        "data": cases.data,
    }
    return tuple(
        Part(name, values, STEP[name].formula, inputs, STEP[name].constants, STEP[name].source)
        for name, values in (*plain, ("slowest node", tail))
    )


def _held(cases: Cases, split: Stages) -> Held:
    """What the rank that holds most has of the parameters."""
    piped = cases.pipeline > 1.0
    ends = np.where(piped, 1.0, np.where(cases.tied > 0.0, 1.0, 2.0))
    return held_by(cases, np.where(piped, split.most, cases.layers), ends)


def _optimizer_seconds(cases: Cases, constants: Constants, held: Held, split: Stages) -> Array:
    # Adam reads weight, gradient and two moments and writes three of them, in fp32.
    seconds = (
        owned(cases, held)
        * (28.0 + 2.0 * cases.half)
        / (cases.memory_bytes_per_s * constants.optimizer_efficiency)
    )
    return seconds + UPDATE_KERNELS * constants.kernel_seconds * cases.processor * split.most


def _accumulation_seconds(cases: Cases, held: Held, bandwidth: Array) -> Array:
    """Of adding the gradients of all micro-batches up."""
    # Forward, backward, and again where blocks are computed again.
    casts: Array = (2.0 + (cases.recompute == 2.0)) * cases.processor * cases.half
    divided = (cases.sharding > 1.0) & ~cases.gathers_once
    summed = np.where(divided, owned(cases, held), held.all)
    added = 2.0 * cases.gradient_bytes + cases.value_bytes + casts * CAST_BYTES
    seconds: Array = cases.micro_batches * summed * added / bandwidth
    return seconds


def step_seconds(cases: Cases, constants: Constants) -> Array:
    """The sum of `step_parts`, of shape (cases,)."""
    total = np.zeros(len(cases))
    for part in step_parts(cases, constants):
        total = total + part.values
    return total
