"""Writers of tables: what `csv.writer` gives is its file, and how the rows are to look."""

from __future__ import annotations

import csv
import gc
import io
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DIALECT = (
    "delimiter", "quotechar", "escapechar", "doublequote", "skipinitialspace", "lineterminator",
    "quoting", "strict",
)  # fmt: skip
_METHODS = (types.BuiltinMethodType, types.MethodType)


def _reduced(writer: Any) -> Any:
    # It shows its settings, but not the method of the file that it writes with.
    write: Any = next(each for each in gc.get_referents(writer) if isinstance(each, _METHODS))
    settings = {name: getattr(writer.dialect, name) for name in _DIALECT}
    return _made, (write.__self__, settings)


def _made(file: Any, settings: dict[str, Any]) -> Any:
    return csv.writer(file, **settings)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {type(csv.writer(io.StringIO())): _reduced}
"""How writers of tables are pickled."""
