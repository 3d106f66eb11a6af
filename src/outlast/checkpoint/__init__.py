"""Versioned, reduced, verified checkpoints of a training state.

from outlast.checkpoint import CheckpointStore
store = CheckpointStore("checkpoints/", keep=3)
state = {"model": model, "optimizer": optimizer}
handle = store.save_async(step, state)      # returns when the state is copied
handle.wait()                               # raises CheckpointError if it was not published
restored = store.restore(state)             # newest version that verifies, or None

Names are loaded when they are used: the file format, the writer process, the cost model and
``outlast ckpt`` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.codec import Bound, Compression
    from outlast.checkpoint.cost import IntervalEstimator
    from outlast.checkpoint.encoder import Reduction
    from outlast.checkpoint.lane import SaveHandle, SaveResult
    from outlast.checkpoint.restore import ReplayLog, Restored
    from outlast.checkpoint.retention import Retention
    from outlast.checkpoint.storage import storage_of
    from outlast.checkpoint.store import CheckpointStore
    from outlast.checkpoint.tiers import DrainResult, Tier
    from outlast.checkpoint.version import Version, list_versions, load

_HOMES = {
    "Bound": "codec",
    "CheckpointStore": "store",
    "Compression": "codec",
    "DrainResult": "tiers",
    "IntervalEstimator": "cost",
    "Reduction": "encoder",
    "ReplayLog": "restore",
    "Restored": "restore",
    "Retention": "retention",
    "SaveHandle": "lane",
    "SaveResult": "lane",
    "Tier": "tiers",
    "Version": "version",
    "list_versions": "version",
    "load": "version",
    "storage_of": "storage",
}

__all__ = [
    "Bound",
    "CheckpointStore",
    "Compression",
    "DrainResult",
    "IntervalEstimator",
    "Reduction",
    "ReplayLog",
    "Restored",
    "Retention",
    "SaveHandle",
    "SaveResult",
    "Tier",
    "Version",
    "list_versions",
    "load",
    "storage_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
