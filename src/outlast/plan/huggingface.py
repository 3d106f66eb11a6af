"""Models from a Hugging Face config.json or by name, without transformers or torch.

    transformer_of(Path("Meta-Llama-3-8B/config.json")).parameters    # 8030261248

Sizes are the config's; what a model type leaves unsaid is in `facts/families.toml`.

A config.json holds sizes; whether a block has biases, two or three matrices, or four norms is in
the code of its type. One `Family` per type states it, checked against the sizes of transformers'
own models on the meta device (tests/plan/test_plan_huggingface.py).

    published("llama-3.1-405b").parameters    # 405853388800

Each entry is the model's own config and the parameter count that its authors state; a test holds
that the sizes give that count within 1 %.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from outlast.errors import PlanError
from outlast.paths import read_text
from outlast.plan.facts import facts
from outlast.plan.transformer import Transformer

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


FAMILIES: dict[str, Family] = {
    kind: Family(**table) for kind, table in facts("families")["families"].items()
}

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types whose blocks are those of another one, as their authors' own code says."""


SYNONYMS: dict[str, tuple[str, ...]] = {
    size: tuple(names) for size, names in facts("families")["synonyms"].items()
}
"""Names that families give to the same size; two that differ contradict each other."""


_CHUNKED = {"llama4_text": 8192}
"""By type, the tokens of a chunk that its blocks with rotated positions do not see beyond."""
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Types whose windows are off unless `use_sliding_window` is true."""

_EXPERT_KEYS = (
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size"),
    "moe_num_experts",
)


def notes_of(table: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """One sentence for each thing that is left out of a model's figures.

    Args:
        table: Content of the config.json, or of its text part.
        kind: Its model type, one of `FAMILIES`.
    """
    notes = []
    if window := _window(table, kind):
        what = "chunks" if kind in _CHUNKED else "windows"
        notes.append(
            f"its attention {what} of {window:,} tokens are ignored: attention is counted in "
            "full, which is too much time and memory for longer sequences"
        )
    if table.get("quantization_config"):
        notes.append(
            "its quantization_config is ignored: all weights are counted in the precision of the "
            "run"
        )
    if table.get("num_nextn_predict_layers"):
        notes.append(
            f"its num_nextn_predict_layers = {table['num_nextn_predict_layers']} layers that "
            "predict further tokens are ignored"
        )
    return tuple(notes)


def _window(table: Mapping[str, Any], kind: str) -> int:
    """Tokens that some block looks back at most; 0 where all blocks see everything."""
    if kind == "gpt_neo":
        local = "local" in str(table.get("attention_types", table.get("attention_layers", "local")))
        return int(table.get("window_size") or 256) if local else 0
    if kind in _SWITCHED and not table.get("use_sliding_window"):
        return 0
    if kind in _CHUNKED:
        window, limited = table.get("attention_chunk_size", _CHUNKED[kind]), "chunked_attention"
    else:
        usual = facts("families")["windows"].get(kind)
        window, limited = table.get("sliding_window", usual), "sliding_attention"
    kinds = table.get("layer_types")
    if isinstance(kinds, list) and limited not in kinds:
        return 0
    whole = isinstance(window, int) and not isinstance(window, bool)
    return window if whole and window > 0 else 0


def refuse_experts(table: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse experts of a type that has none.

    Raises:
        PlanError: The config has such a key; planned without its experts, every figure is wrong.
    """
    if FAMILIES[kind].mixture != "none":
        return
    for key in _EXPERT_KEYS:
        if table.get(key) not in (None, False, 0, 1):
            known = ", ".join(
                sorted(k for k, family in FAMILIES.items() if family.mixture != "none")
            )
            raise PlanError(
                f"{key} = {table[key]!r} of {name}: model_type = {kind!r} has no experts; remove "
                f"it, or give the type of a mixture: {known}"
            )


