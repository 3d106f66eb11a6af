"""Composition of the model: all predictions of candidates, within published utilisation.

Time of the plain step comes from `step_time` and the calibration, mechanisms from their `cost.py`
through `mechanisms` and `fault_tolerance`; memory, loss, energy and money come from `memory`,
`loss` and `energy`. All is computed for many candidates at once; `prediction` reads one row of it.

Formulas with fitted constants may promise what no run has shown. Where they do, a step is held to
the time that the best published run of that chip would take, as a term of its own, and the figures
carry a phrase that says so. Runs of the cluster at hand that reached more count instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.cost import JOULES_PER_KWH
from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.constants import MemoryConstants, memory_constants
from outlast.plan.constraints import calibrated_as
from outlast.plan.energy import (
    Bill,
    StepEnergy,
    bill,
    busy_watts,
    measured_watts,
    step_energy,
)
from outlast.plan.estimate import NORMAL_90
from outlast.plan.facts import facts
from outlast.plan.fault_tolerance import FaultTolerance, fault_tolerance, possible
from outlast.plan.goodput import Finish, finish
from outlast.plan.loss import quality
from outlast.plan.mechanisms import (
    HELD,
    Step,
    dense_flops,
    form_of,
    operations_ratio,
    with_mechanisms,
)
from outlast.plan.memory import CLIFF_HEADROOM, room
from outlast.plan.objectives import Objectives
from outlast.plan.reliability import HOUR_SECONDS, Restart
from outlast.plan.step_fit import Belonging

if TYPE_CHECKING:
    from outlast.coding.delays import DelayModel
    from outlast.energy.model import DeviceConstants
    from outlast.plan.batch import Array, Cases
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.loss import Differences
    from outlast.plan.memory_fit import MemoryFit
    from outlast.plan.space import Block
    from outlast.plan.step_model import StepModel
    from outlast.plan.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Context:
    """The job, the machines, and what is known of both.

    Attributes:
        model: What is trained.
        cluster: On what.
        step: The calibration.
        tokens: Of the whole training.
        baseline: The run whose steps are counted and whose precision losses are compared with, at
            equal data; its division of the work does not count.
        framework: Software that trains.
        timed_as: Name under which the time of such runs was calibrated; empty for that of the
            framework.
        unique_tokens: Different ones in the data; infinite where nothing repeats.
        deadline_seconds: Wall time within which the run should be finished; None without one.
        restart: The recovery after a stop; spares are the cluster's.
        delays: How late workers are; None where nobody knows, so that coding gains nothing.
        clocks: Power and time constants of the device; None where nobody fitted them.
        memory: Fitted constants of the memory model; None for the priors.
        memory_elsewhere: They are of published runs on other clusters.
        busy_watts: What a busy device was measured to draw; None for the prior.
        commits_without: A gradient code commits a step without the chunks that were lost; else
            they are computed again and the gradient is exact.
        unmapped: What of a job is no part of the prediction, a sentence each.
    """

    model: Transformer
    cluster: Cluster
    step: StepModel
    tokens: float
    baseline: Configuration
    framework: str = "outlast"
    timed_as: str = ""
    unique_tokens: float = math.inf
    deadline_seconds: float | None = None
    restart: Restart = field(default_factory=lambda: Restart(replace_seconds=300.0))
    delays: DelayModel | None = None
    clocks: DeviceConstants | None = None
    memory: MemoryFit | None = None
    memory_elsewhere: bool = False
    busy_watts: float | None = None
    commits_without: bool = False
    unmapped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.tokens < math.inf:
            raise PlanError(f"tokens = {self.tokens:g}: give a finite number above 0")
        if not self.unique_tokens > 0.0:
            raise PlanError(f"unique_tokens = {self.unique_tokens:g}: give a number above 0")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0.0:
            raise PlanError(f"deadline_seconds = {self.deadline_seconds:g}: give more than 0")

    @property
    def whose(self) -> Belonging:
        """Whose runs these are, as calibrations count."""
        framework = self.timed_as or calibrated_as(self.framework)
        return Belonging(self.cluster.device, self.cluster.name, framework)

    @property
    def calibrated(self) -> bool:
        """True if runs of this very framework, chip and cluster were measured."""
        return self.step.calibrated(self.whose, mixture=self.model.experts > 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of the training."""
        return max(math.ceil(self.tokens / self.baseline.tokens), 1)


