"""The efficiency model: time, memory, energy, goodput, loss and cost of a run, before it runs.

training = Training(model=published("llama-3-8b"), run=configuration, tokens=1e12)
estimate = predict(training, "h100x64")        # figures with intervals, and their terms
front = search(training, "h100x64", "400 h")   # the exact Pareto front of all legal configurations

Needs no torch. Names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.extras import require

if TYPE_CHECKING:
    from outlast.plan.api import Training, predict, search
    from outlast.plan.cluster import Cluster
    from outlast.plan.cluster_file import cluster_of
    from outlast.plan.configuration import Configuration, Mechanisms, Recovery, Settings
    from outlast.plan.estimate import Interval, Term, Total
    from outlast.plan.huggingface import published, transformer_of
    from outlast.plan.prediction import Estimate
    from outlast.plan.transformer import Transformer

require("plan", "outlast plan", "scipy")

_HOMES = {
    "Cluster": "cluster",
    "Configuration": "configuration",
    "Estimate": "prediction",
    "Interval": "estimate",
    "Mechanisms": "configuration",
    "Recovery": "configuration",
    "Settings": "configuration",
    "Term": "estimate",
    "Total": "estimate",
    "Training": "api",
    "Transformer": "transformer",
    "cluster_of": "cluster_file",
    "predict": "api",
    "published": "huggingface",
    "search": "api",
    "transformer_of": "huggingface",
}

__all__ = [
    "Cluster",
    "Configuration",
    "Estimate",
    "Interval",
    "Mechanisms",
    "Recovery",
    "Settings",
    "Term",
    "Total",
    "Training",
    "Transformer",
    "cluster_of",
    "predict",
    "published",
    "search",
    "transformer_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
