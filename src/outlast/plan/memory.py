"""Bytes of a training run on its devices, term by term, for many configurations at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outlast.plan.batch import (
    Array,
    Cases,
    Part,
    Stage,
    block_parameters,
    embedding_parameters,
    routed_parameters,
    stage,
    stage_parameters,
    texts,
)
from outlast.plan.constants import MemoryConstants

SCORE_VALUES = 2.5
"""Of unfused attention per head and pair of tokens: softmax, its dropout's mask (one byte) and
output, in values of two bytes (Korthikanti et al. 2022, 2205.05198, section 4.1)."""
COLLECTIVES = 4.0
"""Of a block among its tensor ranks, forward and backward, with one undivided tensor each."""
UNDIVIDED = 3.0
"""Hidden tensors that tensor ranks do not divide and that a backward pass has at once: the
gathered gradient of one layer's output, and that of its input before and after it is summed."""


@dataclass(frozen=True, slots=True)
class Activations:
    """In bytes of shape (cases,).

    Attributes:
        kept: By all micro-batches in flight.
        logits: Of one micro-batch, with what the loss makes of them.
        backward: Gradients of activations, and what is computed again for one block.
        buffers: Undivided hidden tensors that tensor-parallel layers gather into.
        ahead: Undivided hidden tensors that wait for collectives while the host runs ahead.
    """

    kept: Array
    logits: Array
    backward: Array
    buffers: Array
    ahead: Array


def activations(cases: Cases, constants: MemoryConstants, stage: Stage) -> Activations:
    """Activations of one rank of a stage.

    Per token a block keeps `hidden_values * h / (t or 1)` values of the hidden width, divided by
    the tensor ranks with sequence parallelism only; `attention_values * (q + kv) / t`; and
    `2 (matrices - 1) f / t` of the feed-forward part: a plain one keeps input and output of its
    activation, a gated one gate, up, activated gate and their product (Korthikanti et al. 2022,
    2205.05198, equations 1 to 4, without dropout's masks). Experts keep as much for each token
    that is routed to them, and the token itself before and after.

    Args:
        cases: (cases,).
        constants: Values per width, copies of logits, buffers.
        stage: Of each case.
    """
    ranks = cases.tensor
    along = np.where(cases.sequence_parallel > 0.0, ranks, 1.0)
    routed = 2.0 * cases.mixture * cases.experts_per_token * cases.hidden / along
    inner = constants.attention_values * (cases.query_width + cases.kv_width) + (
        2.0 * (cases.matrices - 1.0) * cases.active_width
    )
    values = constants.hidden_values * cases.hidden / along + inner / ranks + routed
    scores = np.where(
        cases.fused_attention > 0.0, 0.0, SCORE_VALUES * cases.heads * cases.sequence / ranks
    )
    entry = cases.hidden / along
    again = np.where(
        cases.recompute == 2.0,
        values + scores - entry,
        np.where(cases.recompute == 1.0, scores, 0.0),
    )
    bytes_per_value = cases.rank_tokens * cases.value_bytes
    whole = bytes_per_value * (values + scores)
    some = np.minimum(stage.blocks, 1.0)
    undivided = bytes_per_value * cases.hidden * (ranks > 1.0)
    # On processors collectives are done when they return.
    most = np.where(cases.processor > 0.0, 0.0, constants.buffers_ahead)
    waiting = np.minimum(most, COLLECTIVES * stage.blocks * stage.in_flight)
    loss_values = cases.value_bytes + 2.0 * cases.loss_bytes
    return Activations(
        kept=stage.blocks * stage.in_flight * (whole - bytes_per_value * again),
        logits=stage.head
        * constants.logit_copies
        * loss_values
        * cases.rank_tokens
        * cases.vocabulary
        / ranks,
        backward=some
        * (constants.backward_blocks * whole + UNDIVIDED * undivided + bytes_per_value * again),
        buffers=constants.gather_buffers * undivided,
        ahead=waiting * undivided,
    )


MASTER_BYTES = 4.0
"""Of a weight that the optimizer keeps in fp32 beside the one of the products."""
ADAM_BYTES = 8.0
"""Moments of a weight that Adam updates."""
MUON_BYTES = 4.0
"""Momentum of a weight that Muon updates; embedding and head have the other optimizer's."""
QUANTIZED_BYTES = 2.0
"""Of the fp8 copies of a weight, plain and transposed, that a step's products use."""


