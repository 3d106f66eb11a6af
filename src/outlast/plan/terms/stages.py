"""What dividing a model's blocks among the stages of a pipeline costs a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.constants import Constants
from outlast.plan.terms.held import most_blocks
from outlast.plan.terms.links import group, hop_seconds


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


def stages(
    cases: Cases, constants: Constants, block_seconds: Array, head: Array, tokens: Array
) -> Stages:
    """The stages of some runs.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        block_seconds: Of one block and micro-batch, forward and backward.
        head: Seconds of head and loss of one micro-batch.
        tokens: Of one micro-batch on one rank.
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
    handed = 2.0 * tokens * cases.hidden * cases.value_bytes / along
    hop = np.where(piped, hop_seconds(cases, constants, transfer_group, handed), 0.0)
    hops = cases.micro_batches * cases.stages_per_rank + cases.pipeline - 1.0
    transfers = constants.transfer_exposed * hop * hops
    return Stages(most, even, np.maximum(slowest - mean, 0.0), bubble, transfers)
