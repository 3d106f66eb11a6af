"""Configs of Hugging Face: sizes, parameter counts, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.errors import PlanError
from outlast.plan.huggingface import FAMILIES, MODELS, published, transformer_of

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT_2 = {
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}

PLAIN = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SMALL = {**PLAIN, "num_key_value_heads": 2, "intermediate_size": 96}
MIXTURE = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
INTERLEAVED = {
    **SMALL,
    "head_dim": 16,
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "use_qk_norm": True,
}
SHARED = {key: value for key, value in LATENT.items() if "lora" not in key}
VARIANTS = {
    "bloom": [PLAIN],
    "codegen": [{**PLAIN, "rotary_dim": 16, "n_inner": 96}],
    "deepseek_v2": [{**LATENT, "q_lora_rank": 24}],
    "deepseek_v3": [{**LATENT, "q_lora_rank": None}],
    "dots1": [SHARED],
    "ernie4_5": [{**SMALL, "head_dim": 16}, {**SMALL, "use_bias": True}],
    "exaone4": [{**SMALL, "head_dim": 16}],
    "falcon": [
        {**PLAIN, "bias": True},
        {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128},
        {**PLAIN, "multi_query": False, "parallel_attn": False},
    ],
    "glm": [{**SMALL, "head_dim": 16}, {**SMALL, "attention_bias": False}],
    "glm4": [{**SMALL, "head_dim": 16}],
    "glm4_moe": [
        {**SHARED, "head_dim": 16, "attention_bias": True},
        {**SHARED, "use_qk_norm": True},
    ],
    "gpt2": [{**PLAIN, "n_positions": 128}, {**PLAIN, "n_positions": 128, "n_inner": 96}],
    "gpt_bigcode": [
        {**PLAIN, "n_positions": 128},
        {**PLAIN, "n_positions": 128, "multi_query": False},
    ],
    "gpt_neo": [{**PLAIN, "max_position_embeddings": 128, "attention_types": [[["global"], 3]]}],
    "gpt_neox": [{**PLAIN, "intermediate_size": 96, "attention_bias": False}],
    "gpt_oss": [{**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}],
    "gptj": [{**PLAIN, "rotary_dim": 16}],
    "granitemoe": [{**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}],
    "llama4_text": [
        {**INTERLEAVED, "interleave_moe_layer_step": 2},
        {**INTERLEAVED, "attention_bias": True},
    ],
    "llama": [
        {**SMALL, "attention_bias": True, "mlp_bias": True},
        {**SMALL, "tie_word_embeddings": True, "head_dim": 32},
    ],
    "mixtral": [{**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}],
    "mpt": [PLAIN],
    "olmoe": [{**SMALL, "num_experts": 8, "num_experts_per_tok": 2}],
    "opt": [
        {**PLAIN, "ffn_dim": 128, "max_position_embeddings": 128, "word_embed_proj_dim": 64},
        {
            **PLAIN,
            "ffn_dim": 128,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
            "enable_bias": False,
        },
    ],
    "phimoe": [
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **SMALL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ],
    "seed_oss": [{**SMALL, "head_dim": 16}, {**SMALL, "attention_out_bias": True}],
    "phi": [{**SMALL, "qk_layernorm": True}, SMALL],
    "qwen2_moe": [
        {**MIXTURE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
        {**MIXTURE, "shared_expert_intermediate_size": 48, "qkv_bias": False},
    ],
    "qwen3_moe": [{**MIXTURE, "decoder_sparse_step": 2, "head_dim": 32}],
    "stablelm": [{**SMALL, "qk_layernorm": True, "use_qkv_bias": True}, SMALL],
    "cohere": [{**SMALL, "use_qk_norm": True}, SMALL],
}


def built_parameters(kind: str, settings: dict[str, object]) -> tuple[int, dict[str, object]]:
    """What transformers builds of a config, on the meta device, and the whole config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **settings)
    config.pad_token_id = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()), config.to_dict()


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_parameters_are_those_that_transformers_builds(kind: str) -> None:
    for settings in VARIANTS.get(kind, [SMALL]):
        expected, whole = built_parameters(kind, settings)
        assert transformer_of({"model_type": kind, **settings}).parameters == expected
        # A config that transformers wrote, with all its defaults, says the same.
        assert transformer_of(whole).parameters == expected


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_models_have_the_published_number_of_parameters(name: str) -> None:
    assert published(name).parameters == pytest.approx(MODELS[name].parameters, rel=0.01)
    assert MODELS[name].source