@dataclass(frozen=True, slots=True)
class States:
    """In bytes of shape (cases,).

    Attributes:
        parameters: Of the rank before any sharding, as a count.
        weights: Of the products; with fully sharded parameters those that no pass has gathered.
        gradients: Summed over micro-batches.
        optimizer: fp32 weights and moments.
        buckets: Copies of gradients for their sum among replicas, while passes run.
        passing: Gradients of one block, and of the tables, on their way into the sum; of all
            blocks where ranks scatter them after the last micro-batch only.
        gathered: Weights of fully sharded blocks that a pass needs at once, or that stay gathered.
        after_step: Copies that exist after the optimizer's step and not while passes run.
        step_copies: Buffers that exist only during the optimizer's step.
        saved: What an optimizer that replicas share saves against one that they do not.
    """

    parameters: Array
    weights: Array
    gradients: Array
    optimizer: Array
    buckets: Array
    passing: Array
    gathered: Array
    after_step: Array
    step_copies: Array
    saved: Array

    @property
    def lasting(self) -> Array:
        """Bytes needed at every moment of a run."""
        return self.weights + self.gradients + self.optimizer + self.buckets


def states(cases: Cases, constants: MemoryConstants, stage: Stage) -> States:
    """States of one rank of a stage (ZeRO: Rajbhandari et al. 2019, 1910.02054, section 5).

    Fully sharded parameters have no low-precision shard: FSDP2 casts the fp32 one as it gathers.
    Experts are sharded among the ranks that hold the same ones. In a pipeline weights stay gathered
    and gradients whole until the last micro-batch, since both would else travel in every pass
    (torchtitan's `reshard_after_forward`; the stages of torch.distributed.pipelining).

    Args:
        cases: (cases,).
        constants: Bytes of buckets and copies, moments of the optimizer.
        stage: Of each case.
    """
    parameters = stage_parameters(cases, stage.blocks, stage.ends)
    routed = stage.blocks * routed_parameters(cases) / cases.expert / cases.tensor
    others = parameters - routed
    expert_ranks = np.maximum(cases.shards / cases.expert, 1.0)
    divided = others / cases.shards + routed / expert_ranks
    # Experts that only one of these ranks has are not divided, and nobody gathers them.
    split, routed_split = cases.shards > 1.0, expert_ranks > 1.0
    shared_whole = others * split + routed * routed_split
    shared_part = others * split / cases.shards + routed * routed_split / expert_ranks

    full = cases.sharding == 3.0
    shared = (cases.data * cases.context > 1.0) * 1.0
    optimizer_only = ((cases.sharding == 1.0) | (cases.sharding == 2.0)) * shared
    held = np.where(full, (1.0 - cases.half) * divided, parameters)
    weights = cases.value_bytes * held
    weights = weights + np.where(full, 0.0, QUANTIZED_BYTES * cases.quantized * parameters)
    owned = np.where(cases.sharding > 0.0, divided, parameters)
    tables = stage.ends * embedding_parameters(cases) / cases.tensor / np.maximum(parameters, 1.0)
    moments = np.where(
        cases.muon > 0.0,
        tables * ADAM_BYTES + (1.0 - tables) * MUON_BYTES,
        ADAM_BYTES,
    )
    per_owned = MASTER_BYTES * cases.half + moments
    summed = np.where(cases.sharding > 1.0, divided, parameters)

    whole_block = (block_parameters(cases) - routed_parameters(cases)) / cases.tensor
    whole_block = whole_block + routed_parameters(cases) / cases.expert / cases.tensor
    table = embedding_parameters(cases) / cases.tensor
    piece = np.minimum(stage.blocks, 1.0) * whole_block + np.minimum(stage.ends, 1.0) * table
    cast = np.where(cases.gradient_bytes > cases.value_bytes, cases.value_bytes, 0.0)
    whole = np.where(cases.gathers_once, parameters, piece)
    scattered = np.where(cases.sharding > 1.0, np.minimum(whole, parameters - divided), 0.0)
    # The next block's weights arrive while one computes; the tables stay for a whole pass.
    needed = np.minimum(stage.blocks, 2.0) * whole_block + stage.ends * table
    needed = np.where(cases.gathers_once, parameters, needed)
    gathered = np.where(full, np.minimum(needed, parameters - held), 0.0)
    return States(
        parameters=parameters,
        weights=weights,
        gradients=cases.gradient_bytes * summed,
        optimizer=per_owned * owned,
        buckets=constants.bucket_bytes * parameters * shared * (cases.sharding == 0.0),
        passing=cast * piece + cases.gradient_bytes * scattered,
        gathered=cases.value_bytes * gathered,
        after_step=optimizer_only
        * (
            constants.bucket_bytes * parameters
            + constants.copy_bytes * (shared_whole + shared_part)
        ),
        step_copies=optimizer_only * constants.step_copy_bytes * shared_whole,
        saved=optimizer_only
        * (per_owned * (parameters - divided) + constants.bucket_bytes * parameters),
    )


