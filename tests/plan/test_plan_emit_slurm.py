"""Batch scripts in a real Slurm: accepted, started, warned, saved, and requeued."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plan_emit_runs import CLUSTER, DENSE, RUNS, SETTINGS, configured

from outlast.plan.emit import emit

SLURM_SCRIPT = Path(__file__).parents[1] / "tools" / "slurm_local.sh"
WORKER = """\
import os, pathlib, signal, sys, time

rank = os.environ["RANK"]

def save(*_):
    pathlib.Path(f"saved-{rank}").write_text(os.environ["WORLD_SIZE"])
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
pathlib.Path(f"begun-{rank}").write_text(sys.argv[1])
time.sleep(120)
"""
OUTLAST = """\
#!/bin/bash
trap 'touch saved-$SLURM_PROCID; exit {code}' USR1
echo "$@" > begun-$SLURM_PROCID
while true; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """A real Slurm with two virtual nodes of four made-up GPUs each."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if not shutil.which(name)]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}); .ci/run installs it")
    if os.geteuid() != 0:
        pytest.skip("the test's own Slurm must be started by root")
    root = Path("/tmp") / f"outlast-plan-slurm-{os.getpid()}"
    environment = {"SLURM_LOCAL_ROOT": str(root), "BASEPORT": "17600", "GPUS": "4", "CPUS": "4"}
    up = [str(SLURM_SCRIPT), "up", "2"]
    subprocess.run(up, env={**os.environ, **environment}, check=True, timeout=60)
    try:
        yield {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    finally:
        down = [str(SLURM_SCRIPT), "down"]
        subprocess.run(down, env={**os.environ, **environment}, check=False, timeout=60)
        shutil.rmtree(root, ignore_errors=True)


SMALL = dataclasses.replace(CLUSTER, nodes=2, devices_per_node=4, host_cores=4)


def write(folder: Path, launches: str, devices: int) -> None:
    settings = dataclasses.replace(SETTINGS, launches=launches, predicted_hours=0.5)
    run = configured(data=devices, sharding="none")
    emit("sbatch", DENSE, run, SMALL, out=folder, settings=settings)


def slurm_says(environment: dict[str, str], *command: str, folder: Path) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"not in 60 s; the job said:\n{logs}"
        time.sleep(0.2)


def requeued(environment: dict[str, str], job: str, folder: Path) -> bool:
    return "Restarts=1" in slurm_says(environment, "scontrol", "show", "job", job, folder=folder)


@pytest.mark.slurm
@pytest.mark.parametrize("launches", RUNS)
def test_slurm_takes_the_script(launches, slurm, tmp_path):
    write(tmp_path, launches, 8)
    slurm_says(slurm, "sbatch", "--test-only", "job.sbatch", folder=tmp_path)


@pytest.mark.slurm
def test_workers_of_torchrun_save_when_warned_and_the_job_is_requeued(slurm, tmp_path):
    write(tmp_path, "deepspeed", 2)
    (tmp_path / "train.py").write_text(WORKER)
    path = f"{Path(sys.executable).parent}:{slurm['PATH']}"
    environment = {**slurm, "PATH": path, "MASTER_ADDR": "127.0.0.1"}
    job = slurm_says(environment, "sbatch", "--parsable", "job.sbatch", folder=tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 2, tmp_path)
        assert (tmp_path / "begun-0").read_text() == "training_arguments.yaml"
        slurm_says(slurm, "scancel", "--batch", "--signal=USR1", job, folder=tmp_path)
        wait_for(lambda: requeued(slurm, job, tmp_path), tmp_path)
    finally:
        slurm_says(slurm, "scancel", job, folder=tmp_path)
    saved = {path.name: path.read_text() for path in tmp_path.glob("saved-*")}
    assert saved == {"saved-0": "2", "saved-1": "2"}
    assert not list(tmp_path.glob(".save-now-*"))


@pytest.mark.slurm
@pytest.mark.parametrize(("code", "goes_on"), [(3, True), (2, False)])
def test_outlast_is_requeued_when_it_is_to_be_continued(code, goes_on, slurm, tmp_path):
    write(tmp_path, "outlast", 8)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "outlast").write_text(OUTLAST.format(code=code))
    (programs / "outlast").chmod(0o755)
    environment = {**slurm, "PATH": f"{programs}:{slurm['PATH']}"}
    job = slurm_says(environment, "sbatch", "--parsable", "job.sbatch", folder=tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 8, tmp_path)
        assert (tmp_path / "begun-7").read_text() == "train job.toml\n"
        slurm_says(slurm, "scancel", "--signal=USR1", job, folder=tmp_path)
        shown = ("scontrol", "show", "job", job)
        wait_for(
            lambda: any(
                state in slurm_says(slurm, *shown, folder=tmp_path)
                for state in ("Restarts=1", "JobState=FAILED")
            ),
            tmp_path,
        )
        assert requeued(slurm, job, tmp_path) == goes_on
    finally:
        subprocess.run(["scancel", job], env=slurm, check=False)
    assert len(list(tmp_path.glob("saved-*"))) == 8


@pytest.mark.slurm
@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (1, "FAILED")])
def test_a_run_that_ends_by_itself_is_not_requeued(code, state, slurm, tmp_path):
    write(tmp_path, "deepspeed", 1)
    (tmp_path / "train.py").write_text(f"import sys\nsys.exit({code})\n")
    path = f"{Path(sys.executable).parent}:{slurm['PATH']}"
    environment = {**slurm, "PATH": path, "MASTER_ADDR": "127.0.0.1"}
    job = slurm_says(environment, "sbatch", "--parsable", "job.sbatch", folder=tmp_path)
    shown = ("scontrol", "show", "job", job)
    wait_for(lambda: f"JobState={state}" in slurm_says(slurm, *shown, folder=tmp_path), tmp_path)
    assert "Restarts=0" in slurm_says(slurm, *shown, folder=tmp_path)
