"""A run says what was predicted of it, and then what was measured, on one process and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from forked import run_ranks
from tiny import tiny_job

from outlast.distributed.ranks import ALONE, ranks_from
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.records import (
    MemoryMeasured,
    Predicted,
    StepsDone,
    TrainingStarted,
    forecast_of,
    read_run,
)
from outlast.runtime.recording import MemoryWatch, resident_peak
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job
    from outlast.records import Run

GIB = 2.0**30
EASY = Predicted(
    step_seconds=0.5,
    step_seconds_low=1e-6,
    step_seconds_high=600.0,
    memory_bytes=1.5 * GIB,
    memory_bytes_low=1.0,
    memory_bytes_high=1e6 * GIB,
    tokens_per_s=384.0,
    run_seconds=140.0,
    run_seconds_low=1e-3,
    run_seconds_high=3600.0,
    terms={"matrix products": 0.4, "optimizer": 0.1},
    calibration="none",
)


def start_of(job: Job, prediction: Predicted | None = EASY) -> int:
    return work(Start(job, prediction=prediction), ALONE)


def _of_two(job: Job) -> int:
    return work(Start(job, prediction=EASY), ranks_from(os.environ))


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def kinds(run: Run) -> list[type]:
    return [type(record.event) for record in run.records]


def test_the_prediction_is_printed_before_the_first_step_and_the_figures_after_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, "told")
    assert start_of(job) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    line = "predicted: 0.50 s per step (0.001 ms to 10 min), 1.5 GiB, the whole run in 2 min 20 s"
    said = lines.index(line)
    first_step = next(n for n, each in enumerate(lines) if each.startswith("step 1/6"))
    assert said < first_step
    assert lines[-1].startswith("time per step: predicted 0.50 s, measured ")
    assert lines[-1].count("(inside the interval)") == 2
    assert "; peak memory: predicted 1.5 GiB, measured " in lines[-1]
    run = records(job)
    assert (
        kinds(run).index(Predicted)
        < kinds(run).index(TrainingStarted)
        < kinds(run).index(StepsDone)
    )
    found = forecast_of(run)
    assert found is not None
    assert found.prediction == EASY
    assert found.measured.run_seconds is not None


def test_an_extrapolated_prediction_says_so_and_a_wrong_one_is_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, "wrong", "train.steps=3")
    beyond = ["3 steps are fewer than any calibrated run"]
    start_of(job, replace(EASY, memory_bytes_high=2.0, extrapolated=beyond))
    out = capsys.readouterr().out
    assert "; extrapolated: 3 steps are fewer than any calibrated run\n" in out
    assert "(above the interval)" in out


def test_without_a_prediction_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, "untold", "train.steps=3")
    start_of(job, None)
    assert "predicted" not in capsys.readouterr().out
    run = records(job)
    assert forecast_of(run) is None
    assert Predicted not in kinds(run)


def test_a_resumed_attempt_compares_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, "resumed")
    first = job.model_copy(update={"train": job.train.model_copy(update={"stop_after_steps": 4})})
    assert start_of(first) == EXIT_TO_BE_CONTINUED
    assert "time per step: predicted 0.50 s, measured " in capsys.readouterr().out
    assert start_of(job, replace(EASY, step_seconds=0.25)) == EXIT_DONE
    assert "time per step: predicted 0.25 s, measured " in capsys.readouterr().out
    found = forecast_of(records(job))
    assert found is not None
    assert (found.measured.attempt, found.measured.steps) == (2, 1)
    assert found.measured.run_seconds is None


@pytest.mark.distributed
def test_two_processes_record_the_memory_of_both_and_one_prediction(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "two")
    assert run_ranks(2, _of_two, job) == [EXIT_DONE, EXIT_DONE]
    run = records(job)
    assert len(run.of(Predicted)) == 1
    assert not list(run_directory(job).path.glob("events.rank*"))
    (_, first), *_, (_, last) = run.of(MemoryMeasured)
    assert first.step == 1
    assert [each["rank"] for each in last.ranks] == [0, 1]
    assert last.step == 6
    assert all(each["resident_bytes"] > 50e6 for each in last.ranks)
    assert last.most() == ("resident", max(each["resident_bytes"] for each in last.ranks))
    assert last.most("reserved") is None


@pytest.mark.slow
def test_memory_is_recorded_again_when_it_has_grown_by_more_than_a_hundredth() -> None:
    watch = MemoryWatch(ALONE, torch.device("cpu"))
    assert watch.grown()
    before = watch.measured(1).ranks[0]["resident_bytes"]
    assert not watch.grown()
    # The peak may be above what is in use now, so that more than a hundredth of it is taken.
    held = torch.ones(before // 4)
    assert watch.grown()
    after = watch.measured(2).ranks[0]["resident_bytes"]
    assert after > 1.01 * before
    assert not watch.grown()
    assert len(held)


@pytest.mark.slow
def test_the_peak_is_not_that_of_the_program_that_started_this_one() -> None:
    held = torch.ones(200_000_000)
    mine, source = resident_peak()
    assert mine > 4 * len(held)
    if "VmHWM" not in source:
        pytest.skip("this kernel does not tell")
    code = "from outlast.runtime.recording import resident_peak; print(resident_peak()[0])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 0.75 * mine


def test_without_proc_the_figure_says_where_it_is_from(tmp_path: Path) -> None:
    peak, source = resident_peak(tmp_path / "absent")
    assert peak >= 0.9 * resident_peak()[0]
    assert "ru_maxrss" in source


def test_on_a_gpu_tensors_and_what_torch_has_taken_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3_000)
    event = MemoryWatch(ALONE, torch.device("cuda", 0)).measured(4)
    assert event.most() == ("reserved", 3_000)
    assert event.most("allocated") == ("allocated", 2_000)
    assert event.what.startswith("torch.cuda.max_memory_allocated and max_memory_reserved, ")
