"""Paths: what set-up computes anew from the time or by chance stays what it was.

Where that is gone, as the scratch folder of a job, and what set-up gives now is there, this counts.
Paths below the program's folder are written relative to it, so that the folder may be moved.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.content import vars_of
from outlast.autosave.resume.logs import program_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outlast.autosave.heap.names import Names

_of_setup: dict[str, PurePath] = {}
_names_of_setup: dict[PurePath, str] = {}


def remember(roots: Mapping[str, Any], names: Names) -> None:
    """Take note of the paths that set-up has made: variables, and attributes of own objects.

    Args:
        roots: Name to value of each variable.
        names: What they lead to.
    """
    found = dict(roots)
    for name, object_ in names.objects.items():
        if names.is_own(name):
            found |= {f"{name}.{key}": value for key, value in vars_of(object_).items()}
    _of_setup.clear()
    _names_of_setup.clear()
    for name, found_item in found.items():
        if isinstance(found_item, PurePath) and found_item.is_absolute():
            _of_setup[name] = found_item
            _names_of_setup.setdefault(found_item, name)


def _reduced(path: PurePath) -> Any:
    folder = program_folder()
    if folder is not None and path.is_absolute() and path.is_relative_to(folder):
        return _below, (type(path), str(path.relative_to(folder)))
    above = [parent for parent in (path, *path.parents) if parent in _names_of_setup]
    if not above:
        return type(path), (str(path),)
    return _at_setup, (type(path), str(path), {_names_of_setup[item]: str(item) for item in above})


def _at_setup(kind: type[PurePath], path: str, above: dict[str, str]) -> PurePath:
    for name, before in above.items():
        now = _of_setup.get(name)
        if now is not None and _exists(now) and not _exists(Path(before)):
            return kind(now, PurePath(path).relative_to(before))
    return kind(path)


def _exists(path: PurePath) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        # Of another user, or on a file system that is gone.
        return False


def _below(kind: type[PurePath], rest: str) -> PurePath:
    folder = program_folder()
    return kind(rest) if folder is None else kind(folder, rest)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {PurePath: _reduced}
"""How paths are pickled."""
