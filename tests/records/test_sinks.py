"""TensorBoard and Weights & Biases get the numbers, and are not needed for anything else."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from outlast.errors import OutlastError
from outlast.records import (
    CheckpointSaved,
    Evaluated,
    RecordWriter,
    StepsDone,
    TensorBoardSink,
    WandbSink,
    Warned,
    scalars,
)

if TYPE_CHECKING:
    from pathlib import Path

STEPS = StepsDone(20, 10, 2.5, 0.75, 1e-3, 640, [0.1] * 10, {"compute": 0.9, "data": 0.1})


def test_scalars_carry_their_units() -> None:
    assert scalars(STEPS) == pytest.approx(
        {
            "train/loss_nats": 2.5,
            "train/gradient_norm": 0.75,
            "train/learning_rate": 1e-3,
            "train/step_seconds": 0.1,
            "time/compute_seconds": 0.9,
            "time/data_seconds": 0.1,
        }
    )
    assert scalars(CheckpointSaved(5, 0.1, 0.2, 1000))["checkpoint/bytes"] == 1000.0
    assert scalars(Warned("careful")) == {}


def test_unknown_bits_per_byte_are_left_out() -> None:
    assert scalars(Evaluated(5, 2.0, None, 100, 1.0)) == {"validation/loss_nats": 2.0}
    assert scalars(Evaluated(5, 2.0, 2.9, 100, 1.0))["validation/bits_per_byte"] == 2.9


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = RecordWriter(tmp_path, sinks=[TensorBoardSink(tmp_path / "tensorboard")])
    writer.write(Warned("no number"))
    writer.write(STEPS)
    writer.write(Evaluated(20, float("nan"), 2.9, 100, 1.0))
    writer.close()
    accumulator = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert tags == {*scalars(STEPS), "validation/loss_nats", "validation/bits_per_byte"}
    (point,) = accumulator.Scalars("train/loss_nats")
    assert (point.step, point.value) == (20, 2.5)


def test_missing_tensorboard_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "tensorboard.compat", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OutlastError, match=r"log\.tensorboard = true needs a package that is miss"):
        TensorBoardSink(tmp_path)


def test_missing_wandb_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        OutlastError, match=r'project = "p" needs .* pip install \'outlast\[wandb\]'
    ):
        WandbSink("p", "run", {}, tmp_path)


def test_wandb_that_does_not_start_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ValueError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=ValueError))
    with pytest.raises(OutlastError, match=r'"p" does not work \(no API key\); run `wandb login`'):
        WandbSink("p", "run", {}, tmp_path)


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WandbSink("project", "run-1", {"train": {"steps": 5}}, tmp_path)
    sink.write(STEPS)
    sink.write(Warned("no number"))
    sink.close()
    # Its own process writes the file, and has done so when it has ended.
    wandb.teardown()
    (log,) = tmp_path.glob("wandb/offline-run-*-run-1/run-run-1.wandb")
    content = log.read_bytes()
    assert all(name.encode() in content for name in scalars(STEPS))


def test_reading_a_run_needs_no_heavy_package() -> None:
    code = (
        "import sys, outlast.records\n"
        "print(*{'torch', 'numpy', 'tensorboard', 'wandb'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""
