"""Layers with fewer parameters and operations, trained from scratch or converted.

from outlast.tensorize import tensorize
print(tensorize(model, form="low_rank", rank=0.25, match="*.mlp.*"))    # in place
...                                                                     # optimizer, DDP, training
layer = model.get_submodule("model.layers.0.mlp.up_proj")
print(layer.explain(tokens=4096), layer.to_dense().shape)               # how it computes; exact

Names are loaded when they are used: `cost`, `quality`, `network`, `shapes` and the planner's search
need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.tensorize.accounting import Account, account, counted_flops, kept_bytes
    from outlast.tensorize.cost import effective_parameters
    from outlast.tensorize.embedding import LowRankEmbedding, TTEmbedding, TTMEmbedding
    from outlast.tensorize.export import (
        absorb,
        export_dense,
        export_factored,
        load_factored,
        save_with_dense_weights,
    )
    from outlast.tensorize.layer import (
        BTTLinear,
        CPLinear,
        MonarchLinear,
        StructuredLinear,
        TTLinear,
        TTMLinear,
        TuckerLinear,
        merged,
    )
    from outlast.tensorize.low_rank import (
        BottleneckLinear,
        LatentLinear,
        LowRankLinear,
        SparseLowRankLinear,
        latent_contexts,
    )
    from outlast.tensorize.measure import calibrate
    from outlast.tensorize.parameters import parameter_groups
    from outlast.tensorize.policy import Budget, Choice
    from outlast.tensorize.replace import Replacement, Replacements, tensorize

_NAMES = {
    "accounting": "Account account counted_flops kept_bytes",
    "export": "absorb export_dense export_factored load_factored save_with_dense_weights",
    "embedding": "LowRankEmbedding TTEmbedding TTMEmbedding",
    "low_rank": "BottleneckLinear LatentLinear LowRankLinear SparseLowRankLinear latent_contexts",
    "layer": "BTTLinear CPLinear MonarchLinear StructuredLinear TTLinear TTMLinear TuckerLinear "
    "merged",
    "parameters": "parameter_groups",
    "measure": "calibrate",
    "policy": "Budget Choice",
    "cost": "effective_parameters",
    "replace": "tensorize",
    "table": "Replacement Replacements",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Account",
    "BTTLinear",
    "BottleneckLinear",
    "Budget",
    "CPLinear",
    "Choice",
    "LatentLinear",
    "LowRankEmbedding",
    "LowRankLinear",
    "MonarchLinear",
    "Replacement",
    "Replacements",
    "SparseLowRankLinear",
    "StructuredLinear",
    "TTEmbedding",
    "TTLinear",
    "TTMEmbedding",
    "TTMLinear",
    "TuckerLinear",
    "absorb",
    "account",
    "calibrate",
    "counted_flops",
    "effective_parameters",
    "export_dense",
    "export_factored",
    "kept_bytes",
    "latent_contexts",
    "load_factored",
    "merged",
    "parameter_groups",
    "save_with_dense_weights",
    "tensorize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