_ALIKE = {"bf16": ("bf16", "fp16"), "fp16": ("bf16", "fp16")}
"""Precisions with one peak."""


@dataclass(frozen=True, slots=True)
class Best:
    """The most that a published run reached.

    Attributes:
        chip: Kind of the devices.
        precision: Of the products.
        share: Model FLOPs per second over the peak, attention in full, no recomputation.
        dense: Of a dense model; else of a mixture of experts, since no dense run is known.
        run: What was run.
        source: Where it stands.
    """

    chip: str
    precision: str
    share: float
    dense: bool
    run: str
    source: str


BEST = tuple(Best(**entry) for entry in facts("best_utilisation")["best"])
"""The best published utilisations."""


def best_of(chip: str, precision: str) -> tuple[float, str]:
    """The best published share of the peak of a chip, and in words whose it is.

    Runs in a precision of the same peak count first, and dense ones before mixtures of experts; of
    a chip that has none, all of its runs do; of one of which nobody published any, those of all
    chips. Words say which of these it is.
    """
    alike = _ALIKE.get(precision, (precision,))
    own = [best for best in BEST if best.chip == chip]
    same = [best for best in own or BEST if best.precision in alike]
    dense = [best for best in same if best.dense]
    best = max(dense or same or own or BEST, key=lambda best: best.share)
    remarks = []
    if not own:
        remarks.append(f"of any chip, since none is published of {chip}")
    if not same:
        remarks.append(f"known only in {best.precision}")
    elif not dense:
        remarks.append("known only of mixtures of experts")
    whose = ", ".join([f"{best.chip} in {best.precision}", *remarks])
    return best.share, f"{whose}: {100 * best.share:.1f} %, {best.run}"


def least_seconds(context: Context, layouts: Cases) -> Array | None:
    """(cases,) seconds of a step at the best published utilisation; None: there is no such limit.

    Args:
        context: Model, cluster and calibration.
        layouts: (cases,).
    """
    share = _limits(context, layouts)
    if share is None:
        return None
    flops = dense_flops(context, layouts) * layouts.batch * layouts.sequence
    return np.asarray(flops / (layouts.devices * layouts.peak_flop_per_s * share))


def why_held(context: Context, layouts: Cases) -> tuple[str, ...]:
    """A phrase where the first case is held."""
    least = least_seconds(context, layouts)
    parts = context.step.parts(layouts, context.whose)
    total = sum(float(np.ravel(part.values)[0]) for part in parts)
    if least is None or np.ravel(least)[0] <= total:
        return ()
    precision = "bf16" if np.ravel(layouts.half)[0] > 0.0 else "fp32"
    if np.ravel(layouts.quantized)[0] > 0.0:
        precision = "fp8"
    return (f"{HELD} ({best_of(context.cluster.device, precision)[1]})",)


