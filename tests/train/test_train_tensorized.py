"""Tensorized runs: the same numbers in every layout, after every stop, under every protection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import RanksFailedError
from tiny import assert_equal_bits, evaluations, losses, tiny_job, train, weights

from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.records import (
    AttemptStarted,
    CorruptionDetected,
    Sampled,
    Tensorized,
    Warned,
    guard_totals,
    read_run,
)
from outlast.tensorize import load_factored
from outlast.train.export import load_trained
from outlast.train.run import run_directory

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.job import Job
    from outlast.records import Run

pytestmark = pytest.mark.distributed

# As for the layouts of dense models in test_parallel: nats over six steps.
TOLERANCE = 2e-5
BF16_TOLERANCE = 5e-2

COLA = ("tensorize.form=cola",)
BTT = ("tensorize.form=btt", "tensorize.rank=1")
TT = ("tensorize.form=tt", "tensorize.rank=4")
LAX = ("tensorize.form=lax",)
RULES = ("tensorize.spectral_limit=0.05", "tensorize.product_weight_decay=true")

LAYOUTS = {
    "cola, replicate 2": (2, COLA, ["parallel.replicate=2"]),
    "cola, recomputed": (1, COLA, ["train.activation_checkpointing=true"]),
    "cola, coding": (2, COLA, ["coding.scheme=coverage"]),
    "btt, shard 3": (3, BTT, ["parallel.shard=3"]),
    "btt, replicate 2 x shard 2": (4, BTT, ["parallel.replicate=2", "parallel.shard=2"]),
    "btt, pipeline 2": (2, BTT, ["parallel.pipeline=2", "parallel.pipeline_microbatches=4"]),
    "btt, coding and shards": (2, BTT, ["coding.scheme=coverage", "parallel.shard=2"]),
    "tt, shard 3": (3, TT, ["parallel.shard=3"]),
    "cola, shard 2 x tensor 2": (4, COLA, ["parallel.shard=2", "parallel.tensor=2"]),
    "lax, shard 2": (2, LAX, ["parallel.shard=2"]),
    "bounded, shard 2": (2, (*COLA, *RULES), ["parallel.shard=2"]),
    "bounded, pipeline 2": (
        2, (*COLA, *RULES), ["parallel.pipeline=2", "parallel.pipeline_microbatches=2"],
    ),
}  # fmt: skip


def records(job: Job) -> Run:
    return read_run(run_directory(job).path)


def tensorized(job: Job) -> Tensorized:
    event = records(job).of(Tensorized)[-1][1]
    assert isinstance(event, Tensorized)
    return event


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder, losses and validation losses of a run on one process with these settings."""
    folder = tmp_path_factory.mktemp("tensorized")
    known: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}

    def reference(settings: tuple[str, ...]) -> tuple[Path, list[float], list[float]]:
        if settings not in known:
            job = tiny_job(folder, f"reference{len(known)}", *settings)
            assert train(job, 1) == EXIT_DONE
            known[settings] = losses(job), evaluations(job)
        return folder, *known[settings]

    return reference


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_one_process_run(name: str, references: Any) -> None:
    size, form, layout = LAYOUTS[name]
    folder, expected, expected_validation = references(form)
    job = tiny_job(folder, "".join(each for each in name if each.isalnum()), *form, *layout)
    assert train(job, size) == EXIT_DONE
    assert losses(job) == pytest.approx(expected, abs=TOLERANCE)
    assert evaluations(job) == pytest.approx(expected_validation, abs=TOLERANCE)


@pytest.mark.parametrize("form", [COLA, BTT])
def test_bf16_stays_near_fp32(form: tuple[str, ...], references: Any) -> None:
    folder, expected, _ = references(form)
    for name, layout in (("one", []), ("two", ["parallel.shard=2"])):
        job = tiny_job(folder, f"bf16-{len(form)}-{name}", *form, "train.precision=bf16", *layout)
        assert train(job, 1 + len(layout)) == EXIT_DONE
        assert losses(job) == pytest.approx(expected, abs=BF16_TOLERANCE)


