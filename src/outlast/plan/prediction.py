"""`predict`: all about one run, each figure with its interval and the terms that it is a sum of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outlast.hardware.figure import Unavailable
from outlast.plan.batch import Part, cases, stages_of, texts
from outlast.plan.configuration import Settings
from outlast.plan.constants import MEMORY_PRIORS, PRIORS, Constants, MemoryConstants, Prior
from outlast.plan.constraints import warnings
from outlast.plan.estimate import Interval, Source, Term, Total
from outlast.plan.fault_tolerance import why_impossible
from outlast.plan.goodput import finish, goodput
from outlast.plan.mechanisms import HELD, form_of, operations_ratio
from outlast.plan.memory import LOG_DEVIATION, block_state_bytes, demand, memory_parts
from outlast.plan.model import Judged, beyond, in_time, judge, memory_of
from outlast.plan.reliability import SMALLEST_RATE
from outlast.plan.space import Block
from outlast.records import Predicted

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.goodput import Goodput
    from outlast.plan.model import Context
    from outlast.plan.reliability import Reliability


def stages_held(context: Context, block: Block) -> tuple[tuple[Part, ...], ...]:
    """Terms of the memory of all stages, with what structured layers do without."""
    constants, layouts = memory_of(context), block.layouts
    form = form_of(context.model, block.settings[0])
    found = []
    for item in stages_of(layouts):
        parts = memory_parts(layouts, constants, item)
        if form.share == 1.0:
            found.append(parts)
            continue
        held = block_state_bytes(layouts, demand(layouts, constants, item), item)
        share, name = np.full(1, form.share), "structured layers"
        inputs = {"states of the blocks": held, "parameters of their layers / dense ones": share}
        spared = texts("mechanisms_memory")[name].part(name, held * (share - 1.0), inputs)
        found.append((*parts, spared))
    return tuple(found)


def memory_total(context: Context, parts: tuple[Part, ...], outside: tuple[str, ...]) -> Total:
    """Of the fullest stage; nine in ten of a log-normal error lie within 1.64 deviations."""
    values, fitted = memory_of(context), context.memory
    origin, deviation = "prior", LOG_DEVIATION
    if fitted is None:
        why = f"no memory of {context.framework} was measured: priors alone"
        if context.cluster.processor:
            why = (
                "resident memory of a rank by priors alone: what `outlast plan calibrate` measures "
                "of it is for `outlast train` and `outlast plan compare`"
            )
        elif context.framework == "any":
            why = "no framework is named: memory by priors alone"
        outside = (*outside, why)
    else:
        origin, deviation = "calibrated", fitted.log_deviation
        if context.memory_elsewhere:
            origin = "published"
            outside = (*outside, "constants of published runs on other clusters")
    terms = tuple(_term(part, values, MEMORY_PRIORS, origin) for part in parts)
    middle = sum(term.value for term in terms)
    return Total("B", _around(middle, 1.645 * deviation, outside), terms)


def why_unfit(context: Context, block: Block, run: Configuration, judged: Judged) -> str:
    """Why the run does not run as it should; empty where it does."""
    if impossible := why_impossible(context.cluster, block):
        return impossible
    said = (
        f"micro_batch = {run.micro_batch}, sharding = {run.sharding}, tensor = {run.tensor}, "
        f"recompute = {run.recompute}"
    )
    if not judged.fits[0]:
        usable = first_of(memory_of(context).usable_share * context.cluster.memory_bytes)
        needed = float(judged.pressing[0]) * usable / 2**30
        return (
            f"out of memory: {needed:,.1f} GiB are needed and the allocator can get "
            f"{usable / 2**30:,.1f} GiB with {said}; recompute, shard or divide more, lower "
            "micro_batch, or take more devices"
        )
    if judged.cliff[0]:
        reserved, capacity = judged.memory_bytes[0] / 2**30, judged.capacity_bytes[0] / 2**30
        return (
            f"in the memory cliff: {reserved:,.1f} GiB of {capacity:,.1f} GiB are reserved with "
            f"{said}, so that the allocator gives back and asks again in every step; recompute, "
            "shard or divide more, or lower micro_batch"
        )
    return ""


def first_of(values: np.ndarray) -> float:
    """The number of the first case."""
    return float(np.ravel(values)[0])


COMPUTE = ("matrix products", "attention", "structured layers", "lower clocks")
COMPUTE_SHARE = 0.6
"""Of a step, from which on it is limited by computing."""
ASSUMED_RATE_FACTOR = 2.8
"""Prior: a rate that nobody gave lies between the assumed one over this and times this, as two
clusters of one owner differ: 6.5 and 2.34 failures per 1,000 node-days of RSC-1 and RSC-2 (Kokolis
et al. 2025, arXiv 2410.21680)."""
GIVEN_RATE_FACTOR = 1.5
"""Own prior of the same for a rate that the cluster's file gives: how a year differs from another.
"""
RATES_ASSUMED = "failure rates are assumed"
"""Why figures that count failures are beyond what is known of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction of one run.

    Attributes:
        step_seconds: Of one optimizer step, with its terms; its interval ends where the devices
            compute at their peak.
        calibrated: Runs of this very framework, chip and cluster were measured and fitted; else
            the interval is that of a cluster which no fit had seen.
        tokens_per_s: Of all devices.
        utilisation: Model FLOPs per second over the peak (MFU), no recomputation counted, and of
            structured layers what they compute.
        memory: Of the fullest device, reserved, with its terms.
        memory_by_stage: Reserved bytes of each pipeline stage.
        capacity_bytes: Of a device.
        fits: It runs, and its settings go with each other.
        unfit: Why it does not run, or runs in the memory cliff: a sentence with the settings and
            the remedy; empty where all is well. Figures of what cannot run are as if it did.
        cliff: It runs so close to the limit that the allocator slows it down.
        headroom_bytes: What stays free on the fullest device; below 0 where it does not fit.
        joules: Of one step of all devices at the building's meter, or why they are not known.
        run_joules: Of the whole run.
        ettr: Share of the wall time that is progress, with what the rest is lost to; its interval
            is that of the failure rates.
        finish_seconds: Wall time: low and high are its 10th and 90th percentile, middle its mean;
            in doubt are the step's time, the failure rates, and when failures strike.
        on_time: Probability to finish by the deadline, in doubt of the step's time and of when
            failures strike; None without one.
        lost_work_seconds: Expected work that is done again.
        checkpoint_seconds: Between saves of the tier that saves most often.
        last_save_seconds: From a stop until a version is on shared storage.
        resume_seconds: From a start to the first step, state read from shared storage.
        loss_difference: From the baseline at equal data, nats per token, with its terms. The
            baseline repeats no tokens, has exact gradients of the dense model, and batches of at
            most the critical size.
        money: Of the run, or why it is not known.
        carbon_grams: Likewise.
        limiting: "compute" where matrix products and attention are most of the step, else the name
            of its largest term.
        devices: That the run takes.
        steps: Of the run.
        warnings: What is possible and unwise, and what of a job is no part of the prediction, a
            sentence each.
    """

    step_seconds: Total
    calibrated: bool
    tokens_per_s: Interval
    utilisation: Interval
    memory: Total
    memory_by_stage: tuple[float, ...]
    capacity_bytes: float
    fits: bool
    unfit: str
    cliff: bool
    headroom_bytes: float
    joules: Total | Unavailable
    run_joules: Interval | Unavailable
    ettr: Total
    finish_seconds: Interval
    on_time: float | None
    lost_work_seconds: float
    checkpoint_seconds: float
    last_save_seconds: float
    resume_seconds: float
    loss_difference: Total
    money: Interval | Unavailable
    carbon_grams: Interval | Unavailable
    limiting: str
    devices: int
    steps: int
    warnings: tuple[str, ...] = ()


def predict(context: Context, run: Configuration, settings: Settings | None = None) -> Estimate:
    """Predict one run.

    Args:
        context: The job, the cluster and the calibration.
        run: How the work is divided.
        settings: The mechanisms; None for plain checkpoints on shared storage.

    Raises:
        PlanError: The cluster says nothing of the precision, or a setting is unknown.
    """
    numbers = cases([(context.model, run, context.cluster)])
    one = np.zeros(1, dtype=np.intp)
    block = Block(numbers, (settings or Settings(),), one, one)
    judged = judge(context, block)
    outside = beyond(context, block.layouts)
    # With an interval that ends where the devices' peak does.
    least_seconds = _least_seconds(context, run, block.settings[0])
    origin = "published" if context.step.rows else "prior"
    origin = "calibrated" if context.calibrated else origin
    constants = context.step.constants.constants([context.whose])
    terms = tuple(_term(part, constants, PRIORS, origin) for part in judged.step.parts)
    middle = sum(term.value for term in terms)
    width, energy = float(judged.step_half_widths[0]), float(judged.energy_half_widths[0])
    half = float(np.exp(width))
    # What no run has shown is no middle, but it is possible.
    formulas = middle - sum(term.value for term in terms if term.name == HELD)
    low = max(formulas / half, min(least_seconds, middle))
    seconds = Interval(low, middle, middle * half, context.step.widths.coverage, outside)
    step = Total("s", seconds, terms)
    rate = Interval(
        *(run.tokens / seconds.high, run.tokens / seconds.middle, run.tokens / seconds.low),
        seconds.coverage,
        outside,
    )
    dense = context.model.flops_per_token(run.sequence)
    flops = dense * operations_ratio(context.model, block.settings[0], dense) / run.devices
    stages = stages_held(context, block)
    held = tuple(sum(first_of(part.values) for part in stage) for stage in stages)
    assumed = _assumed(context.cluster)
    ends = _rate_ends(judged.survival.run, assumed)
    whole = (*outside, RATES_ASSUMED) if assumed else outside
    left_out: tuple[str, ...] = ()
    if not isinstance(judged.energy, Unavailable):
        left_out = judged.energy.flags
        if judged.energy.draw.source.origin == "prior":
            left_out = ("watts of a busy device are a prior: none was measured", *left_out)
    deadline = context.deadline_seconds
    # The last tier is the one that every run has: what a run leaves behind when it ends.
    shared, restart = judged.survival.run.tiers[-1], judged.survival.run.restart
    return Estimate(
        step_seconds=step,
        calibrated=context.calibrated,
        tokens_per_s=rate,
        utilisation=rate.scaled(flops / context.cluster.peak_flop_per_s[run.precision]),
        memory=memory_total(context, stages[int(np.argmax(held))], outside),
        memory_by_stage=held,
        capacity_bytes=float(judged.capacity_bytes[0]),
        fits=bool(judged.fits[0]),
        unfit=why_unfit(context, block, run, judged),
        cliff=bool(judged.cliff[0]),
        headroom_bytes=float(judged.capacity_bytes[0] - judged.memory_bytes[0]),
        joules=_joules(judged, run.devices, (*outside, *left_out)),
        run_joules=_interval(judged.run_joules, energy, (*whole, *left_out)),
        ettr=_ettr(judged, ends, whole),
        finish_seconds=_finish(judged, seconds, ends, whole),
        on_time=None if deadline is None else float(in_time(judged, deadline)[0]),
        lost_work_seconds=float(judged.finish.lost_work_seconds[0]),
        checkpoint_seconds=float(judged.survival.interval_seconds[0]),
        last_save_seconds=first_of(np.asarray(shared.blocked_seconds + shared.write_seconds)),
        resume_seconds=first_of(np.asarray(restart.restart_seconds + shared.restore_seconds)),
        loss_difference=judged.quality.total(0),
        money=(
            _interval(judged.bill.money, width, whole)
            if judged.bill.rented
            else _interval(judged.bill.money, energy, (*whole, *left_out))
        ),
        carbon_grams=_interval(judged.bill.carbon_grams, energy, (*whole, *left_out)),
        limiting=_limiting(judged),
        devices=run.devices,
        steps=context.steps,
        warnings=_warnings(context, run, block.settings[0]),
    )


def _warnings(context: Context, run: Configuration, settings: Settings) -> tuple[str, ...]:
    """Warn of what is possible and unwise, and of what a prediction leaves out of a job."""
    found = [*context.model.notes, *context.unmapped]
    found += warnings(context.model, run, context.cluster, context.framework)
    share = form_of(context.model, settings).share
    if share > 1.0:
        found.append(
            f"tensorize_rank = {settings.tensorize_rank:g} of form {settings.tensorize_form} has "
            f"{share:.3g} times the parameters of the dense layers and gains nothing: lower it"
        )
    return tuple(found)


def _least_seconds(context: Context, run: Configuration, settings: Settings) -> float:
    """Of a step that computes at the peak and does nothing else.

    Scores are computed on one side of the diagonal alone, as causal attention can.
    """
    model = context.model
    whole = model.flops_per_token(run.sequence)
    scores = 6.0 * model.layers * model.query_width * run.sequence
    flops = whole * float(operations_ratio(model, settings, whole)) - scores
    return flops * run.tokens / (run.devices * context.cluster.peak_flop_per_s[run.precision])


def _term(
    part: Part, values: Constants | MemoryConstants, priors: Mapping[str, Prior], origin: str
) -> Term:
    """Of the first case, with the constants' values and what is known of them."""
    constants = {
        name: Source(first_of(getattr(values, name)), priors[name].unit, origin, priors[name].text)
        for name in part.constants
    }
    inputs = {name: first_of(value) for name, value in part.inputs.items()}
    return Term(part.name, first_of(part.values), part.formula, inputs, constants, part.source)


