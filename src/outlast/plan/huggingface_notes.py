"""What a config.json says that a `Transformer` does not hold, so that figures can say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.errors import PlanError
from outlast.plan.huggingface_families import FAMILIES

_WINDOWS = {
    "cohere2": 4096,
    "exaone4": 4096,
    "gemma2": 4096,
    "gemma3_text": 4096,
    "gpt_oss": 128,
    "mistral": 4096,
    "olmo3": 4096,
}
"""By type, the tokens of a window where the config does not say (transformers 5)."""

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
        window, limited = table.get("sliding_window", _WINDOWS.get(kind)), "sliding_attention"
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
