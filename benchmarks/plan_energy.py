"""Predicted joules of pipelines that really ran, from nothing that was measured on them but time.

Five pipelines of the Perseus artefact (SOSP'24, ml-energy/zeus, Apache-2.0) on A100 and A40 boards
with a limit of 300 W: time of every forward and backward, energy of each GPU, for 29 to 60 clock
plans each; and Zeus' sweeps of the power limit over the same pipelines. Busy devices are taken to
draw their limit at the top clocks (`outlast.plan.energy.busy_watts` at full activity), waiting ones
what the artefact's authors give; what clocks and caps do comes from profiles of another model.
How these profiles are averaged matters: three ways were looked at, and gave 5.7 to 8.3 % for the
clock plans. The one that stands uses the whole profile.

`data` is the folder that has ``measured_plans/`` and ``zeus_power_limit/``.
"""

from __future__ import annotations

import collections
import csv
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from energy_measured import DEVICES, PIPELINES, Pipeline, measured
from harness import Bar, at_most

from outlast.energy import Schedule
from outlast.energy.model import DeviceConstants, Response, effective_clocks_mhz, evaluate
from outlast.energy.schedule import ExecutedStep
from outlast.plan.cluster import Power
from outlast.plan.energy import (
    Factors,
    StepEnergy,
    activity_at,
    busy_watts,
    clock_factors,
    step_energy,
)


@dataclass(frozen=True)
class CapPoint:
    """What a pipeline takes under one power cap on all devices: seconds, and watts of a device."""

    seconds: float
    watts: float


Sweep = dict[float, CapPoint]


def sweeps_of(path: Path) -> list[Sweep]:
    """Sweeps of power caps (W) of the pipelines in a file."""
    sweeps: dict[str, Sweep] = collections.defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            devices = int(row["dp"]) * int(row["tp"]) * int(row["pp"])
            seconds = float(row["time"])
            watts = float(row["energy"]) / seconds / devices
            sweeps[row["model_name"]][float(row["power_limit_0"])] = CapPoint(seconds, watts)
    return list(sweeps.values())


GOAL = 8.0
"""Per cent, mean absolute error of unseen runs (the notes' G9)."""
LIMIT_WATTS = 300.0
# Nothing idles in these pipelines that is not blocked, so this figure does not matter.
IDLE_WATTS = 50.0
PROFILES = {"A100": "gpt3-175b+a100_sxm_bf16.csv", "A40": "gpt3-175b+a40_bf16.csv"}
"""Of GPT-3 175B on like chips."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of energies, and of limit times time in their place."""

    errors: tuple[float, ...]
    of_limit: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return statistics.fmean(map(abs, self.errors))

    @property
    def limit_mean(self) -> float:
        """That of the power limit times the time."""
        return statistics.fmean(map(abs, self.of_limit))


def power_of(gpu: str) -> Power:
    """Watts of a board."""
    return Power(
        limit_watts=LIMIT_WATTS, blocked_watts=DEVICES[gpu].blocking_watts, idle_watts=IDLE_WATTS
    )


def constants_of(gpu: str) -> DeviceConstants:
    """The chip's constants with the board's limit."""
    return replace(DEVICES[gpu], power_limit_watts=LIMIT_WATTS)


@cache
def activity(gpu: str, data: Path) -> float:
    """Watts per MHz of another model's forwards and backwards on like chips.

    Mean over all clocks at which no limit can hold the chip back: draws below 90 % of it.
    """
    device = DEVICES[gpu]
    found = []
    with (data / "stage_profile" / PROFILES[gpu]).open(newline="") as file:
        for row in csv.DictReader(file):
            watts = float(row["energy"]) / float(row["time"])
            if watts < 0.9 * device.power_limit_watts:
                found.append(activity_at(device, watts, float(row["frequency"])))
    return statistics.fmean(found)


