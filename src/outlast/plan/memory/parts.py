"""Memory as a sum of parts, for each stage of a pipeline."""

from __future__ import annotations

from outlast.errors import PlanError
from outlast.plan.cases import Array, Cases
from outlast.plan.memory.constants import MemoryConstants
from outlast.plan.memory.demand import Demand, demand, library_bytes
from outlast.plan.memory.stages import Place, Stage, stage, stages_of
from outlast.plan.memory.texts import MEMORY
from outlast.plan.terms.part import Part


def memory_parts(
    cases: Cases, constants: MemoryConstants, place: Place = "first"
) -> tuple[Part, ...]:
    """The terms of a stage's reserved memory; their sum is `reserved_bytes` of that stage.

    Args:
        cases: (cases,).
        constants: Of the calibration, or the priors' medians.
        place: "first", "middle" (the second stage) or "last".

    Returns:
        Parts in bytes, each of shape (cases,) or (1,), finite and not negative.
    """
    return _parts(cases, constants, stage(cases, place))


def stage_parts(case: Cases, constants: MemoryConstants) -> tuple[tuple[Part, ...], ...]:
    """The terms of all stages of one case, the first stage first.

    Raises:
        PlanError: More than one case.
    """
    if len(case) != 1:
        raise PlanError(f"{len(case)} cases: a table of stages is of one; take one of them")
    return tuple(_parts(case, constants, item) for item in stages_of(case))


def _parts(cases: Cases, constants: MemoryConstants, of: Stage) -> tuple[Part, ...]:
    found = demand(cases, constants, of)
    inputs = {
        "parameters per rank": found.states.parameters,
        "blocks": of.blocks,
        "in flight": of.in_flight,
        "tokens": cases.micro_batch * cases.sequence / cases.context,
        "shards": cases.shards,
        "tensor": cases.tensor,
        "usable": found.usable,
    }
    return tuple(
        Part(
            name, values, MEMORY[name].formula, inputs, MEMORY[name].constants, MEMORY[name].source
        )
        for name, values in _values(cases, constants, found).items()
    )


def _values(cases: Cases, constants: MemoryConstants, found: Demand) -> dict[str, Array]:
    held, passes = found.states, found.activations
    return {
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