def test_config_files_are_read_from_a_file_or_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    model = transformer_of(tmp_path)
    assert model == transformer_of(path)
    assert model.name == tmp_path.name
    assert model.parameters == 8_030_261_248
    assert (model.kv_heads, model.head_width, model.gated, model.tied) == (8, 128, True, False)
    assert transformer_of(GPT_2).parameters == 124_439_808


def test_active_parameters_of_mixtures_are_those_of_the_chosen_experts() -> None:
    model = published("qwen3-30b-a3b")
    # Alibaba states 3.3 billion activated with both embeddings; one of them is not multiplied.
    embedding = model.embedding_parameters
    assert model.active_parameters + embedding == pytest.approx(3.35e9, rel=0.01)
    assert published("mixtral-8x7b").active_parameters == pytest.approx(12.75e9, rel=0.01)


def test_latent_attention_counts_both_products_of_its_scores() -> None:
    model = published("deepseek-v3")
    scores = 4 * model.query_width
    assert scores == 2 * 128 * (192 + 128)
    assert (model.dense_layers, model.mixture_layers) == (3, 58)
    assert model.active_parameters + model.embedding_parameters == pytest.approx(37.6e9, rel=0.01)


def test_text_part_of_a_model_with_pictures_says_so() -> None:
    inner = {**SMALL, "model_type": "gemma3_text", "head_dim": 32}
    model = transformer_of({"model_type": "gemma3", "text_config": inner}, "gemma")
    assert model.name == "gemma (text part)"
    assert model.layers == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "mamba2"}, "model_type = 'mamba2'"),
        ({"model_type": None}, "no model_type"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"hidden_size": 4096.0}, "hidden_size = 4096.0"),
        ({"n_embd": 1024}, "contradict each other"),
        ({"num_attention_heads": 7}, "no multiple of num_attention_heads = 7"),
        ({"num_key_value_heads": 5}, "kv_heads = 5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"is_encoder_decoder": True}, "encoder and a decoder"),
    ],
)
def test_wrong_configs_are_refused_in_a_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        transformer_of({**LLAMA_3_8B, **changes})
    assert "\n" not in str(caught.value)


def test_families_with_a_default_of_their_own_must_state_their_key_heads() -> None:
    absent = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    with pytest.raises(PlanError, match="num_key_value_heads"):
        transformer_of({**absent, "model_type": "mistral"})
    assert transformer_of({**absent, "model_type": "llama"}).kv_heads == 4
    stated = {**absent, "num_key_value_heads": None, "model_type": "mistral"}
    assert transformer_of(stated).kv_heads == 4


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_files_that_hold_no_config_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"config\.json"):
        transformer_of(path)
    with pytest.raises(PlanError, match="cannot be read"):
        transformer_of(tmp_path / "absent.json")


def test_unknown_published_names_suggest_near_ones() -> None:
    with pytest.raises(PlanError, match="did you mean llama-3-8b"):
        published("llama3-8b")
    assert published("LLaMA-3-8B") == published("llama-3-8b")


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, outlast.plan.huggingface, outlast.plan.cluster_file, "
        "outlast.plan.constraints, outlast.plan.api; "
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("kind", "changes", "window"),
    [
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {}, 4096),
        ("gpt_oss", {}, 128),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 1024}, 1024),
        ("olmo3", {"layer_types": ["full_attention"] * 3}, 0),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, 0),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("gpt_neo", {"max_position_embeddings": 128, "attention_types": [[["global"], 3]]}, 0),
        ("gpt_neo", {"max_position_embeddings": 128, "window_size": 64}, 64),
        ("llama", {}, 0),
    ],
)
def test_windows_that_are_ignored_are_said(kind: str, changes: dict, window: int) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "gpt_oss" else {}
    model = transformer_of({**SMALL, "model_type": kind, **experts, **changes})
    said = [f"its attention windows of {window:,} tokens are ignored"] if window else []
    assert [note.partition(":")[0] for note in model.notes] == said