def _joules(judged: Judged, devices: int, beyond: tuple[str, ...]) -> Total | Unavailable:
    """Of a step, as wide as the errors of its time and of the watts together."""
    if isinstance(judged.energy, Unavailable):
        return judged.energy
    total = judged.energy.total(0, devices)
    width = float(judged.energy_half_widths[0])
    return replace(total, figure=_around(total.figure.middle, width, beyond))


def _assumed(cluster: Cluster) -> tuple[str, ...]:
    """Names of the causes whose rates nobody gave."""
    return tuple(
        cause.name
        for cause in cluster.failures
        if (source := cluster.sources.get(f"failures.{cause.name}"))
        and source.origin == "unverified"
    )


def _rate_ends(run: Reliability, assumed: Sequence[str]) -> tuple[Goodput, Goodput]:
    """The run with as few failures as are likely, and with as many; its settings stay as chosen."""

    def times(power: float) -> Goodput:
        causes = []
        for cause in run.causes:
            factor = ASSUMED_RATE_FACTOR if cause.name in assumed else GIVEN_RATE_FACTOR
            causes.append(replace(cause, per_node_day=cause.per_node_day * factor**power))
        return goodput(replace(run, causes=tuple(causes)))

    return times(-1.0), times(1.0)


def _ettr(judged: Judged, ends: tuple[Goodput, Goodput], beyond: tuple[str, ...]) -> Total:
    """Share of progress, between those with the failure rates at the ends of what is likely."""
    terms = judged.survival.goodput.explain(0)
    losses = tuple(
        replace(term, name=f"lost to {term.name}", value=-term.value) for term in terms[1:]
    )
    whole = Term("wall time", 1.0, "1")
    share = 1.0 - sum(-term.value for term in losses)
    shares = (share, *(first_of(end.ettr) for end in ends))
    # Rounding of the terms may lead out of [0, 1].
    low, middle, high = np.clip([min(shares), share, max(shares)], 0.0, 1.0).tolist()
    return Total("1", Interval(low, middle, high, 0.9, beyond), (whole, *losses))


