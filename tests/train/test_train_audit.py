"""Audits in the trainer: unchanged numbers on every layout, and faults that no other check sees."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import run_ranks
from tiny import assert_equal_bits, losses, tiny_job, train, weights
from torch.nn import functional

from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_DATA_CORRUPTION, EXIT_DONE, DataCorruptionError
from outlast.records import CorruptionDetected, Guarded, Run, Warned, guard_totals, read_run
from outlast.train.loop import Trainer
from outlast.train.run import Start, run_directory, work

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job

pytestmark = pytest.mark.distributed

# The first audit is in step 11; without a small budget every few steps have one.
SHORT = ("train.steps=16", "checkpoint.every_steps=0", "data.validation_fraction=0.0")
ALWAYS = ('guard.audit="100 %"',)

LAYOUTS = {
    "alone": (1, ()),
    "bf16, Muon": (1, ("train.precision=bf16", "optimizer.name=muon")),
    "checkpointing, accumulation": (
        1,
        ("train.activation_checkpointing=true", "train.micro_batch_size=3"),
    ),
    "DDP of three, accumulation": (3, ("train.micro_batch_size=2",)),
    "HSDP": (4, ("parallel.shard=2", "parallel.replicate=2")),
    "tensor": (2, ("parallel.tensor=2",)),
    "pipeline": (2, ("parallel.pipeline=2", "parallel.pipeline_microbatches=4")),
}
TOGETHER = ("HSDP", "tensor", "pipeline")


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def found(job: Job) -> list[CorruptionDetected]:
    return [event for _, event in records(job).of(CorruptionDetected)]


def audits_of(job: Job) -> dict[str, Any]:
    return records(job).of(Guarded)[-1][1].audits


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_audits_change_no_bit_on_any_layout(layout: str, tmp_path: Path) -> None:
    size, settings = LAYOUTS[layout]
    plain = tiny_job(tmp_path, "plain", *SHORT, *settings, "guard.audit=off")
    job = tiny_job(tmp_path, "audited", *SHORT, *settings, *ALWAYS)
    assert train(plain, size) == train(job, size) == EXIT_DONE
    assert losses(job) == losses(plain)
    assert_equal_bits(weights(job), weights(plain))
    assert found(job) == []
    audits = audits_of(job)
    assert audits["replays"] >= 1
    assert audits["updates"] >= audits["replays"]
    assert audits["exact"] is True
    assert audits["unit"] == ("step" if layout in TOGETHER else "micro-batch")
    assert audits["elsewhere"] == layout.startswith("DDP")
    assert (audits["why_not"], audits["updates_why_not"]) == ("", "")
    assert records(plain).of(Guarded)[-1][1].audits == {}


def test_audits_are_on_by_default_and_said_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, "default", *SHORT)
    assert train(job, 1) == EXIT_DONE
    totals = guard_totals(records(job))
    assert totals is not None
    assert "1 audits of passes and 1 of updates in 16 steps" in totals.audits
    assert "repeated on the same device and compared bit for bit" in totals.audits
    assert "of the steps' time" in totals.audits


def test_coded_gradients_are_not_audited_and_a_warning_says_so(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "coded", *SHORT, *ALWAYS, "coding.scheme=coverage")
    assert train(job, 2) == EXIT_DONE
    told = [event.message for _, event in records(job).of(Warned) if "audit" in event.message]
    why = "[coding] sums up whatever replicas have computed in time"
    assert told == [f"guard.audit: passes are not audited: {why}"]
    assert audits_of(job)["replays"] == 0
    assert audits_of(job)["updates"] > 0


def _wrong_silu(job: Job, struck: int, once: bool) -> int:
    """Train, with a wrong element-wise operation on rank `struck`, in every audited step."""
    ranks = ranks_from(os.environ)
    plain, step = functional.silu, Trainer.step
    armed = [False]

    def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        y = plain(x)
        if not armed[0]:
            return y
        armed[0] = not once
        wrong = torch.zeros_like(y)
        wrong.view(-1)[::50] = 0.05
        return y + wrong

    def stepped(self: Trainer, number: int, parts: Any) -> Any:
        # The first audit, in step 11, has shown that passes can be repeated.
        assert self.guard is not None
        replays = self.guard.guard.replays
        assert replays is not None
        armed[0] = ranks.rank == struck and number > 10 and (not once or replays.due)
        return step(self, number, parts)

    functional.silu = silu
    Trainer.step = stepped  # type: ignore[method-assign]
    try:
        return work(Start(job), ranks)
    except DataCorruptionError:
        return EXIT_DATA_CORRUPTION


@pytest.mark.parametrize("size", [1, 3])
def test_a_transient_fault_of_an_activation_leaves_no_trace(size: int, tmp_path: Path) -> None:
    plain = tiny_job(tmp_path, "plain", *SHORT, "guard.audit=off")
    job = tiny_job(tmp_path, "struck", *SHORT, *ALWAYS)
    assert train(plain, size) == EXIT_DONE
    assert set(run_ranks(size, _wrong_silu, job, size - 1, True)) == {EXIT_DONE}
    events = found(job)
    assert {(event.operation, event.outcome, event.found_on) for event in events} == {
        ("audit.gradient", "repeated", size - 1),
        ("audit.loss", "repeated", size - 1),
    }
    assert losses(job) == losses(plain)
    assert_equal_bits(weights(job), weights(plain))


def test_a_rank_whose_activation_is_always_wrong_is_named(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "stuck", *SHORT, *ALWAYS, "launch.restarts=0", "train.steps=30")
    assert set(run_ranks(3, _wrong_silu, job, 1, False)) == {EXIT_DATA_CORRUPTION}
    events = found(job)
    assert {event.found_on for event in events} == {1}
    assert {event.operation for event in events} == {"audit.gradient", "audit.loss"}
    assert all("rank 1 is wrong" in event.module for event in events)
