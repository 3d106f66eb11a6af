"""Jobs of Outlast in the planner's words: the same sizes and shares as the trainer's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.data import microbatch_count
from outlast.errors import PlanError
from outlast.job import Job, load_job
from outlast.plan.api import model_of, run_of
from outlast.plan.cluster_file import cluster_of
from outlast.plan.constraints import problems

EXAMPLES = Path(__file__).parents[2] / "examples"


def quickstart(*changes: str) -> Job:
    return load_job(None, list(changes))


def test_the_embedded_job() -> None:
    model, run = run_of(quickstart(), 1)
    assert (model.name, model.layers, model.hidden, model.vocabulary) == ("quickstart", 2, 128, 256)
    assert (run.batch, run.micro_batch, run.sequence, run.precision) == (16, 16, 128, "fp32")
    assert (run.devices, run.sharding, run.recompute) == (1, "none", "none")
    assert run.sequence_parallel is False


def test_its_model_has_the_parameters_that_the_trainer_builds() -> None:
    from outlast.train.model import build_model, parameter_count

    job = quickstart()
    assert model_of(job).parameters == parameter_count(build_model(job))


def test_the_examples() -> None:
    model, _ = run_of(load_job(EXAMPLES / "pretrain_tensorized.toml"), 1)
    assert (model.name, model.layers) == ("monarch", 4)
    with pytest.raises(PlanError, match=r'model.module = "model:build"'):
        run_of(load_job(EXAMPLES / "own_model" / "job.toml"), 1)


def test_degrees_shards_and_replicas() -> None:
    _, run = run_of(quickstart("parallel.shard=2", "parallel.tensor=2"), 8)
    assert (run.data, run.tensor, run.sharding, run.sharding_ranks) == (4, 2, "parameters", 2)
    assert run.micro_batch == 4
    _, replicas = run_of(quickstart(), 4)
    assert (replicas.data, replicas.sharding, replicas.micro_batch) == (4, "none", 4)
    with pytest.raises(PlanError, match="need 4 devices, and 6 are planned for"):
        run_of(quickstart("parallel.shard=2", "parallel.tensor=2", "parallel.replicate=1"), 6)
    with pytest.raises(PlanError, match=r"train.batch_size = 16 gives no sample"):
        run_of(quickstart(), 17)


def test_the_pipeline_and_its_micro_batches() -> None:
    from outlast.train.layout import resolve_layout
    from outlast.train.preflight import pipeline_shape

    job = quickstart(
        "parallel.pipeline=2", "parallel.pipeline_schedule=interleaved", "train.batch_size=32"
    )
    _, run = run_of(job, 4)
    stages, micro_batches = pipeline_shape(job, resolve_layout(job.parallel, 4))
    assert run.pipeline * run.stages_per_rank == stages
    assert run.micro_batches == micro_batches
    assert (run.schedule, run.data, run.micro_batch) == ("interleaved", 2, 2)


@pytest.mark.parametrize("batch", [16, 17, 30])
@pytest.mark.parametrize("limit", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_micro_batches_are_as_many_as_the_trainers(batch: int, limit: int, devices: int) -> None:
    job = quickstart(f"train.batch_size={batch}", f"train.micro_batch_size={limit}")
    _, run = run_of(job, devices)
    share = -(-batch // devices)
    count = microbatch_count(batch, devices, limit)
    assert run.micro_batch == -(-share // count)
    assert not limit or run.micro_batch <= limit


def test_precision_recomputation_and_attention() -> None:
    _, run = run_of(
        quickstart(
            "train.precision=bf16",
            "train.activation_checkpointing=true",
            "model.attention=eager",
            "data.sequence_length=256",
        ),
        1,
    )
    assert (run.precision, run.recompute, run.fused_attention) == ("bf16", "full", False)
    assert (run.gradient_bytes, run.loss_bytes, run.sequence) == (4, 4, 256)


def test_models_from_files(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = '[run]\nname = "mine"\n[model]\n{} = "{}"\n'
    job_file = tmp_path / "job.toml"
    for key, place in (("config", tmp_path / "config.json"), ("directory", tmp_path)):
        job_file.write_text(text.format(key, place))
        model, run = run_of(load_job(job_file), 2)
        assert (model.name, model.layers, model.tied) == ("mine", 2, True)
        assert run.data == 2
    job_file.write_text(text.format("config", tmp_path / "absent.json"))
    with pytest.raises(PlanError, match=r"absent.json cannot be read"):
        run_of(load_job(job_file), 1)


def test_a_vocabulary_below_the_byte_tokenizers_is_refused() -> None:
    with pytest.raises(PlanError, match="vocab_size is 200"):
        run_of(quickstart("model.settings.vocab_size=200"), 1)


def test_what_the_trainer_refuses_is_refused_before_it_starts() -> None:
    cluster = cluster_of("h100x8")
    model, run = run_of(quickstart(), 8)
    assert problems(model, run, cluster, "outlast") == []
    model, run = run_of(quickstart("parallel.tensor=8", "parallel.shard=1"), 8)
    assert any("heads = 4" in text for text in problems(model, run, cluster, "outlast"))
