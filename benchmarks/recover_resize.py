"""A run that continues with 3, 1 and again 4 processes, against the same run left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Bar, at_most

from outlast.records import StateRecovered, StepsDone, read_run
from outlast.recover.resize import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTINGS = (
    "train.batch_size=12",
    "optimizer.name=adamw",
    "optimizer.learning_rate=0.001",
    "checkpoint.every_steps=1000",
    "evaluate.every_steps=0",
    "sample.tokens=0",
    "export.huggingface=false",
    "log.every_steps=1",
)
_PROCESSES = (4, 3, 1, 4)
_ROUNDING_NATS = 2e-5
"""What the trainer promises of the loss in fp32 when the number of processes changes."""

_DEADLINE_SECONDS = 600.0


def bars(quick: bool) -> list[Bar]:
    """The rows of this part."""
    every = 20 if quick else 60
    steps = every * len(_PROCESSES)
    with tempfile.TemporaryDirectory() as folder:
        alone, changed = Path(folder) / "alone", Path(folder) / "changed"
        with _train(alone, steps) as run:
            _end(run)
        with _train(changed, steps) as run:
            for number, processes in enumerate(_PROCESSES[1:], 1):
                _wait(changed, number * every, run)
                ask(changed, processes)
            _end(run)
        losses = {each: _losses(each) for each in (alone, changed)}
        attempts = [each.world_size for each in read_run(changed).attempts]
        ways = [event.source for _, event in read_run(changed).of(StateRecovered)]
    apart = max(abs(loss - losses[changed][step]) for step, loss in losses[alone].items())
    said = f"{' to '.join(map(str, attempts))} processes, state from {', '.join(ways)}"
    once = list(losses[changed]) == list(losses[alone]) == list(range(1, steps + 1))
    return [
        Bar(
            "4, 3, 1, 4 processes under load: each step done once",
            float(once),
            "",
            "all",
            once and attempts == list(_PROCESSES),
            said,
        ),
        at_most(
            "4, 3, 1, 4 processes under load: loss apart from the run left alone",
            apart,
            "nats, largest of all steps",
            _ROUNDING_NATS,
            f"{steps} steps of 4 processes",
        ),
    ]


@contextlib.contextmanager
def _train(place: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """A run; whatever is left of it when the context ends, is killed."""
    where = [f'run.directory="{place.parent}"', f"run.name={place.name}", f"train.steps={steps}"]
    run = subprocess.Popen(
        [sys.executable, "-m", "outlast", "train", "--nproc", "4", *_SETTINGS, *where],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        # The workers as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.wait(_DEADLINE_SECONDS):
        raise RuntimeError(f"a run ended with exit code {run.returncode}")


def _wait(place: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    """Until so many steps are done."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (place / "events.jsonl").exists() or max(_losses(place), default=0) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not come to step {step}")
        time.sleep(0.1)


def _losses(place: Path) -> dict[int, float]:
    """Of each step, in the order in which they were first done; raises if one was done twice."""
    found: dict[int, float] = {}
    for _, event in read_run(place).of(StepsDone):
        if event.step in found:
            raise RuntimeError(f"step {event.step} was done twice")
        found[event.step] = event.loss
    return found
