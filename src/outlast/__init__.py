"""Outlast makes a PyTorch training run finish.

`outlast.Run` does all of it beside a training loop. Every part is a package of its own and can be
used alone, for example ``from outlast.checkpoint import CheckpointStore``; what most people need
of them can be had from here too: ``dir(outlast)``.

Importing `outlast` loads nothing heavy, neither torch nor transformers: names and packages are
loaded when they are used.
"""

from __future__ import annotations

from outlast.version import __version__

# The command line imports this first, and Ctrl-C meanwhile is Python's: `typing` can wait.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from outlast.autosave import find_state, loop
    from outlast.checkpoint import CheckpointStore
    from outlast.cluster import should_stop
    from outlast.coding import FractionalRepetition, decode
    from outlast.energy import EnergyMeter
    from outlast.integrations.run import Run
    from outlast.plan import predict, search

_HOMES = {
    "CheckpointStore": "outlast.checkpoint",
    "EnergyMeter": "outlast.energy",
    "FractionalRepetition": "outlast.coding",
    "Run": "outlast.integrations.run",
    "decode": "outlast.coding",
    "find_state": "outlast.autosave",
    "loop": "outlast.autosave",
    "predict": "outlast.plan",
    "search": "outlast.plan",
    "should_stop": "outlast.cluster",
}
_PACKAGES = [
    "autosave",
    "checkpoint",
    "cluster",
    "coding",
    "data",
    "energy",
    "guard",
    "hardware",
    "integrations",
    "plan",
    "recover",
    "report",
    "tensorize",
    "train",
]

__all__ = [
    "CheckpointStore",
    "EnergyMeter",
    "FractionalRepetition",
    "Run",
    "__version__",
    "decode",
    "find_state",
    "loop",
    "predict",
    "search",
    "should_stop",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
