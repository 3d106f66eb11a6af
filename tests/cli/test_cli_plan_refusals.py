"""What ``outlast plan`` refuses: one sentence, exit code 2, nothing half done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plan_commands import SMALL, Plan, write_config, write_job

HERE = ("--cluster", "h100x64")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tensor", 16, "--framework", "torchtitan"), "kv_heads = 8"),
        (("--tensor", 3), "tensor = 3 does not divide heads = 32"),
        (("--pipeline", 64), "64 stages"),
        (("--data", 64, "--batch", 32), "batch = 32 gives no sample"),
        (("--data", 1024), "1024 devices, but h100x64 has 64"),
        (("--tensor", 0), "tensor = 0: give at least 1"),
        (("--shard", "all"), "sharding = 'all'"),
        (("--recompute", "some"), "recompute = 'some'"),
        (("--schedule", "best"), "schedule = 'best'"),
        (("--expert", 8), "has no experts"),
        (("--choose", 1, "--tensor", 2), "keep one"),
        (("--choose", 0, *SMALL), "give one of them"),
    ],
)
def test_layouts(plan: Plan, arguments: tuple[object, ...], sentence: str) -> None:
    assert sentence in plan.refused("explain", "llama-3-8b", *HERE, *arguments)


def test_a_vocabulary_that_is_not_divisible(plan: Plan) -> None:
    asked = ("--cluster", "h100x8", "--tensor", 4, "--framework", "torchtitan")
    said = plan.refused("explain", "gpt2", *asked)
    assert "vocabulary = 50257" in said
    assert "pad it" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--batch", 0), "--batch = 0: give at least 1"),
        (("--micro-batch", -1), "--micro-batch = -1"),
        (("--tokens", "many"), "--tokens = many"),
        (("--tokens", "0"), "--tokens = 0"),
        (("--unique-tokens", "-1"), "--unique-tokens = -1"),
        (("--precision", "int8"), "--precision = 'int8'"),
        (("--framework", "jax"), "framework = 'jax'"),
        (("--budget", "40"), "has no unit"),
        (("--budget", "40 kEUR"), "in USD"),
        (("--budget", "10 kgCO2", *SMALL), "carbon"),
        (("--by", "speed"), "--by = 'speed'"),
        (("--by", "money", *SMALL), "neither rent nor price"),
        (("--deadline", "2020-01-01"), "lies before"),
        (("--deadline", "3 MWh"), "is no time"),
        (("--tier", "disk"), "tiers = disk"),
        (("--tier", "memory"), "add shared"),
        (("--guard", "no"), "guard = 'no'"),
        (("--tensorize", "low_rank"), "tensorize_rank = 0"),
        (("--tensorize", "low_rank:x"), "--tensorize = 'low_rank:x'"),
        (("--copies", 0), "coding_copies = 0"),
        (("--queue-wait", "6h", *SMALL), "give wall_time"),
        (("--wall-time", "soon", *SMALL), "is no length of time"),
        (("--wall-time", "10s", *SMALL), "ask for more"),
        (("--price", "nan"), "--price = nan"),
        (("--region", "XX"), "XX"),
        (("--calibration", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("train.steps=5",), "is none"),
    ],
)
def test_options(plan: Plan, arguments: tuple[object, ...], sentence: str) -> None:
    assert sentence in plan.refused("llama-3-8b", *HERE, *arguments)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('node = "dgx-h100"\nnodes = 8\nfabric_bytes_per_s = 0', "fabric_bytes_per_s = 0"),
        ('node = "dgx-h100"\nnodes = 8\ndevice = "a100-sxm-80"', "holds h100-sxm"),
        ('node = "dgx-h100"\nnodes = 8\ndevices = 60', "devices = 60"),
        ('node = "dgx-h100"\nnodes = 8\nmemory_bytes = 40e9', "memory_bytes"),
        ("nodes = 8", "neither node nor device"),
        ('node = "dgx-h100"\nnode_count = 8', "node_count"),
        ('node = "dgx-h100"\nnodes = nan', "nodes = nan"),
        (
            'node = "dgx-h100"\nnodes = 8\n[storage]\nshared_bytes_per_s = 0',
            "mine has no shared storage",
        ),
    ],
)
def test_cluster_files(plan: Plan, tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"[cluster]\n{text}\n")
    assert sentence in plan.refused("llama-3-8b", "--cluster", file)


@pytest.mark.parametrize("cluster", ["h100x63", "h1000x8", "nothing", "nowhere.toml", "h100x0"])
def test_clusters_by_name(plan: Plan, cluster: str) -> None:
    assert cluster in plan.refused("llama-3-8b", "--cluster", cluster)


@pytest.mark.slow
def test_sources(plan: Plan, tmp_path: Path) -> None:
    assert "did you mean llama-3-8b" in plan.refused("llama-3-8", *HERE)
    assert "did you mean `outlast plan explain`" in plan.refused("explian", "llama-3-8b", *HERE)
    assert "without a config.json" in plan.refused(tmp_path, *HERE)
    (tmp_path / "bad.json").write_text("{")
    assert "is no JSON" in plan.refused(tmp_path / "bad.json", *HERE)
    missing = write_config(tmp_path / "part", num_attention_heads=None)
    assert "num_attention_heads" in plan.refused(missing, *HERE)
    uneven = write_config(tmp_path / "uneven", num_attention_heads=17)
    assert "17" in plan.refused(uneven, *HERE)
    assert "cannot be read" in plan.refused(tmp_path / "nowhere.json", *HERE)
    assert "SOURCE is empty" in plan.refused("", *HERE)


def test_what_the_job_says_is_not_said_twice(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert "train.batch_size" in plan.refused(job, *HERE, "--batch", 8)
    assert "train.precision" in plan.refused(job, *HERE, "--precision", "fp8")
    assert "train.batch" in plan.refused(job, "train.batch=8", *HERE)


def test_a_precision_that_the_cluster_does_not_have(plan: Plan) -> None:
    said = plan.refused("llama-3-8b", "--cluster", "a100x512", "--precision", "fp8")
    assert "precision = 'fp8'" in said


def test_the_least_memory_is_of_what_could_run(plan: Plan) -> None:
    said = plan.refused("llama-3-8b", *HERE, *SMALL, "--recover", "live")
    least = re.search(r"the least memory is ([\d.]+) GiB of 80.0 GiB", said)
    assert least is not None
    # Sharded states would take less, and live groups hold whole replicas.
    assert float(least[1]) > 80.0


def test_what_probes_do_not_take(plan: Plan, tmp_path: Path) -> None:
    said = plan.refused("calibrate", "--run", "--cluster", "h100x64")
    assert "--cluster is of runs that are there" in said
    assert "--force is of runs" in plan.refused("calibrate", "--run", "--force")
    assert "--keep" in plan.refused("calibrate", tmp_path, "--keep", tmp_path)
