"""Rows from Outlast's own run directories."""

import numpy as np
import pytest

from outlast.errors import OutlastError
from outlast.job import load_job, to_toml
from outlast.plan.cluster import Cluster
from outlast.plan.memory_fit import COMPILED, OUTLAST
from outlast.plan.run_rows import read_run_row, steady_median
from outlast.records import (
    AttemptStarted,
    MemoryMeasured,
    RecordWriter,
    RunDirectory,
    StepsDone,
    TrainingStarted,
)

CLUSTER = Cluster(
    name="here",
    device="own-cpu",
    nodes=1,
    devices_per_node=4,
    fast_domain=4,
    peak_flop_per_s={"fp32": 1e12},
    matmul_flop_per_s={"fp32": 5e11},
    memory_bytes=2**34,
    memory_bytes_per_s=1e11,
    fast_bytes_per_s=1e10,
    fabric_bytes_per_s=1e9,
)


def write_run(path, starts, *overrides):
    """A run directory with the starts' (processes, layout, first step, seconds of each step)."""
    job = load_job(None, ["train.batch_size=16", "data.sequence_length=32", *overrides])
    directory = RunDirectory(path)
    directory.create(to_toml(job))
    for world_size, parallel, first, seconds in starts:
        writer = RecordWriter(path, attempt=directory.next_attempt())
        layout = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1, **parallel}
        writer.write(
            AttemptStarted(
                fingerprint="f",
                world_size=world_size,
                launch="alone",
                parallel=layout,
                machine={},
                versions={"outlast": "0.1.0"},
                total_steps=450,
                samples_per_step=16,
                tokens_per_step=512,
                parameters=492160,
                flops_per_token=3e6,
            )
        )
        writer.write(TrainingStarted(first, 1.0, {}))
        for start in range(0, len(seconds), 5):
            part = seconds[start : start + 5]
            step = first + start + len(part)
            writer.write(StepsDone(step, len(part), 2.0, 1.0, 1e-3, step * 512, part, {}))
        writer.close()
    return path


def test_plan_rows_of_runs_one_start(tmp_path):
    seconds = [3.0, 1.0, 0.5, *[0.2, 0.21, 0.19] * 9]
    row = read_run_row(write_run(tmp_path / "a", [(1, {}, 0, seconds)]), CLUSTER)
    assert row.name == "a"
    assert row.step_seconds == pytest.approx(0.2)
    assert row.run.batch == 16
    assert row.run.tokens == 512
    assert row.run.precision == "fp32"
    assert row.model.hidden == 128
    assert row.framework == "outlast"
    assert row.version == "0.1.0"
    assert row.fits_time
    assert row.reserved_bytes is None


def test_plan_rows_of_runs_memory_of_the_fullest_process(tmp_path):
    on_device = [
        {"rank": 0, "resident_bytes": 9e9, "allocated_bytes": 5e9, "reserved_bytes": 7e9},
        {"rank": 1, "resident_bytes": 9e9, "allocated_bytes": 6e9, "reserved_bytes": 6.5e9},
    ]
    on_host = [{"rank": 0, "resident_bytes": 9e8}, {"rank": 1, "resident_bytes": 1e9}]
    for name, ranks, expected in (
        ("gpu", on_device, (7e9, 6e9)),
        ("cpu", on_host, (1e9, None)),
    ):
        path = write_run(tmp_path / name, [(2, {"replicate": 2}, 0, [0.1] * 20)])
        writer = RecordWriter(path, attempt=1)
        writer.write(MemoryMeasured(20, ranks, "counters"))
        writer.close()
        row = read_run_row(path, CLUSTER)
        assert (row.reserved_bytes, row.allocated_bytes) == expected
        assert row.fits_memory


def test_plan_rows_of_runs_layout_that_the_start_resolved(tmp_path):
    path = write_run(
        tmp_path / "a",
        [(4, {"replicate": 2, "shard": 2}, 0, [0.1] * 20)],
        "parallel.shard=2",
    )
    run = read_run_row(path, CLUSTER).run
    assert (run.data, run.sharding, run.sharding_ranks, run.devices) == (4, "parameters", 2, 4)
    assert run.micro_batch == 4


def test_plan_rows_of_runs_only_starts_like_the_last_count(tmp_path):
    starts = [(2, {"replicate": 2}, 0, [0.1] * 20), (1, {}, 20, [0.2] * 20)]
    row = read_run_row(write_run(tmp_path / "a", starts), CLUSTER)
    assert row.step_seconds == pytest.approx(0.2)
    assert row.stated_devices == row.run.devices == 1


def test_plan_rows_of_runs_guarded_runs_are_flagged(tmp_path):
    path = write_run(tmp_path / "a", [(1, {}, 0, [0.2] * 9)], "guard.policy=full")
    row = read_run_row(path, CLUSTER)
    assert not row.fits_time
    assert 'guard.policy = "full"' in row.time_flags[0]


def test_plan_rows_of_runs_refused_with_the_reason(tmp_path):
    good = write_run(tmp_path / "good", [(1, {}, 0, [0.2] * 9)])
    untimed = write_run(tmp_path / "untimed", [(1, {}, 0, [])])
    unstarted = write_run(tmp_path / "unstarted", [])
    low_rank = write_run(tmp_path / "low", [(1, {}, 0, [0.2] * 9)], "tensorize.form=low_rank")
    missing = tmp_path / "missing"
    assert read_run_row(good, CLUSTER).name == "good"
    for path, words in (
        (untimed, "no timed step"),
        (unstarted, "no start"),
        (low_rank, 'tensorize.form = "low_rank"'),
        (missing, "not a run directory"),
    ):
        with pytest.raises(OutlastError, match=words):
            read_run_row(path, CLUSTER)


def test_plan_rows_of_runs_steady_median():
    slow_start = np.array([9.0, 5.0, 2.0, *[1.0] * 17])
    assert steady_median([slow_start]) == 1.0
    assert steady_median([np.array([5.0, 1.0])]) == 1.0
    assert steady_median([np.array([5.0])]) == 5.0
    long = np.concatenate([np.full(10, 3.0), np.ones(10), np.full(80, 2.0)])
    assert steady_median([long]) == 2.0


def test_plan_rows_of_runs_compiled_runs_are_apart(tmp_path):
    start = (1, {}, 0, [0.2] * 20)
    compiled = read_run_row(write_run(tmp_path / "a", [start], "train.compile=true"), CLUSTER)
    assert compiled.framework == COMPILED
    assert read_run_row(write_run(tmp_path / "b", [start]), CLUSTER).framework == OUTLAST
