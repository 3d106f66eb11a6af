"""How well schedules and fitted powers explain pipelines that really ran.

Five pipelines of the Perseus artefact (SOSP'24, ml-energy/zeus, Apache-2.0): every plan gives the
clock and median time of each forward and backward, the iteration time, and the energy of each GPU.
Each plan is predicted from the half of the plans that it is not in; both halves are judged. Plan 0
is a cold start and left out.

`data` is the folder that has ``measured_plans/``.
"""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from energy_fit import MeteredStep, fit_plan_energy
from harness import Bar

from outlast.energy import DeviceConstants, Schedule, explained, one_f_one_b
from outlast.errors import EnergyError

PEER = "measured plans of Perseus (SOSP'24), half of them unseen"

# Voltage curves and static power fitted to the same artefact's GPT-3 175B stage profiles, which are
# measurements of another model; blocking power as its authors give it.
DEVICES = {
    "A100": DeviceConstants(
        name="NVIDIA A100-SXM",
        top_clock_mhz=1410,
        static_watts=58.0,
        knee_mhz=1103.0,
        knee_per_ghz=0.73,
        power_limit_watts=400.0,
        blocking_watts=83.64,
    ),
    "A40": DeviceConstants(
        name="NVIDIA A40",
        top_clock_mhz=1740,
        static_watts=90.0,
        knee_mhz=1139.0,
        knee_per_ghz=0.44,
        power_limit_watts=300.0,
        blocking_watts=70.38,
    ),
}


@dataclass(frozen=True)
class Pipeline:
    """A model on a pipeline of GPUs, and whether its communication is small.

    Attributes:
        computes: Whether less than 5 % of a step passes outside its forwards and backwards.
    """

    gpu: str
    model: str
    stages: int
    microbatches: int
    computes: bool

    @property
    def stem(self) -> str:
        """How its files' names begin."""
        return f"perseus_{self.gpu}_{self.model}_dp1pp{self.stages}tp1"

    def __str__(self) -> str:
        return f"{self.model.removesuffix('-uncased')} on {self.stages} {self.gpu}"


PIPELINES = (
    Pipeline("A100", "gpt3-xl", 4, 128, computes=True),
    Pipeline("A40", "gpt3-2.7b", 8, 256, computes=True),
    Pipeline("A100", "wide-resnet101_8", 4, 24, computes=True),
    Pipeline("A100", "bert-huge-uncased", 4, 32, computes=False),
    Pipeline("A40", "bert-huge-uncased", 8, 32, computes=False),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of what was predicted for unseen plans."""

    mean: float
    largest: float


def measured(pipeline: Pipeline, data: Path) -> tuple[Schedule, list[MeteredStep]]:
    """The plans of a pipeline that ran, without the cold start."""
    return _measured(pipeline, data.resolve())


@cache
def _measured(pipeline: Pipeline, data: Path) -> tuple[Schedule, list[MeteredStep]]:
    schedule = one_f_one_b(pipeline.stages, pipeline.microbatches)
    folder = data / "measured_plans"
    whole: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with (folder / f"{pipeline.stem}_iter.csv").open(encoding="utf-8") as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: (int(row["plan"]), int(row["rank"])))
    for row in rows:
        whole[int(row["plan"])].append((float(row["iter_time_s"]), float(row["iter_energy_J"])))
    parts: dict[int, dict[tuple[int, str, int], tuple[float, float]]] = defaultdict(dict)
    with gzip.open(folder / f"{pipeline.stem}_instr.csv.gz", "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            phase = {"F": "forward", "B": "backward"}[row["kind"]]
            key = int(row["stage"]), phase, int(row["mb"])
            parts[int(row["plan"])][key] = float(row["time_s"]), float(row["freq_mhz"])
    steps = []
    for plan in sorted(parts):
        if plan == 0:
            continue
        ran = [parts[plan][o.stage, o.phase, o.microbatch] for o in schedule.operations]
        steps.append(
            MeteredStep(
                operation_seconds=tuple(seconds for seconds, _ in ran),
                step_seconds=statistics.fmean(seconds for seconds, _ in whole[plan]),
                clocks_mhz=tuple(clock for _, clock in ran),
                joules=tuple(joules for _, joules in whole[plan]),
            )
        )
    return schedule, steps


def halves(steps: list[MeteredStep]) -> list[tuple[list[MeteredStep], list[MeteredStep]]]:
    """(seen, unseen) twice: every second plan, and the others."""
    return [(steps[::2], steps[1::2]), (steps[1::2], steps[::2])]


def time_errors(pipeline: Pipeline, data: Path) -> Errors | str:
    """Errors of predicted iteration times, or the refusal."""
    schedule, steps = measured(pipeline, data)
    errors = []
    for seen, unseen in halves(steps):
        try:
            found = explained(schedule, seen)
        except EnergyError as refusal:
            if "outside the timed operations" not in str(refusal):
                raise
            return str(refusal)
        errors += [
            abs(found.step_seconds(step.operation_seconds) / step.step_seconds - 1)
            for step in unseen
        ]
    return Errors(statistics.fmean(errors), max(errors))


def energy_errors(pipeline: Pipeline, data: Path) -> Errors:
    """Errors of the predicted energy of all GPUs, given clocks and times."""
    schedule, steps = measured(pipeline, data)
    errors = []
    for seen, unseen in halves(steps):
        model = fit_plan_energy(schedule, seen, DEVICES[pipeline.gpu])
        errors += [abs(model.predict(step).joules / sum(step.joules) - 1) for step in unseen]
    return Errors(statistics.fmean(errors), max(errors))


def iteration_time_bars(data: Path) -> list[Bar]:
    """Largest error where communication is small, and an explicit refusal elsewhere."""
    bars = []
    for pipeline in PIPELINES:
        found = time_errors(pipeline, data)
        if isinstance(found, str):
            name = f"iteration time of {pipeline}: refused, too much of it was not timed"
            bars.append(Bar(name, None, "%", "refusal", not pipeline.computes, found, "predicted"))
            continue
        bars.append(
            Bar(
                f"iteration time of {pipeline}: largest error (mean {found.mean:.2%})",
                round(100 * found.largest, 3),
                "%",
                "<= 2" if pipeline.computes else "refusal",
                pipeline.computes and found.largest <= 0.02,
                PEER,
                "predicted",
            )
        )
    return bars


def plan_energy_bars(data: Path) -> list[Bar]:
    """Mean absolute error of the energy of unseen plans."""
    bars = []
    for pipeline in PIPELINES:
        found = energy_errors(pipeline, data)
        name = f"plan energy of {pipeline}: mean error (largest {found.largest:.2%})"
        figure = round(100 * found.mean, 3)
        bars.append(Bar(name, figure, "%", "<= 1", found.mean <= 0.01, PEER, "predicted"))
    return bars
