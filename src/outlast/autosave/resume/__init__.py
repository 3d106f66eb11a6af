"""A rewritten program while it runs: its step boundaries, and resuming at one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.autosave.resume.process import random_states, set_random_states, source_of

__all__ = ["random_states", "set_random_states", "source_of"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.process"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
