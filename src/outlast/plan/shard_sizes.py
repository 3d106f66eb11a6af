"""Sizes of shards: blocks and parameters of ranks and pipeline stages, micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from outlast.plan.batch import Array, Cases

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


Place: TypeAlias = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of each case; fields have shape (cases,) or (1,).

    Attributes:
        blocks: How many it has.
        ends: How many of embedding and head it has; one where they share weights.
        head: 1 where it computes logits.
        in_flight: Micro-batches whose activations it keeps at once.
    """

    blocks: Array
    ends: Array
    head: Array
    in_flight: Array


def in_flight(cases: Cases, index: Array) -> Array:
    """Micro-batches whose activations a stage keeps at once.

    1F1B keeps `p - i` on stage i (Narayanan et al. 2021, 2104.04473, section 2.2); the interleaved
    schedule starts `2 (p - i - 1) + (v - 1) p + 1` chunks of 1 / v before its first backward pass,
    on the first stage `p (1 + (p - 1) / (p v))` (Korthikanti et al. 2022, 2205.05198, section
    4.2.3); GPipe keeps all; the zero-bubble schedule ZB-H1 as many as 1F1B (2401.10241).

    Args:
        cases: (cases,).
        index: (cases,) or (1,) number of the stage, from 0.
    """
    ranks, chunks = cases.pipeline, cases.stages_per_rank
    after = ranks - index
    started = np.where(
        chunks > 1.0, (2.0 * (after - 1.0) + (chunks - 1.0) * ranks + 1.0) / chunks, after
    )
    started = np.where(cases.gpipe > 0.0, cases.micro_batches, started)
    return np.minimum(started, cases.micro_batches)


def head_blocks(cases: Cases) -> Array:
    """Cost of the head in blocks, where stages are balanced by cost."""
    mixture = cases.mixture_layers / cases.layers
    wide = (1.0 - mixture) * cases.intermediate + mixture * (
        cases.experts_per_token * cases.expert_intermediate + cases.shared_intermediate
    )
    return cases.vocabulary / (4.0 * cases.query_width + cases.matrices * wide)


def stage(cases: Cases, place: Place) -> Stage:
    """The first, the second, or the last stage; a pipeline without one there has the first.

    The second keeps the most activations of all stages between the ends.

    Args:
        cases: (cases,).
        place: Which.
    """
    piped = cases.pipeline > 1.0
    most, last = _ends(cases)
    whole = np.where(cases.tied > 0.0, 1.0, 2.0)
    first = Stage(
        most, np.where(piped, 1.0, whole), np.where(piped, 0.0, 1.0), in_flight(cases, np.zeros(1))
    )
    if place == "first":
        return first
    if place == "last":
        return Stage(
            last, np.where(piped, 1.0, whole), np.ones(1), in_flight(cases, cases.pipeline - 1.0)
        )
    between = cases.pipeline > 2.0
    inner = np.clip(
        (cases.layers - most - last) / np.where(between, cases.pipeline - 2.0, 1.0), 0.0, most
    )
    return Stage(
        np.where(between, inner, first.blocks),
        np.where(between, 0.0, first.ends),
        np.where(between, 0.0, first.head),
        np.where(between, in_flight(cases, np.ones(1)), first.in_flight),
    )


def stages_of(case: Cases) -> tuple[Stage, ...]:
    """All stages of one case, the first one first.

    Args:
        case: (1,).
    """
    ranks = int(case.pipeline[0])
    middle = stage(case, "middle")
    inner = [
        Stage(middle.blocks, middle.ends, middle.head, in_flight(case, np.full(1, float(index))))
        for index in range(1, ranks - 1)
    ]
    last = [stage(case, "last")] if ranks > 1 else []
    return (stage(case, "first"), *inner, *last)


def _ends(cases: Cases) -> tuple[Array, Array]:
    """Blocks of the first and of the last stage."""
    head = head_blocks(cases)
    piped = cases.pipeline > 1.0
    most = np.where(piped, most_blocks(cases, head), cases.layers)
    return most, np.where(piped, last_blocks(cases, head), cases.layers)
