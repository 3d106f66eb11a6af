"""Tiny models with random weights, one per family of transformers' own classes, to drill with.

A training step of each takes a fraction of a second on one core, has no dropout, and gives the same
bits when it is repeated. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import GuardError
from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    Inputs = dict[str, Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
        model: With the weights that the training starts from.
        batch: Inputs of a step, the same for the same step.
        loss: Scalar loss of the model for such inputs.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]

    def under_autocast(self, dtype: torch.dtype = torch.bfloat16) -> Case:
        """The same with its forward pass under autocast."""

        def loss(model: nn.Module, inputs: Any) -> Tensor:
            with torch.autocast("cpu", dtype):
                return self.loss(model, inputs)

        return Case(self.model, self.batch, loss)


_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGES: dict[str, Any] = {"num_labels": 10, "num_channels": 3}

_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", _TEXT),
    "llama-eager": ("Llama", "ForCausalLM", {**_TEXT, "attn_implementation": "eager"}),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {
            "vocab_size": 128,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral": ("Mixtral", "ForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "qwen2-moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {**_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-moe": ("Qwen3Moe", "ForCausalLM", {**_TEXT, **_EXPERTS}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": 128,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": ("Bert", "ForSequenceClassification", {**_TEXT, **_NO_DROPOUT, "num_labels": 5}),
    "gemma": ("Gemma", "ForCausalLM", _TEXT),
    "vit": (
        "ViT",
        "ForImageClassification",
        {**_TEXT, **_NO_DROPOUT, **_IMAGES, "image_size": 32, "patch_size": 8},
    ),
    "convnext": (
        "ConvNext",
        "ForImageClassification",
        {**_IMAGES, "hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2},
    ),
    "resnet": (
        "ResNet",
        "ForImageClassification",
        {
            **_IMAGES,
            "embedding_size": 16,
            "hidden_sizes": [32, 64],
            "depths": [1, 1],
            "layer_type": "bottleneck",
        },
    ),
    "mamba": (
        "Mamba",
        "ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "use_mambapy": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def _transformers_case(
    kind: str, head: str, settings: dict[str, Any], *, dtype: torch.dtype = torch.float32
) -> Case:
    """A case of transformers' own classes for one kind of model."""
    require("train", f"the model {kind} of the zoo", "transformers")
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**settings))
    model.to(dtype).train()

    def batch(step: int) -> Inputs:
        draw = torch.Generator().manual_seed(1000 + step)
        if "num_channels" in settings:
            images = torch.randn(4, 3, 32, 32, generator=draw).to(dtype)
            return {"pixel_values": images, "labels": torch.randint(10, (4,), generator=draw)}
        ids = torch.randint(3, settings["vocab_size"], (4, 32), generator=draw)
        if "num_labels" in settings:
            labels = torch.randint(settings["num_labels"], (4,), generator=draw)
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": ids, "labels": ids}

    def loss(model: nn.Module, inputs: Inputs) -> Tensor:
        found: Tensor = model(**inputs).loss
        return found

    return Case(model, batch, loss)


FAMILIES: dict[str, Callable[..., Case]] = {
    name: partial(_transformers_case, kind, head, settings)
    for name, (kind, head, settings) in _CLASSES.items()
}
"""By name; each takes the weights' ``dtype``."""


def families(names: Iterable[str]) -> dict[str, Callable[..., Case]]:
    """Cases by name, ``all`` of them, or ``FAMILIES`` of a Python file.

    Raises:
        GuardError: For a name that is no family, or a file without any.
    """
    found: dict[str, Callable[..., Case]] = {}
    for name in names:
        if name.endswith(".py"):
            path = Path(name)
            if not path.is_file():
                raise GuardError(f"--zoo {name}: there is no such file")
            own = run_path(name).get("FAMILIES")
            if not isinstance(own, dict) or not own:
                raise GuardError(
                    f"--zoo {name} has no FAMILIES: write FAMILIES = {{'name': build}}, where "
                    "build(dtype=...) returns an outlast.guard.inject.zoo.Case"
                )
            found |= own
        elif name == "all":
            found |= FAMILIES
        elif name in FAMILIES:
            found[name] = FAMILIES[name]
        else:
            near = difflib.get_close_matches(name, FAMILIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(FAMILIES)
            raise GuardError(f"--zoo {name} is not all, a Python file or one of {known}{hint}")
    return found
