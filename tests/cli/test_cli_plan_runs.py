"""``outlast plan compare`` and ``calibrate``: from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_commands import CLUSTER, Plan

from outlast.job import load_job, to_toml
from outlast.plan.api import published_constants
from outlast.plan.batch import cases, stage
from outlast.plan.calibration import (
    Provenance,
    calibration_of,
    read_calibration,
    write_calibration,
)
from outlast.plan.cluster_file import cluster_of, read_cluster
from outlast.plan.configuration import Configuration
from outlast.plan.constants import memory_constants
from outlast.plan.huggingface import published
from outlast.plan.memory import demand
from outlast.plan.memory_fit import RESIDENT_PRIORS, Resident, resident_constants
from outlast.plan.run_rows import read_run_row
from outlast.records import (
    AttemptStarted,
    MemoryMeasured,
    Predicted,
    RecordWriter,
    RunDirectory,
    StepsDone,
    TrainingStarted,
)

LOG = "\n".join(
    f" [2026-02-03 10:00:{i:02d}] iteration {i:8d}/     500 | consumed samples: {256 * i:8d} | "
    f"elapsed time per iteration (ms): {{ms}} | throughput per GPU (TFLOP/s/GPU): 201.2 | "
    "learning rate: 1.500000E-06 | global batch size:   256 | lm loss: 1.1E+01 | "
    "loss scale: 1.0 | grad norm: 8.1 | number of skipped iterations:   0 |"
    for i in range(10)
)
SETTINGS = """
cluster = "h100x64"
[model]
published = "llama-3-8b"
[run]
data = {data}
tensor = {tensor}
sequence = 4096
micro_batch = 1
batch = 256
sharding = "optimizer"
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


