"""What the model types of Hugging Face leave unsaid in their config.json.

A config.json holds sizes; whether a block has biases, two or three matrices, or four norms is in
the code of its type. One `Family` per type states it, checked against the sizes of transformers'
own models on the meta device (tests/plan/test_plan_huggingface.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Bias = bool | str
"""Present, absent, or what a key of the config says."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The conventions of one model type.

    Attributes:
        gated: Three matrices in the feed-forward part in place of two.
        tied: Default of `tie_word_embeddings`, which a config.json may leave out.
        width_factor: Inner width over hidden width where the config gives none; 0: it must.
        states_kv_heads: The config must give the number of key heads: what an absent one means is
            another number in every type.
        fixed_head_width: Features of a head where the config gives none; 0: hidden over heads.
        norms: Norms of a block, each over the hidden width.
        norm_bias: Norms have a bias beside their weight.
        norm_weight: Norms have a weight at all.
        extra_norms: Norms over the hidden width outside the blocks, beside the final one.
        query_bias: Query, key and value projections have a bias.
        output_bias: The attention's output projection has one.
        inner_bias: The feed-forward part's matrices have one.
        head_bias: The head has one.
        query_norm: Norms of queries and keys: none, over one head, or over all heads.
        positions: Learned positions: how many beyond the longest sequence; None: none are learned.
        mixture: Which keys say that experts are there and how large they are.
        latent: Keys and values of all heads come from one narrow vector (DeepSeek-V2).
    """

    gated: bool = True
    tied: bool = False
    width_factor: int = 0
    states_kv_heads: bool = False
    fixed_head_width: int = 0
    norms: int = 2
    norm_bias: bool = False
    norm_weight: bool = True
    extra_norms: int = 0
    query_bias: Bias = False
    output_bias: Bias = False
    inner_bias: Bias = False
    head_bias: Bias = False
    query_norm: Literal["none", "head", "width"] = "none"
    positions: int | None = None
    mixture: Literal["none", "all", "sparse", "deepseek", "llama4"] = "none"
    latent: bool = False


_LLAMA = Family(query_bias="attention_bias", output_bias="attention_bias", inner_bias="mlp_bias")
_GPT = Family(
    gated=False,
    tied=True,
    width_factor=4,
    norm_bias=True,
    query_bias=True,
    output_bias=True,
    inner_bias=True,
)
_GPTJ = replace(_GPT, tied=False, norms=1, query_bias=False, output_bias=False, head_bias=True)
_COHERE = Family(tied=True, norms=1, query_bias="attention_bias", output_bias="attention_bias")
_GEMMA = Family(
    states_kv_heads=True,
    tied=True,
    fixed_head_width=256,
    query_bias="attention_bias",
    output_bias="attention_bias",
)

FAMILIES: dict[str, Family] = {
    "bloom": replace(_GPT, extra_norms=1),
    "arcee": replace(_LLAMA, gated=False),
    "codegen": _GPTJ,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "deepseek_v2": Family(mixture="deepseek", latent=True),
    "deepseek_v3": Family(mixture="deepseek", latent=True),
    "dots1": Family(
        states_kv_heads=True,
        query_norm="head",
        query_bias="attention_bias",
        output_bias="attention_bias",
        mixture="deepseek",
    ),
    "ernie4_5": Family(
        tied=True,
        states_kv_heads=True,
        fixed_head_width=128,
        query_bias="use_bias",
        output_bias="use_bias",
        inner_bias="use_bias",
    ),
    "exaone4": Family(states_kv_heads=True, query_norm="head"),
    "falcon": replace(_GPT, query_bias="bias", output_bias="bias", inner_bias="bias"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, query_norm="head"),
    "glm": Family(states_kv_heads=True, fixed_head_width=128, query_bias="attention_bias"),
    "glm4": Family(
        states_kv_heads=True, fixed_head_width=128, norms=4, query_bias="attention_bias"
    ),
    "glm4_moe": Family(states_kv_heads=True, query_bias="attention_bias", mixture="deepseek"),
    "gpt2": replace(_GPT, positions=0),
    "gpt_bigcode": replace(_GPT, positions=0),
    "gpt_neo": replace(_GPT, positions=0, query_bias=False),
    "gpt_neox": replace(
        _GPT, tied=False, query_bias="attention_bias", output_bias="attention_bias"
    ),
    "gpt_oss": Family(
        states_kv_heads=True, query_bias=True, output_bias=True, inner_bias=True, mixture="all"
    ),
    "gptj": _GPTJ,
    "granite": _LLAMA,
    "granitemoe": Family(query_bias="attention_bias", output_bias="attention_bias", mixture="all"),
    "llama": _LLAMA,
    "llama4_text": Family(
        states_kv_heads=True,
        query_bias="attention_bias",
        output_bias="attention_bias",
        mixture="llama4",
    ),
    "mistral": Family(states_kv_heads=True),
    "mixtral": Family(states_kv_heads=True, mixture="all"),
    "mpt": Family(gated=False, tied=True, width_factor=4),
    "nemotron": replace(_LLAMA, gated=False, norm_bias=True),
    "olmo": Family(norm_weight=False, query_bias="attention_bias", output_bias="attention_bias"),
    "olmo2": Family(query_norm="width", query_bias="attention_bias", output_bias="attention_bias"),
    "olmo3": Family(query_norm="width", query_bias="attention_bias", output_bias="attention_bias"),
    "olmoe": Family(
        query_norm="width",
        query_bias="attention_bias",
        output_bias="attention_bias",
        mixture="all",
    ),
    "opt": replace(
        _GPT,
        positions=2,
        query_bias="enable_bias",
        output_bias="enable_bias",
        inner_bias="enable_bias",
    ),
    "phi": Family(
        gated=False,
        norms=1,
        norm_bias=True,
        query_bias=True,
        output_bias=True,
        inner_bias=True,
        head_bias=True,
    ),
    "phi3": Family(),
    "phimoe": Family(
        states_kv_heads=True,
        norm_bias=True,
        query_bias="attention_bias",
        output_bias="attention_bias",
        head_bias="lm_head_bias",
        mixture="all",
    ),
    "qwen2": Family(states_kv_heads=True, query_bias=True),
    "qwen2_moe": Family(states_kv_heads=True, query_bias="qkv_bias", mixture="sparse"),
    "qwen3": Family(
        states_kv_heads=True,
        fixed_head_width=128,
        query_norm="head",
        query_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "qwen3_moe": Family(
        states_kv_heads=True,
        query_norm="head",
        query_bias="attention_bias",
        output_bias="attention_bias",
        mixture="sparse",
    ),
    "seed_oss": Family(
        states_kv_heads=True,
        fixed_head_width=128,
        query_bias="attention_bias",
        output_bias="attention_out_bias",
        inner_bias="mlp_bias",
    ),
    "smollm3": replace(_LLAMA, tied=True, states_kv_heads=True),
    "stablelm": Family(states_kv_heads=True, norm_bias=True, query_bias="use_qkv_bias"),
    "starcoder2": Family(
        states_kv_heads=True,
        gated=False,
        tied=True,
        norm_bias=True,
        query_bias="use_bias",
        output_bias="use_bias",
        inner_bias="use_bias",
    ),
}

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types whose blocks are those of another one, as their authors' own code says."""

BIAS_DEFAULTS = {
    ("glm", "attention_bias"): True,
    ("glm4", "attention_bias"): True,
    ("seed_oss", "attention_bias"): True,
    ("gpt_neox", "attention_bias"): True,
    ("opt", "enable_bias"): True,
    ("qwen2_moe", "qkv_bias"): True,
    ("starcoder2", "use_bias"): True,
}
"""By type and key, the defaults of what `Bias` names that are not false."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
}
"""Names that families give to the same size; two that differ contradict each other."""
