"""Rows from the logs that other frameworks write."""

import pytest

from outlast.errors import PlanError
from outlast.plan.run_rows import FRAMEWORKS, read_lines, read_log_row

SETTINGS = """
cluster = "h100x64"
version = "1.0"

[model]
published = "llama-3-8b"

[run]
data = 16
tensor = 4
sequence = 4096
micro_batch = 1
batch = 256
sharding = "optimizer"
"""
TITAN = "\n".join(
    f"[rank0]:[titan] 2026-02-03 10:00:{step:02d},123 - root - INFO - \x1b[31mstep: {step:2d}  "
    f"\x1b[32mloss:  8.1234  \x1b[33mmemory: {40 + step / 10:.2f}GiB(50.65%)  "
    f"\x1b[34mtps: {tps:,}  \x1b[36mtflops: 310.10  \x1b[35mmfu: 31.36%\x1b[39m"
    for step, tps in [(1, 412), (10, 3200), (20, 4096), (30, 4097), (40, 4096), (50, 4095)]
)
MEGATRON = """\
[Rank 0] (after 2 iterations) memory (MB) | allocated: 20000.1 | max allocated: 31000.5 | \
reserved: 40000.0 | max reserved: 42000.0
[Rank 1] (after 2 iterations) memory (MB) | allocated: 20000.1 | max allocated: 30000.5 | \
reserved: 40000.0 | max reserved: 41000.0
""" + "\n".join(
    f" [2026-02-03 10:00:{i:02d}] iteration {i:8d}/     500 | consumed samples: {256 * i:8d} | "
    f"elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 201.2 | "
    "learning rate: 1.500000E-06 | global batch size:   256 | lm loss: 1.1E+01 | "
    "loss scale: 1.0 | grad norm: 8.1 | number of skipped iterations:   0 |"
    for i, ms in enumerate([9000.1, 4100.0, 4010.0, 4001.0, 4000.0, 3999.0, 4000.0, 4002.0])
)
NANOTRON = "\n".join(
    f"02/03/2026 10:00:{i:02d} [INFO|DP=0|PP=0|TP=0|host]: iteration: {i} / 20 | consumed_tokens: "
    f"{i}.05M | elapsed_time_per_iteration_ms: {ms} | tokens_per_sec: 262K | "
    "tokens_per_sec_per_gpu: 4.1K | global_batch_size: 256 | lm_loss: 11.7 | lr: 1e-05 | "
    "model_tflops_per_gpu: 205 | hardware_tflops_per_gpu: 205 | grad_norm: 20.1\n"
    "02/03/2026 10:00:00 [INFO|DP=0|PP=0|TP=0|host]:  Memory usage: 17000.1MiB. "
    f"Peak allocated {18000 + i}.50MiB. Peak reserved: 27400.00MiB"
    for i, ms in enumerate(["12.1K", "4.10K", "4.01K", "4K", "4K", "4K", "4K", "998"])
)
DEEPSPEED = "\n".join(
    f"[2026-02-03 10:00:0{i},123] [INFO] [timer.py:264:stop] epoch=0/micro_step={i}/"
    f"global_step={i}, RunningAvgSamplesPerSec={rate - 1}, CurrSamplesPerSec={rate}, "
    "MemAllocated=5.13GB, MaxMemAllocated=20.34GB"
    for i, rate in enumerate([10.5, 60.1, 63.9, 64.0, 64.0, 64.1, 64.0, 63.95])
)
TRAINER = (
    "  0%|          | 0/100 [00:00<?, ?it/s]\r"
    + "\r".join(
        f" {i:2d}%|█         | {i}/100 [00:{i:02d}<06:{60 - i}, {rate}]"
        for i, rate in enumerate(
            ["9.10s/it", "5.2s/it", "4.1s/it", "4.00s/it", "4.01s/it", "4.00s/it", "1.25it/s"], 1
        )
    )
    + "\n{'loss': 2.1, 'grad_norm': 1.3, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    "{'train_runtime': 412.3, 'train_samples_per_second': 62.1, 'train_steps_per_second': 0.24}\n"
)
LOGS = {
    "torchtitan": TITAN,
    "Megatron-LM": MEGATRON,
    "nanotron": NANOTRON,
    "DeepSpeed": DEEPSPEED,
    "HF Trainer": TRAINER,
}


def row_of(folder, text, settings=SETTINGS):
    (folder / "train.log").write_text(text)
    (folder / "train.toml").write_text(settings)
    return read_log_row(folder / "train.log", folder / "train.toml")