@cache
def governed(gpu: str, data: Path) -> float:
    """Share of busy time that the clock governs, in the same profile at the same clocks.

    Time of all forwards and backwards together is `a + b / clock`, by least squares on relative
    errors; the share is that of the second part at the highest clock.
    """
    device = DEVICES[gpu]
    seconds: dict[float, float] = collections.defaultdict(float)
    held_back = set()
    with (data / "stage_profile" / PROFILES[gpu]).open(newline="") as file:
        for row in csv.DictReader(file):
            clock = float(row["frequency"])
            seconds[clock] += float(row["time"])
            if float(row["energy"]) / float(row["time"]) >= 0.9 * device.power_limit_watts:
                held_back.add(clock)
    clocks = np.array(sorted(set(seconds) - held_back))
    times = np.array([seconds[clock] for clock in clocks])
    design = np.stack([np.ones(clocks.size), 1.0 / clocks], axis=1) / times[:, None]
    whole, inverse = np.linalg.lstsq(design, np.ones(clocks.size), rcond=None)[0]
    at_top = inverse / clocks[-1]
    return float(np.clip(at_top / (whole + at_top), 0.0, 1.0))


def stages_energy(
    pipeline: Pipeline, schedule: Schedule, step: ExecutedStep, clocks: Factors | None = None
) -> tuple[StepEnergy, list[int]]:
    """Energy of every operation and of every stage's waiting, and the stages they belong to."""
    stages = [operation.stage for operation in schedule.operations]
    busy = np.array(step.operation_seconds)
    waiting = step.step_seconds - np.bincount(stages, busy, pipeline.stages)
    power = power_of(pipeline.gpu)
    # Operations that overlap their stage's end leave no time to wait.
    seconds = (
        np.append(busy, np.zeros(pipeline.stages)),
        np.append(np.zeros(busy.size), np.maximum(waiting, 0.0)),
        0.0,
    )
    if clocks is not None:
        # Measured times hold the clocks' effect already.
        rest = np.ones(pipeline.stages)
        clocks = np.ones(1), np.append(clocks[1], rest)
    draw = busy_watts(power, 1.0)
    found = step_energy(power, draw, seconds, clocks=clocks)
    return found, [*stages, *range(pipeline.stages)]


def top_clock_errors(pipeline: Pipeline, data: Path) -> Errors:
    """Of each device in the first plan, which runs at the highest clocks."""
    schedule, steps = measured(pipeline, data)
    step = steps[0]
    found, stages = stages_energy(pipeline, schedule, step)
    joules = np.bincount(stages, found.device_joules, pipeline.stages)
    flat = LIMIT_WATTS * step.step_seconds / np.array(step.joules) - 1.0
    return Errors(tuple(joules / np.array(step.joules) - 1.0), tuple(flat))


def plan_errors(pipeline: Pipeline, data: Path, quick: bool) -> Errors:
    """Of all devices together in each plan of clocks."""
    schedule, steps = measured(pipeline, data)
    errors, flat = [], []
    for step in steps[:: 5 if quick else 1]:
        factors = clock_factors(
            constants_of(pipeline.gpu), activity(pipeline.gpu, data), np.array(step.clocks_mhz)
        )
        found, _ = stages_energy(pipeline, schedule, step, factors)
        whole = sum(step.joules)
        errors.append(float(found.device_joules.sum()) / whole - 1.0)
        flat.append(LIMIT_WATTS * pipeline.stages * step.step_seconds / whole - 1.0)
    return Errors(tuple(errors), tuple(flat))


def cap_effect(
    constants: DeviceConstants, activity: float, cap_watts: float, *, compute_share: float = 1.0
) -> tuple[float, float]:
    """Time and energy of a step of 1 s under a power limit, relative to the board's limit.

    Args:
        constants: Of the device.
        activity: Watts per MHz at the voltage below the knee.
        cap_watts: The limit.
        compute_share: Share of the step that the clock governs.
    """
    top = np.array([constants.top_clock_mhz])
    response = Response(
        fixed_seconds=1.0 - compute_share,
        clock_seconds=compute_share
        * float(effective_clocks_mhz(constants, activity, top)[0])
        / constants.top_clock_mhz,
        activity_watts_per_mhz=activity,
    )
    capped = replace(constants, power_limit_watts=min(cap_watts, constants.power_limit_watts))
    (seconds, joules), (longer, less) = (evaluate(response, c, top) for c in (constants, capped))
    return float(longer[0] / seconds[0]), float(less[0] / joules[0])


