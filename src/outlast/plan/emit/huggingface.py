"""Files for Hugging Face: model config, training arguments, Accelerate, DeepSpeed."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.batch import SHARDING
from outlast.plan.emit.settings import commented, head, nodes_of, script, torchrun, yaml_text

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import EmitSettings
    from outlast.plan.transformer import Transformer


ARGUMENTS = "training_arguments.yaml"
CONFIG = "model/config.json"

READS_ARGUMENTS = (
    f"The script reads {ARGUMENTS} with transformers.HfArgumentParser((TrainingArguments,))"
    ".parse_yaml_file and the model from model/."
)


def model_config(model: Transformer, run: Configuration, settings: EmitSettings) -> dict[str, Any]:
    """The model's own config where it was given, else one with the same numbers.

    Dense gated models become llama, those without gates starcoder2, mixtures mixtral, and where
    some blocks are dense or some experts shared, qwen3_moe and qwen2_moe.

    Args:
        model: Its numbers.
        run: Says the length of a sequence.
        settings: May hold the model's own config.

    Raises:
        PlanError: No config was given, and none of these models has the numbers.
    """
    if settings.model_config:
        return dict(settings.model_config)
    numbers: dict[str, Any] = {
        "model_type": "llama" if model.gated else "starcoder2",
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": run.sequence,
        "tie_word_embeddings": model.tied,
    }
    if model.experts:
        numbers |= _mixture(model)
    elif not model.gated:
        numbers["use_bias"] = False
    has_head_width = numbers["model_type"] in ("llama", "mixtral")
    if has_head_width:
        numbers["head_dim"] = model.head_width
    if (
        model.projection_parameters
        or (model.experts and not model.gated)
        or (not has_head_width and model.query_width != model.hidden)
    ):
        raise PlanError(
            f"{model.name} has numbers that no model of type {numbers['model_type']} has: give its "
            "own Hugging Face config as model_config"
        )
    return numbers


def _mixture(model: Transformer) -> dict[str, Any]:
    if not model.dense_layers and not model.shared_intermediate:
        return {
            "model_type": "mixtral",
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "intermediate_size": model.expert_intermediate,
        }
    numbers: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_intermediate,
        # A width must be given, also where no block is dense.
        "intermediate_size": model.intermediate or model.expert_intermediate,
        "mlp_only_layers": [block for block, has in enumerate(model.has_experts) if not has],
    }
    if model.shared_intermediate:
        numbers |= {
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": model.shared_intermediate,
        }
    return numbers


def config_text(model: Transformer, run: Configuration, settings: EmitSettings) -> str:
    """`model_config` as a config.json, whose head is the value of `_comment`."""
    values = {"_comment": head(model, run, settings), **model_config(model, run, settings)}
    return json.dumps(values, indent=2) + "\n"


def arguments_text(
    model: Transformer, run: Configuration, settings: EmitSettings, **more: Any
) -> str:
    """Training arguments as YAML.

    Args:
        model: What is trained.
        run: How.
        settings: The rest.
        more: Arguments of one framework.
    """
    values: dict[str, Any] = {
        "output_dir": settings.name,
        "per_device_train_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "max_steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": settings.warmup_steps,
        "max_grad_norm": settings.gradient_clip,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint_every_steps,
        "save_total_limit": settings.keep,
        "seed": settings.seed,
        "bf16": run.precision in ("bf16", "fp8"),
        "fp16": run.precision == "fp16",
        "enable_jit_checkpoint": True,
        **more,
    }
    notes = [READS_ARGUMENTS, f"The script cuts its text into samples of {run.sequence} tokens."]
    if run.tensor > 1:
        notes.append(f'It loads the model with tp_plan="auto" and a mesh of {run.tensor} ranks.')
    return commented(head(model, run, settings, *notes)) + yaml_text(values)


_MIXED = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def accelerate_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of every file by its name.

    Raises:
        PlanError: The run does not fill its nodes.
    """
    nodes, per_node = nodes_of(run, cluster)
    sharded = _is_sharded(run)
    full = run.recompute == "full"
    more: dict[str, Any] = {"gradient_checkpointing": full and not sharded}
    if sharded:
        # Gradients are summed over micro-batches where they are sharded, in fp32.
        more["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    body = (
        "exec accelerate launch --config_file accelerate.yaml \\\n"
        '  --machine_rank "${NODE_RANK:-0}" --main_process_ip "${MASTER_ADDR:-127.0.0.1}" \\\n'
        f'  --main_process_port "${{MASTER_PORT:-29500}}" \\\n'
        f"  {shlex.quote(settings.script)} {ARGUMENTS}\n"
    )
    values = _config(run, nodes, nodes * per_node)
    return {
        "accelerate.yaml": commented(head(model, run, settings)) + yaml_text(values),
        ARGUMENTS: arguments_text(model, run, settings, **more),
        CONFIG: config_text(model, run, settings),
        "accelerate.sh": script(model, run, settings, body, READS_ARGUMENTS),
    }


def _is_sharded(run: Configuration) -> bool:
    """True if FSDP2 is needed: for states, or for what is built on it."""
    shard = 1 if run.sharding == "none" else run.sharding_ranks or run.data
    return run.context > 1 or run.tensor > 1 or shard > 1


def _config(run: Configuration, nodes: int, processes: int) -> dict[str, Any]:
    sharded = _is_sharded(run)
    alone = processes == 1
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "NO" if alone else "MULTI_GPU",
        "mixed_precision": _MIXED[run.precision],
        "num_machines": nodes,
        "num_processes": processes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "use_cpu": False,
    }
    if run.precision == "fp8":
        values["fp8_config"] = {"backend": "AO"}
    if sharded:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": run.sharding == "parameters",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": run.recompute == "full",
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
        }
        shard = run.sharding_ranks or run.data
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": run.data // shard,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": run.tensor,
            "parallelism_config_cp_size": run.context,
        }
    return values


_SUMS = {4: "fp32", 2: "{precision}"}


def deepspeed_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of every file by its name.

    Raises:
        PlanError: The run does not fill its nodes.
    """
    nodes, per_node = nodes_of(run, cluster)
    note = f"torchrun starts {settings.script}; `deepspeed --hostfile` would do so, too."
    body = f"exec {torchrun(nodes, per_node)} \\\n  {shlex.quote(settings.script)} {ARGUMENTS}\n"
    return {
        "ds_config.json": _config_text(model, run, settings),
        ARGUMENTS: arguments_text(
            model,
            run,
            settings,
            gradient_checkpointing=run.recompute == "full",
            deepspeed="ds_config.json",
        ),
        CONFIG: config_text(model, run, settings),
        "deepspeed.sh": script(model, run, settings, body, READS_ARGUMENTS, note),
    }


def _config_text(model: Transformer, run: Configuration, settings: EmitSettings) -> str:
    values: dict[str, Any] = {
        # JSON has no comments, and DeepSpeed does not mind names that it does not know.
        "_comment": head(
            model,
            run,
            settings,
            f"Recomputation ({run.recompute}) is switched on in {ARGUMENTS}, by the model itself.",
        ),
        "train_batch_size": run.batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "gradient_clipping": settings.gradient_clip,
        "zero_optimization": {
            "stage": SHARDING[run.sharding],
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": run.precision == "bf16"},
        "fp16": {"enabled": run.precision == "fp16"},
        "data_types": {
            "grad_accum_dtype": _SUMS[run.gradient_bytes].format(precision=run.precision)
        },
        "steps_per_print": 10,
    }
    if run.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": run.tensor}
    return json.dumps(values, indent=2) + "\n"