def write_run(path: Path, step_seconds: float, *overrides: str, predicted: Any = None) -> Path:
    """A run directory of one process with thirty equal steps."""
    job = load_job(None, ["train.batch_size=16", "data.sequence_length=32", *overrides])
    directory = RunDirectory(path)
    directory.create(to_toml(job))
    writer = RecordWriter(path, attempt=directory.next_attempt())
    samples, length = job.train.batch_size, job.data.sequence_length
    writer.write(
        AttemptStarted(
            fingerprint="f",
            world_size=1,
            launch="alone",
            parallel={"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1},
            machine={},
            versions={"outlast": "0.1.0"},
            total_steps=450,
            samples_per_step=samples,
            tokens_per_step=samples * length,
            parameters=492160,
            flops_per_token=3e6,
        )
    )
    if predicted is not None:
        writer.write(predicted)
    writer.write(TrainingStarted(0, 1.0, {}))
    for step in range(5, 35, 5):
        spent = {"compute": 4.5 * step_seconds, "communication": 0.5 * step_seconds}
        seconds = [step_seconds] * 5
        writer.write(StepsDone(step, 5, 2.0, 1.0, 1e-3, step * samples * length, seconds, spent))
    writer.write(MemoryMeasured(30, [{"rank": 0, "resident_bytes": 6e8}], "counters"))
    writer.close()
    return path


def forecast(step_seconds: float) -> Predicted:
    return Predicted(
        step_seconds=step_seconds,
        step_seconds_low=0.8 * step_seconds,
        step_seconds_high=1.25 * step_seconds,
        memory_bytes=6e8,
        memory_bytes_low=5e8,
        memory_bytes_high=7e8,
        tokens_per_s=512 / step_seconds,
        terms={"matrix products": 0.9 * step_seconds, "gradient sum": 0.1 * step_seconds},
        calibration="mine",
        memory_of="resident",
    )


def test_compare_with_what_the_run_recorded(plan: Plan, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.2, predicted=forecast(0.21))
    code, out, _ = plan("compare", run)
    assert code == 0
    assert "inside the interval" in out
    assert "recorded before the run (mine)" in out
    assert "drift" not in out
    found = plan.json("compare", run)
    [step, *_] = found["figures"]
    assert step["name"] == "step time"
    assert step["ratio"] == pytest.approx(0.2 / 0.21)
    parts = {each["part"]: each for each in found["parts"]}
    assert parts["compute in a step"]["predicted"] == pytest.approx(0.9 * 0.21)
    assert parts["compute in a step"]["measured"] == pytest.approx(0.9 * 0.2)
    assert parts["communication in a step"]["measured"] == pytest.approx(0.1 * 0.2)


def test_compare_warns_of_drift_by_its_exit_code(plan: Plan, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.4, predicted=forecast(0.2))
    code, out, _ = plan("compare", run)
    assert code == 1
    assert "drift: step time" in out
    assert "above the interval" in out
    code, out, _ = plan("compare", run, "--json")
    assert code == 1
    assert "step time" in json.loads(out)["drift"]


def test_compare_predicts_where_the_run_recorded_nothing(plan: Plan, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.2)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    code, out, _ = plan("compare", run, "--cluster", cluster, "--json")
    assert code in (0, 1)
    found = json.loads(out)
    assert found["predicted_by"].startswith("predicted now")
    names = {each["name"]: each for each in found["figures"]}
    assert names["step time"]["measured"] == pytest.approx(0.2)
    assert names["peak memory"]["measured"] == 6e8
    assert {"lost work, of the wall time", "both in a step"} <= {
        each["part"] for each in found["parts"]
    }


def test_compare_predicts_the_memory_that_is_measured_on_processors(
    plan: Plan, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER.replace("nodes", "processor = true\nnodes", 1))
    resident = Resident(
        {name: each["mean"] for name, each in RESIDENT_PRIORS.items()}, np.eye(6), 0.04, 4
    )
    step = calibration_of(published_constants(), Provenance(date="today", version="0"))
    constants = {**step.constants, **resident_constants(resident, "this machine")}
    calibration = replace(step, constants=constants)
    file = tmp_path / "calibration.toml"
    write_calibration(calibration, file)
    run = write_run(tmp_path / "run", 0.2)
    _, out, _ = plan("compare", run, "--cluster", cluster, "--calibration", file, "--json")
    [memory] = [each for each in json.loads(out)["figures"] if each["name"] == "peak memory"]
    row = read_run_row(run, read_cluster(cluster))
    numbers = cases([(row.model, row.run, row.cluster)])
    assert memory["predicted"] == pytest.approx(float(resident.bytes(numbers)[0]), rel=1e-3)
    assert memory["measured"] == 6e8


def test_compare_refuses_what_is_no_run(plan: Plan, tmp_path: Path) -> None:
    plan.refused("compare", tmp_path)
    plan.refused("compare", tmp_path / "nowhere")


@pytest.mark.slow
def test_calibrate_from_runs(plan: Plan, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    runs = [
        write_run(tmp_path / f"run{batch}", 0.02 * batch, f"train.batch_size={batch}")
        for batch in (4, 8, 16, 32)
    ]
    dirty = write_run(tmp_path / "dirty", 0.3, "guard.policy=full")
    out = tmp_path / "mine.calibration.toml"
    asked = ("calibrate", *runs, dirty, "--cluster", cluster)
    code, said, _ = plan(*asked, "--output", out)
    assert code == 0
    assert "4 of 5 rows are fitted: run4, run8, run16, run32" in said
    assert 'left out: row dirty: guard.policy = "full"' in said
    assert "constant MFU: median" in said
    assert "matmul_efficiency" in said
    assert f"wrote {out}" in said
    written = read_calibration(out)
    assert written.provenance.rows == ("run4", "run8", "run16", "run32")
    assert any("dirty" in each for each in written.provenance.flagged)
    code, said, _ = plan("compare", runs[1], "--cluster", cluster, "--calibration", out, "--json")
    step = json.loads(said)["figures"][0]
    assert step["ratio"] == pytest.approx(1.0, abs=0.3)
    assert len(plan.json(*asked, "--force")["used"]) == 5


@pytest.mark.slow
def test_calibrate_from_logs(plan: Plan, tmp_path: Path) -> None:
    for tensor, ms in ((1, 2900.0), (2, 3000.0), (4, 3300.0)):
        (tmp_path / f"tp{tensor}.log").write_text(LOG.replace("{ms}", str(ms)))
        text = SETTINGS.format(data=64 // tensor, tensor=tensor)
        (tmp_path / f"tp{tensor}.toml").write_text(text)
    (tmp_path / "alone.log").write_text(LOG)
    logs = [tmp_path / f"{name}.log" for name in ("tp1", "tp2", "tp4", "alone")]
    found = plan.json("calibrate", *logs)
    assert found["used"] == ["tp1", "tp2", "tp4"]
    [refused] = found["refused"]
    assert "alone.toml" in refused["reason"]
    assert found["errors"]["model"]["rows"] == 3
    assert found["intervals"]["median_half_width"] > 0
    assert found["output"] is None


def memory_line(tensor: int) -> tuple[str, float]:
    """What Megatron-LM prints of a run whose memory differs from the priors; and bytes reserved."""
    run = Configuration(
        data=64 // tensor,
        tensor=tensor,
        sequence=4096,
        micro_batch=1,
        batch=256,
        sharding="optimizer",
    )
    numbers = cases([(published("llama-3-8b"), run, cluster_of("h100x64"))])
    true = memory_constants({"fragment_share": 0.5, "library_bytes": 3e9, "logit_copies": 1.4})
    need = demand(numbers, true, stage(numbers, "first"))
    held, peak, most = (
        float(each[0]) / 2**20 for each in (need.allocated, need.peak, need.reserved)
    )
    said = f"memory (MB) | allocated: {held} | max allocated: {peak} | max reserved: {most}"
    return f" [Rank 0] (after 10 iterations) {said}\n", most * 2**20


@pytest.mark.slow
def test_calibrate_learns_memory_from_logs_and_plans_with_it(plan: Plan, tmp_path: Path) -> None:
    for tensor in (2, 4, 8):
        text = LOG.replace("{ms}", str(2900.0 + 100 * tensor)) + memory_line(tensor)[0]
        (tmp_path / f"tp{tensor}.log").write_text(text)
        settings = SETTINGS.format(data=64 // tensor, tensor=tensor)
        (tmp_path / f"tp{tensor}.toml").write_text(settings)
    (tmp_path / "failed.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    failed = SETTINGS.format(data=64, tensor=1).replace("micro_batch = 1", "micro_batch = 4")
    (tmp_path / "failed.toml").write_text('framework = "Megatron-LM"' + failed)
    logs = [tmp_path / f"{name}.log" for name in ("tp2", "tp4", "tp8", "failed")]
    out = tmp_path / "mine.toml"
    code, said, _ = plan("calibrate", *logs, "--output", out)
    assert code == 0
    assert "memory of Megatron-LM: 4 runs, error of unseen ones" in said
    learned = plan.json("calibrate", *logs)["memory"]["Megatron-LM"]
    assert learned["rows"] == 4
    assert learned["unseen_error"] < learned["error_before"]
    asked = ("explain", "llama-3-8b", "--cluster", "h100x64", "--framework", "megatron")
    layout = ("--tensor", 4, "--shard", "optimizer", "--batch", 256, "--sequence", 4096)
    layout = (*layout, "--micro-batch", 1)
    before = plan.json(*asked, *layout)["estimate"]["memory"]
    after = plan.json(*asked, *layout, "--calibration", out)["estimate"]["memory"]
    most = memory_line(4)[1]
    off = [abs(each["figure"]["middle"] / most - 1.0) for each in (before, after)]
    assert off[1] < 0.5 * off[0]
    origins = {one["origin"] for term in after["terms"] for one in term["constants"].values()}
    assert origins == {"calibrated"}


def test_calibrate_refuses_too_little(plan: Plan, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    run = write_run(tmp_path / "run", 0.2)
    assert "give at least 2" in plan.refused("calibrate", run, "--cluster", cluster)
    assert "nothing to calibrate from" in plan.refused("calibrate")
    assert "--run varies one job" in plan.refused("calibrate", "--run", run, run)
    assert "is not there" in plan.refused("calibrate", tmp_path / "nowhere")
    assert "gives a row" in plan.refused("calibrate", tmp_path, "--cluster", cluster)
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    assert "lacks the columns" in plan.refused("calibrate", "--table", tmp_path / "table.csv")


def test_here_is_this_machine_as_it_was_measured(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_PLAN_HOME", str(tmp_path))
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("nodes", "processor = true\nnodes", 1))
    (tmp_path / "job.toml").write_text(to_toml(load_job(None, ["launch.nproc=2"])))
    one = plan.json("explain", tmp_path / "job.toml", "launch.nproc=1")
    two = plan.json("explain", tmp_path / "job.toml")
    assert one["cluster"]["devices_per_node"] == 1
    assert two["cluster"]["devices_per_node"] == 2
    assert two["configuration"]["data"] == 2
    # Both share what the machine has.
    peaks = [each["cluster"]["peak_flop_per_s"]["fp32"] for each in (one, two)]
    assert peaks[1] == pytest.approx(peaks[0] / 2)
    run = write_run(tmp_path / "run", 0.2)
    code, out, _ = plan("compare", run, "--json")
    assert code in (0, 1)
    assert json.loads(out)["predicted_by"].startswith("predicted now")
    (tmp_path / "calibration.toml").write_text("broken")
    assert "calibration.toml" in plan.refused("explain", tmp_path / "job.toml")
