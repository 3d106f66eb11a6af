"""From the job's [model] section to an nn.Module, and facts about it.

A model maps token ids (batch, sequence) to logits (batch, sequence, vocabulary), either as its
result or as the result's ``logits``, as Hugging Face's causal language models do.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from outlast.job import Job, ModelSection


@dataclass(frozen=True)
class ModelFacts:
    """What must be known of a model before it is built; None where it cannot be known.

    Attributes:
        vocabulary_size: Number of token ids.
        positions: Longest sequence.
        heads: Attention heads.
        key_value_heads: Key and value heads.
        layers: Transformer blocks.
        tied: Whether input and output embedding are one tensor.
        dropout: Names of settings that are dropout probabilities above 0.
    """

    vocabulary_size: int | None = None
    positions: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    layers: int | None = None
    tied: bool = False
    dropout: tuple[str, ...] = ()


def load_config(model: ModelSection) -> PretrainedConfig | None:
    """The Hugging Face config that [model] describes, or None for a module function.

    Raises:
        OutlastError: When the file or directory is missing or is no known config.
    """
    if model.module:
        return None
    from transformers import AutoConfig

    if model.settings:
        settings = dict(model.settings)
        kind = settings.pop("model_type")
        try:
            config = AutoConfig.for_model(kind, **settings)
        except (ValueError, TypeError) as error:
            raise OutlastError(
                f"[model.settings] is no {kind} config: {_first_line(error)}"
            ) from None
    else:
        name, place = _place(model)
        if not place.exists():
            raise OutlastError(f'model.{name} = "{place}" does not exist')
        try:
            config = AutoConfig.from_pretrained(str(place), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise OutlastError(
                f'model.{name} = "{place}" holds no Hugging Face config: {_first_line(error)}'
            ) from None
    # A key-value cache serves generation only and costs memory in training.
    config.use_cache = False
    return config


def _place(model: ModelSection) -> tuple[str, Path]:
    if model.config:
        return "config", Path(model.config)
    assert model.directory is not None
    return "directory", Path(model.directory)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]


def facts_of(config: PretrainedConfig | None) -> ModelFacts:
    """Facts that a Hugging Face config states."""
    if config is None:
        return ModelFacts()
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    dropout = tuple(
        name
        for name, value in sorted(text.to_dict().items())
        if ("drop" in name or "pdrop" in name) and isinstance(value, float) and value > 0
    )
    return ModelFacts(
        vocabulary_size=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        layers=getattr(text, "num_hidden_layers", None),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        dropout=dropout,
    )


def build_model(job: Job) -> nn.Module:
    """Build the job's model in fp32 on the CPU; its weights depend on run.seed alone.

    Raises:
        OutlastError: When the model cannot be built or its weights cannot be loaded.
    """
    torch.manual_seed(job.run.seed)
    model = job.model
    if model.module:
        return _from_function(model)
    from transformers import AutoModelForCausalLM

    config = load_config(model)
    assert config is not None
    settings = {"attn_implementation": model.attention, "dtype": torch.float32}
    try:
        if _wants_weights(model):
            built = AutoModelForCausalLM.from_pretrained(
                model.directory, config=config, local_files_only=True, **settings
            )
        else:
            built = AutoModelForCausalLM.from_config(config, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise OutlastError(f"the model cannot be built: {_first_line(error)}") from None
    assert isinstance(built, nn.Module)
    return built.train()


def _wants_weights(model: ModelSection) -> bool:
    if model.initialize == "scratch" or not model.directory:
        return False
    has_weights = any(Path(model.directory).glob("*.safetensors"))
    if model.initialize == "pretrained" and not has_weights:
        raise OutlastError(
            f'model.initialize = "pretrained", but model.directory = "{model.directory}" holds no '
            "*.safetensors file"
        )
    return has_weights


def _from_function(model: ModelSection) -> nn.Module:
    assert model.module is not None
    module_name, _, function_name = model.module.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise OutlastError(f'model.module = "{model.module}" cannot be imported: {error}') from None
    try:
        built = function(**model.arguments)
    except TypeError as error:
        raise OutlastError(
            f'model.module = "{model.module}" cannot be called with model.arguments = '
            f"{model.arguments}: {error}"
        ) from None
    if not isinstance(built, nn.Module):
        raise OutlastError(
            f'model.module = "{model.module}" returned a {type(built).__name__}, not an nn.Module'
        )
    return built.train()


def logits_of(output: Any) -> torch.Tensor:
    """The logits (batch, sequence, vocabulary) in a model's output."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert isinstance(logits, torch.Tensor)
    return logits


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, sequence_length: int, config: Any = None) -> float:
    """Floating-point operations per trained token, forward and backward.

    6 N + 12 L h s (Kaplan et al. 2020; Narayanan et al. 2021, without the causal halving), where N
    counts the parameters of matrices that are multiplied (an input embedding is only looked up).
    """
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.ndim >= 2 and (id(parameter) not in lookups or id(parameter) in products)
    )
    attention = 0.0
    if config is not None:
        text = config.get_text_config()
        layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
        attention = 12.0 * layers * width * sequence_length
    return 6.0 * matrices + attention


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model: the elements of its longest nn.ModuleList, by name."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda item: len(item[1]))
    return {f"{name}.{index}": block for index, block in enumerate(longest)}
