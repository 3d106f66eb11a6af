"""What is written is read by the frameworks' own parsers, and says what was planned."""

import argparse
import dataclasses
import importlib
import json
import re
import shlex
import sys

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_emit_runs import CLUSTER, DENSE, MIXTURE, PLAIN, RUNS, SETTINGS, SHARED, configured
from test_plan_emit_targets import drawn, models

from outlast.errors import JobError, PlanError
from outlast.job import job_from_text, load_job
from outlast.plan.emit import EmitSettings, emit, emitted
from outlast.plan.targets import problem

COMMON = {
    "expert": (1,),
    "sequence": (512,),
    "batch": (16,),
    "gradient_bytes": (4,),
    "recompute": ("none", "full"),
}
some = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@settings(some, max_examples=10)
@given(
    model=models,
    run=drawn(
        **COMMON,
        context=(1,),
        sequence_parallel=(False,),
        schedule=("1f1b",),
        balance=("layers",),
        sharding=("none", "parameters"),
        precision=("fp32", "bf16"),
    ),
)
def test_outlast_takes_every_job_that_it_can_express(model, run):
    from outlast.train.preflight import preflight

    assume(problem("outlast", model, run) is None and run.devices <= CLUSTER.devices_per_node)
    job = job_from_text(emitted("outlast", model, run, CLUSTER)["job.toml"])
    plan = preflight(job, run.devices)
    assert plan.layout.world_size == run.devices
    assert plan.layout.data_ranks == run.data
    assert job.train.batch_size == run.batch
    assert job.train.activation_checkpointing == (run.recompute == "full")


def test_overrides_reach_the_job(tmp_path):
    given = dataclasses.replace(
        SETTINGS,
        overrides=("guard.policy=full", "checkpoint.every_steps=7", "run.directory='x y'"),
        train=("a.txt",),
    )
    (path,) = emit("outlast", *RUNS["outlast"], CLUSTER, out=tmp_path, settings=given)
    job = load_job(path)
    assert (job.guard.policy, job.checkpoint.every_steps) == ("full", 7)
    assert (job.run.directory, job.data.train) == ("x y", ["a.txt"])


def test_an_override_that_outlast_does_not_know_is_refused():
    given = EmitSettings(overrides=("guard.polcy=full",))
    with pytest.raises(JobError, match=r"did you mean guard\.policy"):
        emitted("outlast", *RUNS["outlast"], CLUSTER, given)


