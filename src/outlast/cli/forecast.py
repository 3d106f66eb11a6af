"""What `outlast train` says before the first step: the planner's prediction of this job, here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.plan.entry import Training
    from outlast.records import Predicted

HOME = "OUTLAST_PLAN_HOME"
"""Folder of this machine's calibration; `~/.cache/outlast/plan` where it is not set."""


def calibration_home() -> Path:
    """Where `outlast plan calibrate --run` leaves what it measured, for `outlast train` to find."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get(HOME) or Path(cache) / "outlast" / "plan")


def prediction_of(job: Job, processes: int) -> Predicted | str:
    """The prediction of a job on this machine, or in a phrase why there is none.

    Args:
        job: Checked.
        processes: That will train.
    """
    from outlast.cli.plan_place import HERE, place_of
    from outlast.plan.entry import predict, training_of
    from outlast.plan.record import as_record

    home = calibration_home()
    try:
        cluster = place_of(HERE, processes)
        file = home / "calibration.toml"
        known = file if file.exists() else None
        training = training_of(job, processes, cluster, calibration=known)
        estimate = predict(training, cluster, calibration=known)
        resident = None if known is None else _resident(known, training, cluster)
    except OutlastError as error:
        return str(error).splitlines()[0]
    except Exception as error:
        # A run must not fail for want of its prediction.
        return f"{type(error).__name__}: {error}"
    record = as_record(estimate, str(file) if known else "published runs")
    if resident is None:
        return record
    low, middle, high = resident
    return replace(record, memory_bytes=middle, memory_bytes_low=low, memory_bytes_high=high)


def prediction_for(job: Job, processes: int) -> Predicted | None:
    """As `prediction_of`; prints why there is none."""
    found = prediction_of(job, processes)
    if isinstance(found, str):
        print(f"no prediction: {found}", flush=True)
        return None
    return found


def _resident(
    file: Path, training: Training, cluster: Cluster
) -> tuple[float, float, float] | None:
    """The resident memory of ranks on processors, where a calibration knows it."""
    import numpy as np

    from outlast.plan.calibration.calibration_file import read_calibration
    from outlast.plan.calibration.resident import resident_of
    from outlast.plan.cases import cases

    found = resident_of(read_calibration(file)) if cluster.processor else None
    if found is None:
        return None
    numbers = cases([(training.model, training.run, cluster)])
    middle = float(found.bytes(numbers)[0])
    factor = float(np.exp(found.half_widths(numbers)[0]))
    return middle / factor, middle, middle * factor
