"""A transformer as a Hugging Face config, and a run as Hugging Face training arguments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.emit.settings import commented, head, yaml_text

if TYPE_CHECKING:
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import Settings
    from outlast.plan.transformer import Transformer

ARGUMENTS = "training_arguments.yaml"
CONFIG = "model/config.json"
READS_ARGUMENTS = (
    f"The script reads {ARGUMENTS} with transformers.HfArgumentParser((TrainingArguments,))"
    ".parse_yaml_file and the model from model/."
)


def model_config(model: Transformer, run: Configuration, settings: Settings) -> dict[str, Any]:
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


def config_text(model: Transformer, run: Configuration, settings: Settings) -> str:
    """`model_config` as a config.json, whose head is the value of `_comment`."""
    values = {"_comment": head(model, run, settings), **model_config(model, run, settings)}
    return json.dumps(values, indent=2) + "\n"


def arguments_text(model: Transformer, run: Configuration, settings: Settings, **more: Any) -> str:
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
    notes = [
        READS_ARGUMENTS,
        f"The script cuts its text into samples of {run.sequence} tokens.",
    ]
    if run.tensor > 1:
        notes.append(f'It loads the model with tp_plan="auto" and a mesh of {run.tensor} ranks.')
    return commented(head(model, run, settings, *notes)) + yaml_text(values)