@pytest.mark.parametrize("model", [DENSE, PLAIN, MIXTURE, SHARED], ids=lambda model: model.name)
def test_hugging_face_builds_the_model_that_was_planned(model, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    emit("deepspeed", model, configured(data=2), CLUSTER, out=tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    parameters = sum(each.numel() for each in built.parameters())
    # Biases of projections and norms of heads are not counted in a plan.
    assert parameters == pytest.approx(model.parameters, rel=5e-3)


@pytest.mark.parametrize("model", [DENSE, MIXTURE, SHARED], ids=lambda model: model.name)
def test_the_planner_reads_its_own_config_back(model, tmp_path):
    from outlast.plan.huggingface import transformer_of

    emit("accelerate", model, configured(data=2), CLUSTER, out=tmp_path)
    read = transformer_of(tmp_path / "model" / "config.json", name=model.name)
    assert dataclasses.replace(read, further_parameters=0) == model


def test_a_model_s_own_config_is_kept_as_it_is(tmp_path, monkeypatch):
    from outlast.train.model import load_config

    own = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "pad_token_id": None,
        "rope_theta": 1e6,
        "hidden_size": 256,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
    }
    given = dataclasses.replace(SETTINGS, model_config=own)
    emit("outlast", *RUNS["outlast"], CLUSTER, out=tmp_path, settings=given)
    monkeypatch.chdir(tmp_path)
    config = load_config(load_job(tmp_path / "job.toml").model)
    assert config is not None
    assert config.num_hidden_layers == 14
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert own.items() <= written.items()


def test_numbers_that_no_known_model_has_ask_for_the_model_s_own_config():
    odd = dataclasses.replace(PLAIN, head_width=64)
    with pytest.raises(PlanError, match="give its own Hugging Face config as model_config"):
        emitted("deepspeed", odd, configured(data=2), CLUSTER)


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_latent_attention_is_not_written_as_another_attention(target):
    latent = dataclasses.replace(DENSE, projection_parameters=100_000)
    with pytest.raises(PlanError, match="projection_parameters = 100000"):
        emitted(target, latent, configured(data=2), CLUSTER)


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_training_arguments_are_those_of_hugging_face(target):
    from transformers import TrainingArguments

    model, run = RUNS[target]
    arguments = yaml.safe_load(emitted(target, model, run, CLUSTER)["training_arguments.yaml"])
    assert arguments.keys() <= {field.name for field in dataclasses.fields(TrainingArguments)}
    samples = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    assert samples * run.data == run.batch


@some
@given(
    model=models,
    run=drawn(
        **COMMON,
        tensor=(1, 2),
        context=(1, 2),
        pipeline=(1,),
        sequence_parallel=(False,),
        sharding=("none", "gradients", "parameters"),
        fused_attention=(True,),
    ),
)
def test_accelerate_takes_every_run_that_it_can_express(model, run):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.parallelism_config import ParallelismConfig

    assume(problem("accelerate", model, run) is None and run.devices <= CLUSTER.devices_per_node)
    values = yaml.safe_load(emitted("accelerate", model, run, CLUSTER)["accelerate.yaml"])
    config = ClusterConfig(**values, debug=False)
    assert config.num_processes == run.devices
    sizes = {
        name.removeprefix("parallelism_config_"): size
        for name, size in config.parallelism_config.items()
    }
    if sizes:
        assert ParallelismConfig(**sizes).total_size == run.devices
    else:
        assert run.tensor == run.context == 1


@pytest.mark.supports("accelerate", "plan")
def test_accelerate_launch_reads_the_file(tmp_path, monkeypatch):
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    paths = emit("accelerate", *RUNS["accelerate"], CLUSTER, out=tmp_path, settings=SETTINGS)
    file = next(path for path in paths if path.name == "accelerate.yaml")
    arguments = ["--config_file", str(file), "--machine_rank", "1", "train.py"]
    parsed = launch.launch_command_parser().parse_args(arguments)
    # Parsing on a machine without GPUs would fall back to CPU in a check of the hardware.
    monkeypatch.setattr(launch, "is_bf16_available", lambda *_: True)
    args, *_ = launch._validate_launch_command(parsed)
    args.num_processes = 8
    environment = prepare_multi_gpu_env(args)
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"
    assert environment["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.supports("deepspeed", "plan")
@pytest.mark.supports("deepspeed", "plan")
def test_deepspeed_takes_the_config(tmp_path, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    model, run = RUNS["deepspeed"]
    emit("deepspeed", model, run, CLUSTER, out=tmp_path)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)

    class Ranks:
        get_data_parallel_world_size = staticmethod(lambda: run.data)

    read = config.DeepSpeedConfig(str(tmp_path / "ds_config.json"), mpu=Ranks())
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (64, run.micro_batches)
    assert read.zero_config.stage == 2
    assert read.bfloat16_config.enabled
    assert read.tensor_parallel_config.autotp_size == run.tensor


def test_deepspeed_values_are_those_of_the_plan():
    model, run = RUNS["deepspeed"]
    values = json.loads(emitted("deepspeed", model, run, CLUSTER)["ds_config.json"])
    assert values["train_batch_size"] == (
        values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"] * run.data
    )
    assert values["zero_optimization"]["stage"] == 2
    assert values["data_types"] == {"grad_accum_dtype": "fp32"}


TITAN = {
    "pipeline": RUNS["torchtitan"],
    "mixture": (MIXTURE, configured(data=8, context=2, expert=4, sharding="parameters")),
    "shared": (SHARED, configured(data=2, sharding="gradients", recompute="full")),
    "zero bubble": (
        DENSE,
        configured(pipeline=2, stages_per_rank=2, schedule="zero_bubble", precision="fp32"),
    ),
    "tied": (dataclasses.replace(DENSE, tied=True), configured(data=4)),
}


@pytest.mark.slow
@pytest.mark.supports("torchtitan", "plan")
@pytest.mark.parametrize("case", TITAN)
def test_torchtitan_builds_the_configuration(case, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    manager = pytest.importorskip("torchtitan.config.manager")
    from torchtitan.distributed.parallel_dims import ParallelDims

    model, run = TITAN[case]
    emit("torchtitan", model, run, CLUSTER, out=tmp_path, settings=SETTINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchtitan_run", raising=False)
    importlib.invalidate_caches()
    config = manager.ConfigManager().parse_args(["--module", "torchtitan_run", "--config", "run"])
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        built = config.model_spec.model.build()
    parameters = sum(each.numel() for each in built.parameters())
    assert parameters == pytest.approx(model.parameters, rel=5e-3)
    division = ParallelDims.from_config(config.parallelism, run.devices)
    assert division.dp_replicate * division.dp_shard == run.data
    if run.pipeline > 1:
        stages = config.parallelism.module_fqns_per_model_part
        assert len(stages) == run.pipeline * run.stages_per_rank
        assert sum(name.startswith("layers.") for stage in stages for name in stage) == model.layers


# Options of megatron/training/arguments.py of Megatron-Core 0.15, and what they take.
MEGATRON_NUMBERS = """
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups
    max-position-embeddings seq-length micro-batch-size global-batch-size train-iters
    lr-warmup-iters seed save-interval log-interval eval-iters recompute-num-layers
    tensor-model-parallel-size context-parallel-size pipeline-model-parallel-size
    num-virtual-stages-per-pipeline-rank expert-model-parallel-size num-experts
    moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size vocab-size
    num-distributed-optimizer-instances
"""
MEGATRON_FRACTIONS = """
    lr min-lr clip-grad attention-dropout hidden-dropout
"""
MEGATRON_FLAGS = """
    group-query-attention swiglu untie-embeddings-and-output-weights disable-bias-linear
    exit-signal-handler fp16 bf16 accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16
    sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather
    use-megatron-fsdp moe-grouped-gemm mock-data
"""
MEGATRON_CHOICES = {
    "position-embedding-type": ["learned_absolute", "rope", "mrope", "relative", "none"],
    "normalization": ["LayerNorm", "RMSNorm"],
    "attention-backend": ["flash", "fused", "unfused", "local", "auto"],
    "recompute-granularity": ["full", "selective"],
    "recompute-method": ["uniform", "block"],
    "lr-decay-style": ["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    "fp8-format": ["e4m3", "hybrid"],
    "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "ckpt-format": ["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"],
    "moe-token-dispatcher-type": ["allgather", "alltoall", "flex"],
    "tokenizer-type": ["HuggingFaceTokenizer", "NullTokenizer"],
}
MEGATRON_TEXTS = """
    save load pipeline-model-parallel-layout moe-layer-freq tokenizer-model split
"""


def megatron_parser():
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in MEGATRON_NUMBERS.split():
        parser.add_argument(f"--{name}", type=int)
    for name in MEGATRON_FRACTIONS.split():
        parser.add_argument(f"--{name}", type=float)
    for name in MEGATRON_FLAGS.split():
        parser.add_argument(f"--{name}", action="store_true")
    for name, choices in MEGATRON_CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    for name in MEGATRON_TEXTS.split():
        parser.add_argument(f"--{name}")
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--data-path", nargs="*")
    return parser


@some
@given(
    model=models,
    run=drawn(sequence=(512,), batch=(16,), schedule=("1f1b", "interleaved"), expert=(1, 2)),
    tokenizer=st.sampled_from(("", "tok")),
)
def test_megatron_arguments_are_documented_and_say_the_plan(model, run, tokenizer):
    assume(problem("megatron", model, run) is None)
    assume(run.devices <= CLUSTER.devices_per_node)
    given = EmitSettings(train=("a b", "c"), tokenizer=tokenizer)
    text = emitted("megatron", model, run, CLUSTER, given)["megatron.sh"]
    listed = re.search(r"arguments=\(\n(.*?)\n\)\n", text, re.DOTALL)
    assert listed is not None
    args = megatron_parser().parse_args(shlex.split(listed.group(1)))
    assert args.data_path == ["a b", "c"]
    divided = (
        args.tensor_model_parallel_size
        * args.context_parallel_size
        * args.pipeline_model_parallel_size
    )
    assert run.devices // divided == run.data
    assert args.global_batch_size % (args.micro_batch_size * run.data) == 0
    assert args.untie_embeddings_and_output_weights != model.tied
    assert args.fp16 == (run.precision == "fp16")
    assert bool(args.num_experts) == bool(model.experts)
    stages = run.pipeline * run.stages_per_rank if run.pipeline > 1 else 1
    if args.pipeline_model_parallel_layout:
        layout = args.pipeline_model_parallel_layout
        assert layout.count("t") == model.layers
        assert layout.count("|") == stages - 1
    else:
        assert model.layers % stages == 0
        assert (args.num_virtual_stages_per_pipeline_rank or 1) * run.pipeline == stages


def test_megatron_bridge_says_the_same():
    model, run = RUNS["megatron"]
    values = yaml.safe_load(emitted("megatron", model, run, CLUSTER)["megatron_bridge.yaml"])
    assert values["model"]["num_layers"] == model.layers
    assert values["model"]["moe_layer_freq"] == [0, 1, 1, 1]
    assert values["train"]["global_batch_size"] == run.batch
    assert values["mixed_precision"].startswith("bf16_with_fp8")
    assert values["optimizer"]["lr"] == pytest.approx(3e-4)


def test_a_small_learning_rate_stays_a_number():
    given = EmitSettings(learning_rate=1e-5)
    values = yaml.safe_load(
        emitted("accelerate", DENSE, configured(data=2), CLUSTER, given)["training_arguments.yaml"]
    )
    assert values["learning_rate"] == pytest.approx(1e-5)