def _limits(context: Context, layouts: Cases) -> Array | None:
    """(cases,) or (1,) largest believable shares of the peak; None where runs are measured here.

    The peak of processors is a rate that was measured of products, which others come close to.
    """
    whose = context.whose
    if context.calibrated and context.cluster.processor:
        return None
    place = context.step.places.get(whose.group(mixture=context.model.experts > 1))
    reached = place.utilisation if place and context.calibrated else {}
    shares = {
        name: max(
            best_of(whose.chip, name)[0],
            *(reached.get(item, 0.0) for item in _ALIKE.get(name, (name,))),
        )
        for name in ("fp8", "bf16", "fp32")
    }
    half = np.where(layouts.half > 0.0, shares["bf16"], shares["fp32"])
    return np.asarray(np.where(layouts.quantized > 0.0, shares["fp8"], half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Predictions of candidates; arrays have shape (candidates,) unless said.

    Attributes:
        step: A step with its mechanisms.
        step_half_widths: Half of the interval of its time, in log space.
        memory_bytes: Reserved on the fullest device.
        capacity_bytes: Of a device.
        pressing: What it needs and cannot give back, over the memory that it can get.
        possible: Its settings go with each other and with the cluster.
        fits: It is possible and does not run out of memory.
        cliff: It fits, but so closely that the allocator slows it down.
        survival: Goodput and checkpoints.
        finish: Distribution of the wall time.
        energy: Joules of a step, per device, or why they are not known.
        energy_half_widths: Half of the interval of a step's or the run's joules, in log space.
        run_joules: Of the whole run at the building's meter, or why they are not known.
        bill: What the run costs.
        quality: Its loss less the baseline's (see `loss.quality` for what that is).
        devices: That it takes.
    """

    step: Step
    step_half_widths: Array
    memory_bytes: Array
    capacity_bytes: Array
    pressing: Array
    possible: np.ndarray
    fits: np.ndarray
    cliff: np.ndarray
    survival: FaultTolerance
    finish: Finish
    energy: StepEnergy | Unavailable
    energy_half_widths: Array
    run_joules: Array | Unavailable
    bill: Bill
    quality: Differences
    devices: Array


def judge(context: Context, block: Block) -> Judged:
    """Predict candidates.

    Args:
        context: The job, the cluster, the calibration.
        block: Layouts and settings.
    """
    layouts, spread = block.layouts, block.spread
    plain = context.step.parts(layouts, context.whose)
    step = with_mechanisms(context, block, plain, least_seconds(context, layouts))
    widths = spread(context.step.half_widths(layouts, context.whose))
    shares = None
    if any(setting.tensorize_form != "dense" for setting in block.settings):
        shares = block.by_setting(lambda setting: form_of(context.model, setting).share)
    memory = room(layouts, memory_of(context), block.layout, shares)
    capacity = spread(layouts.memory_bytes)
    alive = fault_tolerance(context, block, step)
    going = possible(context.cluster, block)
    devices = spread(layouts.devices)
    productive = context.steps * (
        step.seconds / (1.0 + step.guard_overhead) / (1.0 + step.coding_overhead)
    )
    done = finish(alive.goodput, productive)
    energy = _energy(context, block, step)
    joules = _run_joules(context, energy, devices, step, done)
    device_hours = devices * done.expected_seconds / HOUR_SECONDS
    return Judged(
        step=step,
        step_half_widths=widths,
        memory_bytes=memory.reserved_bytes,
        capacity_bytes=capacity,
        pressing=memory.pressing,
        possible=going,
        fits=going & (memory.pressing < 1.0),
        cliff=memory.headroom < CLIFF_HEADROOM,
        survival=alive,
        finish=done,
        energy=energy,
        energy_half_widths=(
            widths
            if isinstance(energy, Unavailable)
            # Errors of the watts and of the time are independent.
            else np.hypot(widths, NORMAL_90 * energy.deviation / energy.joules)
        ),
        run_joules=joules,
        bill=bill(context.cluster.prices, device_hours, joules),
        quality=quality(context, block, step),
        devices=devices,
    )


def in_time(judged: Judged, deadline_seconds: float) -> Array:
    """(candidates,) probability to finish by a deadline, the error of the step's time included."""
    return judged.finish.likely(deadline_seconds, judged.step_half_widths / NORMAL_90)


def memory_of(context: Context) -> MemoryConstants:
    """The memory model's constants, fitted or believed."""
    if context.memory is None:
        return memory_constants()
    return context.memory.constants((context.whose.framework,))


def beyond(context: Context, layouts: Cases) -> tuple[str, ...]:
    """Why the first of some layouts is beyond what was calibrated, a phrase each."""
    return (*context.step.outside(layouts, context.whose), *why_held(context, layouts))


def evaluator(context: Context) -> Callable[[Block], Objectives]:
    """Function that a search asks of each block of candidates."""

    def evaluate(block: Block) -> Objectives:
        judged = judge(context, block)
        missed: Array | Unavailable = Unavailable("no deadline was given")
        if context.deadline_seconds is not None:
            missed = 1.0 - in_time(judged, context.deadline_seconds)
        half, joules = judged.step_half_widths, judged.energy_half_widths
        money = half if judged.bill.rented else joules
        energy = judged.run_joules
        if not isinstance(energy, Unavailable):
            energy = energy * (1.0 / JOULES_PER_KWH)
        nats = (judged.quality.high - judged.quality.low) / 2.0
        return Objectives(
            hours=judged.finish.expected_seconds / HOUR_SECONDS,
            # What cannot run for another reason is not to be named as the least memory.
            memory_bytes=np.where(judged.possible, judged.memory_bytes, np.inf),
            capacity_bytes=judged.capacity_bytes,
            fits=judged.fits,
            cliff=judged.cliff,
            kwh=energy,
            lost_hours=(1.0 - judged.survival.goodput.ettr)
            * judged.finish.expected_seconds
            / HOUR_SECONDS,
            miss_probability=missed,
            loss_difference=judged.quality.middle,
            device_hours=judged.finish.expected_seconds / HOUR_SECONDS * judged.devices,
            money=judged.bill.money,
            grams_co2=judged.bill.carbon_grams,
            flags=lambda row: beyond(context, block.layouts.taken(block.layout[[row]])),
            half_widths={
                "hours": half,
                "kwh": joules,
                "lost_hours": half,
                "device_hours": half,
                "money": money,
                "grams_co2": joules,
                "loss_difference": nats,
            },
        )

    return evaluate


def _energy(context: Context, block: Block, step: Step) -> StepEnergy | Unavailable:
    """Joules of a step: computing, waiting for others, and with nothing to do."""
    cluster = context.cluster
    if cluster.power is None:
        return Unavailable(
            "what the devices draw is not known",
            "give limit_watts, blocked_watts and idle_watts under [power] of the cluster file",
        )
    names = ("pipeline bubble", "host and kernel starts", "fixed", "uneven stages")
    idle = np.zeros(len(block))
    for part in step.parts:
        if part.name in names:
            idle = idle + part.values
    busy = step.busy_seconds
    slowed = busy if step.clocks is None else busy * step.clocks[0]
    idle = np.minimum(idle, np.maximum(step.seconds - slowed, 0.0))
    blocked = np.maximum(step.seconds - slowed - idle, 0.0)
    if context.busy_watts is not None:
        draw = measured_watts(context.busy_watts, "given with the job")
    else:
        layouts = block.layouts
        per_token = context.model.flops_per_token(context.baseline.sequence)
        flops = per_token * context.baseline.tokens
        # Full recomputation computes the forward pass, a third of the rest, once more.
        computed = flops * np.where(layouts.recompute == 2.0, 4.0 / 3.0, 1.0)
        share = block.spread(computed / (layouts.peak_flop_per_s * layouts.devices))
        share = share * block.by_setting(
            lambda setting: operations_ratio(context.model, setting, per_token)
        )
        activity = np.minimum(share / np.maximum(busy, 1e-12), 1.0)
        draw = busy_watts(cluster.power, activity)
    return step_energy(
        cluster.power,
        draw,
        (busy, blocked, idle),
        devices_per_node=cluster.devices_per_node,
        clocks=step.clocks,
        sources=cluster.sources,
    )


def _run_joules(
    context: Context, energy: StepEnergy | Unavailable, devices: Array, step: Step, done: Finish
) -> Array | Unavailable:
    """Steps, those done again included, and waiting for the rest of the wall time."""
    if isinstance(energy, Unavailable):
        return energy
    power = energy.power
    computing = context.steps * step.seconds + done.lost_work_seconds
    waiting = np.maximum(done.expected_seconds - computing, 0.0)
    rest = power.idle_watts + power.node_watts / energy.devices_per_node
    each = energy.joules * computing / step.seconds + waiting * rest * power.pue
    return np.asarray(devices * each)