def test_other_parts_that_are_ignored_are_said() -> None:
    inner = {**SMALL, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 512}
    pictures = transformer_of({"model_type": "gemma3", "text_config": inner})
    assert "text part" in pictures.notes[0]
    assert "512 tokens" in pictures.notes[1]
    small = {**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}}
    quantised = transformer_of(small)
    assert "quantization_config is ignored" in quantised.notes[0]
    # Notes are no sizes: the model is the same one, and can still be a key.
    assert quantised == transformer_of(LLAMA_3_8B)
    assert len({quantised, transformer_of(LLAMA_3_8B)}) == 1
    assert transformer_of(LLAMA_3_8B).notes == ()


@pytest.mark.parametrize(
    ("kind", "changes", "dense"),
    [
        ("llama4_text", {**INTERLEAVED, "interleave_moe_layer_step": 2}, (0, 2)),
        ("llama4_text", {**INTERLEAVED, "moe_layers": [0]}, (1, 2)),
        ("deepseek_v3", {**LATENT, "first_k_dense_replace": 0, "moe_layer_freq": 2}, (1,)),
        ("qwen3_moe", {**MIXTURE, "decoder_sparse_step": 2}, (0, 2)),
        ("qwen3_moe", {**MIXTURE, "mlp_only_layers": [2]}, (2,)),
        # The first ones, which goes without saying.
        ("qwen3_moe", {**MIXTURE, "mlp_only_layers": [0, 1]}, ()),
        ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}, ()),
    ],
)
def test_blocks_without_experts_keep_their_places(
    kind: str, changes: dict, dense: tuple[int, ...]
) -> None:
    model = transformer_of({**changes, "model_type": kind})
    assert model.dense_blocks == dense
    wanted = dense or range(model.dense_layers)
    assert [block for block, has in enumerate(model.has_experts) if not has] == [*wanted]
    assert sum(model.has_experts) == model.mixture_layers < model.layers


@pytest.mark.parametrize(
    ("blocks", "said"),
    [((2, 1), "rising numbers"), ((1, 3), "below 3"), ((1,), "are 1, and dense_layers = 2")],
)
def test_places_of_dense_blocks_are_checked(blocks: tuple[int, ...], said: str) -> None:
    model = transformer_of({**MIXTURE, "model_type": "qwen3_moe", "mlp_only_layers": [0, 2]})
    with pytest.raises(PlanError, match=said):
        replace(model, dense_blocks=blocks)


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({}, 8192),
        ({"attention_chunk_size": 4096}, 4096),
        ({"attention_chunk_size": None}, 0),
        ({"layer_types": ["full_attention"] * 3}, 0),
        ({"layer_types": ["chunked_attention"] * 3}, 8192),
    ],
)
def test_chunks_of_attention_that_are_ignored_are_said(changes: dict, chunk: int) -> None:
    model = transformer_of({**INTERLEAVED, "model_type": "llama4_text", **changes})
    said = [f"its attention chunks of {chunk:,} tokens are ignored"] if chunk else []
    assert [note.partition(":")[0] for note in model.notes] == said


@pytest.mark.parametrize("key", ["num_local_experts", "n_routed_experts", "moe_intermediate_size"])
def test_experts_of_a_type_without_them_are_refused(key: str) -> None:
    with pytest.raises(PlanError, match=f"{key} = 8 of llama: model_type = 'llama' has no experts"):
        transformer_of({**LLAMA_3_8B, key: 8})
    assert transformer_of({**LLAMA_3_8B, key: None}) == transformer_of(LLAMA_3_8B)


def test_models_as_large_as_their_authors_say() -> None:
    scout = {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "vocab_size": 202048,
            "tie_word_embeddings": False,
        },
    }
    # "17 billion active parameters with 16 experts ... 109 billion": with what sees pictures.
    found = transformer_of(scout)
    assert found.parameters == pytest.approx(108e9, rel=0.01)
    # Our own count of what is in use has no embedding, of which a token reads one row.
    assert found.active_parameters + found.embedding_parameters == pytest.approx(17e9, rel=0.02)
    kimi = {
        **MODELS["deepseek-v3"].config,
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    }
    # "32 billion activated parameters and 1 trillion total parameters".
    found = transformer_of(kimi)
    assert found.parameters == pytest.approx(1.03e12, rel=0.01)
    assert found.active_parameters == pytest.approx(32e9, rel=0.05)
