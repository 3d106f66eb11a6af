"""Loops of Lightning Fabric with Outlast: one process, DDP and FSDP2, killed, stopped, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning.fabric")

from fabric_runs import assert_same, finish, losses, records, start, weights

from outlast.checkpoint import storage_of
from outlast.checkpoint.retention import complete_versions
from outlast.records import CorruptionDetected, StopRequested, energy_totals, forecast_of

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

EVERY_5 = "checkpoint.every_steps=5"


@pytest.mark.supports("fabric", "checkpoint", "resume", "chain", "records")
def test_a_loop_that_is_killed_and_stopped_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    other, folder = tmp_path / "undisturbed", tmp_path / "killed"
    finish(other)
    assert start(folder, EVERY_5, plan="8 SIGKILL") == [None]
    assert start(folder, EVERY_5, plan="11 SIGTERM") == [3]
    finish(folder, EVERY_5)
    assert_same(folder, other)
    run = records(folder)
    assert [each.outcome for each in run.attempts] == ["died", "to_be_continued", "completed"]
    assert [event.step for _, event in run.of(StopRequested)] == [11]
    assert run.steps()[-1][1].step == 18


@pytest.mark.supports("fabric", "guard", "energy", "records", "tensorize", "plan")
def test_wrong_numbers_are_put_right_and_joules_recorded(tmp_path: Path) -> None:
    other, folder = tmp_path / "undisturbed", tmp_path / "faulty"
    finish(other, tensorize=True)
    meter = tmp_path / "joules"
    meter.write_text("1000.0\n")
    energy = ["energy.measure=true", f'energy.sources=["file:{meter}"]']
    fault = "linear.output:bit=29:step=4"
    finish(folder, "guard.policy=linear", *energy, fault=fault, joules=str(meter), tensorize=True)
    assert_same(folder, other)
    assert "0.weight" not in weights(folder)
    run = records(folder)
    [(_, wrong)] = run.of(CorruptionDetected)
    assert (wrong.operation, wrong.outcome, wrong.step) == ("linear.forward", "corrected", 4)
    totals = energy_totals(run)
    assert totals is not None
    assert totals.joules == pytest.approx(180.0)
    forecast = forecast_of(run)
    assert forecast is not None
    [time] = [each for each in forecast.compared() if each.name == "step time"]
    assert time.predicted == 0.5
    assert time.measured


@pytest.mark.supports("fabric", "checkpoint", "resume", "malleable")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_that_are_killed_go_on_as_two_or_as_one(
    tmp_path: Path, strategy: str
) -> None:
    other, folder = tmp_path / "undisturbed", tmp_path / "killed"
    finish(other, ranks=2, strategy=strategy)
    assert start(folder, EVERY_5, plan="7 SIGKILL 1", ranks=2, strategy=strategy)[1] is None
    assert start(folder, EVERY_5, plan="9 SIGTERM 1", ranks=2, strategy=strategy)[0] == 3
    finish(folder, EVERY_5, ranks=2, strategy=strategy)
    assert_same(folder, other)
    shrunk = tmp_path / "shrunk"
    assert start(shrunk, EVERY_5, plan="7 SIGTERM 1", ranks=2, strategy=strategy)[0] == 3
    finish(shrunk, ranks=1, strategy=strategy)
    assert losses(shrunk) == pytest.approx(losses(other), rel=1e-4)


@pytest.mark.supports("fabric", "checkpoint", "resume")
@pytest.mark.parametrize("strategy", ["ddp", "store"])
def test_saves_and_loads_of_fabric_go_through_the_store(tmp_path: Path, strategy: str) -> None:
    how = {"ranks": 2, "strategy": strategy, "files": strategy == "ddp"}
    other, folder = tmp_path / "undisturbed", tmp_path / "killed"
    finish(other, **how)
    assert start(folder, plan="10 SIGKILL 0", **how)[0] is None
    finish(folder, **how)
    assert_same(folder, other)
    # Steps 9 and 10 were done again.
    assert len((folder / "losses0.jsonl").read_text().splitlines()) == 20
    # One path leads to two of the saves, and another to the newest; the others are gone.
    kept = complete_versions(storage_of(folder / "store"))
    assert [version.step for version in kept] == [2, 3, 4]


@pytest.mark.supports("fabric", "malleable")
def test_what_two_shards_saved_is_loaded_by_one(tmp_path: Path) -> None:
    other, folder = tmp_path / "undisturbed", tmp_path / "shrunk"
    finish(other, ranks=2, strategy="store")
    finish(folder, ranks=2, strategy="store", steps=8)
    finish(folder, ranks=1, strategy="store")
    assert losses(folder) == pytest.approx(losses(other), rel=1e-4)
