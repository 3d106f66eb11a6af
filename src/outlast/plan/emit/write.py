"""Write a plan out for a framework: Megatron-LM and its bridges, torchtitan, Slurm.

Megatron-LM: its command-line arguments in a script, and the same for Megatron-Bridge and NeMo.
Names of arguments: megatron/training/arguments.py and Megatron-Bridge's guide for users of
Megatron-LM (docs.nvidia.com/nemo/megatron-bridge).

A Slurm batch script: the run as a chain of starts, each of which saves before its limit.

Outlast's ranks are started by srun itself: Slurm's warning reaches every rank, which saves and
ends with exit code 3. All others are started by torchrun, one on every node. The warning then goes
to the batch script, which leaves a file that the nodes look for: a signal to the step would end
torchrun, and with some of Slurm's ways to follow processes also data loaders.

torchtitan: a Python module with one function that returns the configuration.

Since 0.3, torchtitan reads no TOML: `--module` names a module, `--config` a function in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outlast.errors import EXIT_TO_BE_CONTINUED, PlanError
from outlast.plan.emit.huggingface import accelerate_files, deepspeed_files
from outlast.plan.emit.outlast_job import only_in_outlast, outlast_files
from outlast.plan.emit.settings import (
    EmitSettings,
    argument_lines,
    blocks_per_stage,
    commented,
    head,
    is_even,
    nodes_of,
    render,
    script,
    torchrun,
    unsaid,
    yaml_text,
)
from outlast.plan.emit.targets import problem, target_named, unwritten

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


Arguments: TypeAlias = "list[tuple[str, Any]]"


_STRATEGY = {"gradients": "optim_grads", "parameters": "optim_grads_params"}


def megatron_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of every file by its name.

    Raises:
        PlanError: The run does not fill its nodes, or the blocks per stage do not fit.
    """
    nodes, per_node = nodes_of(run, cluster)
    arguments = [
        *_model(model, run),
        *_training(run, settings),
        *_parallel(model, run, settings),
        *_data(model, settings),
    ]
    connections = ""
    if (run.tensor > 1 or run.context > 1) and not _fully_sharded(run):
        connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    body = (
        f"{connections}arguments=(\n{argument_lines(arguments)}\n)\n"
        f"exec {torchrun(nodes, per_node)} \\\n"
        '  "${MEGATRON:?is the folder of Megatron-LM}/pretrain_gpt.py" "${arguments[@]}"\n'
    )
    bridge_note = (
        "Overrides for a recipe of Megatron-Bridge (NeMo), with the groups of its ConfigContainer."
    )
    return {
        "megatron.sh": script(model, run, settings, body, *unsaid(model)),
        "megatron_bridge.yaml": commented(head(model, run, settings, bridge_note, *unsaid(model)))
        + yaml_text(_bridge(model, run, settings)),
    }


def _fully_sharded(run: Configuration) -> bool:
    return run.sharding in _STRATEGY and run.data > 1


def _model(model: Transformer, run: Configuration) -> Arguments:
    arguments: Arguments = [
        ("--num-layers", model.layers),
        ("--hidden-size", model.hidden),
        ("--ffn-hidden-size", model.intermediate or model.expert_intermediate),
        ("--num-attention-heads", model.heads),
        ("--kv-channels", model.head_width),
        ("--seq-length", run.sequence),
        ("--max-position-embeddings", run.sequence),
        ("--position-embedding-type", "rope"),
        ("--normalization", "RMSNorm"),
        ("--disable-bias-linear", None),
        ("--attention-dropout", 0.0),
        ("--hidden-dropout", 0.0),
        ("--attention-backend", "auto" if run.fused_attention else "unfused"),
    ]
    if model.kv_heads < model.heads:
        arguments += [("--group-query-attention", None), ("--num-query-groups", model.kv_heads)]
    if model.gated:
        arguments.append(("--swiglu", None))
    if not model.tied:
        arguments.append(("--untie-embeddings-and-output-weights", None))
    if model.experts:
        arguments += _experts(model, run)
    return arguments


