"""Description of a model's structured layers in config.json, and building them from it.

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

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.embedding import (
    LowRankEmbedding,
    StructuredEmbedding,
    TiedHead,
    name_of,
    tied_heads,
)
from outlast.tensorize.execute import MergedPath
from outlast.tensorize.layer import BTTLinear, StructuredLayer, StructuredLinear
from outlast.tensorize.low_rank import (
    BottleneckLinear,
    LatentLinear,
    LowRankLinear,
    SparseLowRankLinear,
    link_latents,
)
from outlast.tensorize.network import Route, lower
from outlast.tensorize.shapes import FORMS, class_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


_HALF = (torch.bfloat16, torch.float16)

Structured = StructuredLinear | StructuredEmbedding


def structured(model: nn.Module) -> dict[str, Structured]:
    """All structured layers by name, under every name that a layer has."""
    if not any(isinstance(module, StructuredLayer) for module in model.modules()):
        # Modules of others may hold each other, and then have names without end.
        return {}
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StructuredLinear | StructuredEmbedding)
    }


def dense_weight(layer: Structured) -> Tensor:
    """The weight (out, in), or the table (rows, columns), in the dtype of the first factor.

    Half-precision factors are multiplied in float32 and rounded once.

    Raises:
        TensorizeError: The layer is no matrix.
    """
    with torch.no_grad():
        dtype = layer.factors()[0].dtype
        return _wide(layer).to_dense().detach().to(dtype).contiguous()


def two_factors(layer: Structured) -> tuple[Tensor, Tensor] | None:
    """The factors that the cores merge to at the best cut of the chain.

    A chain is two matrices where a cut has all inputs on one side and all outputs on the other;
    the rank is the product of the bonds that it cuts.

    Returns:
        (rank, in) and (out, rank), of an embedding (rank, rows) and (columns, rank), in the dtype
        of the first factor; None where no cut is such, as in a tensor-train matrix.
    """
    if isinstance(layer, SparseLowRankLinear):
        return None
    count = len(layer.network.cores)
    cuts = [Route((left, count - left)) for left in range(1, count)]
    plain = [cut for cut in cuts if all(s.is_plain for s in lower(layer.network, cut).stages)]
    route = min(plain, key=lambda cut: lower(layer.network, cut).stages[1].k, default=None)
    if route is None:
        return None
    with torch.no_grad():
        dtype = layer.factors()[0].dtype
        cores = [core.detach() for core in _wide(layer).factors()]
        first, last = MergedPath(layer.network, route, cores, cores[0].dtype).matrices
        return first[0].to(dtype).contiguous(), last[0].to(dtype).contiguous()


def _wide(layer: Structured) -> Structured:
    if isinstance(layer, LowRankLinear):
        layer.check_children()
    if any(factor.dtype in _HALF for factor in layer.factors()):
        return copy.deepcopy(layer).float()
    return layer


def is_matrix(layer: Structured) -> bool:
    """Return whether the layer is a linear map by itself."""
    if isinstance(layer, LatentLinear):
        return layer.activation is None and layer._taken is None and layer._left is None
    return not isinstance(layer, BottleneckLinear)


def merged_layer(layer: Structured) -> nn.Module:
    """The layer to run instead: of two factors, a plain one, or the layer itself.

    Layers with something between their factors stay, and block tensor trains (Monarch), whose
    merged weight has full rank. All others become two factors where these have fewer parameters
    than the dense weight, and else `nn.Linear` or `nn.Embedding`.
    """
    if not is_matrix(layer) or isinstance(layer, BTTLinear):
        return layer
    rows, columns = layer.network.out_features, layer.network.in_features
    factors = two_factors(layer)
    if factors is None or len(factors[0]) * (rows + columns) >= rows * columns:
        return dense_layer(layer)
    if type(layer) in (LowRankLinear, LowRankEmbedding):
        return layer
    rank = len(factors[0])
    made: Any
    if isinstance(layer, StructuredEmbedding):
        table, up = factors[0].t().contiguous(), factors[1]
        options: dict[str, Any] = {"padding_idx": layer.padding_idx, "device": "meta"}
        made = LowRankEmbedding(columns, rows, rank, dtype=up.dtype, **options)
        made.table.weight, made.up.weight = _learned(table, layer), _learned(up, layer)
    else:
        bias = layer.bias
        options = {"bias": bias is not None, "device": "meta", "dtype": factors[0].dtype}
        made = LowRankLinear(columns, rows, rank, **options)
        made.down.weight, made.up.weight = (_learned(factor, layer) for factor in factors)
        if bias is not None:
            made.up.bias = bias
    trained: nn.Module = made.train(layer.training)
    return trained


def dense_layer(layer: Structured) -> nn.Module:
    """`nn.Linear` or `nn.Embedding` with the layer's weight and its own bias.

    Raises:
        TensorizeError: The layer is no matrix.
    """
    if not is_matrix(layer):
        raise TensorizeError(
            "it has a nonlinearity or another layer's latent between its factors and is no matrix"
        )
    weight = _learned(dense_weight(layer), layer)
    rows, columns = weight.shape
    dense: nn.Embedding | nn.Linear
    if isinstance(layer, StructuredEmbedding):
        dense = nn.Embedding(rows, columns, layer.padding_idx, device="meta")
    else:
        dense = nn.Linear(columns, rows, layer.bias is not None, device="meta")
        if layer.bias is not None:
            dense.bias = layer.bias  # type: ignore[assignment]
    dense.weight = weight
    return dense.train(layer.training)


def _learned(tensor: Tensor, layer: Structured) -> nn.Parameter:
    """A parameter that is trained if the layer's factors are."""
    return nn.Parameter(tensor, requires_grad=layer.factors()[0].requires_grad)


