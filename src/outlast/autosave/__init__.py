"""Automatic checkpoints: what a program must save is found, and unmodified scripts resume."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.autosave.position import loop
    from outlast.autosave.state_plan import StatePlan, find_state

__all__ = ["StatePlan", "find_state", "loop"]

_PLACES = {"loop": "position", "find_state": "state_plan", "StatePlan": "state_plan"}


def __getattr__(name: str) -> Any:
    # A program is read and rewritten without torch, which these need.
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
