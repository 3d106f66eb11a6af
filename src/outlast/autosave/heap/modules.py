"""Modules by their names, also those that are found in another alone (``torch.ops.aten``)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def is_importable(value: Any) -> bool:
    """Whether a class or a function is found by its own name."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def is_loose(module: ModuleType) -> bool:
    """Whether a module is one that a program has made itself, and that no import finds."""
    own = vars(module)
    return (
        type(module) is ModuleType
        and "__file__" not in own
        and own.get("__spec__") is own.get("__loader__") is None
    )


def module_named(name: str) -> ModuleType:
    """The module of this name, imported if it has not been.

    Raises:
        ModuleNotFoundError: When there is none.
    """
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        outer, _, inner = name.rpartition(".")
        found = getattr(module_named(outer), inner, None) if outer else None
        if not isinstance(found, ModuleType):
            raise
        return found
