"""How blocks and parameters are divided among the ranks."""

from __future__ import annotations

import numpy as np

from outlast.plan.cases import Array, Cases

_WHOLE = 0.05
"""Share of a block that is not moved to another stage."""


def block_parameters(cases: Cases) -> Array:
    """Of an average block, all its experts counted, on all ranks together."""
    mixture = cases.mixture_layers / cases.layers
    dense = cases.matrices * cases.hidden * cases.intermediate
    routed = cases.experts * cases.matrices * cases.hidden * cases.expert_intermediate
    shared = cases.hidden * (cases.matrices * cases.shared_intermediate + cases.experts)
    return cases.attention_parameters + (1.0 - mixture) * dense + mixture * (routed + shared)


def routed_parameters(cases: Cases) -> Array:
    """Of an average block, those of its routed experts, on all ranks together."""
    routed = cases.experts * cases.matrices * cases.hidden * cases.expert_intermediate
    return cases.mixture_layers / cases.layers * routed


def embedding_parameters(cases: Cases) -> Array:
    """Of the embedding; the head has as many."""
    return cases.vocabulary * cases.hidden


def most_blocks(cases: Cases, head_blocks: Array) -> Array:
    """Blocks of the stage that has most of them.

    Args:
        cases: (cases,).
        head_blocks: (cases,) what the head costs, in blocks: stages that are balanced by cost
            leave room for it.
    """
    even = np.ceil(cases.layers / cases.pipeline)
    fair = np.ceil((cases.layers + head_blocks) / cases.pipeline - _WHOLE)
    return np.where(cases.by_cost > 0.0, np.minimum(fair, cases.layers), even)


def last_blocks(cases: Cases, head_blocks: Array) -> Array:
    """Blocks of the stage that has the head.

    A stage that is balanced by cost begins with the block after the one at which the cost of all
    before reaches its share of the whole, embedding and norms for nothing (nanotron's
    `build_model`).

    Args:
        cases: (cases,).
        head_blocks: As of `most_blocks`.
    """
    even = np.floor(cases.layers / cases.pipeline)
    before = (cases.layers + head_blocks) * (cases.pipeline - 1.0) / cases.pipeline
    by_cost = np.maximum(cases.layers - np.ceil(before - _WHOLE), 0.0)
    return np.where(cases.by_cost > 0.0, by_cost, even)


def stage_parameters(cases: Cases, blocks: Array, ends: Array) -> Array:
    """Parameters of one rank of a stage, before any sharding among data-parallel ranks.

    Args:
        cases: (cases,).
        blocks: (cases,) blocks of the stage.
        ends: (cases,) how many of embedding and head it has.
    """
    routed = routed_parameters(cases)
    others = block_parameters(cases) - routed
    held = blocks * (others + routed / cases.expert) + ends * embedding_parameters(cases)
    return held / cases.tensor