CALIBRATED = {"DeepSpeed": "Megatron-DeepSpeed", "HF Trainer": "accelerate"}
"""Names by which the planner finds the constants of `--framework deepspeed` and `accelerate`."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_plan_rows_of_logs_framework_and_time(tmp_path, framework):
    row = row_of(tmp_path, LOGS[framework])
    assert row.framework == CALIBRATED.get(framework, framework)
    assert row.step_seconds == pytest.approx(4.0, rel=2e-3), "the slow first steps are left out"
    assert (row.run.devices, row.version, row.name) == (64, "1.0", "train")
    assert row.model.layers == 32
    assert row.chip == "h100-sxm"
    assert row.fits_time


def test_plan_rows_of_logs_reserved_and_allocated_are_kept_apart(tmp_path):
    titan = row_of(tmp_path, TITAN)
    assert titan.reserved_bytes == 45.0 * 2**30
    assert titan.allocated_bytes is None
    megatron = row_of(tmp_path, MEGATRON)
    assert megatron.allocated_bytes == 31000.5 * 2**20
    assert megatron.held_bytes == 20000.1 * 2**20
    assert megatron.reserved_bytes == 42000.0 * 2**20
    nanotron = row_of(tmp_path, NANOTRON)
    assert nanotron.allocated_bytes == 18007.5 * 2**20
    assert nanotron.reserved_bytes == 27400.0 * 2**20
    deepspeed = row_of(tmp_path, DEEPSPEED)
    assert deepspeed.allocated_bytes == 20.34 * 2**30
    assert deepspeed.held_bytes is not None
    assert not row_of(tmp_path, TRAINER).fits_memory


def test_plan_rows_of_logs_throughput_as_stated(tmp_path):
    nanotron = row_of(tmp_path, NANOTRON)
    assert nanotron.stated_tokens_per_s == 4100.0
    assert nanotron.stated_flop_per_s == 205e12
    assert nanotron.tokens_per_s == pytest.approx(4096.0)
    assert row_of(tmp_path, MEGATRON).stated_flop_per_s == pytest.approx(201.2e12)


def test_plan_rows_of_logs_another_batch_is_flagged(tmp_path):
    row = row_of(tmp_path, MEGATRON, SETTINGS.replace("batch = 256", "batch = 512"))
    assert "global batch of 256, the settings say 512" in row.flags[0]
    assert not row.fits_time


def test_plan_rows_of_logs_only_the_end_of_a_trainer_log(tmp_path):
    row = row_of(tmp_path, TRAINER.splitlines()[-1])
    assert row.step_seconds == pytest.approx(256 / 62.1)


def test_plan_rows_of_logs_sizes_in_place_of_a_name(tmp_path):
    sizes = """
[model]
layers = 32
hidden = 4096
heads = 32
kv_heads = 8
head_width = 128
intermediate = 14336
gated = true
vocabulary = 128256
"""
    row = row_of(tmp_path, TITAN, SETTINGS.replace('[model]\npublished = "llama-3-8b"\n', sizes))
    assert row.model.parameters == pytest.approx(8.03e9, rel=0.01)


def test_plan_rows_of_logs_framework_can_be_named():
    both = MEGATRON + "\n" + DEEPSPEED
    assert read_lines(both, "DeepSpeed").framework == "DeepSpeed"
    assert read_lines(both + "\n" + MEGATRON).framework == "Megatron-LM"


@pytest.mark.parametrize(
    ("log", "old", "new", "words"),
    [
        ("nothing of use", "", "", "no line of"),
        (TITAN, "micro_batch", "microbatch", "did you mean micro_batch"),
        (TITAN, "[run]", "[runs]", "did you mean run"),
        (TITAN, "data = 16", "data = 16.0", "wrong type"),
        (TITAN, "batch = 256", "batch = 0", "batch = 0"),
        (TITAN, "llama-3-8b", "llama-3-8bb", "did you mean"),
        (TITAN, 'sharding = "optimizer"', 'sharding = "zero"', "sharding = 'zero'"),
        (TITAN, 'cluster = "h100x64"', "", "lacks cluster"),
        (TITAN, 'version = "1.0"', 'framework = "torch"', "framework = 'torch'"),
        (TITAN, "[run]", "[run", "not valid TOML"),
    ],
)
def test_plan_rows_of_logs_refused_with_the_reason(tmp_path, log, old, new, words):
    with pytest.raises(PlanError) as caught:
        row_of(tmp_path, log, SETTINGS.replace(old, new, 1) if old else SETTINGS)
    assert words in str(caught.value)


def test_plan_rows_of_logs_missing_file(tmp_path):
    (tmp_path / "train.toml").write_text(SETTINGS)
    with pytest.raises(PlanError, match="cannot be read"):
        read_log_row(tmp_path / "none.log", tmp_path / "train.toml")


OUT_OF_MEMORY = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 79.11 GiB of which 1.02 GiB is free.\n"
)


def test_plan_rows_of_logs_a_run_that_ran_out_of_memory(tmp_path):
    settings = SETTINGS.replace("[model]", 'framework = "torchtitan"\n[model]', 1)
    row = row_of(tmp_path, OUT_OF_MEMORY, settings)
    assert row.out_of_memory
    assert not row.fits_time
    assert (row.framework, row.step_seconds) == ("torchtitan", None)
    later = row_of(tmp_path, TITAN + OUT_OF_MEMORY)
    assert later.out_of_memory
    assert later.step_seconds == pytest.approx(4.0, rel=2e-3)
    assert later.reserved_bytes is None, "what it held as it failed is not what it needs"
    with pytest.raises(PlanError, match=r"train\.toml lacks framework: the log ends for want"):
        row_of(tmp_path, OUT_OF_MEMORY)
    with pytest.raises(PlanError, match="no line"):
        row_of(tmp_path, "nothing", settings)


def test_plan_rows_of_logs_a_run_that_went_on_after_a_warning_did_fit(tmp_path):
    steps = MEGATRON.splitlines()
    warned = "\n".join([*steps[:1], OUT_OF_MEMORY, *steps[1:]])
    row, plain = row_of(tmp_path, warned), row_of(tmp_path, MEGATRON)
    assert not row.out_of_memory
    assert row.reserved_bytes == plain.reserved_bytes
    assert row.reserved_bytes is not None
    assert row_of(tmp_path, warned + "\n" + OUT_OF_MEMORY).out_of_memory


def test_plan_rows_of_logs_a_bar_that_is_closed_is_no_step(tmp_path):
    bar = " 10%|#         | 100/1000 [02:03<18:27,  1.23s/it]"
    closed = bar.replace("02:03", "02:05")
    ended = f"{bar}\n{OUT_OF_MEMORY}{closed}\n"
    assert row_of(tmp_path, ended).out_of_memory
    assert not row_of(tmp_path, ended + bar.replace("100/1000", "101/1000")).out_of_memory
