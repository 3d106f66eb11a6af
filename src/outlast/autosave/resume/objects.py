"""How the objects of libraries are written down that a program's own ways do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.autosave.resume import files, iterators, loaders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    **files.REDUCERS,
    **iterators.REDUCERS,
    **loaders.REDUCERS,
}
"""Type to how its objects, and those of types derived from it, are pickled."""

IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    **files.IN_PLACE,
    **iterators.IN_PLACE,
    **loaders.IN_PLACE,
}
"""Type to what its objects hold, and how to make others hold it; those that set-up makes anew."""