PHASE_POWER = 5.0
"""Of the norm that joins passes and optimizer step: what one leaves cached serves the other in
part; a sum would be 1, full reuse infinity."""
SQUEEZE_POWER = 4.0
"""Of the norm that joins cached memory and the room for it."""
LEAST_ROOM = 0.01
"""Of the usable memory, for the cache of a run that needs all of it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Of one stage of each case, in bytes of shape (cases,).

    Attributes:
        states: Weights, gradients, optimizer.
        activations: Of the passes.
        after_step: What the time after the optimizer's step needs beyond that of the passes.
        allocated: After a step: no activations.
        peak: The most that tensors hold at once.
        fragments: Cached pieces that fit no tensor.
        ahead: Cached tensors that wait for collectives.
        copies: Cached buffers of the optimizer's step.
        reserved: The sum of what is needed and cached.
        wanted: The same without a device's limit.
        pressing: Needed, and cached without giving back: beyond the usable memory a run fails.
        usable: Memory that the allocator can get.
    """

    states: States
    activations: Activations
    after_step: Array
    allocated: Array
    peak: Array
    fragments: Array
    ahead: Array
    copies: Array
    reserved: Array
    wanted: Array
    pressing: Array
    usable: Array


def demand(cases: Cases, constants: MemoryConstants, stage: Stage) -> Demand:
    """Bytes that a stage needs and reserves.

    Passes and the optimizer's step follow each other, so the larger one counts. The allocator
    caches more than is needed: pieces between tensors, tensors whose collectives are under way
    when the host has run ahead, and buffers of the step that found no room among the cached
    pieces of the passes. Near the device's limit it gives back what it can.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        stage: Of each case.
    """
    held = states(cases, constants, stage)
    passes = activations(cases, constants, stage)
    computing = passes.kept + passes.logits + passes.backward
    busy = held.lasting + held.passing + held.gathered + computing
    stepped = held.lasting + held.after_step
    floor = passes.buffers + constants.workspace_bytes
    tail = floor + library_bytes(cases, constants)

    after_step = np.maximum(stepped - busy, 0.0)
    needed = busy + after_step + tail
    pieces = constants.fragment_share * computing
    cached = np.maximum(busy + pieces + passes.ahead, stepped)
    stepping = np.where(held.step_copies > 0.0, stepped + held.step_copies, 0.0)
    # A shared optimizer never costs more than it saves.
    most = np.maximum(held.saved - after_step, 0.0)
    waiting = np.minimum(_joined(cached, stepping) - cached, most)
    wanted = cached + waiting + tail
    settled = np.maximum(busy + pieces, stepped)
    stuck = settled - np.maximum(busy, stepped)
    stuck = stuck + np.minimum(_joined(settled, stepping) - settled, most)
    pressing = needed + constants.stuck_share * stuck

    usable = constants.usable_share * cases.memory_bytes
    extra = np.maximum(wanted - needed, 0.0)
    room = np.maximum(usable - needed, LEAST_ROOM * usable)
    kept = (1.0 + (extra / room) ** SQUEEZE_POWER) ** (-1.0 / SQUEEZE_POWER)
    # What is cached beside the copies of the step, divided in the ratio of its two causes.
    between = np.maximum(cached + tail - needed, 0.0) * kept
    share = pieces / np.maximum(pieces + passes.ahead, 1.0)
    copies = waiting * kept
    return Demand(
        states=held,
        activations=passes,
        after_step=after_step,
        allocated=stepped + floor,
        peak=np.maximum(busy, stepped + held.step_copies) + floor,
        fragments=between * share,
        ahead=between * (1.0 - share),
        copies=copies,
        reserved=needed + between + copies,
        wanted=wanted,
        pressing=pressing,
        usable=usable,
    )


def library_bytes(cases: Cases, constants: MemoryConstants) -> Array:
    """Bytes that are reserved, or on processors resident, beside everything else."""
    return np.where(cases.processor > 0.0, constants.process_bytes, constants.library_bytes)


