"""Lightning's `Trainer` with Outlast: killed, stopped, resumed, recorded, guarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
from forked import RanksFailedError
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import EVERY_5, assert_same, finish, losses, records, start

from outlast.autosave.libraries import HandedOver
from outlast.errors import IntegrationError
from outlast.guard.findings import HARMFUL
from outlast.integrations.lightning import take_over, with_outlast
from outlast.records import (
    AttemptEnded,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    Guarded,
    StopRequested,
    energy_totals,
    forecast_of,
)
from outlast.runtime.cadence import Every

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


def undisturbed(tmp_path: Path, *settings: str, **how: Any) -> Path:
    """A training beside that nothing happens to."""
    other = tmp_path / "undisturbed"
    finish(other, *settings, **how)
    return other


@pytest.mark.supports("lightning", "checkpoint", "resume", "records")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_that_is_killed_ends_with_the_bits_of_one_without_outlast(
    tmp_path: Path, workers: int
) -> None:
    other = undisturbed(tmp_path, without=True, workers=workers)
    folder = tmp_path / "killed"
    settings = [EVERY_5, f"checkpoint.asynchronous={str(not workers).lower()}"]
    # Before the first save, between saves, in the last step of an epoch, in the first of another.
    for step in (3, 8, 12, 25):
        assert start(folder, *settings, plan=f"{step} SIGKILL", workers=workers) == [None]
    finish(folder, *settings, workers=workers)
    assert_same(folder, other)
    run = records(folder)
    assert [each.outcome for each in run.attempts] == ["died"] * 4 + ["completed"]
    restored = [event.step for _, event in run.of(CheckpointRestored)]
    # In the background, the newest save may not be complete when the process dies.
    assert restored == [5, 10, 25] or (not workers and {*restored} <= {5, 10, 20, 25})
    assert run.steps()[-1][1].step == 36
    assert 35 in [event.step for _, event in run.of(CheckpointSaved)]


@pytest.mark.supports("lightning", "chain", "resume")
def test_a_signal_stops_after_the_step_with_exit_code_3(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, accumulate=2)
    folder = tmp_path / "stopped"
    assert start(folder, plan="7 SIGTERM", accumulate=2) == [3]
    assert start(folder, plan="9 SIGUSR1", accumulate=2) == [3]
    finish(folder, accumulate=2)
    assert_same(folder, other)
    # Nothing was done twice.
    assert len((folder / "losses0.jsonl").read_text().splitlines()) == 36
    run = records(folder)
    stops = [(event.step, event.reason) for _, event in run.of(StopRequested)]
    assert stops == [(8, "SIGTERM"), (10, "SIGUSR1")]
    outcomes = [event.outcome for _, event in run.of(AttemptEnded)]
    assert outcomes == ["to_be_continued", "to_be_continued", "completed"]
    # Before the first step there is nothing to save, and nothing is done.
    early = tmp_path / "early"
    assert start(early, plan="0 SIGTERM", validate=True) == [3]
    assert not (early / "losses0.jsonl").exists()
    # A step's loss is the mean of its two batches.
    batches = losses(other)
    [(step, loss), *_] = records(other).losses()
    assert step == 3
    assert loss == pytest.approx(sum(batches[n] for n in range(6)) / 6, abs=1e-6)


@pytest.mark.supports("lightning", "chain")
def test_in_a_slurm_job_nothing_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"JOB_ID": "17", "JOB_NAME": "it", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    for name, value in {**job, "NODEID": "0", "NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    # With Lightning's requeue, this signal would save a file of its own and call scontrol.
    assert start(tmp_path, plan="4 SIGUSR1") == [3]
    assert list(tmp_path.glob("**/hpc_ckpt*")) == []
    assert [event.step for _, event in records(tmp_path).of(StopRequested)] == [5]


@pytest.mark.supports("lightning", "guard", "energy", "records", "plan")
def test_wrong_numbers_are_put_right_and_joules_recorded(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    folder = tmp_path / "faulty"
    meter = tmp_path / "joules"
    meter.write_text("1000.0\n")
    finish(
        folder,
        "guard.policy=linear",
        "energy.measure=true",
        f'energy.sources=["file:{meter}"]',
        fault="linear.output:bit=29:step=4",
        joules=str(meter),
    )
    assert_same(folder, other)
    run = records(folder)
    [(_, wrong)] = run.of(CorruptionDetected)
    assert (wrong.operation, wrong.outcome, wrong.step) == ("linear.forward", "corrected", 4)
    assert run.of(Guarded)[-1][1].checks > 36
    totals = energy_totals(run)
    assert totals is not None
    assert totals.joules == pytest.approx(360.0)
    forecast = forecast_of(run)
    assert forecast is not None
    [time] = [each for each in forecast.compared() if each.name == "step time"]
    assert time.predicted == 0.5
    assert time.measured


@pytest.mark.supports("lightning", "tensorize", "resume")
def test_a_tensorized_model_is_resumed(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, tensorize=True)
    folder = tmp_path / "killed"
    assert start(folder, EVERY_5, plan="17 SIGKILL", tensorize=True) == [None]
    finish(folder, EVERY_5, tensorize=True)
    assert_same(folder, other)
    weights = torch.load(folder / "result0.pt", weights_only=True)
    assert "net.0.weight" not in weights


@pytest.mark.supports("lightning", "checkpoint", "resume", "chain")
def test_two_processes_stop_together_and_go_on_after_a_kill(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, devices=2)
    folder = tmp_path / "killed"
    # The signal comes to the second process alone.
    assert start(folder, EVERY_5, plan="4 SIGTERM 1", devices=2)[0] == 3
    assert start(folder, EVERY_5, plan="14 SIGKILL 0", devices=2)[0] is None
    finish(folder, EVERY_5, devices=2)
    assert_same(folder, other, ranks=2)


@pytest.mark.supports("lightning", "malleable")
def test_two_processes_are_continued_by_one_with_the_same_samples(tmp_path: Path) -> None:
    how: dict[str, Any] = {"plain": True, "epochs": 2}
    other = undisturbed(tmp_path, EVERY_5, devices=2, batch=8, **how)
    folder = tmp_path / "shrunk"
    assert start(folder, EVERY_5, plan="10 SIGKILL 0", devices=2, batch=8, **how)[0] is None
    finish(folder, EVERY_5, batch=16, **how)
    whole = [losses(other, rank) for rank in range(2)]
    found = losses(folder)
    for batch in range(10, 12):
        mean = sum(of_rank[batch] for of_rank in whole) / 2
        assert found[batch] == pytest.approx(mean, rel=1e-4), batch


def test_trainers_are_left_as_they_were_behind_a_run(tmp_path: Path) -> None:
    own = pl.Trainer.__init__, pl.Trainer.fit
    undo = take_over(HandedOver(Every(), tmp_path / "stores.json", tmp_path))
    assert (pl.Trainer.__init__, pl.Trainer.fit) != own
    undo()
    assert (pl.Trainer.__init__, pl.Trainer.fit) == own


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(IntegrationError, match="save_last=True to one of them"):
        with_outlast(callbacks=ModelCheckpoint(every_n_train_steps=3))
    with pytest.raises(IntegrationError, match="both say when to save"):
        with_outlast(callbacks=ModelCheckpoint(save_last=True), settings=[EVERY_5])
    with pytest.raises(IntegrationError, match='every_steps = "auto" cannot be followed'):
        with_outlast(settings=['checkpoint.every_steps="auto"'])
    with pytest.raises(IntegrationError, match=r"checkpoint\.mirror = '/m' cannot be followed"):
        with_outlast(settings=['checkpoint.mirror="/m"'])


@pytest.mark.supports("lightning", "resume", "records")
def test_a_stream_without_a_length_goes_on_after_an_error(tmp_path: Path) -> None:
    how: dict[str, Any] = {"stream": True, "epochs": -1, "steps": 30}
    other = undisturbed(tmp_path, without=True, **how)
    folder = tmp_path / "failed"
    with pytest.raises(RanksFailedError, match="ValueError: it went wrong"):
        start(folder, EVERY_5, plan="19 raise", **how)
    finish(folder, EVERY_5, **how)
    assert_same(folder, other)
    run = records(folder)
    [first, last] = [event for _, event in run.of(AttemptEnded)]
    assert (first.outcome, first.reason) == ("failed", "ValueError: it went wrong")
    assert last.outcome == "completed"
    assert [event.step for _, event in run.of(CheckpointRestored)] == [15]


@pytest.mark.supports("lightning", "resume")
def test_a_training_of_plain_lightning_changes_over_in_its_middle(tmp_path: Path) -> None:
    other = undisturbed(tmp_path, without=True)
    folder = tmp_path / "changing"
    # At the end of an epoch: Lightning itself keeps no place in the data and no random numbers.
    finish(folder, without=True, epochs=1, keeping={"save_last": True})
    [file] = (folder / "plain").glob("last.ckpt")
    finish(folder, **{"from": str(file)})
    found = losses(folder)
    assert {*found} == {*range(36)}
    whole = losses(other)
    assert all(found[batch] == whole[batch] for batch in range(12))
    [(_, last)] = records(folder).of(AttemptEnded)
    assert (last.outcome, last.step) == ("completed", 36)


@pytest.mark.supports("lightning", "resume")
def test_each_of_several_loaders_goes_on_where_it_was(tmp_path: Path) -> None:
    # The short one begins anew after five batches; validation comes in the middle of an epoch.
    how: dict[str, Any] = {"several": True, "validate": True, "validate_every": 6}
    settings = ["checkpoint.every_steps=4", "checkpoint.asynchronous=false"]
    other = undisturbed(tmp_path, without=True, **how)
    folder = tmp_path / "killed"
    for step in (5, 9, 22):
        assert start(folder, *settings, plan=f"{step} SIGKILL", **how) == [None]
    finish(folder, *settings, **how)
    assert_same(folder, other)
    restored = [event.step for _, event in records(folder).of(CheckpointRestored)]
    assert restored == [4, 8, 20]


@pytest.mark.smoke
@pytest.mark.supports("lightning", "guard")
def test_numbers_that_stay_wrong_end_the_training_before_they_are_used(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    folder = tmp_path / "faulty"
    settings = ["guard.policy=linear", EVERY_5]
    with pytest.raises(RanksFailedError, match="DataCorruptionError"):
        start(folder, *settings, fault="linear.output:bit=29:step=13:permanent")
    run = records(folder)
    assert {each.outcome for _, each in run.of(CorruptionDetected)} <= set(HARMFUL)
    assert run.of(CorruptionDetected)
    assert run.attempts[-1].outcome == "failed"
    finish(folder, *settings)
    [(_, restored)] = records(folder).of(CheckpointRestored)
    assert restored.step == 10
    assert_same(folder, other)
