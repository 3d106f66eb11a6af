"""Trainings as processes of their own, which can be killed.

They are forked from the test process, which has loaded torch, transformers and the command line: a
start from nothing takes seconds, and is tested where it matters (test_launch).
"""

import contextlib
import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers.models.llama.modeling_llama  # noqa: F401  (loaded once, before processes fork)

from outlast.cli.main import main
from outlast.job import Job, to_toml
from outlast.records import StepsDone, read_run
from outlast.train.run import run_directory

DEADLINE_SECONDS = 240.0
LOADED = (
    "outlast.cli.plan_calibrate",
    "outlast.cli.train",
    "outlast.cluster.stopping",
    "outlast.cluster.staging",
    "outlast.cluster.storage",
    "outlast.cluster.transfers",
    "outlast.plan.api",
    "outlast.plan.prediction",
    "outlast.report.sections",
    "outlast.train.launch",
    "outlast.train.live",
    "plotly.offline",
)
"""What every run loads when it comes to it."""

for _name in LOADED:
    importlib.import_module(_name)
_started: list["Forked"] = []


def command_here(arguments: list[str]) -> tuple[int, str]:
    """Run `outlast` with these arguments in this process: its exit code and standard error."""
    sys.argv = ["outlast", *arguments]
    code, error = 0, io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, error.getvalue()


class Forked:
    """`outlast` with these arguments in a forked process group; used like a `subprocess.Popen`.

    Attributes:
        pid: Of the process, which leads its group and session.
    """

    def __init__(self, arguments: list[str], output: Path) -> None:
        self._output = output
        self._process: Any = multiprocessing.get_context("fork").Process(
            target=_outlast, args=(arguments, output)
        )
        # A process that collected this one's garbage could wait for threads that it does not have.
        gc.freeze()
        self._process.start()
        gc.unfreeze()
        self.pid = int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that has killed it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, at the end."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"{self._process.name}, {self.said()}", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it has printed, at the end."""
        self.wait(timeout)
        return self.said(), None

    def said(self) -> str:
        """What it has printed so far, on stdout and stderr."""
        return self._output.read_text() if self._output.exists() else ""

    def send_signal(self, number: int) -> None:
        """Send the signal, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill this process alone."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the whole group, if this process is still there."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()
            self.wait()


def _outlast(arguments: list[str], output: Path) -> None:
    os.setsid()
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # What pytest has put in their place captures for the test process.
    sys.stdout, sys.stderr = (open(each, "w", buffering=1, closefd=False) for each in (1, 2))  # noqa: SIM115
    logging.getLogger().handlers.clear()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["outlast", *arguments]
    main()


def start(folder: Path, *arguments: str) -> Forked:
    """`outlast` with these arguments; what it prints goes to a file in `folder`."""
    process = Forked(list(arguments), folder / f"output-{len(list(folder.glob('output-*')))}")
    _started.append(process)
    return process


def start_process(job: Job, folder: Path, *arguments: str) -> Forked:
    """`outlast train` in a process group of its own, so that all of it can be killed."""
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    return start(folder, "train", str(file), *arguments)


def end_started() -> None:
    """Kill what is left of all runs that were started, for the end of a test that has failed."""
    while _started:
        _started.pop().end()


def wait_for_step(job: Job, step: int, process: Forked) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            done = [event.step for _, event in read_run(run_directory(job).path).of(StepsDone)]
        except Exception:  # the directory is not there yet
            done = []
        if done and done[-1] >= step:
            return
        assert process.poll() is None, f"ended early:\n{process.said()}"
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {DEADLINE_SECONDS:g} s")


def finish(process: Forked) -> tuple[int | None, str]:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def load_torchft() -> None:
    """Skip without torchft; with it, load it once for all processes of live groups."""
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    import torchft.checkpointing
    import torchft.process_group  # noqa: F401