def _finish(
    judged: Judged, seconds: Interval, ends: tuple[Goodput, Goodput], beyond: tuple[str, ...]
) -> Interval:
    """The spreads of failures, of their rates and of the step's time, as independent in log space.

    The spread of the rates counts in full, as so few clusters are known that ends are no quantiles.
    """
    mean = float(judged.finish.expected_seconds[0])
    early, late = (float(judged.finish.quantile_seconds(share)[0]) for share in (0.1, 0.9))
    productive = mean * max(first_of(judged.survival.goodput.ettr), SMALLEST_RATE)
    fast, slow = (float(finish(end, productive).expected_seconds[0]) for end in ends)
    # 10th and 90th percentile of the step from its 5th and 95th, as of a normal error.
    step = np.log(seconds.high / seconds.middle) * 1.2816 / 1.6449
    short = min(step, np.log(seconds.middle / seconds.low))
    low = _joined(short, np.log(mean / min(early, mean)), np.log(mean / min(fast, mean)))
    high = _joined(step, np.log(max(late, mean) / mean), np.log(max(slow, mean) / mean))
    likely = mean * float(np.exp(-low)), mean, mean * float(np.exp(high))
    return Interval(*likely, 0.8, beyond)


def _joined(*spreads: float) -> float:
    return float(np.sqrt(sum(spread**2 for spread in spreads)))


