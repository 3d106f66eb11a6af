"""Paths: what set-up computes anew from the time or by chance stays what it was.

Paths below the program's folder are written relative to it, so that the folder may be moved.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from outlast.autosave.resume.files import program_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _reduced(path: PurePath) -> Any:
    folder = program_folder()
    if folder is not None and path.is_absolute() and path.is_relative_to(folder):
        return _below, (type(path), str(path.relative_to(folder)))
    return type(path), (str(path),)


def _below(kind: type[PurePath], rest: str) -> PurePath:
    folder = program_folder()
    return kind(rest) if folder is None else kind(folder, rest)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {PurePath: _reduced}
"""How paths are pickled."""
