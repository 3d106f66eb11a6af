"""Automatic checkpoints: what a program must save is found, and unmodified scripts resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.autosave.api import loop

__all__ = ["loop"]


def __getattr__(name: str) -> Any:
    # A program is read and rewritten without torch, which the loop needs.
    if name == "loop":
        from outlast.autosave.api import loop

        return loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
