"""Rows read from a published table: sizes, conventions, memory, flags and refusals."""

import csv

import pytest

from outlast.errors import PlanError
from outlast.plan.conformal import folds
from outlast.plan.rows import forced
from outlast.plan.run_rows import read_rows
from outlast.plan.step_model import interval_groups

GPT = {
    "row_id": "a1",
    "group": "vtrain_multi",
    "status": "ok",
    "model": "GPT-18.4B",
    "params_b": "18.4",
    "layers": "40",
    "hidden": "6144",
    "heads": "48",
    "kv_heads": "48",
    "ffn": "24576",
    "swiglu": "0",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "num_gpus": "256",
    "precision": "fp16",
    "tp": "8",
    "pp": "1",
    "dp": "32",
    "cp": "1",
    "mbs": "4",
    "gbs": "1024",
    "recompute": "full",
    "iter_time_s": "8.5",
    "notes": "",
}
SWEEP = {
    **GPT,
    "row_id": "n1",
    "group": "nanotron",
    "model": "Llama-like 8B",
    "params_b": "8.86",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "14336",
    "swiglu": "1",
    "vocab": "131072",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "num_gpus": "64",
    "precision": "bf16",
    "tp": "4",
    "pp": "2",
    "dp": "8",
    "zero_stage": "1",
    "mbs": "1",
    "gbs": "256",
    "grad_accum": "32",
    "recompute": "none",
    "iter_time_s": "6.0",
    "mem_gb": "26.78",
    "mem_kind": "GiB reserved (allocated 17.57)",
    "notes": "1F1B; after_pp_fix=True; recompute off is inferred",
}
NEMO = {
    **GPT,
    "row_id": "m1",
    "group": "nemo_moe",
    "model": "Qwen3_30B_a3B",
    **dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), ""),
    "gpu": "GB300-288GB",
    "num_gpus": "8",
    "precision": "MXFP8",
    "seq_len": "4096",
    "tp": "1",
    "dp": "8",
    "ep": "8",
    "mbs": "8",
    "gbs": "512",
    "recompute": "",
    "sharding": "DDP/dist-optim",
    "iter_time_s": "5.8851",
    "tflops_gpu": "1029",
    "tok_s_gpu": "44544",
    "source_ref": "performance-summary.md, release 26.08 NeMo Container",
}


def read(folder, *rows):
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = folder / "rows.csv"
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, columns)
        writer.writeheader()
        writer.writerows(rows)
    return read_rows(file)


def one(folder, row):
    rows, refused = read(folder, row)
    assert not refused
    return rows[0]


def test_plan_rows_megatron_deepspeed(tmp_path):
    row = one(tmp_path, GPT)
    assert row.run.devices == row.stated_devices == 256
    assert (row.run.recompute, row.run.gradient_bytes) == ("full", 2)
    assert not row.run.fused_attention
    assert not row.run.sequence_parallel
    assert row.model.tied, "18.4 B is the size with one matrix for head and embedding"
    assert row.chip == "a100-sxm-80"
    assert row.cluster.nodes == 32
    # By hand: tokens per second and device times 6 N + 12 L d s.
    assert row.model_flops_share == pytest.approx(0.3603, abs=0.001)
    assert row.fits_time
    assert not row.fits_memory


def test_plan_rows_sweep_memory_and_sharding(tmp_path):
    row = one(tmp_path, SWEEP)
    assert row.reserved_bytes == 26.78 * 2**30
    assert row.held_bytes == 17.57 * 2**30
    assert (row.run.sharding, row.run.balance, row.run.gradient_bytes) == ("optimizer", "cost", 4)
    assert row.run.fused_attention
    assert row.run.sequence_parallel
    assert not row.model.tied
    assert row.stated_micro_batches == row.run.micro_batches == 32


def test_plan_rows_before_the_pipeline_fix_keep_their_memory(tmp_path):
    row = one(tmp_path, {**SWEEP, "notes": "after_pp_fix=False"})
    assert not row.fits_time
    assert row.fits_memory
    assert forced([row])[0].fits_time
    flat = {**SWEEP, "pp": "1", "dp": "16", "grad_accum": "16", "notes": "after_pp_fix=False"}
    assert one(tmp_path, flat).fits_time


def test_plan_rows_out_of_memory_has_no_time(tmp_path):
    row = one(tmp_path, {**SWEEP, "status": "oom", "iter_time_s": "", "mem_gb": ""})
    assert row.out_of_memory
    assert row.step_seconds is None
    assert row.tokens_per_s is None
    assert row.reserved_bytes is None


