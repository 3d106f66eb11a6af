"""How the objects of libraries are written down that a program's own ways do not fit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from outlast.autosave.resume import files, handlers, iterators, loaders, paths, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    **files.REDUCERS,
    **iterators.REDUCERS,
    **loaders.REDUCERS,
    **paths.REDUCERS,
    **tables.REDUCERS,
    logging.FileHandler: handlers.reduced_handler,
}
"""Type to how its objects, and those of types derived from it, are pickled."""

IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    **files.IN_PLACE,
    **iterators.IN_PLACE,
    **loaders.IN_PLACE,
}
"""Type to what its objects hold, and how to make others hold it; those that set-up makes anew."""
