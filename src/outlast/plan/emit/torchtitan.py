"""torchtitan: a Python module with one function that returns the configuration.

Since 0.3, torchtitan reads no TOML: `--module` names a module, `--config` a function in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.plan.emit.launch import nodes_of, script, torchrun
from outlast.plan.emit.settings import commented, head, unsaid
from outlast.plan.emit.stages import blocks_per_stage

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import Settings
    from outlast.plan.transformer import Transformer

_THETA = 500_000.0
"""Base of the rotary embedding where the model's config says none; Llama 3's."""

_IMPORTS = """\
from functools import partial

from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
"""

_DENSE_IMPORTS = """\
from torchtitan.models.llama3.model import Llama3Model as Model
from torchtitan.models.llama3.model import Llama3TransformerBlock as Block
from torchtitan.models.llama3.parallelize import parallelize_llama as parallelize
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter as Adapter
"""

_MIXTURE_IMPORTS = """\
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.qwen3.model import Qwen3Model as Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Block
from torchtitan.models.qwen3.parallelize import parallelize_qwen3 as parallelize
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as Adapter
"""

_MODEL = """\


NORMAL = partial(nn.init.normal_, std=0.02)
MATRIX = {{"weight": NORMAL, "bias": nn.init.zeros_}}


def norm():
    return RMSNorm.Config(normalized_shape={hidden}, param_init={{"weight": nn.init.ones_}})


def feed_forward(width):
    return make_ffn_config(
        dim={hidden}, hidden_dim=width, w1_param_init=MATRIX, w2w3_param_init=MATRIX
    )

{mixture}
def block(layer):
    attention = make_gqa_config(
        dim={hidden},
        n_heads={heads},
        n_kv_heads={kv_heads},
        head_dim={head_width},
        wqkv_param_init=MATRIX,
        wo_param_init=MATRIX,
        inner_attention=get_attention_config("flex"),
        fuse_qkv=True,
        rope=CosSinRoPE.Config(dim={head_width}, max_seq_len={sequence}, theta={theta}),
    )
    return Block.Config(
        attention_norm=norm(), ffn_norm=norm(), attention=attention, {feed_forward}
    )


def model():
    config = Model.Config(
        dim={hidden},
        vocab_size={vocabulary},
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings={vocabulary},
            embedding_dim={hidden},
            param_init={{"weight": {embedding}}},
        ),
        norm=norm(),
        lm_head=Linear.Config(
            in_features={hidden}, out_features={vocabulary}, param_init=MATRIX
        ),
        layers=[block(layer) for layer in range({layers})],
    )
{converter}    return ModelSpec(
        name="{family}",
        flavor={name!r},
        model=config,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn={hook},
        state_dict_adapter=Adapter,
    )
"""

_MIXTURE = """\

def mixture():
    return make_moe_config(
        num_experts={experts},
        router=make_router_config(
            dim={hidden},
            num_experts={experts},
            gate_param_init=MATRIX,
            top_k={experts_per_token},
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim={hidden},
            hidden_dim={expert_intermediate},
            num_experts={experts},
            top_k={experts_per_token},
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
            comm_backend="standard",
        ),
        shared_experts={shared},
    )

"""

_CONVERTER = """\
    from torchtitan.components.quantization import Float8LinearConverter

    converter = Float8LinearConverter.Config(model_compile_enabled=True, filter_fqns=["lm_head"])
    config = converter.build().convert(config)
"""

_PARTS = """\


def parts():
    first, names = 0, []
    for blocks in {blocks}:
        names.append([f"layers.{{layer}}" for layer in range(first, first + blocks)])
        first += blocks
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return names
"""

_RUN = """\


def run() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model(),
        loss=CrossEntropyLoss.Config(global_vocab_size={vocabulary}),
        hf_assets_path={tokenizer!r},
        dump_folder={name!r},
        optimizer=default_adamw(lr={learning_rate!r}),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps={warmup_steps}, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
{training}
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset={dataset!r}),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval={every},
            keep_latest_k={keep},
            last_save_model_only=False,
            async_mode="async",
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compiled}, components=["model"]),
        debug=DebugConfig(seed={seed}),
    )
"""


def torchtitan_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: Settings
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
    text = "".join(
        (
            commented(head(model, run, settings, note, *unsaid(model))),
            _IMPORTS,
            _MIXTURE_IMPORTS if model.experts else _DENSE_IMPORTS,
            _model_text(model, run, settings),
            _stages_text(model, run, settings),
            _run_text(model, run, settings),
        )
    )
    return {
        "torchtitan_run.py": text,
        "torchtitan.sh": script(model, run, settings, body, note),
    }


def _model_text(model: Transformer, run: Configuration, settings: Settings) -> str:
    numbers: dict[str, Any] = {
        name: getattr(model, name)
        for name in (
            *("hidden", "heads", "kv_heads", "head_width", "layers", "vocabulary", "tied"),
            *("experts", "experts_per_token", "expert_intermediate"),
        )
    }
    shared = model.shared_intermediate
    numbers["shared"] = f"feed_forward({shared})" if shared else "None"
    feed_forward = f"feed_forward=feed_forward({model.intermediate})"
    if model.experts and model.dense_layers:
        dense = f'{{"feed_forward": feed_forward({model.intermediate})}}'
        where = f"in {model.dense_blocks}" if model.dense_blocks else f"< {model.dense_layers}"
        feed_forward = f'**({dense} if layer {where} else {{"moe": mixture()}})'
    elif model.experts:
        feed_forward = "moe=mixture()"
    return _MODEL.format(
        **numbers,
        name=settings.name,
        sequence=run.sequence,
        theta=_theta(settings),
        mixture=_MIXTURE.format(**numbers) if model.experts else "",
        feed_forward=feed_forward,
        embedding="skip_param_init" if model.tied else "NORMAL",
        converter=_CONVERTER if run.precision == "fp8" else "",
        family="qwen3" if model.experts else "llama3",
        hook="register_moe_load_balancing_hook" if model.experts else "None",
    )


def _theta(settings: Settings) -> float:
    config = settings.model_config
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta") or _THETA
    return float(theta)


def _stages_text(model: Transformer, run: Configuration, settings: Settings) -> str:
    if run.pipeline == 1:
        return ""
    blocks = blocks_per_stage(model, run, settings.blocks_per_stage)
    return _PARTS.format(blocks=list(blocks))


def _schedule(run: Configuration) -> str:
    if run.schedule == "zero_bubble":
        return "InterleavedZeroBubble"
    if run.stages_per_rank > 1:
        return "Interleaved1F1B"
    return "GPipe" if run.schedule == "gpipe" else "1F1B"


def _run_text(model: Transformer, run: Configuration, settings: Settings) -> str:
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
    return _RUN.format(
        vocabulary=model.vocabulary,
        tokenizer=settings.tokenizer or "./assets/tokenizer",
        name=settings.name,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        training=_keywords(training),
        dataset=settings.train[0] if settings.train else "c4_test",
        parallelism=_keywords(parallelism),
        every=settings.checkpoint_every_steps,
        # torchtitan refuses to keep one, since the newest may still be on its way.
        keep=max(settings.keep, 2),
        recompute="FullAC.Config()" if run.recompute == "full" else "None",
        compiled=run.precision == "fp8",
        seed=settings.seed,
    )


def _keywords(values: dict[str, Any]) -> str:
    return "\n".join(f"            {name}={value}," for name, value in values.items())