def test_plan_rows_mixture_and_its_flops(tmp_path):
    row = one(tmp_path, NEMO)
    assert row.model.parameters == pytest.approx(30.5e9, rel=0.01)
    assert row.model.experts_per_token == 8
    assert row.run.expert == 8
    assert row.run.precision == "fp8"
    assert row.version == "26.08"
    assert row.cluster.fast_domain == 72
    # NeMo counts half of the attention.
    assert row.model_flop_per_s / row.stated_flop_per_s == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize("spelling", ["FP8-CS", "MXFP8", "amp_fp8", "FP8 (25.09 page)", "NVFP4"])
def test_plan_rows_precision_spellings(tmp_path, spelling):
    row = one(tmp_path, {**NEMO, "precision": spelling})
    assert row.run.precision == "fp8"
    assert row.fits_time == (spelling != "NVFP4")


@pytest.mark.parametrize(
    ("gpu", "memory_gib"),
    [("A100-40GB", 40), ("V100-32GB", 32), ("B200-180GB", 180), ("B300-288GB", 268)],
)
def test_plan_rows_clusters_hold_what_the_part_holds(tmp_path, gpu, memory_gib):
    row = one(tmp_path, {**GPT, "gpu": gpu})
    assert row.cluster.memory_bytes / 2**30 == pytest.approx(memory_gib, rel=0.01)
    assert row.cluster.matmul_flop_per_s["fp16"] < row.cluster.peak_flop_per_s["fp16"]
    assert row.cluster.devices >= 256


def test_plan_rows_time_follows_from_what_is_stated(tmp_path):
    throughput = one(tmp_path, {**SWEEP, "iter_time_s": "", "tok_s_gpu": "16384"})
    assert throughput.step_seconds == pytest.approx(256 * 4096 / (16384 * 64))
    hardware = {**GPT, "group": "megatron2021", "iter_time_s": "", "tflops_gpu": "135", "mbs": ""}
    row = one(tmp_path, hardware)
    # With recomputation, model FLOPs are three quarters of those of the hardware.
    assert row.model_flop_per_s / 135e12 == pytest.approx(0.75, abs=0.02)
    assert not row.fits_time, "the micro-batch was a guess"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": "nous_moe"}, "micro-batch"),
        ({"group": "other"}, "group = 'other'"),
        ({"gpu": "TPUv4"}, "gpu = 'TPUv4'"),
        ({"notes": "LoRA Performance"}, "adapters"),
        ({"mbs": ""}, "mbs is not stated"),
        ({"tp": "two"}, "tp = 'two'"),
        ({"dp": "1.5"}, "dp = 1.5"),
        ({"precision": "int3"}, "precision = 'int3'"),
        ({"recompute": "some"}, "recompute = 'some'"),
        ({"iter_time_s": "-3"}, "step_seconds = -3"),
        ({"kv_heads": "7"}, "kv_heads = 7"),
    ],
)
def test_plan_rows_refused_with_the_reason(tmp_path, change, words):
    rows, refused = read(tmp_path, {**GPT, **change}, {**GPT, "row_id": "a2"})
    assert [row.name for row in rows] == ["a2"]
    assert refused[0].name == "a1"
    assert words in refused[0].reason


def test_plan_rows_unknown_mixture_is_refused(tmp_path):
    _, refused = read(tmp_path, {**NEMO, "model": "Nemotron_3_Super"})
    assert "Nemotron_3_Super" in refused[0].reason


def test_plan_rows_file_errors_name_the_file(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_rows(tmp_path / "missing.csv")
    (tmp_path / "short.csv").write_text("row_id,group\na,b\n")
    with pytest.raises(PlanError, match="lacks the columns"):
        read_rows(tmp_path / "short.csv")


def test_plan_rows_key_ignores_the_release(tmp_path):
    older = {**NEMO, "row_id": "m2", "source_ref": "release 26.02 NeMo", "precision": "FP8-CS"}
    other = {**NEMO, "row_id": "m3", "mbs": "4"}
    rows, _ = read(tmp_path, NEMO, older, other)
    assert rows[0].key == rows[1].key != rows[2].key
    assert len(set(interval_groups(rows))) == 1


def test_plan_rows_folds_never_split_a_key():
    keys = [f"k{index // 3}" for index in range(60)]
    found = folds(keys, 5)
    assert {len({found[i] for i, k in enumerate(keys) if k == key}) for key in keys} == {1}
    counts = [int((found == fold).sum()) for fold in range(5)]
    assert max(counts) - min(counts) <= 3
    order = list(reversed(range(60)))
    again = folds([keys[i] for i in order], 5)
    assert [again[order.index(i)] for i in range(60)] == found.tolist()
    with pytest.raises(PlanError, match="folds = 21"):
        folds(keys, 21)