_TEXT_PART = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Types with a text model inside, and the type of that."""


@dataclass(frozen=True, slots=True)
class _Config:
    """A config's table with its name, model type, conventions, and what is left out of it."""

    table: Mapping[str, Any]
    name: str
    kind: str
    family: Family
    notes: tuple[str, ...] = ()

    def size(self, field: str, *, default: int | None = None, least: int = 1) -> int:
        """A size by any of its names.

        Raises:
            PlanError: Missing without a default, no whole number, or two names that disagree.
        """
        names = SYNONYMS.get(field, (field,))
        given = {key: self.table[key] for key in names if self.table.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PlanError(
                    f"{key} = {value!r} of {self.name}: give a whole number of at least {least}"
                )
        if len(set(given.values())) > 1:
            said = " and ".join(f"{key} = {value}" for key, value in given.items())
            raise PlanError(f"{said} of {self.name} contradict each other: keep one")
        if given:
            return int(next(iter(given.values())))
        if default is None:
            raise PlanError(
                f"{self.name} (model_type {self.kind!r}) has no {names[0]}: add it to the config"
            )
        return default

    def flag(self, key: str, default: bool) -> bool:
        """A true or false; null counts as absent."""
        value = self.table.get(key)
        if value is not None and not isinstance(value, bool):
            raise PlanError(f"{key} = {value!r} of {self.name}: give true or false")
        return default if value is None else value

    def named(self, key: str) -> list[int]:
        """Blocks by their numbers; null counts as none."""
        value = self.table.get(key) or []
        if not isinstance(value, list):
            raise PlanError(f"{key} = {value!r} of {self.name}: give a list of numbers")
        return value

    def bias(self, bias: Bias) -> bool:
        """True if a bias is there."""
        if isinstance(bias, bool):
            return bias
        defaults = facts("families")["bias_defaults"].get(self.kind, {})
        return self.flag(bias, defaults.get(bias, False))


def transformer_of(config: Mapping[str, Any] | Path | str, name: str = "") -> Transformer:
    """The sizes of a decoder-only language model.

    Parameters are exact for the known types (as transformers 5 builds them). Of a model with
    pictures or sound, only the text part is read. Sliding windows and other limits of attention are
    not expressed: attention counts over the whole sequence. `notes` says what was left out.

    Args:
        config: The content of a config.json, or the path of one or of its directory. A text is
            refused: it could be either.
        name: For people; by default the directory or the model type.

    Raises:
        PlanError: Nothing readable, an unknown model type, or sizes missing or contradictory.
    """
    if isinstance(config, Path):
        path = config / "config.json" if config.is_dir() else config
        table, name = _read(path), name or _name(path)
    elif isinstance(config, Mapping):
        table = config
    else:
        raise PlanError(f"config = {config!r} is neither a Path nor what a config.json holds")
    read = _recognised(table, name)
    attention = _latent_attention(read) if read.family.latent else _attention(read)
    sizes = attention | _feed_forward(read)
    bare = Transformer(
        name=read.name,
        layers=read.size("num_hidden_layers"),
        hidden=read.size("hidden_size"),
        vocabulary=read.size("vocab_size"),
        gated=read.family.gated,
        tied=read.flag("tie_word_embeddings", read.family.tied),
        notes=read.notes,
        **sizes,
    )
    further = _norms(read, bare) + _biases(read, bare) + _positions(read, bare)
    # Norms may have no weights at all, so this may be below the two per block that are counted.
    return replace(bare, further_parameters=further)


def _name(path: Path) -> str:
    """A model's folder is called as the model; a config of another name is one of many there."""
    return path.resolve().parent.name if path.name == "config.json" else path.name


def _read(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(read_text(path))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise PlanError(f"{path} holds no table: give a Hugging Face config.json")
    return table


def _recognised(table: Mapping[str, Any], name: str) -> _Config:
    kind = table.get("model_type")
    if not isinstance(kind, str):
        raise PlanError(
            f"{name or 'the config'} has no model_type: give a Hugging Face config.json, "
            'with for example "model_type": "llama"'
        )
    label = name or kind
    if isinstance(table.get("text_config"), Mapping):
        inner = dict(table["text_config"])
        inner.setdefault("model_type", _TEXT_PART.get(kind, kind))
        part = _recognised(inner, f"{label} (text part)")
        left = "only its text part is read: what sees pictures or hears sound is left out"
        return replace(part, notes=(left, *part.notes))
    if table.get("is_encoder_decoder"):
        raise PlanError(
            f"{label} has an encoder and a decoder, and only decoder-only models can be planned"
        )
    kind = SAME_AS.get(kind, kind)
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(
            f"model_type = {kind!r} of {label} is not known: {hint}it is not recorded which "
            "matrices, biases and norms its blocks have; describe it as an outlast.plan "
            f"Transformer, or as the nearest of {', '.join(sorted(FAMILIES))}"
        )
    refuse_experts(table, kind, label)
    return _Config(table, label, kind, FAMILIES[kind], notes_of(table, kind))


def _attention(read: _Config) -> dict[str, int]:
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    width = read.family.fixed_head_width
    if not width and read.table.get("head_dim") is None and hidden % heads:
        raise PlanError(
            f"hidden_size = {hidden} of {read.name} is no multiple of num_attention_heads = "
            f"{heads}, and no head_dim is given: add it"
        )
    return {
        "heads": heads,
        "kv_heads": _kv_heads(read, heads),
        "head_width": read.size("head_dim", default=width or hidden // heads),
    }


def _kv_heads(read: _Config, heads: int) -> int:
    old_falcon = read.kind == "falcon" and not read.flag("new_decoder_architecture", False)
    if read.kind == "gpt_bigcode" or old_falcon:
        return 1 if read.flag("multi_query", True) else heads
    names = SYNONYMS["num_key_value_heads"]
    if read.family.states_kv_heads and not any(name in read.table for name in names):
        raise PlanError(
            f"{read.name} (model_type {read.kind!r}) has no num_key_value_heads, whose default "
            f"differs between versions: add it (num_attention_heads = {heads} without groups)"
        )
    return read.size("num_key_value_heads", default=heads)


def _latent_attention(read: _Config) -> dict[str, int]:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

    Keys and values of all heads are built from a narrow latent vector. Scores read
    `qk_nope + qk_rope` features and outputs `v` features of a head; `head_width` is their mean, so
    that `4 s heads head_width` counts both products.
    """
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    latent, turned = read.size("kv_lora_rank"), read.size("qk_rope_head_dim")
    plain, value = read.size("qk_nope_head_dim"), read.size("v_head_dim")
    squeezed = read.size("q_lora_rank", default=0)
    key = plain + turned
    queries = squeezed * (hidden + heads * key) if squeezed else hidden * heads * key
    return {
        "heads": heads,
        "kv_heads": heads,
        "head_width": -(-(key + value) // 2),
        "projection_parameters": queries
        + hidden * (latent + turned)
        + latent * heads * (plain + value)
        + heads * value * hidden,
    }


def _feed_forward(read: _Config) -> dict[str, Any]:
    kind = read.family.mixture
    if kind == "none":
        return {"intermediate": _intermediate(read)}
    experts, chosen = read.size("experts"), read.size("experts_per_token")
    if kind == "all":
        return {
            "intermediate": 0,
            "experts": experts,
            "experts_per_token": chosen,
            "expert_intermediate": _intermediate(read),
        }
    key = "intermediate_size" if kind == "llama4" else "moe_intermediate_size"
    width, layers = read.size(key), read.size("num_hidden_layers")
    if kind == "llama4":
        # Mixtures with one expert for all tokens are in every n-th block, or in those named.
        every = read.size("interleave_moe_layer_step", default=1)
        mixtures = set(read.named("moe_layers") or range(every - 1, layers, every))
        shared, dense = width, [block for block in range(layers) if block not in mixtures]
    elif kind == "deepseek":
        # Dense blocks of a DeepSeek model: the first ones, and those between every n-th.
        first = read.size("first_k_dense_replace", least=0)
        every = read.size("moe_layer_freq", default=1)
        shared = read.size("n_shared_experts", default=0, least=0) * width
        dense = [block for block in range(layers) if block < first or block % every != 0]
    else:
        # Dense blocks of a Qwen mixture: those that are named, and those between every n-th.
        key = "shared_expert_intermediate_size"
        shared = read.size(key, least=0) if read.kind == "qwen2_moe" else 0
        every, named = read.size("decoder_sparse_step", default=1), read.named("mlp_only_layers")
        dense = [block for block in range(layers) if block in named or (block + 1) % every != 0]
    inner = 0
    if dense:
        inner = read.size("intermediate_size_mlp") if kind == "llama4" else _intermediate(read)
    return {
        "intermediate": inner,
        "experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "dense_layers": len(dense),
        "dense_blocks": () if dense == list(range(len(dense))) else tuple(dense),
    }


def _intermediate(read: _Config) -> int:
    hidden = read.size("hidden_size")
    if read.kind in ("mpt", "bloom"):
        # Neither has another name for its inner width.
        return read.size("expansion_ratio", default=4) * hidden
    factor = read.family.width_factor
    needed = read.kind in ("gpt_neox", "opt")
    return read.size(
        "intermediate_size", default=factor * hidden if factor and not needed else None
    )


def _norms(read: _Config, model: Transformer) -> int:
    """Weights and biases of norms beyond two weights per block and a final one."""
    family = read.family
    norms = family.norms
    if read.kind == "falcon" and read.flag("new_decoder_architecture", False):
        norms = read.size("num_ln_in_parallel_attn", default=2)
    elif read.kind == "falcon":
        norms = 1 if read.flag("parallel_attn", True) else 2
    elif read.kind == "stablelm" and read.flag("use_parallel_residual", False):
        norms = 1
    final = 0 if read.kind == "opt" and not read.flag("do_layer_norm_before", True) else 1
    each = (family.norm_weight + family.norm_bias) * model.hidden
    total = (model.layers * norms + final + family.extra_norms) * each
    # Of the same name: norms of one head here, of all heads in Cohere, without weights in Llama 4.
    asked = read.flag("use_qk_norm", False)
    if family.query_norm == "head" or (read.kind == "glm4_moe" and asked):
        total += model.layers * 2 * model.head_width
    elif (
        family.query_norm == "width"
        or (read.kind == "cohere" and asked)
        or (read.kind == "stablelm" and read.flag("qk_layernorm", False))
    ):
        total += model.layers * (model.query_width + model.kv_width)
    elif read.kind == "phi" and read.flag("qk_layernorm", False):
        total += model.layers * 4 * model.head_width
    if family.latent:
        squeezed = read.size("q_lora_rank", default=0)
        total += model.layers * (squeezed + read.size("kv_lora_rank"))
    return total - (2 * model.layers + 1) * model.hidden


def _biases(read: _Config, model: Transformer) -> int:
    family, total = read.family, 0
    if read.bias(family.query_bias):
        total += model.layers * (model.query_width + 2 * model.kv_width)
    if read.bias(family.output_bias):
        total += model.layers * model.hidden
    if read.bias(family.inner_bias):
        narrow = model.matrices - 1
        total += model.plain_layers * (narrow * model.intermediate + model.hidden)
        expert = narrow * model.expert_intermediate + model.hidden
        total += model.mixture_layers * model.experts * expert
    if read.bias(family.head_bias):
        total += model.vocabulary
    if read.kind == "gpt_oss":
        # A router's biases, and one learned sink of the attention per head.
        total += model.layers * (model.experts + model.heads)
    if read.kind == "qwen2_moe":
        # The gate of the experts that every token goes through.
        total += model.mixture_layers * model.hidden
    return total


def _positions(read: _Config, model: Transformer) -> int:
    if read.family.positions is None:
        return 0
    if read.kind == "opt" and read.size("word_embed_proj_dim", default=model.hidden) != (
        model.hidden
    ):
        raise PlanError(
            f"word_embed_proj_dim = {read.table['word_embed_proj_dim']} of {read.name} differs "
            f"from hidden_size = {model.hidden}: models with a narrower embedding cannot be planned"
        )
    return (read.size("max_position_embeddings") + read.family.positions) * model.hidden


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model that others have described.

    Attributes:
        config: As in its config.json, or as such a file would say it.
        parameters: What its authors state.
        source: Where the sizes stand.
    """

    config: Mapping[str, Any]
    parameters: float
    source: str


def published(name: str) -> Transformer:
    """The sizes of a well-known model.

    Args:
        name: For example "llama-3-8b"; letter case is ignored.

    Raises:
        PlanError: No such name; the sentence suggests near ones.
    """
    wanted = name.casefold()
    if wanted not in MODELS:
        near = difflib.get_close_matches(wanted, MODELS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(MODELS)}"
        raise PlanError(f"no published model is named {name!r}: {hint}")
    return transformer_of(MODELS[wanted].config, wanted)


MODELS: Mapping[str, PublishedModel] = {
    name: PublishedModel(**table) for name, table in facts("models").items()
}
