"""Short real runs of `outlast train`, each a measured row.

A probe is a job file in a folder of its own and the run directory that the trainer leaves beside
it. A folder that is kept is read again and not run again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import OutlastError, PlanError
from outlast.plan.calibration.here import divided
from outlast.plan.calibration.run_rows import read_run_row

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.calibration.family import Setting
    from outlast.plan.calibration.rows import Row
    from outlast.plan.cluster import Cluster

FEWEST_STEPS, MOST_STEPS = 10, 60
MEASURED_SECONDS = 7.0
"""That the steps of a probe should take together."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_")


@dataclass(frozen=True)
class Probe:
    """A setting that was run.

    Attributes:
        setting: What was run.
        row: What was measured.
        seconds: From the start of the process to its end; 0 where it was read from a kept folder.
        steps: That it trained; 0 likewise.
    """

    setting: Setting
    row: Row
    seconds: float
    steps: int = 0


_NO_TRACKERS = {
    "tensorboard": False,
    "wandb_project": None,
    "mlflow_experiment": None,
    "trackio_project": None,
}


def probe_job(setting: Setting, folder: Path, steps: int) -> Job:
    """The job of a short run that does nothing but train, and one small checkpoint at its end.

    Args:
        setting: Model, batch and division of the work.
        folder: That will hold the run directory.
        steps: Of the run.
    """
    job, ranks = setting.job, setting.run.devices
    quiet: dict[str, Mapping[str, object]] = {
        "run": {"name": setting.name, "directory": str(folder)},
        "train": {"steps": steps, "compile": False, "stop_after_steps": 0},
        "checkpoint": {"every_steps": 0, "writer": "thread", "replay": "off", "mirror": ""},
        "evaluate": {"every_steps": 0},
        "sample": {"tokens": 0},
        "export": {"huggingface": False},
        "energy": {"measure": False, "prometheus_port": 0},
        "guard": {"policy": "off", "modules": {}},
        "coding": {"scheme": "off"},
        "tensorize": {"form": "off"},
        "log": {"every_steps": steps, **_NO_TRACKERS},
        "launch": {"nproc": ranks, "restarts": 0},
        "schedule": {"name": "constant", "warmup_steps": 0},
    }
    sections = {name: getattr(job, name).model_copy(update=item) for name, item in quiet.items()}
    return job.model_copy(update=sections)


def steps_for(predicted_seconds: float) -> int:
    """Steps of a probe whose step takes about as long as given."""
    wanted = int(np.ceil(MEASURED_SECONDS / max(predicted_seconds, 1e-6)))
    return int(np.clip(wanted, FEWEST_STEPS, MOST_STEPS))


def run_probe(
    setting: Setting, cluster: Cluster, folder: Path, steps: int, timeout_seconds: float
) -> Probe:
    """Train a setting for some steps, or read what an earlier call has trained in the folder.

    Args:
        setting: What to run.
        cluster: This machine with one rank, or with one rank per GPU.
        folder: For the job file and the run directory.
        steps: To train.
        timeout_seconds: After which the run is ended.

    Raises:
        PlanError: The run fails or takes too long.
    """
    from outlast.job import to_toml

    kept = kept_probe(setting, cluster, folder)
    if kept is not None:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{setting.name}.toml"
    file.write_text(to_toml(probe_job(setting, folder, steps), comments=False), encoding="utf-8")
    command = [sys.executable, "-m", "outlast", "train", str(file), "--fresh"]
    begun = time.monotonic()
    output = _ended(command, timeout_seconds, setting.name)
    found = kept_probe(setting, cluster, folder)
    if found is None:
        last = (output.strip().splitlines() or ["it printed nothing"])[-1]
        raise PlanError(f"probe {setting.name} did not finish: {last}")
    return replace(found, seconds=time.monotonic() - begun, steps=steps)


def kept_probe(setting: Setting, cluster: Cluster, folder: Path) -> Probe | None:
    """What an earlier run of the setting measured; None where there is none that was completed."""
    from outlast.records import read_run

    directory = folder / setting.name
    if not (directory / "events.jsonl").is_file():
        return None
    try:
        attempts = read_run(directory).attempts
        if not attempts or attempts[-1].outcome != "completed":
            return None
        row = read_run_row(directory, divided(cluster, setting.run.devices))
    except OutlastError:
        return None
    # The machine stands for the cluster, so that its runs correct each other.
    return Probe(setting, replace(row, source=cluster.name), 0.0)


def _ended(command: Sequence[str], timeout_seconds: float, name: str) -> str:
    """What a command printed; its whole process group is ended after the timeout."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER and not key.startswith(_LAUNCHER_PREFIXES)
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ranks that it starts belong to the group and end with it.
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"probe {name} was ended after {timeout_seconds:.0f} s: free the machine of other work"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return output
