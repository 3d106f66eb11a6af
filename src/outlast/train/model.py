"""From the job's [model] section to an nn.Module, and facts about it.

A model maps token ids (batch, sequence) to logits (batch, sequence, vocabulary), either as its
result or as the result's ``logits``, as Hugging Face's causal language models do.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import OutlastError
from outlast.extras import require
from outlast.job.checks import NO_MATRICES
from outlast.tensorize.network import Route, lower
from outlast.tensorize.parameters import StructuredPart, structured_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PretrainedConfig

    from outlast.job import Job, ModelSection

_LONGEST_REASON = 300


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model before it is built; None where they cannot be known.

    Attributes:
        model_type: Hugging Face's name of the architecture.
        vocabulary_size: Number of token ids.
        positions: Longest sequence.
        heads: Attention heads.
        key_value_heads: Key and value heads.
        layers: Transformer blocks.
        tied: Whether input and output embedding are one tensor.
        dropout: Names of settings that are dropout probabilities above 0.
    """

    model_type: str | None = None
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
    require("train", "outlast train", "transformers")
    from transformers import AutoConfig

    if model.settings:
        config = _config_in_place(model)
    else:
        name = "config" if model.config else "directory"
        place = Path(model.config or model.directory or "")
        if not place.exists():
            raise OutlastError(
                f'model.{name} = "{place}" does not exist; give a config.json or the folder of a '
                "Hugging Face model"
            )
        if not (place.is_file() or place.is_dir()):
            raise OutlastError(f'model.{name} = "{place}" is a pipe or a device; give a file')
        try:
            config = AutoConfig.from_pretrained(str(place), local_files_only=True)
        except Exception as error:  # the config classes raise errors of many kinds
            raise OutlastError(
                f'model.{name} = "{place}" holds no Hugging Face config: {_reason(error)}'
            ) from None
    # A key-value cache serves generation only and costs memory in training.
    config.use_cache = False
    return config


def _config_in_place(model: ModelSection) -> PretrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings = dict(model.settings)
    kind = settings.pop("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise OutlastError(
            f'model.settings.model_type = "{kind}" is no model type that transformers knows'
            f"{_did_you_mean(str(kind), CONFIG_MAPPING_NAMES)}"
        )
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # the config classes raise errors of many kinds
        raise OutlastError(f"[model.settings] is no {kind} config: {_reason(error)}") from None
    # Hugging Face keeps a key that it does not know as one more attribute, and says nothing.
    usual = type(config)()
    unknown = [key for key in settings if hasattr(config, key) and not hasattr(usual, key)]
    if unknown:
        known = [name for name in dir(usual) if not name.startswith("_")]
        named = "; ".join(
            f"model.settings.{key} is not known{_did_you_mean(key, known)}" for key in unknown
        )
        raise OutlastError(f"[model.settings] is no {kind} config: {named}")
    return config


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _reason(error: BaseException) -> str:
    """Message of a library's error in one line; a bare key or number needs the error's name."""
    said = " ".join(str(error).split())
    if len(said) > _LONGEST_REASON:
        said = said[: _LONGEST_REASON - 3] + "..."
    clear = isinstance(error, (OSError, ValueError, RuntimeError)) and said
    return said if clear else f"{type(error).__name__}: {said}"


def facts_of(config: PretrainedConfig | None) -> ModelFacts:
    """Facts that a Hugging Face config states."""
    if config is None:
        return ModelFacts()
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    dropout = tuple(
        name
        for name, value in sorted(text.to_dict().items())
        if "drop" in name
        # These belong to heads for other tasks, which a causal language model has not.
        and not name.startswith(("summary_", "classifier_"))
        and isinstance(value, float)
        and value > 0
    )
    return ModelFacts(
        model_type=text.model_type,
        vocabulary_size=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        layers=getattr(text, "num_hidden_layers", None),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        dropout=dropout,
    )