KEY = "outlast_tensorize"

VERSION = 1


def describe(model: nn.Module, shared: Mapping[str, str]) -> dict[str, Any]:
    """The entry of a model.

    Args:
        model: A model with structured layers.
        shared: See `shared_names`.
    """
    layers = structured(model)
    # The lines of latent crossing, each with its kind of gate.
    crossing = {n: one for n, one in layers.items() if isinstance(one, LatentLinear)}
    takers = {id(one._taken): own for own, one in crossing.items() if one._taken is not None}
    lines = []
    for own, one in crossing.items():
        if one._taken is not None or one._left is None:
            continue
        names, linked = [own], one
        while linked._left is not None:
            names.append(takers[id(linked._left)])
            linked = crossing[names[-1]]
        gate = linked.gate
        kind = "identity" if gate is None else "scalar" if gate.numel() == 1 else "vector"
        lines.append([kind, names])
    return {
        "version": VERSION,
        "model_class": type(model).__name__,
        "layers": {
            name: {
                "form": layer.form,
                "embedding": isinstance(layer, StructuredEmbedding),
                "settings": {
                    key: list(value) if isinstance(value, tuple) else value
                    for key, value in layer.settings().items()
                },
                "network": str(layer.network),
            }
            for name, layer in layers.items()
        },
        "shared": dict(shared),
        "lines": lines,
        "heads": {
            name: {"embedding": name_of(head.embedding, model), "bias": head.bias is not None}
            for name, head in tied_heads(model).items()
        },
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
        homes = {
            form.name: form.embedding if layer["embedding"] else form.linear
            for form in FORMS.values()
            if form.embedding or not layer["embedding"]
        }
        if layer["form"] not in homes:
            raise TensorizeError(
                f"{KEY}: {name} has form = {layer['form']!r}, which is not one of "
                f"{', '.join(homes)}"
            )
        settings = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in layer["settings"].items()
        }
        try:
            made = class_named(homes[layer["form"]])(**settings, device=torch.device("meta"))
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
            link_latents(line, gate)  # type: ignore[arg-type]


def share(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Give parameters that were one the same object again."""
    for name, leader in shared.items():
        home, _, last = name.rpartition(".")
        leader_home, _, leader_last = leader.rpartition(".")
        owner = model.get_submodule(home)
        tensor = getattr(model.get_submodule(leader_home), leader_last)
        if isinstance(owner, nn.ParameterList):
            owner[int(last)] = tensor
        else:
            setattr(owner, last, tensor)