def _experts(model: Transformer, run: Configuration) -> Arguments:
    arguments: Arguments = [
        ("--num-experts", model.experts),
        ("--moe-router-topk", model.experts_per_token),
        ("--moe-ffn-hidden-size", model.expert_intermediate),
        ("--moe-token-dispatcher-type", "alltoall"),
        ("--expert-model-parallel-size", run.expert),
    ]
    if model.dense_layers:
        frequency = f"([0]*{model.dense_layers}+[1]*{model.mixture_layers})"
        if model.dense_blocks:
            # Megatron reads an expression without spaces.
            frequency = f"[{','.join(str(int(has)) for has in model.has_experts)}]"
        arguments.append(("--moe-layer-freq", frequency))
    if model.shared_intermediate:
        arguments.append(("--moe-shared-expert-intermediate-size", model.shared_intermediate))
    if run.precision in ("bf16", "fp8"):
        arguments.append(("--moe-grouped-gemm", None))
    return arguments


def _training(run: Configuration, settings: EmitSettings) -> Arguments:
    arguments: Arguments = [
        ("--micro-batch-size", run.micro_batch),
        ("--global-batch-size", run.batch),
        ("--train-iters", settings.steps),
        ("--lr", settings.learning_rate),
        ("--min-lr", f"{settings.learning_rate / 10:g}"),
        ("--lr-decay-style", "cosine"),
        ("--lr-warmup-iters", settings.warmup_steps),
        ("--clip-grad", settings.gradient_clip),
        ("--seed", settings.seed),
        ("--save", settings.name),
        ("--load", settings.name),
        ("--save-interval", settings.checkpoint_every_steps),
        ("--exit-signal-handler", None),
        ("--log-interval", 10),
        ("--eval-iters", 0),
    ]
    if run.precision in ("fp16", "bf16"):
        arguments.append((f"--{run.precision}", None))
    if run.precision == "fp8":
        arguments += [("--bf16", None), ("--fp8-format", "hybrid")]
    if run.precision != "fp32" and run.gradient_bytes == 4:
        arguments.append(("--accumulate-allreduce-grads-in-fp32", None))
    if run.precision in ("bf16", "fp8") and run.gradient_bytes == 2:
        arguments += [("--grad-reduce-in-bf16", None)]
    if run.recompute == "attention":
        arguments += [
            ("--recompute-granularity", "selective"),
            ("--recompute-modules", "core_attn"),
        ]
    if run.recompute == "full":
        arguments += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", 1),
        ]
    return arguments