def _interval(
    values: np.ndarray | Unavailable, half_width: float, outside: tuple[str, ...]
) -> Interval | Unavailable:
    if isinstance(values, Unavailable):
        return values
    return _around(first_of(values), half_width, outside)


def _around(middle: float, half_width: float, outside: tuple[str, ...]) -> Interval:
    """With 90 % coverage; as wide on both sides, in log space."""
    factor = float(np.exp(half_width))
    return Interval(middle / factor, middle, middle * factor, 0.9, outside)


def _limiting(judged: Judged) -> str:
    """Name the largest part of the step: "compute" where products and attention are most of it."""
    values = {part.name: first_of(part.values) for part in judged.step.parts}
    computing = sum(values.get(name, 0.0) for name in COMPUTE)
    if computing > COMPUTE_SHARE * sum(values.values()):
        return "compute"
    return max(values, key=lambda name: values[name])


def as_record(estimate: Estimate, calibration: str) -> Predicted:
    """An estimate as plain numbers, for the run's records."""
    step, memory, rate = estimate.step_seconds, estimate.memory.figure, estimate.tokens_per_s
    tokens = rate.middle * step.figure.middle
    joules: tuple[float | None, ...] = (None, None, None)
    if not isinstance(estimate.joules, Unavailable):
        found = estimate.joules.figure
        joules = tuple(end / tokens for end in (found.low, found.middle, found.high))
    return Predicted(
        step_seconds=step.figure.middle,
        step_seconds_low=step.figure.low,
        step_seconds_high=step.figure.high,
        memory_bytes=memory.middle,
        memory_bytes_low=memory.low,
        memory_bytes_high=memory.high,
        tokens_per_s=rate.middle,
        joules_per_token_low=joules[0],
        joules_per_token=joules[1],
        joules_per_token_high=joules[2],
        terms={term.name: term.value for term in step.terms},
        coverage=step.figure.coverage,
        extrapolated=list(step.figure.extrapolated),
        calibration=calibration,
    )
