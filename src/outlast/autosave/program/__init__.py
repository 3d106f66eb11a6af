"""The program as text: where it trains, what is live there, and the text that can be re-entered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.autosave.program.scopes import defined_names
    from outlast.autosave.program.source import RUNTIME, Rewritten, Site
    from outlast.autosave.program.training import explain, find_training

__all__ = ["RUNTIME", "Rewritten", "Site", "defined_names", "explain", "find_training"]

_PLACES = {
    "defined_names": "scopes",
    "RUNTIME": "source",
    "Rewritten": "source",
    "Site": "source",
    "explain": "training",
    "find_training": "training",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
