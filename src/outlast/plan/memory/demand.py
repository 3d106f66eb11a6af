"""What one stage needs, and what the allocator reserves for it: the composition of all terms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.memory.activations import Activations, activations
from outlast.plan.memory.constants import MemoryConstants
from outlast.plan.memory.stages import Stage
from outlast.plan.memory.states import States, states

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
        needed: The larger of passes and what follows the step, with buffers and libraries.
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
    needed: Array
    fragments: Array
    ahead: Array
    copies: Array
    reserved: Array
    wanted: Array
    pressing: Array
    usable: Array


def demand(cases: Cases, constants: MemoryConstants, stage: Stage) -> Demand:
    """What a stage needs and reserves.

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
        needed=needed,
        fragments=between * share,
        ahead=between * (1.0 - share),
        copies=copies,
        reserved=needed + between + copies,
        wanted=wanted,
        pressing=pressing,
        usable=usable,
    )


def library_bytes(cases: Cases, constants: MemoryConstants) -> Array:
    """What is reserved, or on processors resident, beside everything else."""
    return np.where(cases.processor > 0.0, constants.process_bytes, constants.library_bytes)


def _joined(passes: Array, step: Array) -> Array:
    """Norm of two phases, exact where the second is 0."""
    larger = np.maximum(passes, step)
    ratio = np.minimum(passes, step) / larger
    # A power of an array by multiplication is many times faster than by logarithms.
    square = ratio * ratio
    return larger * (1.0 + square * square * ratio) ** (1.0 / PHASE_POWER)
