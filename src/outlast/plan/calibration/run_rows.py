"""Rows from run directories of `outlast train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import OutlastError, PlanError
from outlast.job.load import job_from_text
from outlast.plan.calibration.known import COMPILED, OUTLAST
from outlast.plan.calibration.rows import Refused, Row
from outlast.plan.calibration.steady import steady_median
from outlast.plan.job_runs import run_of
from outlast.records import AttemptStarted, MemoryMeasured, StepsDone, read_run

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.records import Run

FRAMEWORK = OUTLAST


def read_runs(paths: Iterable[Path | str], cluster: Cluster) -> tuple[list[Row], list[Refused]]:
    """The rows of several run directories, and those that give none with the reason.

    Args:
        paths: Run directories.
        cluster: Where all of them ran.
    """
    rows: list[Row] = []
    refused: list[Refused] = []
    for path in paths:
        try:
            rows.append(read_run_row(path, cluster))
        except OutlastError as error:
            refused.append(Refused(str(path), str(error)))
    return rows, refused


def read_run_row(path: Path | str, cluster: Cluster) -> Row:
    """One run as a row: the median time of its steps once they are steady.

    Of a run with several starts, those count that had as many processes and as they were divided
    in the last; the first steps of each start are left out. Memory is the largest of a process's
    peaks in the last start; on a CPU, `reserved_bytes` is the resident memory of the process.

    Args:
        path: A run directory.
        cluster: Where it ran.

    Raises:
        PlanError: No step was timed, or the model is not one that the planner can express.
        RunError: `path` is not a run directory.
        JobError: Its job cannot be read.
    """
    run = read_run(path)
    job = job_from_text(run.job_text, f"the job of {path}")
    started = {record.attempt: event for record, event in run.of(AttemptStarted)}
    if not started:
        raise PlanError(f"{path} holds no start of the run: train some steps first")
    last = started[max(started)]
    if job.tensorize.form != "off":
        raise PlanError(
            f'tensorize.form = "{job.tensorize.form}" of {path}: constants are fitted to dense '
            'models; run the probe with tensorize.form = "off"'
        )
    alike = {
        number
        for number, event in started.items()
        if (event.world_size, event.parallel) == (last.world_size, last.parallel)
    }
    reserved, allocated, assumptions = _memory_bytes(run, max(started))
    model, configuration = run_of(_as_laid_out(job, last), last.world_size)
    return Row(
        name=run.name,
        model=model,
        run=configuration,
        cluster=cluster,
        source=str(path),
        framework=COMPILED if job.train.compile else FRAMEWORK,
        version=last.versions.get("outlast", ""),
        step_seconds=_step_seconds(run, alike),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        stated_devices=last.world_size,
        assumptions=assumptions,
        time_flags=_time_flags(run.name, job),
    )


def _as_laid_out(job: Job, started: AttemptStarted) -> Job:
    """The job with the degrees that the start resolved, e.g. `replicate` in place of 0."""
    degrees: dict[str, Any] = {
        name: started.parallel[name]
        for name in ("replicate", "shard", "tensor", "pipeline")
        if name in started.parallel
    }
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=degrees)})


def _step_seconds(run: Run, attempts: set[int]) -> float:
    by_attempt: dict[int, list[float]] = {}
    for record, event in run.steps():
        if record.attempt in attempts and isinstance(event, StepsDone):
            by_attempt.setdefault(record.attempt, []).extend(event.step_seconds)
    series = [np.array(seconds) for seconds in by_attempt.values() if seconds]
    if not series:
        raise PlanError(f"{run.path} holds no timed step: train at least a few steps")
    return steady_median(series)


def _memory_bytes(run: Run, attempt: int) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Reserved and allocated bytes of the fullest process, and what stands for what."""
    events = [event for record, event in run.of(MemoryMeasured) if record.attempt == attempt]
    if not events:
        return None, None, ()
    reserved, allocated = events[-1].most("reserved"), events[-1].most("allocated")
    if reserved is not None:
        return reserved[1], None if allocated is None else allocated[1], ()
    resident = events[-1].most("resident")
    if resident is None:
        return None, None, ()
    return resident[1], None, ("reserved memory is the resident memory of the process",)


def _time_flags(name: str, job: Job) -> tuple[str, ...]:
    """What a run did beside training, whose time the constants must not take up."""
    flags = []
    if job.guard.policy in {"linear", "full"}:
        flags.append(
            f'row {name}: guard.policy = "{job.guard.policy}" checks every step, which the '
            'constants would take up; run the probe with "light" or "off"'
        )
    if job.coding.scheme not in {"off", "coverage"}:
        flags.append(
            f'row {name}: coding.scheme = "{job.coding.scheme}" computes parts of the batch more '
            'than once; run the probe with "off"'
        )
    return tuple(flags)
