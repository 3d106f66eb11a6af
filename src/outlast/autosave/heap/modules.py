"""Modules by their names, also those that are found in another alone (``torch.ops.aten``)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


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