def cap_errors(pipeline: Pipeline, data: Path, *, times_known: bool) -> Errors:
    """Of all devices at each power limit below the board's.

    Args:
        pipeline: Which.
        data: Folder of the measurements.
        times_known: Take times from the sweep; else predict them too, from the run at the board's
            limit.
    """
    steps = measured(pipeline, data)[1]
    busy = sum(steps[0].operation_seconds) / pipeline.stages / steps[0].step_seconds
    sweep = _sweep(pipeline, data)
    whole = sweep[max(sweep)].seconds
    caps = np.array([cap for cap in sorted(sweep) if cap < max(sweep)])
    watts, share = activity(pipeline.gpu, data), governed(pipeline.gpu, data)
    device = constants_of(pipeline.gpu)
    # Time is linear in the share that the clock governs, and power depends on the cap alone.
    slower = np.array([cap_effect(device, watts, float(cap))[0] for cap in caps])
    weaker = np.array([cap_effect(device, watts, float(cap), compute_share=0.0)[1] for cap in caps])
    ran = np.array([sweep[cap].seconds for cap in caps])
    span = ran if times_known else whole * (1.0 + share * (slower - 1.0))
    power = power_of(pipeline.gpu)
    # All operations slow down together, and with them the time that devices wait.
    seconds = (busy * span, (1.0 - busy) * span, 0.0)
    clocks = np.ones(1), weaker
    found = step_energy(power, busy_watts(power, 1.0), seconds, clocks=clocks)
    drawn = ran * np.array([sweep[cap].watts for cap in caps])
    return Errors(tuple(found.joules / drawn - 1.0), tuple(LIMIT_WATTS * ran / drawn - 1.0))


def _sweep(pipeline: Pipeline, data: Path) -> Sweep:
    path = data / "zeus_power_limit" / f"{pipeline.gpu}_zeus_global.csv"
    with path.open(newline="") as file:
        names = list(dict.fromkeys(row["model_name"] for row in csv.DictReader(file)))
    return sweeps_of(path)[names.index(pipeline.model)]


def rows(quick: bool, data: Path | None = None) -> list[Bar]:
    """Errors of predicted energy, each beside that of the power limit times the time.

    Args:
        quick: Every fifth plan only.
        data: Folder of the measurements; without it every row is unavailable.
    """
    top = "energy of each GPU of 5 unseen pipelines, top clocks: mean error"
    plans = "energy of 5 unseen pipelines under their clock plans: mean error"
    known = "energy of 5 pipelines under power caps, measured times: mean error"
    unknown = "time and energy of 5 pipelines under power caps: mean error of energy"
    node = "energy of unseen runs on an H200 node: mean error"
    nobody = "no meter of such a node at hand; best published for 8 H100: 11.4 % (2506.14551)"
    missing = [Bar(node, None, "%", f"<= {GOAL:g}", False, nobody, "predicted")]
    if data is None:
        reason = "needs the public measurements: give --data"
        names = (top, plans, known, unknown)
        return [
            *(Bar(each, None, "%", f"<= {GOAL:g}", False, reason, "predicted") for each in names),
            *missing,
        ]
    data = data.resolve()
    found = []
    for name, errors in (
        (top, [top_clock_errors(each, data) for each in PIPELINES]),
        (plans, [plan_errors(each, data, quick) for each in PIPELINES]),
        (known, [cap_errors(each, data, times_known=True) for each in PIPELINES]),
        (unknown, [cap_errors(each, data, times_known=False) for each in PIPELINES]),
    ):
        mean = 100.0 * statistics.fmean(each.mean for each in errors)
        worst = 100.0 * max(each.mean for each in errors)
        limit = 100.0 * statistics.fmean(each.limit_mean for each in errors)
        peer = f"power limit x time {limit:.1f} %; our worst pipeline {worst:.1f} %"
        found.append(replace(at_most(name, mean, "%", GOAL, peer), kind="predicted"))
    return [*found, *missing]
