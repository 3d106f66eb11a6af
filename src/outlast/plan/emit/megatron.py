"""Megatron-LM: its command-line arguments in a script, and the same for Megatron-Bridge and NeMo.

Names of arguments: megatron/training/arguments.py and Megatron-Bridge's guide for users of
Megatron-LM (docs.nvidia.com/nemo/megatron-bridge).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from outlast.plan.emit.settings import (
    argument_lines,
    blocks_per_stage,
    commented,
    head,
    is_even,
    nodes_of,
    script,
    torchrun,
    unsaid,
    yaml_text,
)

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import EmitSettings
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