def _joined(passes: Array, step: Array) -> Array:
    """Norm of two phases, exact where the second is 0."""
    larger = np.maximum(passes, step)
    ratio = np.minimum(passes, step) / larger
    # A power of an array by multiplication is many times faster than by logarithms.
    square = ratio * ratio
    return larger * (1.0 + square * square * ratio) ** (1.0 / PHASE_POWER)


CLIFF_HEADROOM = 0.13
"""Of the device's memory: H100 runs that reserved 70 GiB of 80 or more took several times longer
than their neighbours, since the allocator gives back and asks again in every step; runs at 55 to
68 GiB did not (measured, nanotron's sweep)."""
LOG_DEVIATION = 0.16
"""Of the memory of a run around the model, where no fit says it."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of candidates on their fullest stage, each (candidates,).

    Attributes:
        reserved_bytes: The most that the allocator holds during a step.
        pressing: What a run needs and cannot give back, over what the allocator can get: above 1
            it runs out of memory, more likely than not.
        headroom: Share of the memory that nothing is reserved of; below 0 where more is wanted.
    """

    reserved_bytes: Array
    pressing: Array
    headroom: Array


def room(
    layouts: Cases,
    constants: MemoryConstants,
    layout: NDArray[np.intp] | None = None,
    shares: Array | None = None,
) -> Room:
    """Memory of candidates, that of the states less what structured layers do without.

    The first stage of a pipeline keeps the most activations, the last one has the logits; those
    between hold less than the first.

    Args:
        layouts: (layouts,).
        constants: Of the calibration, or the priors' medians.
        layout: (candidates,) index into `layouts`; None for each of them once.
        shares: (candidates,) parameters of the linear layers over those of the dense ones; None
            where all are dense.
    """
    rows = np.arange(len(layouts)) if layout is None else layout

    def spread(values: Array) -> Array:
        return np.broadcast_to(values, (len(layouts),))[rows]

    piped = bool((layouts.pipeline > 1.0).any())
    found = []
    for item in stage(layouts, "first"), *([stage(layouts, "last")] if piped else []):
        need = demand(layouts, constants, item)
        less: Array | float = 0.0
        if shares is not None:
            less = spread(block_state_bytes(layouts, need, item)) * (1.0 - shares)
        pressing = (spread(need.pressing) - less) / spread(need.usable)
        found.append((spread(need.reserved) - less, pressing, spread(need.wanted) - less))
    reserved, most, wanted = (np.max(values, axis=0) for values in zip(*found, strict=True))
    return Room(reserved, most, 1.0 - wanted / spread(layouts.memory_bytes))


def block_state_bytes(cases: Cases, need: Demand, of: Stage) -> Array:
    """(cases,) weights, gradients and optimizer states of a stage's blocks, on one rank."""
    tables = of.ends * embedding_parameters(cases) / cases.tensor
    share = 1.0 - np.minimum(tables / np.maximum(need.states.parameters, 1.0), 1.0)
    return np.asarray(need.states.lasting * share)


MEMORY = texts("memory")


def memory_parts(cases: Cases, constants: MemoryConstants, of: Stage) -> tuple[Part, ...]:
    """The terms of a stage's reserved memory.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        of: The stage of each case.

    Returns:
        Parts in bytes, each of shape (cases,) or (1,), finite and not negative.
    """
    found = demand(cases, constants, of)
    held, passes = found.states, found.activations
    inputs = {
        "parameters per rank": held.parameters,
        "blocks": of.blocks,
        "in flight": of.in_flight,
        "tokens": cases.rank_tokens,
        "shards": cases.shards,
        "tensor": cases.tensor,
        "usable": found.usable,
    }
    values = {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer states": held.optimizer,
        "gradient buckets": held.buckets,
        "gradients on their way": held.passing,
        "gathered weights": held.gathered,
        "activations": passes.kept,
        "logits and loss": passes.logits,
        "backward pass of a block": passes.backward,
        "tensor-parallel buffers": passes.buffers,
        "workspaces and libraries": constants.workspace_bytes + library_bytes(cases, constants),
        "copies after the step": found.after_step,
        "cached pieces": found.fragments,
        "cached for collectives": found.ahead,
        "cached for the step": found.copies,
    }
    return tuple(MEMORY[name].part(name, item, inputs) for name, item in values.items())