def build_model(job: Job, *, drawn: bool = True) -> nn.Module:
    """Build the job's model in fp32 on the CPU; its weights depend on run.seed alone.

    Args:
        job: Checked.
        drawn: Whether it gets its first weights; False leaves whatever is in memory, for a state
            that is restored as a whole. A model from a function has its own way.

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
        if not drawn:
            return _without_weights(config, settings).train()
        if wants_weights(model):
            built, found = AutoModelForCausalLM.from_pretrained(
                model.directory,
                config=config,
                local_files_only=True,
                output_loading_info=True,
                **settings,
            )
            if missing := sorted(found["missing_keys"]):
                # Hugging Face would fill them with random numbers and train on.
                raise OutlastError(
                    f'model.directory = "{model.directory}" holds no weights for {len(missing)} '
                    f"tensors of the model, such as {missing[0]}; complete the *.safetensors files "
                    'or set model.initialize = "scratch"'
                )
        else:
            built = AutoModelForCausalLM.from_config(config, **settings)
    except OutlastError:
        raise
    except Exception as error:  # the model classes raise errors of many kinds
        raise OutlastError(f"the model cannot be built: {_reason(error)}") from None
    assert isinstance(built, nn.Module)
    return built.train()


def _without_weights(config: PretrainedConfig, settings: dict[str, Any]) -> nn.Module:
    """A model of this config with whatever is in memory as its weights.

    Buffers get their values, since some are in no state_dict. If a class with code of its own
    draws such a buffer at random, it could differ from that of a model with first weights, before
    which more was drawn.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import guard_torch_init_functions

    done: Any = nn.Parameter
    done._is_hf_initialized = True
    try:
        with guard_torch_init_functions():
            built = AutoModelForCausalLM.from_config(config, **settings)
    finally:
        del done._is_hf_initialized
    assert isinstance(built, nn.Module)
    return built


def load_code(model: ModelSection) -> None:
    """Import what builds the model, so that processes forked later need not do so again."""
    from transformers import AutoModelForCausalLM

    config = load_config(model)
    # A type without a class of its own is built, or refused, by the processes.
    with contextlib.suppress(KeyError):
        AutoModelForCausalLM._model_mapping[type(config)]


def wants_weights(model: ModelSection) -> bool:
    """Return whether the weights of model.directory are loaded.

    Raises:
        OutlastError: When they cannot be, or are asked for and not there.
    """
    if model.initialize == "scratch" or not model.directory:
        return False
    has_weights = any(Path(model.directory).glob("*.safetensors"))
    if not has_weights and any(Path(model.directory).glob("*.bin")):
        raise OutlastError(
            f'model.directory = "{model.directory}" holds *.bin weights, and only *.safetensors '
            'can be read; convert them, or set model.initialize = "scratch"'
        )
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
        # Only the call itself: a TypeError from inside the function is the author's to see whole.
        with contextlib.suppress(ValueError):  # something built in does not say what it takes
            inspect.signature(function).bind(**model.arguments)
    except TypeError as error:
        raise OutlastError(
            f'model.module = "{model.module}" cannot be called with model.arguments = '
            f"{model.arguments}: {error}"
        ) from None
    built = function(**model.arguments)
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
    counts the parameters of matrices that are multiplied (an input embedding is only looked up). Of
    a structured layer it counts `products_per_token` in place of the factors.
    """
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    structured = list(structured_layers(model))
    factors = {id(factor) for layer in structured for factor in layer.parameters}
    matrices = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.ndim >= 2
        and id(parameter) not in factors
        and (id(parameter) not in lookups or id(parameter) in products)
    )
    matrices += sum(products_per_token(layer) for layer in structured)
    attention = 0.0
    if config is not None:
        text = config.get_text_config()
        layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
        attention = 12.0 * layers * width * sequence_length
    return 6.0 * matrices + attention


def products_per_token(layer: StructuredPart) -> int:
    """Multiplications of one token's features by a structured layer, by the way with the fewest.

    Ways are two products of merged cores and, of linear forms, the rebuilt dense weight. Merging is
    left out, since it does not depend on the number of tokens. Where more is computed because that
    is faster, it is no more useful. An embedding only looks up.
    """
    network = layer.network
    if layer.looks_up:
        return 0
    dense = network.in_features * network.out_features
    if layer.module.form == "sltrain":  # what is sparse cannot be left apart
        return dense
    count = len(network.cores)
    cuts = [Route((left, count - left)) for left in range(1, count)]
    found = [
        sum(stage.b * stage.m * stage.k * stage.f for stage in lower(network, cut).stages)
        for cut in cuts
    ]
    return min(found if layer.module.form in NO_MATRICES else [*found, dense])


@dataclass(frozen=True)
class ModelSize:
    """Parameters (tied ones once) and floating-point operations per trained token of a model."""

    parameters: int
    flops_per_token: float


def size_of(model: nn.Module, sequence_length: int) -> ModelSize:
    """The size of a whole model, to be taken before it is sharded or cut."""
    flops = flops_per_token(model, sequence_length, getattr(model, "config", None))
    return ModelSize(parameter_count(model), flops)


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


class Elsewhere(nn.Module):
    """Stands for a block of another stage: returns its first argument."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand `hidden_states` (batch, sequence, width) on."""
        return hidden_states


def held_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """Blocks of `model` with their dropout index (from 1), without those held elsewhere."""
    return {
        index + 1: block
        for index, block in enumerate(blocks_of(model).values())
        if not isinstance(block, Elsewhere)
    }