def _parallel(model: Transformer, run: Configuration, settings: EmitSettings) -> Arguments:
    arguments: Arguments = [
        ("--tensor-model-parallel-size", run.tensor),
        ("--context-parallel-size", run.context),
        ("--pipeline-model-parallel-size", run.pipeline),
    ]
    if run.sequence_parallel and run.tensor > 1:
        arguments.append(("--sequence-parallel", None))
    if run.pipeline > 1:
        blocks = blocks_per_stage(model, run, settings.blocks_per_stage)
        if not is_even(blocks):
            arguments.append(("--pipeline-model-parallel-layout", layout(blocks)))
        elif run.stages_per_rank > 1:
            arguments.append(("--num-virtual-stages-per-pipeline-rank", run.stages_per_rank))
    if run.sharding == "none" or run.data == 1:
        return arguments
    arguments += [
        ("--use-distributed-optimizer", None),
        ("--overlap-grad-reduce", None),
        ("--overlap-param-gather", None),
    ]
    replicas = run.data // (run.sharding_ranks or run.data)
    if replicas > 1:
        arguments.append(("--num-distributed-optimizer-instances", replicas))
    if _fully_sharded(run):
        arguments += [
            ("--use-megatron-fsdp", None),
            ("--data-parallel-sharding-strategy", _STRATEGY[run.sharding]),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    return arguments


def layout(blocks: tuple[int, ...]) -> str:
    """Stages as Megatron writes them: E embedding, t block, L loss, | between stages.

    Args:
        blocks: Of every stage, in the order that a sample goes through them.
    """
    stages = ["t" * count for count in blocks]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def _data(model: Transformer, settings: EmitSettings) -> Arguments:
    arguments: Arguments = [("--vocab-size", model.vocabulary)]
    if settings.tokenizer:
        arguments += [
            ("--tokenizer-type", "HuggingFaceTokenizer"),
            ("--tokenizer-model", settings.tokenizer),
        ]
    else:
        arguments.append(("--tokenizer-type", "NullTokenizer"))
    if settings.train:
        arguments += [("--data-path", settings.train), ("--split", "99,1,0")]
    else:
        arguments.append(("--mock-data", None))
    return arguments


def _bridge(model: Transformer, run: Configuration, settings: EmitSettings) -> dict[str, Any]:
    blocks = blocks_per_stage(model, run, settings.blocks_per_stage)
    values: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.intermediate or model.expert_intermediate,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_width,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": model.gated,
        "vocab_size": model.vocabulary,
        "share_embeddings_and_output_weights": model.tied,
        "seq_length": run.sequence,
        "tensor_model_parallel_size": run.tensor,
        "sequence_parallel": run.sequence_parallel and run.tensor > 1,
        "context_parallel_size": run.context,
        "pipeline_model_parallel_size": run.pipeline,
        "expert_model_parallel_size": run.expert,
        "recompute_granularity": {"none": None, "attention": "selective", "full": "full"}[
            run.recompute
        ],
    }
    if run.recompute == "full":
        values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if run.precision == "fp8":
        values["fp8"] = "hybrid"
    if run.pipeline > 1 and not is_even(blocks):
        values["pipeline_model_parallel_layout"] = layout(blocks)
    elif run.pipeline > 1 and run.stages_per_rank > 1:
        values["virtual_pipeline_model_parallel_size"] = run.stages_per_rank
    if model.experts:
        values |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_intermediate,
            "moe_shared_expert_intermediate_size": model.shared_intermediate or None,
            "moe_layer_freq": list(map(int, model.has_experts)),
        }
    replicas = run.data // (run.sharding_ranks or run.data) if run.sharding != "none" else 1
    return {
        "model": values,
        "train": {
            "micro_batch_size": run.micro_batch,
            "global_batch_size": run.batch,
            "train_iters": settings.steps,
            "exit_signal_handler": True,
        },
        "ddp": {
            "use_distributed_optimizer": run.sharding != "none" and run.data > 1,
            "use_megatron_fsdp": _fully_sharded(run),
            "data_parallel_sharding_strategy": _STRATEGY.get(run.sharding, "no_shard")
            if run.data > 1
            else "no_shard",
            "num_distributed_optimizer_instances": replicas,
            "grad_reduce_in_fp32": run.gradient_bytes == 4,
        },
        "optimizer": {"lr": settings.learning_rate, "clip_grad": settings.gradient_clip},
        "scheduler": {"lr_warmup_iters": settings.warmup_steps},
        "checkpoint": {
            "save": settings.name,
            "load": settings.name,
            "save_interval": settings.checkpoint_every_steps,
        },
        "rng": {"seed": settings.seed},
        "mixed_precision": {
            "fp32": None,
            "fp16": "fp16_mixed",
            "bf16": "bf16_mixed",
            "fp8": "bf16_with_fp8_delayed_scaling_mixed",
        }[run.precision],
    }


SAVES = {"megatron": True, "deepspeed": True, "accelerate": True, "torchtitan": False}


"""True for targets whose workers save when they get SIGTERM."""


