"""Trainings as processes of their own, which can be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from outlast.job import Job, to_toml
from outlast.records import StepsDone, read_run
from outlast.train.run import run_directory

_started: list[subprocess.Popen[str]] = []


def start_process(job: Job, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`outlast train` in a process group of its own, so that all of it can be killed."""
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast", "train", str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _started.append(process)
    return process


def end_started() -> None:
    """Kill what is left of all runs that were started, for the end of a test that has failed."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_for_step(job: Job, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        try:
            done = [event.step for _, event in read_run(run_directory(job).path).of(StepsDone)]
        except Exception:  # the directory is not there yet
            done = []
        if done and done[-1] >= step:
            return
        assert process.poll() is None, f"ended early:\n{process.stdout and process.stdout.read()}"
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in 120 s")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output
