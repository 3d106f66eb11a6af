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
    from outlast.tensorize.budget import Budget
    from outlast.tensorize.export import absorb, export_dense, export_factored, load_factored
    from outlast.tensorize.forms.block import BTTLinear, MonarchLinear
    from outlast.tensorize.forms.cp import CPLinear
    from outlast.tensorize.forms.embedding import LowRankEmbedding, TTEmbedding, TTMEmbedding
    from outlast.tensorize.forms.latent import LatentLinear, latent_contexts
    from outlast.tensorize.forms.low_rank import BottleneckLinear, LowRankLinear
    from outlast.tensorize.forms.sparse import SparseLowRankLinear
    from outlast.tensorize.forms.tensor_train import TTLinear, TTMLinear
    from outlast.tensorize.forms.tucker import TuckerLinear
    from outlast.tensorize.layer import StructuredLinear, merged
    from outlast.tensorize.planner import calibrate
    from outlast.tensorize.policy import Choice
    from outlast.tensorize.quality import effective_parameters
    from outlast.tensorize.replace import tensorize
    from outlast.tensorize.rules.groups import parameter_groups
    from outlast.tensorize.table import Replacement, Replacements

_HOMES = {
    "Account": "accounting",
    "BTTLinear": "forms.block",
    "BottleneckLinear": "forms.low_rank",
    "Budget": "budget",
    "CPLinear": "forms.cp",
    "Choice": "policy",
    "LatentLinear": "forms.latent",
    "LowRankEmbedding": "forms.embedding",
    "LowRankLinear": "forms.low_rank",
    "MonarchLinear": "forms.block",
    "Replacement": "table",
    "Replacements": "table",
    "SparseLowRankLinear": "forms.sparse",
    "StructuredLinear": "layer",
    "TTEmbedding": "forms.embedding",
    "TTLinear": "forms.tensor_train",
    "TTMEmbedding": "forms.embedding",
    "TTMLinear": "forms.tensor_train",
    "TuckerLinear": "forms.tucker",
    "absorb": "export",
    "account": "accounting",
    "calibrate": "planner",
    "counted_flops": "accounting",
    "effective_parameters": "quality",
    "export_dense": "export",
    "export_factored": "export",
    "kept_bytes": "accounting",
    "latent_contexts": "forms.latent",
    "load_factored": "export",
    "merged": "layer",
    "parameter_groups": "rules.groups",
    "tensorize": "replace",
}

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
    "tensorize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