def batch_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of job.sbatch, and of node.sh where torchrun starts the ranks.

    Raises:
        PlanError: The run does not fill its nodes, or is warned before its time limit begins.
    """
    nodes, per_node = nodes_of(run, cluster)
    minutes, starts = _limit(settings)
    alone = settings.launches == "outlast"
    tasks = per_node if alone else 1
    days, rest = divmod(minutes, 24 * 60)
    # A task's share of the node; 0 where nobody said how many cores a node has.
    cores = cluster.host_cores * per_node / cluster.devices_per_node // tasks
    options = [
        ("job-name", settings.name),
        ("nodes", nodes),
        ("ntasks-per-node", tasks),
        ("gpus-per-node", per_node),
        ("cpus-per-task", int(cores)),
        ("time", f"{days}-{rest // 60:02}:{rest % 60:02}:00"),
        ("signal", f"{'' if alone else 'B:'}USR1@{settings.warn_seconds}"),
        ("partition", settings.partition),
        ("account", settings.account),
        ("output", f"{settings.name}-%j.log"),
        ("open-mode", "append"),
    ]
    notes = ["Submit it from its own folder: sbatch job.sbatch", *_length_notes(settings, starts)]
    job = render(
        "job.sbatch",
        options=[f"{name}={_word(name, value)}" for name, value in options if value],
        head=commented(head(model, run, settings, *notes)),
        cores=bool(options[4][1]),
        alone=alone,
        to_be_continued=EXIT_TO_BE_CONTINUED,
    )
    if alone:
        return {"job.sbatch": job}
    note = "Runs on every node: starts torchrun, and tells its workers to save when warned."
    node = render(
        "node.sh",
        head=commented(head(model, run, settings, note)),
        target=settings.launches,
        saves=SAVES[settings.launches],
    )
    return {"job.sbatch": job, "node.sh": node}


def _limit(settings: EmitSettings) -> tuple[int, int]:
    """Minutes of one start, and starts of the whole run."""
    hours, starts = settings.longest_hours, 1
    if settings.predicted_hours is not None:
        wanted = settings.predicted_hours * (1.0 + settings.margin) + settings.warn_seconds / 3600
        starts = math.ceil(wanted / hours)
        hours = min(wanted, hours)
    minutes = math.ceil(hours * 60)
    if settings.warn_seconds >= minutes * 60:
        raise PlanError(
            f"warn_seconds = {settings.warn_seconds} is not below the time limit of "
            f"{minutes * 60} s: warn later or allow more with longest_hours"
        )
    return minutes, starts


def _length_notes(settings: EmitSettings, starts: int) -> list[str]:
    if settings.predicted_hours is None:
        limit = f"the limit is longest_hours = {settings.longest_hours:g}."
        return [f"How long the run takes was not predicted; {limit}"]
    note = (
        f"Time limit: {settings.predicted_hours:.3g} predicted hours and {settings.margin:.0%} "
        "margin"
    )
    if starts > 1:
        note += f", in about {starts} starts of {settings.longest_hours:g} h"
    lost = "" if SAVES.get(settings.launches, True) else " (torchtitan does not save on a warning)"
    return [f"{note}{lost}."]


def _word(name: str, value: object) -> str:
    text = str(value)
    if any(character.isspace() or character in "\"'`$\\#" for character in text):
        raise PlanError(
            f"{name} = {text!r} cannot stand in a batch script: use letters, digits, dots, dashes "
            "and underscores"
        )
    return text


_NUMBERS = (
    *("hidden", "heads", "kv_heads", "head_width", "layers", "vocabulary", "tied"),
    *("experts", "experts_per_token", "expert_intermediate"),
)


_THETA = 500_000.0


"""Base of the rotary embedding where the model's config says none; Llama 3's."""


def torchtitan_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of every file by its name.

    Raises:
        PlanError: The run does not fill its nodes, or the blocks per stage do not fit.
    """
    nodes, per_node = nodes_of(run, cluster)
    body = (
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"\n'
        f"exec {torchrun(nodes, per_node)} \\\n"
        "  -m torchtitan.train --module torchtitan_run --config run\n"
    )
    note = (
        "For torchtitan 0.3. It has no handler of signals: a run that is stopped goes on from its "
        f"newest checkpoint, at most {settings.checkpoint_every_steps} steps back."
    )
    comments = commented(head(model, run, settings, note, *unsaid(model)))
    return {
        "torchtitan_run.py": _run_text(model, run, settings, comments),
        "torchtitan.sh": script(model, run, settings, body, note),
    }


def _schedule(run: Configuration) -> str:
    if run.schedule == "zero_bubble":
        return "InterleavedZeroBubble"
    if run.stages_per_rank > 1:
        return "Interleaved1F1B"
    return "GPipe" if run.schedule == "gpipe" else "1F1B"