@pytest.mark.parametrize("form", [COLA, BTT])
def test_compiled_blocks_train_alike(form: tuple[str, ...], references: Any) -> None:
    folder, expected, _ = references(form)
    job = tiny_job(folder, f"compiled-{len(form)}", *form, "train.compile=true")
    assert train(job, 1) == EXIT_DONE
    assert losses(job) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, (*BTT, "optimizer.name=muon")),
        (2, (*COLA, *RULES, "parallel.shard=2")),
        (1, (*TT, "tensorize.mup=true")),
        (1, (*BTT, *RULES[1:], "checkpoint.replay=exact")),
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


def test_a_run_goes_on_with_other_numbers_of_shards(references: Any) -> None:
    folder, expected, _ = references(BTT)
    layouts = ((2, ["parallel.shard=2"]), (3, ["parallel.shard=3"]), (1, []))
    for number, (size, layout) in enumerate(layouts):
        stop = ["train.stop_after_steps=2"] if number < 2 else []
        job = tiny_job(folder, "changing", *BTT, *layout, *stop)
        assert train(job, size) == (EXIT_TO_BE_CONTINUED if stop else EXIT_DONE)
    assert losses(job) == pytest.approx(expected, abs=TOLERANCE)


def test_the_records_tell_what_was_replaced(references: Any) -> None:
    folder, *_ = references(COLA)
    job = tiny_job(folder, "told", *COLA, "train.steps=2", "schedule.warmup_steps=0")
    assert train(job, 1) == EXIT_DONE
    event = tensorized(job)
    assert (event.form, event.wanted_rank, event.kept) == ("cola", "0.25", {})
    assert len(event.modules) == 4 * 7
    q_proj = event.modules[0]
    assert q_proj["name"] == "model.layers.0.self_attn.q_proj"
    assert (q_proj["in_features"], q_proj["out_features"], q_proj["rank"]) == (32, 32, "8")
    assert (q_proj["parameters"], q_proj["dense_parameters"]) == (8 * 64, 32 * 32)
    assert (q_proj["flops"], q_proj["dense_flops"]) == (2 * 8 * 64, 2 * 32 * 32)
    left = sum(each["dense_parameters"] - each["parameters"] for each in event.modules)
    assert event.dense_parameters - event.parameters == left
    assert event.dense_flops_per_token - event.flops_per_token == 6 * left
    [(_, started)] = records(job).of(AttemptStarted)
    assert started.parameters == event.parameters
    assert started.flops_per_token == event.flops_per_token


def test_layers_without_gain_stay_dense_unless_forced(tmp_path: Path) -> None:
    # Rank 20 has 20 (32 + 64) = 1920 < 2048 parameters in the MLP, and 20 (32 + 32) > 1024.
    settings = ("tensorize.form=low_rank", "tensorize.rank=20", "train.steps=2")
    short = ("schedule.warmup_steps=0", "checkpoint.every_steps=0")
    job = tiny_job(tmp_path, "kept", *settings, *short)
    assert train(job, 1) == EXIT_DONE
    event = tensorized(job)
    assert len(event.modules) == 4 * 3
    assert len(event.kept) == 4 * 4
    assert "has 1280 parameters, dense 1024" in event.kept["model.layers.0.self_attn.q_proj"]
    forced = tiny_job(tmp_path, "forced", *settings, *short, "tensorize.force=true")
    assert train(forced, 1) == EXIT_DONE
    assert len(tensorized(forced).modules) == 4 * 7
    none = tiny_job(tmp_path, "none", *settings, *short, "tensorize.rank=32")
    with pytest.raises(RanksFailedError, match="leaves no layer with fewer parameters"):
        train(none, 1)


def test_only_what_matches_is_replaced(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path, "mlp", *COLA, 'tensorize.match=["*.mlp.*"]', 'tensorize.exclude=["*.2.*"]',
        "train.steps=2", "schedule.warmup_steps=0", "checkpoint.every_steps=0",
    )  # fmt: skip
    assert train(job, 1) == EXIT_DONE
    names = [each["name"] for each in tensorized(job).modules]
    assert len(names) == 3 * 3
    assert all(".mlp." in name and ".2." not in name for name in names)


