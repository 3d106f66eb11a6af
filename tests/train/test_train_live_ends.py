"""Live groups, their launcher and their lighthouse die at awkward moments."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import finish, load_torchft, start_process, wait_for_step
from tiny import tiny_job

from outlast.job import Job
from outlast.records import (
    AttemptEnded,
    CheckpointSaved,
    MemberLost,
    MembershipChanged,
    StepsDone,
    read_run,
)
from outlast.recover.phase_page import arm, pages_folder, read_pages
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed
DEADLINE_SECONDS = 150.0
LIVE = (
    'recover.mode="live"',
    "launch.nproc=2",
    "launch.timeout_seconds=60",
    "recover.heartbeat_seconds=4",
)


@pytest.fixture(autouse=True)
def _torchft() -> None:
    load_torchft()


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def pages_of(job: Job) -> Path:
    directory = run_directory(job)
    wait(lambda: (directory.path / "id").exists())
    pages = pages_folder(job.recover.memory, directory)
    wait(lambda: len(read_pages(pages)) == 2)
    return pages


def test_the_writer_that_dies_in_its_last_save_leaves_no_run_without_an_end(
    tmp_path: Path,
) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100", "checkpoint.every_steps=20")
    process = start_process(job, tmp_path)
    arm(pages_of(job), 0, "save", step=job.train.steps)
    code, output = finish(process)
    assert code == 0, output
    run = read_run(run_directory(job).path)
    ((_, ended),) = run.of(AttemptEnded)
    assert (ended.outcome, ended.step) == ("completed", 100)
    assert run.of(CheckpointSaved)[-1][1].step == 100
    assert {step for step, _ in run.losses()} == set(range(1, 101))


def test_a_run_without_a_checkpoint_begins_anew_after_its_launcher_has_died(
    tmp_path: Path,
) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100000", "checkpoint.every_steps=100000")
    process = start_process(job, tmp_path)
    wait_for_step(job, 3, process)
    arm(pages_of(job), 0, "data", step=5, number=signal.SIGSTOP)
    wait(lambda: "stopped" in [each.state for each in read_pages(pages_of(job))])
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    # Also the one that is stopped, and with both of them the lighthouse.
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_SECONDS)
    assert alive == []
    process = start_process(job, tmp_path)
    wait(lambda: 2 in steps_of(job) and steps_of(job)[2] >= 3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3, output


def steps_of(job: Job) -> dict[int, int]:
    """By attempt: the last step that is recorded."""
    recorded = read_run(run_directory(job).path).of(StepsDone)
    return {record.attempt: event.step for record, event in recorded}


def test_a_lighthouse_that_dies_is_started_again_and_recorded(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100000", "checkpoint.every_steps=100000")
    process = start_process(job, tmp_path)
    wait_for_step(job, 3, process)
    launcher = psutil.Process(process.pid)
    (lighthouse,) = (each for each in launcher.children() if "_serve" in " ".join(each.cmdline()))
    lighthouse.kill()
    path = run_directory(job).path
    wait(lambda: bool(read_run(path).of(MemberLost)))
    step = read_run(path).of(MemberLost)[0][1].step
    wait_for_step(job, step + 5, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3, output
    (_, lost), *_ = read_run(path).of(MemberLost)
    assert (lost.member, lost.cause) == ("lighthouse", "coordinator")


def test_a_fault_of_a_rank_strikes_the_group_of_that_number(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=40", "checkpoint.every_steps=100000")
    process = start_process(job, tmp_path, "--process-fault", "kill:step=3:rank=1")
    code, output = finish(process)
    assert code == 0, output
    run = read_run(run_directory(job).path)
    lost = [event.member for _, event in run.of(MemberLost)]
    assert lost == ["group 1"]
    assert run.of(MembershipChanged)[0][1].reason == "lost"
    assert [step for step, _ in run.losses()] == list(range(1, 41))
