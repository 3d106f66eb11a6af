"""Automatic checkpoints: what a program must save is found, and unmodified scripts resume."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.autosave.api import loop
    from outlast.autosave.trace.plan import find_state
    from outlast.autosave.trace.state import StatePlan

__all__ = ["StatePlan", "find_state", "loop"]

_PLACES = {"loop": "api", "find_state": "trace.plan", "StatePlan": "trace.state"}


def __getattr__(name: str) -> Any:
    # A program is read and rewritten without torch, which these need.
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
