"""What the trainer does with its checkpoints: cadence, replay logs, a faster place, a mirror."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from forked import RanksFailedError
from runs import finish, start_process, wait_for_step
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.checkpoint import list_versions, load, storage_of
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.records import (
    CheckpointFailed,
    CheckpointInterval,
    CheckpointRestored,
    CheckpointSaved,
    read_run,
)
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed


def steps_in(place: Path) -> list[int]:
    return [version.step for version in list_versions(storage_of(place))]


def test_the_best_interval_is_measured_and_told(tmp_path: Path) -> None:
    settings = ('checkpoint.every_steps="auto"', "train.steps=45", "checkpoint.mtbf_hours=0.001")
    job = tiny_job(tmp_path, "auto", *settings)
    assert train(job, 1) == EXIT_DONE
    run = read_run(run_directory(job).path)
    # An early save measures what a save costs, the others follow from it; the last is at the end.
    saved = [event.step for _, event in run.of(CheckpointSaved)]
    assert saved[0] == 20
    assert saved[-1] == 45
    told = [event for _, event in run.of(CheckpointInterval)]
    assert told
    assert "save every" in told[0].reason


def test_with_replay_logs_a_kill_costs_no_logged_step(tmp_path: Path) -> None:
    replay = (
        'checkpoint.replay="bf16"',
        'recover.mode="off"',
        "launch.nproc=2",
        "parallel.shard=2",
    )
    settings = (*replay, "checkpoint.every_steps=0", "train.steps=40")
    whole = tiny_job(tmp_path, "whole", *settings)
    assert finish(start_process(whole, tmp_path))[0] == EXIT_DONE
    job = tiny_job(tmp_path, "killed", *settings)
    process = start_process(job, tmp_path)
    wait_for_step(job, 12, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    [(_, restored)] = read_run(run_directory(job).path).of(CheckpointRestored)
    # The only version is that of the start; the log of the newest step may not be there yet.
    assert restored.step >= 10
    assert_equal_bits(weights(job), weights(whole))
    assert losses(job) == losses(whole)


def test_a_faster_place_is_saved_to_first(tmp_path: Path) -> None:
    fast, mirror = tmp_path / "fast", tmp_path / "mirror"
    settings = (
        f'checkpoint.fast="{fast}"',
        f'checkpoint.mirror="{mirror}"',
        "checkpoint.drain_every=2",
        "checkpoint.mirror_every=1000",
        "checkpoint.every_steps=1",
    )
    whole = tiny_job(tmp_path, "whole")
    assert train(whole, 1) == EXIT_DONE
    job = tiny_job(tmp_path, "tiers", *settings, "train.stop_after_steps=3")
    assert train(job, 1) == EXIT_TO_BE_CONTINUED
    [place] = fast.iterdir()
    # One before it may still have been copied on when this one was published.
    assert steps_in(place)[-1] == 3
    assert steps_in(run_directory(job).checkpoints)[-1] == 3
    [copy] = mirror.iterdir()
    assert steps_in(copy) == [3]
    # The node is lost: its disk is empty.
    shutil.rmtree(fast)
    resumed = tiny_job(tmp_path, "tiers", *settings)
    assert train(resumed, 1) == EXIT_DONE
    [(_, restored)] = read_run(run_directory(job).path).of(CheckpointRestored)
    assert restored.step == 3
    assert_equal_bits(weights(resumed), weights(whole))


def test_a_fresh_run_takes_nothing_from_the_faster_place(tmp_path: Path) -> None:
    settings = (f'checkpoint.fast="{tmp_path / "fast"}"',)
    job = tiny_job(tmp_path, "again", *settings)
    assert train(job, 1) == EXIT_DONE
    run_directory(job).move_aside()
    assert train(job, 1) == EXIT_DONE
    assert not read_run(run_directory(job).path).of(CheckpointRestored)
    assert len(losses(job)) == job.train.steps


def test_a_run_that_fell_back_saves_where_it_ends(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "back", "train.stop_after_steps=5", "checkpoint.keep=9")
    assert train(job, 1) == EXIT_TO_BE_CONTINUED
    checkpoints = run_directory(job).checkpoints
    for version in list_versions(storage_of(checkpoints)):
        if version.step > 2:
            (pack,) = (checkpoints / version.folder).glob("*.pack")
            pack.write_bytes(pack.read_bytes()[:-1] + b"x")
    again = tiny_job(tmp_path, "back", "train.stop_after_steps=1", "checkpoint.keep=9")
    assert train(again, 1) == EXIT_TO_BE_CONTINUED
    newest = list_versions(storage_of(checkpoints))[-1]
    # Older than the damaged versions by its step, newer by its session.
    assert (newest.session, newest.step) == (2, 3)
    resumed = tiny_job(tmp_path, "back", "checkpoint.keep=9")
    assert train(resumed, 1) == EXIT_DONE
    restored = [event for _, event in read_run(run_directory(job).path).of(CheckpointRestored)]
    assert [event.step for event in restored] == [2, 3]
    assert restored[-1].skipped == []


def test_a_checkpoint_has_the_figures_of_its_own_step_alone(tmp_path: Path) -> None:
    settings = ("checkpoint.every_steps=1", "evaluate.every_steps=2", "checkpoint.keep=9")
    job = tiny_job(tmp_path, "measured", *settings)
    assert train(job, 1) == EXIT_DONE
    storage = storage_of(run_directory(job).checkpoints)
    measured = {
        version.step: set(load(storage, version).seal.metrics) for version in list_versions(storage)
    }
    assert measured == {
        step: {"validation_loss"} if step % 2 == 0 else set() for step in range(1, 7)
    }


def test_a_save_that_cannot_be_begun_stops_no_training(tmp_path: Path) -> None:
    settings = ("checkpoint.every_steps=2", "train.stop_after_steps=0")
    job = tiny_job(tmp_path, "taken", *settings)
    checkpoints = run_directory(job).checkpoints
    checkpoints.parent.mkdir(parents=True)
    # Where the store is to be there is a file, until the training is nearly done.
    checkpoints.write_text("in the way")
    with pytest.raises(RanksFailedError, match=r"cannot be (made|listed)|Not a directory"):
        train(job, 1)
    run = read_run(run_directory(job).path)
    assert len(run.losses()) == job.train.steps
    assert [event.step for _, event in run.of(CheckpointFailed)][:2] == [2, 4]