@pytest.mark.parametrize("level", ["light", "linear"])
def test_the_guard_finds_nothing_wrong_in_what_rules_change(tmp_path: Path, level: str) -> None:
    job = tiny_job(tmp_path, "guarded", *COLA, *RULES, f"guard.policy={level}", "train.steps=12")
    assert train(job, 1) == EXIT_DONE
    assert records(job).of(CorruptionDetected) == []
    totals = guard_totals(records(job))
    assert totals is not None
    assert totals.checks > 0


def test_the_guard_checks_the_products_of_two_factors(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "factors", *COLA, "guard.policy=linear", "train.steps=2",
                   "schedule.warmup_steps=0")  # fmt: skip
    assert train(job, 1) == EXIT_DONE
    totals = guard_totals(records(job))
    assert totals is not None
    assert set(totals.uncovered) == {"LlamaRMSNorm"}
    # Forward, dX and dW of both factors of 28 layers, in both steps.
    assert totals.operations["linear.dw"].checks > 0


def test_the_guard_sees_products_of_cores_and_says_what_it_does_not_see(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "cores", *BTT, "guard.policy=linear", "train.steps=2",
                   "schedule.warmup_steps=0")  # fmt: skip
    assert train(job, 1) == EXIT_DONE
    totals = guard_totals(records(job))
    assert totals is not None
    assert set(totals.uncovered) == {"LlamaRMSNorm"}
    assert any("not guarded" in event.message for _, event in records(job).of(Warned))


@pytest.mark.parametrize(("model_type", "processes"), [("llama", 2), ("gpt2", 1)])
def test_the_export_is_a_dense_model_of_equal_logits(
    tmp_path: Path, model_type: str, processes: int
) -> None:
    from transformers import AutoModelForCausalLM

    small = []
    if model_type == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 256}
        drops = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        small = ["model.settings={}", "model.settings.model_type=gpt2"]
        small += [f"model.settings.{key}={value}" for key, value in (sizes | drops).items()]
    job = tiny_job(
        tmp_path, "exported", *small, "tensorize.form=low_rank", "export.huggingface=true",
        "sample.tokens=8",
    )  # fmt: skip
    # The first of them exports alone.
    assert train(job, processes) == EXIT_DONE
    loaded = AutoModelForCausalLM.from_pretrained(run_directory(job).model, local_files_only=True)
    own, _ = load_trained(job, run_directory(job))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, own(ids).logits, atol=1e-5)
    assert sum(each.numel() for each in own.parameters()) == tensorized(job).parameters
    assert records(job).of(Sampled)


def test_what_is_no_matrix_is_exported_as_factors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = tiny_job(tmp_path, "factors", *COLA, "export.huggingface=true", "sample.tokens=8")
    assert train(job, 1) == EXIT_DONE
    folder = run_directory(job).model
    found = load_factored(folder).state_dict()
    for name, tensor in weights(job).items():
        assert torch.equal(found[name], tensor)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert any("no matrices" in event.message for _, event in records(job).of(Warned))
    assert records(job).of(Sampled)


def test_training_goes_on_from_the_weights_of_a_dense_model(tmp_path: Path) -> None:
    dense = tiny_job(tmp_path, "dense", "export.huggingface=true", "train.steps=12")
    assert train(dense, 1) == EXIT_DONE
    form = ("tensorize.form=btt", "tensorize.rank=2", "tensorize.force=true", "train.steps=2")
    start = ("model.settings={}", f'model.directory="{run_directory(dense).model}"')
    short = ("schedule.warmup_steps=1", "export.huggingface=true")
    near = tiny_job(tmp_path, "near", *start, *form, *short)
    assert train(near, 1) == EXIT_DONE
    far = tiny_job(tmp_path, "far", *start, *form, *short, "tensorize.initialize=scratch")
    assert train(far, 1) == EXIT_DONE
    assert losses(near)[0] < losses(far)[0] - 0.05
    # The ranks are found again, and the export loads what was trained.
    model, step = load_trained(near, run_directory(near))
    assert step == 2
    assert any("cores" in name for name in model.state_dict())
