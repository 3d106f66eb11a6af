"""Bytes of weights, gradients and optimizer states of one rank, and of their copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.memory.constants import MemoryConstants
from outlast.plan.memory.stages import Stage
from outlast.plan.terms.held import (
    block_parameters,
    embedding_parameters,
    routed_parameters,
    stage_parameters,
)

MASTER_BYTES = 4.0
"""Of a weight that the optimizer keeps in fp32 beside the one of the products."""
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
        """What every moment of a run needs."""
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
        tables * constants.moment_bytes + (1.0 - tables) * MUON_BYTES,
        constants.moment_bytes,
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
