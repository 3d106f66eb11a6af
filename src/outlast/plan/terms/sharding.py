"""Seconds that data-parallel ranks spend on gradients, and on weights that are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.constants import Constants
from outlast.plan.terms.held import routed_parameters, stage_parameters
from outlast.plan.terms.links import all_gather_seconds, all_reduce_seconds, group

HIDDEN_SHARE = 0.9
"""Of the computing time, behind which gathering and scattering can hide at most."""
GATHERS = 2.0
"""Of a block's weights in a pass of fully sharded parameters: forward and backward, where they do
not stay (`Cases.gathers_once`)."""


@dataclass(frozen=True, slots=True)
class Held:
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


def held_by(cases: Cases, blocks: Array, ends: Array) -> Held:
    """Both kinds of a stage's parameters.

    Args:
        cases: (cases,).
        blocks: (cases,) of the stage.
        ends: (cases,) how many of embedding and head it has.
    """
    parameters = stage_parameters(cases, blocks, ends)
    routed = blocks * routed_parameters(cases) / cases.expert / cases.tensor
    return Held(parameters - routed, routed, blocks)


def owned(cases: Cases, held: Held) -> Array:
    """(cases,): parameters that one rank's optimizer updates."""
    experts = np.maximum(cases.shards / cases.expert, 1.0)
    divided = held.others / cases.shards + held.routed / experts
    return np.where(cases.sharding > 0.0, divided, held.all)


def communication_seconds(
    cases: Cases, constants: Constants, held: Held, computing: Array
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
