"""Layers with their cores merged: two factors where that is smaller, else a plain layer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.execute import Path
from outlast.tensorize.forms import (
    BottleneckLinear,
    BTTLinear,
    LatentLinear,
    LowRankEmbedding,
    LowRankLinear,
    SparseLowRankLinear,
    StructuredEmbedding,
)
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.network import Network, Route, lower

if TYPE_CHECKING:
    from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)

Structured = StructuredLinear | StructuredEmbedding


def structured(model: nn.Module) -> dict[str, Structured]:
    """All structured layers by name, under every name that a layer has."""
    if not any(
        isinstance(module, StructuredLinear | StructuredEmbedding) for module in model.modules()
    ):
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
    route = _best_cut(layer.network)
    if route is None:
        return None
    with torch.no_grad():
        dtype = layer.factors()[0].dtype
        cores = [core.detach() for core in _wide(layer).factors()]
        first, last = Path(layer.network, route, cores, cores[0].dtype).matrices
        return first[0].to(dtype).contiguous(), last[0].to(dtype).contiguous()


def _wide(layer: Structured) -> Structured:
    if isinstance(layer, LowRankLinear):
        layer.check_children()
    if any(factor.dtype in _HALF for factor in layer.factors()):
        return copy.deepcopy(layer).float()
    return layer


def _best_cut(network: Network) -> Route | None:
    count = len(network.cores)
    cuts = [Route((left, count - left)) for left in range(1, count)]
    plain = [cut for cut in cuts if all(s.is_plain for s in lower(network, cut).stages)]
    return min(plain, key=lambda cut: lower(network, cut).stages[1].k, default=None)


def is_matrix(layer: Structured) -> bool:
    """Whether the layer is a linear map by itself."""
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
