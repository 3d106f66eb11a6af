"""Ranks that follow the training of a run: tensorize.adapt_rank."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from runs import finish, start_process, wait_for_step
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.records import CorruptionDetected, RanksChanged, StateRecovered, guard_totals, read_run
from outlast.train.export import load_trained
from outlast.train.run import run_directory

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job
    from outlast.records import Run

pytestmark = pytest.mark.distributed

# As for the layouts of dense models in test_parallel: nats over six steps.
TOLERANCE = 2e-5

ADAPT = ("tensorize.force=true", "tensorize.adapt_rank=true", "tensorize.adapt_every_steps=2")
SHRINK = ("tensorize.rank=12", *ADAPT, "tensorize.adapt_energy=0.8")
GROW = ("tensorize.rank=4", *ADAPT, "tensorize.adapt_energy=1.0", "tensorize.largest_rank=12")
LOW_RANK = ("tensorize.form=low_rank", *SHRINK)
SHARDED = ("parallel.shard=2",)


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def changes(job: Job) -> list[RanksChanged]:
    """The changes of ranks of all attempts."""
    return [event for _, event in records(job).of(RanksChanged)]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, (*LOW_RANK, *SHARDED)),
        (3, (*LOW_RANK, "parallel.shard=3", "optimizer.name=muon")),
        (1, (*LOW_RANK, "train.activation_checkpointing=true", "guard.policy=full")),
        (1, ("tensorize.form=cola", *SHRINK, "tensorize.spectral_limit=0.05")),
        (1, ("tensorize.form=sltrain", *SHRINK)),
        (2, ("tensorize.form=tt", *SHRINK, *SHARDED, "tensorize.product_weight_decay=true")),
        (1, ("tensorize.form=btt", *GROW, "optimizer.name=muon")),
        (2, ("tensorize.form=low_rank", *GROW)),
    ],
)
def test_a_resumed_run_ends_in_equal_bits(
    tmp_path: Path, size: int, settings: tuple[str, ...]
) -> None:
    whole = tiny_job(tmp_path, "whole", *settings)
    assert train(whole, size) == EXIT_DONE
    stopped = tiny_job(tmp_path, "stopped", *settings, "train.stop_after_steps=3")
    assert train(stopped, size) == EXIT_TO_BE_CONTINUED
    resumed = tiny_job(tmp_path, "stopped", *settings)
    assert train(resumed, size) == EXIT_DONE
    assert losses(resumed) == losses(whole)
    assert_equal_bits(weights(resumed), weights(whole))
    first, *later = changes(whole)
    assert first.step == 2
    assert first.changes
    # After the step at which it was stopped the ranks are those of its checkpoint.
    at_two, restored, *others = changes(resumed)
    assert at_two.changes == first.changes
    assert [(event.step, event.changes) for event in others] == [
        (event.step, event.changes) for event in later
    ]
    assert restored.step == 3
    assert restored.parameters == first.parameters
    assert {item["name"]: item["after"] for item in restored.changes} == {
        item["name"]: item["after"] for item in first.changes
    }


def test_ranks_shrink_within_their_bounds_and_the_records_tell(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "shrinking", *LOW_RANK, "tensorize.smallest_rank=8")
    assert train(job, 1) == EXIT_DONE
    events = changes(job)
    assert all(item["after"] < item["before"] for event in events for item in event.changes)
    assert {item["after"] for event in events for item in event.changes} == {8}
    for item in events[0].changes:
        # No more than the energy that may go.
        assert 0.0 < item["error"] <= 0.2**0.5
    tensorized = records(job).tensorized
    assert tensorized is not None
    model, _ = load_trained(job, run_directory(job))
    assert tensorized.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert tensorized.parameters < tensorized.dense_parameters


def test_growing_keeps_the_function(tmp_path: Path) -> None:
    """The step after a growth has the loss that it has without one."""
    fixed = tiny_job(tmp_path, "fixed", "tensorize.form=low_rank", "tensorize.rank=4")
    growing = tiny_job(tmp_path, "growing", "tensorize.form=low_rank", *GROW)
    for job in (fixed, growing):
        assert train(job, 1) == EXIT_DONE
    assert losses(growing)[:3] == pytest.approx(losses(fixed)[:3], abs=TOLERANCE)
    assert losses(growing)[4:] != pytest.approx(losses(fixed)[4:], abs=TOLERANCE)
    for item in (item for event in changes(growing) for item in event.changes):
        assert item["before"] < item["after"] <= 12
        assert item["error"] == 0.0


def test_a_run_goes_on_with_other_numbers_of_shards(tmp_path: Path) -> None:
    whole = tiny_job(tmp_path, "whole", *LOW_RANK)
    assert train(whole, 1) == EXIT_DONE
    for size, layout in ((2, SHARDED), (1, ()), (3, ("parallel.shard=3",))):
        stop = [] if size == 3 else ["train.stop_after_steps=2"]
        job = tiny_job(tmp_path, "changing", *LOW_RANK, *layout, *stop)
        assert train(job, size) == (EXIT_TO_BE_CONTINUED if stop else EXIT_DONE)
    assert losses(job) == pytest.approx(losses(whole), abs=TOLERANCE)


def test_a_killed_run_ends_in_equal_bits(tmp_path: Path) -> None:
    settings = (
        *LOW_RANK, "train.steps=30", "tensorize.adapt_every_steps=5", "checkpoint.every_steps=7",
        "launch.nproc=2", *SHARDED,
    )  # fmt: skip
    whole = tiny_job(tmp_path, "whole", *settings)
    assert finish(start_process(whole, tmp_path))[0] == EXIT_DONE
    job = tiny_job(tmp_path, "killed", *settings)
    for step in (8, 17):
        process = start_process(job, tmp_path)
        wait_for_step(job, step, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    assert losses(job) == losses(whole)
    assert_equal_bits(weights(job), weights(whole))
    assert changes(whole)
    # States that several processes kept in memory outlive their launcher.
    assert records(job).of(StateRecovered)


def test_the_guard_goes_on_with_the_changed_model(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "guarded", *LOW_RANK, "guard.policy=linear")
    assert train(job, 1) == EXIT_DONE
    assert changes(job)
    assert records(job).of(CorruptionDetected) == []
    totals = guard_totals(records(job))
    assert totals is not None
    # Of all six steps: forward, dX and dW of the factors of 28 layers, one row each at least.
    assert totals.operations["linear.dw"].checks >= 6 * 2 * 28
