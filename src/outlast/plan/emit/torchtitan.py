"""torchtitan: a Python module with one function that returns the configuration.

Since 0.3, torchtitan reads no TOML: `--module` names a module, `--config` a function in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.plan.emit.settings import (
    blocks_per_stage,
    commented,
    head,
    nodes_of,
    render,
    script,
    torchrun,
    unsaid,
)

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import EmitSettings
    from outlast.plan.transformer import Transformer

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
