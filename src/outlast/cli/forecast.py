"""The planner's prediction of a job on this machine, said before the first step of a training."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import OutlastError, PlanError

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.api import Training
    from outlast.plan.calibration import Calibration
    from outlast.plan.cluster import Cluster
    from outlast.plan.prediction import Estimate
    from outlast.records import Predicted, Run


HOME = "OUTLAST_PLAN_HOME"
"""Folder of this machine's calibration; `~/.cache/outlast/plan` where it is not set."""


PUBLISHED = "published runs"
"""What the constants are from where nothing was calibrated."""


def calibration_home() -> Path:
    """Folder of the measurements of `outlast plan calibrate --run`."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get(HOME) or Path(cache) / "outlast" / "plan")


def prediction_of(job: Job, processes: int) -> Predicted | str:
    """The prediction of a job on this machine, or in a phrase why there is none.

    Args:
        job: Checked.
        processes: That will train.
    """
    from outlast.plan.api import predict, training_of
    from outlast.plan.calibration import read_calibration
    from outlast.plan.memory_fit import known_of

    try:
        cluster = place_of(HERE, processes)
        file = calibration_for(HERE, None)
        calibration = None if file is None else read_calibration(Path(file))
        known = None if calibration is None else known_of(calibration)
        training = training_of(job, processes, cluster, calibration=known)
        estimate = predict(training, cluster, calibration=known)
        return record_of(estimate, training, cluster, calibration, file)
    except OutlastError as error:
        return str(error).splitlines()[0]
    except Exception as error:
        # A run must not fail for want of its prediction.
        return f"{type(error).__name__}: {error}"


def record_of(
    estimate: Estimate,
    training: Training,
    cluster: Cluster,
    calibration: Calibration | None,
    file: str | Path | None,
) -> Predicted:
    """An estimate as a run's records hold it.

    On processors its memory is the resident one of a rank, where the calibration knows it: that is
    what is measured there.

    Args:
        estimate: Of `training` on `cluster`.
        training: What was predicted.
        cluster: Where.
        calibration: That was used; None for constants fitted to published runs.
        file: Its own.

    Raises:
        PlanError: The calibration knows only a part of what resident memory depends on.
    """
    import numpy as np

    from outlast.plan.batch import cases
    from outlast.plan.memory_fit import resident_of
    from outlast.plan.prediction import as_record

    record = as_record(estimate, PUBLISHED if file is None else str(file))
    found = None if calibration is None or not cluster.processor else resident_of(calibration)
    if found is None:
        return record
    numbers = cases([(training.model, training.run, cluster)])
    middle = float(found.bytes(numbers)[0])
    factor = float(np.exp(found.half_widths(numbers)[0]))
    return replace(
        record,
        memory_bytes=middle,
        memory_bytes_low=middle / factor,
        memory_bytes_high=middle * factor,
    )


def prediction_for(job: Job, processes: int) -> Predicted | None:
    """As `prediction_of`; prints why there is none."""
    found = prediction_of(job, processes)
    if isinstance(found, str):
        print(f"no prediction: {found}", flush=True)
        return None
    return found


HERE = "here"


def place_of(name: str, ranks: int = 0) -> Cluster:
    """A cluster by its name or file; `here` is this machine, as `calibrate --run` measured it.

    Args:
        name: As `--cluster` says it.
        ranks: Processes among which a machine without accelerators is shared; 0: as it stands.

    Raises:
        PlanError: It cannot be read, or nothing is known of this machine.
    """
    from outlast.plan.cluster import divided
    from outlast.plan.cluster_file import cluster_of, read_cluster, this_cluster

    measured = calibration_home() / "cluster.toml"
    if name == HERE and not measured.exists():
        try:
            return this_cluster(ranks)
        except PlanError as error:
            raise PlanError(f"{error}; or name a cluster, as --cluster h100x64") from None
    found = read_cluster(measured) if name == HERE else cluster_of(name)
    shared = ranks and (found.processor or name == HERE) and found.devices != ranks
    return divided(found, ranks) if shared else found


def calibration_for(name: str, given: str | Path | None) -> str | Path | None:
    """The calibration to use: the one given; on this machine, its own where there is one."""
    own = calibration_home() / "calibration.toml"
    return own if given is None and name == HERE and own.exists() else given


def ranks_of(run: Run) -> int:
    """Processes of the last start of a run; 0 where there is none."""
    from outlast.records import AttemptStarted

    started = [event.world_size for _, event in run.of(AttemptStarted)]
    return started[-1] if started else 0
