"""Allocated and reserved bytes of a run, and whether it fits its devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outlast.plan.cases import Array, Cases
from outlast.plan.memory.constants import MemoryConstants
from outlast.plan.memory.demand import Demand, demand
from outlast.plan.memory.stages import stage

CLIFF_HEADROOM = 0.13
"""Of the device's memory: H100 runs that reserved 70 GiB of 80 or more took several times longer
than their neighbours, since the allocator gives back and asks again in every step; runs at 55 to
68 GiB did not (measured, nanotron's sweep)."""
LOG_DEVIATION = 0.16
"""Of the memory of a run around the model, where no fit says it."""


def allocated_bytes(cases: Cases, constants: MemoryConstants) -> Array:
    """What tensors hold after a step, on the rank that holds most: no activations.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.

    Returns:
        (cases,).
    """
    first, last = _ends(cases, constants)
    return _full(cases, np.maximum(first.allocated, last.allocated))


def reserved_bytes(cases: Cases, constants: MemoryConstants) -> Array:
    """The most that the allocator holds during a step, over the stages of the pipeline.

    The first stage keeps the most activations, the last one has the logits; those between hold
    less than the first.
    """
    first, last = _ends(cases, constants)
    return _full(cases, np.maximum(first.reserved, last.reserved))


def first_stage_allocated(cases: Cases, constants: MemoryConstants) -> Array:
    """`allocated_bytes` of rank 0, which most logs are of."""
    return _full(cases, demand(cases, constants, stage(cases, "first")).allocated)


def first_stage_reserved(cases: Cases, constants: MemoryConstants) -> Array:
    """`reserved_bytes` of rank 0, which most logs are of."""
    return _full(cases, demand(cases, constants, stage(cases, "first")).reserved)


def pressing_shares(cases: Cases, constants: MemoryConstants) -> Array:
    """What a run needs and cannot give back, over what its devices' allocators can get.

    Above 1 it runs out of memory more likely than not.
    """
    first, last = _ends(cases, constants)
    return _full(cases, np.maximum(first.pressing, last.pressing) / first.usable)


def out_of_memory_probability(
    cases: Cases, constants: MemoryConstants, log_deviation: float = LOG_DEVIATION
) -> Array:
    """Probability that a run does not fit.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        log_deviation: Of measured memory around the model: `MemoryFit.log_deviation`.

    Returns:
        (cases,), from 0 to 1: that of a log-normal error that exceeds the room.
    """
    from scipy.special import ndtr

    found: Array = ndtr(np.log(pressing_shares(cases, constants)) / log_deviation)
    return found


def headroom(cases: Cases, constants: MemoryConstants) -> Array:
    """Share of the devices' memory that nothing is reserved of; below 0 where more is wanted."""
    first, last = _ends(cases, constants)
    return _full(cases, 1.0 - np.maximum(first.wanted, last.wanted) / cases.memory_bytes)


def cliff(cases: Cases, constants: MemoryConstants) -> NDArray[np.bool_]:
    """Whether a run fits, if at all, with so little room that it is several times slower."""
    found: NDArray[np.bool_] = headroom(cases, constants) < CLIFF_HEADROOM
    return found


def fits(
    cases: Cases,
    constants: MemoryConstants,
    least_headroom: float = CLIFF_HEADROOM,
) -> NDArray[np.bool_]:
    """Whether a run fits with room to spare.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        least_headroom: Share of the memory that must be left; 0.13 keeps clear of the cliff.
    """
    first, last = _ends(cases, constants)
    wanted = np.maximum(first.wanted, last.wanted)
    pressing = np.maximum(first.pressing, last.pressing)
    found: NDArray[np.bool_] = _full(cases, wanted / cases.memory_bytes) <= 1.0 - least_headroom
    return found & (pressing < first.usable)


def _ends(cases: Cases, constants: MemoryConstants) -> tuple[Demand, Demand]:
    first = demand(cases, constants, stage(cases, "first"))
    if (cases.pipeline <= 1.0).all():
        return first, first
    return first, demand(cases, constants, stage(cases, "last"))


def _full(cases: Cases, values: Array) -> Array:
    """A figure of all cases, also where all its inputs agree."""
    return np.broadcast_to(values, (len(cases),)).copy()
