"""Loss of candidates against a baseline: what the laws of `quality` are asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outlast.hardware.figure import Unavailable
from outlast.plan.quality.difference import Differences, loss_differences
from outlast.plan.quality.effects import coding_error, critical_batch_tokens
from outlast.plan.quality.runs import RankShare, law_parameters, rank_share, runs
from outlast.plan.reliability.recovery import DAY_SECONDS
from outlast.plan.structured import form_of

if TYPE_CHECKING:
    from outlast.plan.cases import Array
    from outlast.plan.context import Context
    from outlast.plan.mechanisms import Step
    from outlast.plan.pareto.space import Block


MOST_MISSED = 0.99
"""Of the steps that a rank misses: with more, hardly a step has a gradient and no run ends."""


def quality(context: Context, block: Block, step: Step) -> Differences:
    """The loss of candidates less that of the baseline, on as many tokens.

    The baseline is the dense model in the baseline's precision, trained on tokens none of which
    repeats, with exact gradients, and with batches of at most the critical size. So a run differs
    from it by repeated tokens, batches above the critical one, structured layers, fewer bits, and
    chunks that a code leaves out; a plain run by nothing.
    """
    model, layouts = context.model, block.layouts
    count = len(layouts)
    kinds = np.where(layouts.quantized > 0.0, "fp8", np.where(layouts.half > 0.0, "bf16", "fp32"))
    parameters = law_parameters(model)
    tokens = context.tokens
    batch = np.broadcast_to(layouts.batch * layouts.sequence, (count,))[block.layout]
    critical = float(critical_batch_tokens(np.array([tokens]))[0])
    mixture = float(bool(model.experts))
    run = runs(
        parameters,
        tokens,
        batch,
        unique_tokens=min(context.unique_tokens, tokens),
        precision=np.broadcast_to(kinds, (count,))[block.layout],
        rank=_ranks(context, block, parameters),
        gradient_error=_gradient_error(context, block, step),
        mixture=mixture,
    )
    baseline = runs(
        parameters,
        tokens,
        np.minimum(batch, critical),
        unique_tokens=tokens,
        precision=context.baseline.precision,
        mixture=mixture,
    )
    return loss_differences(run, baseline)


def _gradient_error(context: Context, block: Block, step: Step) -> Array:
    """(candidates,) extra variance of the gradients of codes that go on without lost chunks.

    A rank misses a step when one of the devices that hold its replica's parts fails in it. Codes
    that compute lost chunks again are exact, and so is a run without a code.
    """
    error = np.zeros(len(block))
    copies = block.by_setting([float(setting.coding_copies) for setting in block.settings])
    if not context.commits_without or copies.max() == 1.0:
        return error
    layouts, count = block.layouts, len(block.layouts)
    data, devices, chunks = (
        np.broadcast_to(values, (count,))[block.layout]
        for values in (layouts.data, layouts.devices, layouts.micro_batches)
    )
    # Wrong numbers do not take a rank away.
    loud = [cause for cause in context.cluster.failures if not cause.silent]
    per_second = sum(cause.per_node_day for cause in loud) / DAY_SECONDS
    nodes = np.ceil(devices / data / context.cluster.devices_per_node)
    missed = np.minimum(-np.expm1(-per_second * nodes * step.seconds), MOST_MISSED)
    coded = (copies > 1.0) & (missed > 0.0)
    if coded.any():
        held = np.minimum(copies, data)
        error[coded] = coding_error(data[coded], chunks[coded], held[coded], missed[coded])
    return error


def _ranks(context: Context, block: Block, parameters: float) -> RankShare | None:
    """(candidates,) effective parameters of the forms; None where all layers are dense."""
    if all(setting.tensorize_form == "dense" for setting in block.settings):
        return None
    rows: list[Sequence[float]] = []
    source = ""
    for setting in block.settings:
        if setting.tensorize_form == "dense":
            rows.append((1.0, 1.0, 1.0, 1.0))
            continue
        # Layers with more parameters than dense ones are worth no more than these.
        share = min(form_of(context.model, setting).share, 1.0)
        found = rank_share(setting.tensorize_form, share, parameters)
        if isinstance(found, Unavailable):
            # Nothing was observed of the form: the share of the parameters that stay, and less.
            rows.append((0.5 * share, share, 1.0, 0.0))
            continue
        source = found.source
        rows.append((found.low[0], found.middle[0], found.high[0], found.known[0]))
    table = np.array(rows, dtype=np.float64)[block.setting]
    return RankShare(table[:, 0], table[:, 1], table[:, 2], table[:, 3], source)
