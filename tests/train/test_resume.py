"""Stopping, killing and resuming a run: nothing is lost, nothing is seen twice."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import finish, start_process, wait_for_step
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.checkpoint import list_versions, storage_of
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.job import Job
from outlast.records import (
    CheckpointRestored,
    CheckpointSaved,
    StateRecovered,
    StopRequested,
    read_run,
)
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed

# Training loss (nats) across world sizes; measured: see docs/train.md.
TOLERANCE = 2e-5


@pytest.mark.smoke
def test_stopped_on_four_resumed_on_two_then_three(tmp_path: Path) -> None:
    whole = tiny_job(tmp_path, "whole", "train.steps=9")
    assert train(whole, 1) == EXIT_DONE
    stop = "train.stop_after_steps=3"
    for size, code in ((4, EXIT_TO_BE_CONTINUED), (2, EXIT_TO_BE_CONTINUED), (3, EXIT_DONE)):
        part = tiny_job(tmp_path, "parts", "train.steps=9", *([stop] if size != 3 else []))
        assert train(part, size) == code
    assert losses(part) == pytest.approx(losses(whole), abs=TOLERANCE)
    run = read_run(run_directory(part).path)
    assert [attempt.world_size for attempt in run.attempts] == [4, 2, 3]
    assert [attempt.first_step for attempt in run.attempts] == [0, 3, 6]
    assert [event.step for _, event in run.of(StopRequested)] == [3, 6]
    final, expected = weights(part), weights(whole)
    for name, tensor in final.items():
        assert torch.allclose(tensor, expected[name], atol=1e-4), name


def test_one_run_goes_through_every_kind_of_layout(tmp_path: Path) -> None:
    whole = tiny_job(tmp_path, "whole", "train.steps=10")
    assert train(whole, 1) == EXIT_DONE
    layouts = (
        (4, ["parallel.shard=2", "parallel.tensor=2"]),
        (4, ["parallel.replicate=2", "parallel.shard=2"]),
        (2, ["parallel.tensor=2"]),
        (2, ["parallel.pipeline=2", "parallel.pipeline_microbatches=2"]),
        (1, []),
    )
    for number, (size, overrides) in enumerate(layouts):
        last = number == len(layouts) - 1
        stop = [] if last else ["train.stop_after_steps=2"]
        part = tiny_job(tmp_path, "parts", "train.steps=10", *overrides, *stop)
        assert train(part, size) == (EXIT_DONE if last else EXIT_TO_BE_CONTINUED)
    assert losses(part) == pytest.approx(losses(whole), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, []),
        (4, ["parallel.replicate=2", "parallel.shard=2"]),
        (1, ["optimizer.name=muon"]),
        (3, []),
        (4, ["parallel.replicate=4"]),
        (2, ["parallel.shard=2"]),
        (2, ["parallel.tensor=2"]),
        (2, ["parallel.pipeline=2", "parallel.pipeline_microbatches=2"]),
    ],
)
def test_resumed_on_as_many_ranks_ends_in_equal_bits(
    tmp_path: Path, size: int, overrides: list[str]
) -> None:
    whole = tiny_job(tmp_path, "whole", *overrides)
    assert train(whole, size) == EXIT_DONE
    stopped = tiny_job(tmp_path, "stopped", *overrides, "train.stop_after_steps=3")
    assert train(stopped, size) == EXIT_TO_BE_CONTINUED
    resumed = tiny_job(tmp_path, "stopped", *overrides)
    assert train(resumed, size) == EXIT_DONE
    assert_equal_bits(weights(resumed), weights(whole))
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_saves_at_the_next_step_boundary(tmp_path: Path, signal_name: str) -> None:
    long = ("train.steps=100000", "checkpoint.every_steps=0")
    job = tiny_job(tmp_path, "signalled", *long)
    process = start_process(job, tmp_path)
    wait_for_step(job, 5, process)
    process.send_signal(signal.Signals[signal_name])
    code, output = finish(process)
    assert code == EXIT_TO_BE_CONTINUED, output
    run = read_run(run_directory(job).path)
    [(_, stopped)] = run.of(StopRequested)
    assert stopped.reason == signal_name
    assert list_versions(storage_of(run_directory(job).checkpoints))[-1].step == stopped.step
    assert run.losses()[-1][0] == stopped.step
    assert not (run_directory(job).path / "lock").exists()


LONG = ("train.steps=90", "checkpoint.every_steps=10")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """A function from a number of processes to a job of `LONG` that nothing befell."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs: dict[int, Job] = {}

    def of(nproc: int) -> Job:
        if nproc not in jobs:
            job = tiny_job(folder, f"whole{nproc}", *LONG, f"launch.nproc={nproc}")
            assert finish(start_process(job, folder))[0] == EXIT_DONE
            jobs[nproc] = job
        return jobs[nproc]

    return of


@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_at_any_moment_ends_in_equal_bits(
    tmp_path: Path, nproc: int, undisturbed: Callable[[int], Job]
) -> None:
    whole = undisturbed(nproc)
    job = tiny_job(tmp_path, "killed", *LONG, f"launch.nproc={nproc}")
    random = np.random.default_rng(nproc)
    target = 0
    while target < 80:
        process = start_process(job, tmp_path)
        wait_for_step(job, target + 3, process)
        time.sleep(float(random.uniform(0.0, 0.2)))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        target += 35
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    assert_equal_bits(weights(job), weights(whole))
    assert losses(job) == losses(whole)
    run = read_run(run_directory(job).path)
    # Alone from checkpoints; states that several processes kept in memory outlive their launcher.
    assert len(run.of(CheckpointRestored if nproc == 1 else StateRecovered)) >= 2


def test_a_killed_launcher_leaves_a_run_that_goes_on_at_once(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "launcher", *LONG, "launch.nproc=2")
    process = start_process(job, tmp_path)
    wait_for_step(job, 15, process)
    process.kill()
    process.communicate()
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    assert read_run(run_directory(job).path).of(StateRecovered)


@pytest.mark.smoke
def test_a_killed_worker_is_restarted_with_its_group(
    tmp_path: Path, undisturbed: Callable[[int], Job]
) -> None:
    whole = undisturbed(2)
    job = tiny_job(tmp_path, "worker", *LONG, "launch.nproc=2")
    process = start_process(job, tmp_path)
    wait_for_step(job, 20, process)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, output = finish(process)
    assert code == EXIT_DONE, output
    run = read_run(run_directory(job).path)
    assert [attempt.outcome for attempt in run.attempts] == ["died", "completed"]
    assert_equal_bits(weights(job), weights(whole))


def test_a_damaged_newest_checkpoint_falls_back(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "damaged", "train.stop_after_steps=5")
    assert train(job, 1) == EXIT_TO_BE_CONTINUED
    newest = list_versions(storage_of(run_directory(job).checkpoints))[-1]
    file = next((run_directory(job).checkpoints / newest.folder).glob("*.pack"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = tiny_job(tmp_path, "damaged")
    assert train(resumed, 1) == EXIT_DONE
    run = read_run(run_directory(job).path)
    [(_, restored)] = run.of(CheckpointRestored)
    assert restored.step == 4
    assert "step-00000005" in restored.skipped[0]
    assert [event.step for _, event in run.of(CheckpointSaved)][-1] == 6