def _run_text(model: Transformer, run: Configuration, settings: EmitSettings, comments: str) -> str:
    training = {
        # A pipeline cuts the local batch into micro-batches itself.
        "local_batch_size": run.micro_batch if run.pipeline == 1 else run.batch // run.data,
        "global_batch_size": run.batch,
        "seq_len": run.sequence,
        "steps": settings.steps,
        "max_norm": settings.gradient_clip or 'float("inf")',
        "mixed_precision_param": '"float32"' if run.precision == "fp32" else '"bfloat16"',
        "disable_cuda_graphs": True,
    }
    shard = 1 if run.sharding == "none" else run.sharding_ranks or run.data
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": run.data // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": '"always"' if run.sharding == "parameters" else '"never"',
        "tensor_parallel_degree": run.tensor,
        "enable_sequence_parallel": run.sequence_parallel,
        "context_parallel_degree": run.context,
        "expert_parallel_degree": run.expert,
        "pipeline_parallel_degree": run.pipeline,
    }
    if run.pipeline > 1:
        parallelism |= {
            "pipeline_parallel_schedule": f'"{_schedule(run)}"',
            "pipeline_parallel_microbatch_size": run.micro_batch,
            "module_fqns_per_model_part": "parts()",
        }
    feed_forward = f"feed_forward=feed_forward({model.intermediate})"
    if model.experts and model.dense_layers:
        dense = f'{{"feed_forward": feed_forward({model.intermediate})}}'
        where = f"in {model.dense_blocks}" if model.dense_blocks else f"< {model.dense_layers}"
        feed_forward = f'**({dense} if layer {where} else {{"moe": mixture()}})'
    elif model.experts:
        feed_forward = "moe=mixture()"
    config, shared = settings.model_config, model.shared_intermediate
    rope = config.get("rope_parameters") or {}
    return render(
        "torchtitan_run.py",
        **{name: getattr(model, name) for name in _NUMBERS},
        head=comments,
        name=settings.name,
        sequence=run.sequence,
        theta=float(config.get("rope_theta") or rope.get("rope_theta") or _THETA),
        shared=f"feed_forward({shared})" if shared else "None",
        feed_forward=feed_forward,
        embedding="skip_param_init" if model.tied else "NORMAL",
        quantized=run.precision == "fp8",
        family="qwen3" if model.experts else "llama3",
        hook="register_moe_load_balancing_hook" if model.experts else "None",
        blocks=list(blocks_per_stage(model, run, settings.blocks_per_stage))
        if run.pipeline > 1
        else None,
        tokenizer=settings.tokenizer or "./assets/tokenizer",
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        training=training,
        dataset=settings.train[0] if settings.train else "c4_test",
        parallelism=parallelism,
        every=settings.checkpoint_every_steps,
        # torchtitan refuses to keep one, since the newest may still be on its way.
        keep=max(settings.keep, 2),
        recompute="FullAC.Config()" if run.recompute == "full" else "None",
        compiled=run.precision == "fp8",
        seed=settings.seed,
    )


Writer: TypeAlias = "Callable[[Transformer, Configuration, Cluster, EmitSettings], dict[str, str]]"


_WRITERS: Mapping[str, Writer] = {
    "outlast": outlast_files,
    "torchtitan": torchtitan_files,
    "megatron": megatron_files,
    "deepspeed": deepspeed_files,
    "accelerate": accelerate_files,
}


def emitted(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    settings: EmitSettings | None = None,
) -> dict[str, str]:
    """Text of every file that `emit` writes, by its name below the folder.

    Args:
        target: Name in `outlast.plan.emit.TARGETS`; "sbatch" also gives the files of what it
            launches.
        model: What is trained.
        run: How.
        cluster: Where.
        settings: What a plan does not say; defaults where None.

    Raises:
        PlanError: The target cannot express the run or its mechanisms, or it does not fit the
            cluster; one sentence.
        JobError: An override of the Outlast job is not possible.
    """
    settings = settings or EmitSettings()
    target_named(target)
    framework = settings.launches if target == "sbatch" else target
    if framework not in _WRITERS:
        raise PlanError(f"launches = {framework!r} is none of {', '.join(_WRITERS)}")
    sentence = problem(framework, model, run) or unwritten(framework, model)
    if sentence is None and framework != "outlast":
        title = target_named(framework).title
        sentence = only_in_outlast(settings.mechanisms, title) or None
    if sentence is not None:
        raise PlanError(sentence)
    files = _WRITERS[framework](model, run, cluster, settings)
    if target == "sbatch":
        files = {**batch_files(model, run, cluster, settings), **files}
    return files


def emit(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    *,
    out: Path,
    settings: EmitSettings | None = None,
) -> list[Path]:
    """Write a plan out for a framework, all of it or nothing.

    Args:
        target: Name in `outlast.plan.emit.TARGETS`.
        model: What is trained.
        run: How.
        cluster: Where.
        out: Folder; made where it is missing.
        settings: What a plan does not say; defaults where None.

    Returns:
        The files that were written.

    Raises:
        PlanError: What `emitted` raises, or a file is there and differs, or cannot be written.
        JobError: An override of the Outlast job is not possible.
    """
    from outlast.records import replace_file

    settings = settings or EmitSettings()
    files = emitted(target, model, run, cluster, settings)
    paths = {out / name: text.encode() for name, text in files.items()}
    try:
        for path, content in paths.items():
            if path.exists() and not settings.replace and path.read_bytes() != content:
                raise PlanError(
                    f"{path} exists and differs: give another folder, or replace = true"
                )
        for path, content in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
            if path.suffix in (".sh", ".sbatch"):
                path.chmod(0o755)
    except OSError as error:
        raise PlanError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return list(paths)
