"""What config.json says of a model's structured layers, and building them from it.

The entry ``outlast_tensorize``::

    {"version": 1,
     "model_class": "LlamaForCausalLM",              the class in transformers
     "layers": {"model.layers.0.mlp.up_proj": {      by the module's name
         "form": "tt", "embedding": false,
         "settings": {"rank": 8, "in_modes": [...]}, the arguments of the form's class
         "network": "ab->cd; ap,pbq,qcr,rd; ..."}},  letters and sizes of all cores
     "shared": {"name of a parameter": "name of the one that it is"},
     "lines": [["gate", ["layer", ...]], ...],       of latent crossing
     "heads": {"lm_head": {"embedding": "model.embed_tokens", "bias": false}}}    tied to factors
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import forms
from outlast.tensorize.forms.tied import TiedHead, name_of, tied_heads
from outlast.tensorize.hf.plain import Structured, structured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KEY = "outlast_tensorize"
VERSION = 1

_LINEAR: dict[str, type[nn.Module]] = {
    kind.form: kind
    for kind in (
        forms.LowRankLinear,
        forms.BottleneckLinear,
        forms.LatentLinear,
        forms.SparseLowRankLinear,
        forms.TTLinear,
        forms.TTMLinear,
        forms.BTTLinear,
        forms.MonarchLinear,
        forms.TuckerLinear,
        forms.CPLinear,
    )
}
_EMBEDDINGS: dict[str, type[nn.Module]] = {
    kind.form: kind for kind in (forms.LowRankEmbedding, forms.TTEmbedding, forms.TTMEmbedding)
}


def describe(model: nn.Module, shared: Mapping[str, str]) -> dict[str, Any]:
    """The entry of a model.

    Args:
        model: A model with structured layers.
        shared: See `shared_names`.
    """
    layers = structured(model)
    return {
        "version": VERSION,
        "model_class": type(model).__name__,
        "layers": {name: _described(layer) for name, layer in layers.items()},
        "shared": dict(shared),
        "lines": _lines(layers),
        "heads": {
            name: {"embedding": name_of(head.embedding, model), "bias": head.bias is not None}
            for name, head in tied_heads(model).items()
        },
    }


def _described(layer: Structured) -> dict[str, Any]:
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in layer.settings().items()
    }
    return {
        "form": layer.form,
        "embedding": isinstance(layer, forms.StructuredEmbedding),
        "settings": settings,
        "network": str(layer.network),
    }


def shared_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of every tensor that has been met before -> its first name.

    Args:
        state: ``model.state_dict(keep_vars=True)``.
    """
    first: dict[int, str] = {}
    shared = {}
    for name, tensor in state.items():
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return shared


def _lines(layers: Mapping[str, Structured]) -> list[list[Any]]:
    """The lines of latent crossing, each with its kind of gate."""
    crossing = {n: one for n, one in layers.items() if isinstance(one, forms.LatentLinear)}
    takers = {id(one._taken): name for name, one in crossing.items() if one._taken is not None}
    lines = []
    for name, one in crossing.items():
        if one._taken is not None or one._left is None:
            continue
        names, layer = [name], one
        while layer._left is not None:
            names.append(takers[id(layer._left)])
            layer = crossing[names[-1]]
        gate = layer.gate
        kind = "identity" if gate is None else "scalar" if gate.numel() == 1 else "vector"
        lines.append([kind, names])
    return lines


def checked(entry: Any, where: str) -> dict[str, Any]:
    """The entry, if it is one.

    Raises:
        TensorizeError: It is none, or of a later version.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("layers"), dict):
        raise TensorizeError(
            f"{where} has no entry {KEY}: it was not written by export_factored; load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
    if entry.get("version") != VERSION:
        raise TensorizeError(
            f"{where} has {KEY}.version = {entry.get('version')}, and this Outlast reads "
            f"{VERSION}: use the one that wrote it"
        )
    return entry


def put_in_layers(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Replace the layers that an entry names, by ones without values, on the meta device.

    Raises:
        TensorizeError: A form or a module is not known.
    """
    for name, layer in entry["layers"].items():
        kinds = _EMBEDDINGS if layer["embedding"] else _LINEAR
        if layer["form"] not in kinds:
            raise TensorizeError(
                f"{KEY}: {name} has form = {layer['form']!r}, which is not one of "
                f"{', '.join(kinds)}"
            )
        settings = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in layer["settings"].items()
        }
        try:
            made = kinds[layer["form"]](**settings, device=torch.device("meta"))
            model.set_submodule(name, made, strict=True)
        except (TypeError, AttributeError, ValueError) as error:
            raise TensorizeError(f"{KEY}: {name} cannot be built: {error}") from None
        if str(made.network) != layer["network"]:
            raise TensorizeError(
                f"{KEY}: {name} is not the layer that its settings build: the entry was changed, "
                "or written by another version"
            )
    for name, head in entry.get("heads", {}).items():
        embedding: Any = model.get_submodule(head["embedding"])
        model.set_submodule(name, TiedHead(embedding, bias=head["bias"], device="meta"))
    for gate, names in entry["lines"]:
        line = [model.get_submodule(name) for name in names]
        with torch.device("meta"):
            forms.link_latents(line, gate)  # type: ignore[arg-type]


def share(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Give parameters that were one the same object again."""
    for name, leader in shared.items():
        home, _, last = name.rpartition(".")
        owner, tensor = model.get_submodule(home), _tensor(model, leader)
        if isinstance(owner, nn.ParameterList):
            owner[int(last)] = tensor
        else:
            setattr(owner, last, tensor)


def _tensor(model: nn.Module, name: str) -> Tensor:
    home, _, last = name.rpartition(".")
    return getattr(model.get_submodule(home), last)  # type: ignore[no-any-return]
