"""Writers of tables: what `csv.writer` gives is its file, and how the rows are to look."""

from __future__ import annotations

import csv
import gc
import io
import types
from typing import TYPE_CHECKING, Any

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DIALECT = (
    "delimiter", "quotechar", "escapechar", "doublequote", "skipinitialspace", "lineterminator",
    "quoting", "strict",
)  # fmt: skip
_METHODS = (types.BuiltinMethodType, types.MethodType)


def _reduced(writer: Any) -> Any:
    # It shows its settings, but not what it writes with.
    found = (referent for referent in gc.get_referents(writer) if callable(referent))
    write: Any = next((name for name in found if not isinstance(name, type)), None)
    if write is None:
        raise AutosaveError(
            "what a csv.writer writes with cannot be seen; make it with a file that open() gives"
        )
    settings = {name: getattr(writer.dialect, name) for name in _DIALECT}
    if isinstance(write, _METHODS):
        return _made, (write.__self__, settings)
    return _made_with, (write, settings)


def _made(file: Any, settings: dict[str, Any]) -> Any:
    return csv.writer(file, **settings)


def _made_with(write: Any, settings: dict[str, Any]) -> Any:
    # Files of `tempfile` give a function of their own.
    return csv.writer(types.SimpleNamespace(write=write), **settings)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {type(csv.writer(io.StringIO())): _reduced}
"""How writers of tables are pickled."""
