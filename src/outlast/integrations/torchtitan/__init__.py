"""Outlast inside torchtitan 0.3: checkpoints, guard, energy and records, structured layers.

def my_run() -> Trainer.Config:
    return use_outlast(llama3_debugmodel(), "job.toml")

`use_outlast` changes a recipe of any model; `OutlastTrainer`, `OutlastCheckpointManager.Config` and
`TensorizeConverter.Config` stand in recipes of one's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.integrations.installed import require

if TYPE_CHECKING:
    from outlast.integrations.torchtitan.converter import TensorizeConverter
    from outlast.integrations.torchtitan.manager import OutlastCheckpointManager
    from outlast.integrations.torchtitan.trainer import OutlastTrainer, use_outlast

require("torchtitan", "0.3", "0.4")

_HOMES = {
    "OutlastCheckpointManager": "manager",
    "OutlastTrainer": "trainer",
    "TensorizeConverter": "converter",
    "use_outlast": "trainer",
}

__all__ = ["OutlastCheckpointManager", "OutlastTrainer", "TensorizeConverter", "use_outlast"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
