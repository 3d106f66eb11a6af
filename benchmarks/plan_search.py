"""Decisions: regret of what the model recommends among published runs, and a search's speed."""

from __future__ import annotations

import collections
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from harness import Bar
from plan_memory import held_out
from plan_models import uncalibrated
from plan_time import SWEEP, fitting_rows

from outlast.plan.api import Training, search
from outlast.plan.batch import cases
from outlast.plan.cluster_file import cluster_of
from outlast.plan.configuration import Configuration, Mechanisms
from outlast.plan.conformal import Support
from outlast.plan.huggingface import published
from outlast.plan.rows import Row, clean
from outlast.plan.run_rows import read_rows
from outlast.plan.step_model import StepModel, belonging, fitted, validate

MOST_SECONDS = 2.0


def regret_bars(data: Path, quick: bool) -> Iterator[Bar]:
    """Throughput lost by running what is predicted to be fastest, in each cell of the sweep.

    A cell is a model on a number of devices; the choice is among the runs of it that were made,
    those that ran out of memory included. Time and memory come from fits that have not seen the
    configuration.

    Args:
        data: The published table.
        quick: Fewer folds.
    """
    count = 3 if quick else 10
    rows = fitting_rows(data)
    held = validate(rows, count)
    timed = zip(held.rows, held.predicted_seconds, strict=True)
    seconds = {row.name: float(value) for row, value in timed if row.source == SWEEP}
    table = [row for row in clean(read_rows(data)[0]) if row.source == SWEEP]
    fitting = dict(zip((row.name for row in table), held_out(table, count).fitting, strict=True))
    cells: dict[tuple[str, int], list[Row]] = collections.defaultdict(list)
    for row in table:
        if row.name in seconds or row.out_of_memory:
            cells[row.model.name, row.run.devices].append(row)
    lost, worst, bad = [], "", 0
    for (model, devices), found in sorted(cells.items()):
        ran = [row for row in found if not row.out_of_memory]
        if len(ran) < 2:
            continue
        safe = [row for row in found if fitting[row.name]]
        failed = [row for row in safe if row.out_of_memory]
        if failed:
            # Nobody could time these, so they are predicted by a fit without the cell.
            names = {row.name for row in found}
            others = [row for row in rows if row.name not in names]
            untimed = _untimed(others, failed)
            seconds |= dict(zip((row.name for row in failed), untimed, strict=True))
        best = min(row.step_seconds or np.inf for row in ran)
        choice = min(safe, key=lambda row: seconds[row.name], default=None)
        # Nothing recommended where something runs counts as everything lost, as does a failure.
        time = np.inf if choice is None else choice.step_seconds or np.inf
        bad += choice is not None and choice.out_of_memory
        lost.append(1.0 - best / time)
        if lost[-1] == max(lost):
            worst = f"{model} on {devices}"
    peer = "random 55 / 56, rule of thumb 27 / 11, Calculon 17 / 10 at best, llm-analysis 45 / 48"
    peer = f"{peer}; {len(lost)} cells, worst {worst} {100 * max(lost):.0f} %"
    for label, value, most in (
        ("mean", 100.0 * float(np.mean(lost)), 5.0),
        ("median", 100.0 * float(np.median(lost)), 1.0),
    ):
        name = f"regret of the recommended run, {label} over the sweep's cells"
        yield Bar(name, round(value, 3), "%", f"<= {most:g}", value <= most, peer, "predicted")
    yield Bar("recommended runs that ran out of memory", bad, "", "<= 0", bad == 0, "", "predicted")


def _untimed(rows: Sequence[Row], failed: Sequence[Row]) -> np.ndarray:
    """Predicted seconds of runs that nobody could time."""
    constants, residual = fitted(rows)
    numbers = cases([(row.model, row.run, row.cluster) for row in failed])
    model = StepModel(constants, residual, uncalibrated().widths, Support({}))
    return model.seconds(numbers, [belonging(row) for row in failed])


def speed_bars() -> Iterator[Bar]:
    """A search over more than 100,000 candidates with all objectives, on one core."""
    training = Training(
        model=published("llama-3.1-405b"),
        run=Configuration(
            data=10_240, sequence=8192, micro_batch=1, batch=10_240, sharding="parameters"
        ),
        tokens=1.5e13,
        framework="any",
    )
    cluster = cluster_of("h100x10240")
    settings = Mechanisms(tiers=(("shared",), ("memory", "shared")))
    spent = []
    for _ in range(3):
        begun, wall = time.process_time(), time.perf_counter()
        front = search(training, cluster, mechanisms=settings, deadline_seconds=90 * 86400.0)
        spent.append((time.process_time() - begun, time.perf_counter() - wall))
    cpu = float(np.median([each[0] for each in spent]))
    scaled = cpu * 100_000 / front.searched
    axes = f"{front.searched:,} candidates, {len(front.axes)} objectives"
    peer = f"{axes}; Calculon did not finish 5,120 GPUs in 500 s"
    name = "search of 405B on 10,240 GPUs: CPU time"
    yield Bar(name, round(cpu, 3), "s", "reported", True, peer)
    name = "search of 405B on 10,240 GPUs: CPU time per 100,000 candidates"
    yield Bar(name, round(scaled, 3), "s", "<= 2", scaled <= MOST_SECONDS, peer)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield Bar("memory of this process", round(peak, 3), "GiB", "<= 1", peak <= 1.0, axes)
