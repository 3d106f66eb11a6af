"""The engine of a run without a framework: what it keeps, and for how long."""

from __future__ import annotations

import contextlib
import gc
import shutil
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outlast.checkpoint import CheckpointStore
from outlast.distributed.ranks import ALONE
from outlast.errors import CheckpointError
from outlast.records import TrainingStarted, Warned
from outlast.runtime.engine import Runtime, StepResult
from outlast.runtime.recording import MemoryWatch, StepRecords
from outlast.runtime.stop import Stop


def test_what_nobody_records_does_not_grow_without_bound() -> None:
    runtime = Runtime(ALONE)
    for number in range(5000):
        runtime.write(Warned(str(number)))
    assert len(runtime.early) == 1000
    assert runtime.early[-1] == Warned("4999")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_keeps_no_tensors_alive(late: bool) -> None:
    gone: list[Any] = []

    class Memory:
        """In-memory checkpoint that cannot be closed."""

        def close(self, *, forget: bool) -> None:
            fails()

    def fails() -> None:
        tensor = torch.zeros(4)
        gone.append(weakref.ref(tensor))
        raise CheckpointError("it went wrong")

    gc.disable()
    try:
        with contextlib.suppress(CheckpointError), Runtime(ALONE) as runtime:
            if late:
                runtime.memory = Memory()  # type: ignore[assignment]
            else:
                fails()
        assert gone[0]() is None
    finally:
        gc.enable()


class Meter:
    """A meter of energy that is open until it is closed."""

    is_open = True

    def close(self) -> None:
        self.is_open = False


def recorded() -> tuple[Runtime, Meter]:
    """A runtime with records that nobody writes, and the meter in them."""
    watch = MemoryWatch(ALONE, torch.device("cpu"))
    records = StepRecords(None, ALONE, log_every=1, memory=watch)
    meter = Meter()
    records.meter = meter  # type: ignore[assignment]
    return Runtime(ALONE, records=records), meter


def test_an_error_closes_the_meter() -> None:
    runtime, meter = recorded()
    with contextlib.suppress(ValueError), runtime:
        raise ValueError("it went wrong")
    assert not meter.is_open


def unwritable(folder: Path) -> CheckpointStore:
    """A store that has become a file."""
    store = CheckpointStore(folder / "store", writer="thread")
    shutil.rmtree(folder / "store", ignore_errors=True)
    (folder / "store").write_text("")
    return store


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_last_save_that_failed_is_an_error_of_the_close(tmp_path: Path) -> None:
    runtime = Runtime(ALONE)
    saves = runtime.save_to(unwritable(tmp_path), {"model": nn.Linear(2, 2)})
    runtime.save(1)
    with pytest.raises(CheckpointError, match="store"):
        runtime.close()
    assert saves.closed
    # A second call does nothing.
    runtime.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_program_that_ends_itself_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    runtime = Runtime(ALONE)
    runtime.save_to(unwritable(tmp_path), {"model": nn.Linear(2, 2)})
    runtime.save(1)
    with pytest.raises(SystemExit, match="5"), runtime:
        sys.exit(5)


def test_time_of_an_evaluation_is_none_of_a_step() -> None:
    runtime, _ = recorded()
    assert runtime.records is not None
    runtime.records.meter = None
    runtime.begin(0, started=TrainingStarted(0, 0.0, {}))
    with runtime.watch("compute"), runtime.evaluating():
        time.sleep(0.2)
    runtime.records.step(StepResult(1))
    assert runtime.clock.so_far() < 0.1
    assert max(runtime.records._step_seconds) < 0.1
    seconds = runtime.records.watch.lap()
    assert seconds["evaluation"] >= 0.2
    assert seconds["compute"] < 0.1


def test_outside_of_the_main_thread_no_signal_is_taken() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[str] = []

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="no signal can be taken"), Stop():
            found.append("trained")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["trained"]
    assert signal.getsignal(signal.SIGTERM) == before
