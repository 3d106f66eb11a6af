"""The memory of one run in words and terms: stages, the fullest one, and why a run is unfit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outlast.plan.estimate import Interval, Source, Term, Total
from outlast.plan.memory.constants import MEMORY_PRIORS
from outlast.plan.memory.demand import demand
from outlast.plan.memory.limits import LOG_DEVIATION
from outlast.plan.memory.parts import stage_parts
from outlast.plan.memory.stages import stages_of
from outlast.plan.model import Judged, memory_of
from outlast.plan.structured import block_state_bytes, form_of
from outlast.plan.terms.part import Part
from outlast.plan.unfit import in_cliff, out_of_memory, why_impossible

if TYPE_CHECKING:
    from outlast.plan.configuration import Configuration
    from outlast.plan.context import Context
    from outlast.plan.pareto.space import Block


def stages_held(context: Context, block: Block) -> tuple[tuple[Part, ...], ...]:
    """Terms of the memory of all stages, with what structured layers do without."""
    constants, layouts = memory_of(context), block.layouts
    plain = stage_parts(layouts, constants)
    form = form_of(context.model, block.settings[0])
    if form.share == 1.0:
        return plain
    found = []
    for parts, item in zip(plain, stages_of(layouts), strict=True):
        held = block_state_bytes(layouts, demand(layouts, constants, item), item)
        share = np.full(1, form.share)
        spared = Part(
            "structured layers",
            held * (share - 1.0),
            "states of the blocks * (parameters of their layers / dense ones - 1)",
            {"states of the blocks": held, "parameters of their layers / dense ones": share},
            (),
            "outlast.tensorize.cost",
        )
        found.append((*parts, spared))
    return tuple(found)


def memory_total(context: Context, parts: tuple[Part, ...], outside: tuple[str, ...]) -> Total:
    """Of the fullest stage; nine in ten of a log-normal error lie within 1.64 deviations."""
    values, fitted = memory_of(context), context.memory
    origin, deviation = "prior", LOG_DEVIATION
    if fitted is None:
        outside = (*outside, _why_prior(context))
    else:
        origin, deviation = "calibrated", fitted.log_deviation
        if context.memory_elsewhere:
            origin = "published"
            outside = (*outside, "constants of published runs on other clusters")
    terms = tuple(
        Term(
            part.name,
            first_of(part.values),
            part.formula,
            {name: first_of(value) for name, value in part.inputs.items()},
            {
                name: Source(
                    first_of(getattr(values, name)),
                    MEMORY_PRIORS[name].unit,
                    origin,
                    MEMORY_PRIORS[name].text,
                )
                for name in part.constants
            },
            part.source,
        )
        for part in parts
    )
    middle = sum(term.value for term in terms)
    factor = float(np.exp(1.645 * deviation))
    return Total("B", Interval(middle / factor, middle, middle * factor, 0.9, outside), terms)


def _why_prior(context: Context) -> str:
    if context.cluster.processor:
        return (
            "resident memory of a rank by priors alone: what `outlast plan calibrate` measures of "
            "it is for `outlast train` and `outlast plan compare`"
        )
    if context.framework == "any":
        return "no framework is named: memory by priors alone"
    return f"no memory of {context.framework} was measured: priors alone"


def why_unfit(context: Context, block: Block, run: Configuration, judged: Judged) -> str:
    """Why the run does not run as it should; empty where it does."""
    impossible = why_impossible(context.cluster, block)
    if impossible:
        return impossible
    if not judged.fits[0]:
        usable = memory_of(context).usable_share * context.cluster.memory_bytes
        return out_of_memory(run, float(judged.pressing[0]), first_of(np.asarray(usable)))
    if judged.cliff[0]:
        return in_cliff(run, float(judged.memory_bytes[0]), float(judged.capacity_bytes[0]))
    return ""


def first_of(values: np.ndarray) -> float:
    """The number of the first case."""
    return float(np.ravel(values)[0])
