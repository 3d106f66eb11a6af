"""A path that leads to a version of a store: a small file, and the list of all such files."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.checkpoint import list_versions
from outlast.checkpoint.format.version import is_published
from outlast.errors import CheckpointError
from outlast.records import OwnerLock, replace_file

if TYPE_CHECKING:
    from outlast.checkpoint import Version
    from outlast.checkpoint.format.storage import LocalStorage

_FORMAT = "outlast checkpoint file 1"
_START = f'{{"format": "{_FORMAT}"'.encode()
_LIST = "files.json"


@dataclass(frozen=True)
class Entry:
    """What a path leads to.

    Attributes:
        version: Folder of a version.
        values: JSON of the content without its tensors, where that is not what the version holds.
    """

    version: str
    values: Any = None


@dataclass(frozen=True)
class Pointer:
    """The content of a path.

    Attributes:
        store: Directory of the store.
        entries: The newest first; the first that is complete counts.
    """

    store: Path
    entries: list[Entry]


def is_pointer(path: Path) -> bool:
    """Whether `path` is such a file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


def read_pointer(path: Path) -> Pointer:
    """The content of `path`.

    Raises:
        CheckpointError: When it is no such file.
    """
    if not is_pointer(path):
        what = "is no checkpoint file of Outlast" if path.exists() else "is not there"
        raise CheckpointError(f"{path} {what}")
    try:
        found = json.loads(path.read_bytes())
        entries = [Entry(each["version"], each.get("values")) for each in found["entries"]]
        return Pointer(Path(os.path.normpath(path.parent / found["store"])), entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


class PointerList:
    """The paths that lead to a store.

    Args:
        storage: The store.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self._file = storage.root / _LIST
        self._paths: list[Path] | None = None

    @property
    def paths(self) -> list[Path]:
        """All of them, the oldest first; also where the store was moved or copied with them."""
        if self._paths is None:
            found: dict[Path, None] = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                for each in json.loads(self._file.read_bytes()):
                    near = os.path.normpath(self._storage.root / each["relative"])
                    found |= dict.fromkeys((Path(each["path"]), Path(near)))
            self._paths = [each for each in found if self._leads_here(each)]
        return self._paths

    def point(self, path: Path, entry: Entry) -> None:
        """Let `path` lead to `entry`, and until that is complete to what it led to before.

        Raises:
            CheckpointError: When it cannot be written.
        """
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a directory, perhaps a checkpoint of another kind; remove it, or save "
                "under another name"
            )
        entries = [entry, *self._complete(path, besides=entry.version)[:1]]
        listed = [{"version": each.version, "values": each.values} for each in entries]
        content = {
            "format": _FORMAT,
            "store": os.path.relpath(self._storage.root, path.parent),
            "entries": listed,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path not in self.paths:
                # Listed first: what a path leads to is never deleted.
                self._paths = [*self.paths, path]
                self._write()
            replace_file(path, json.dumps(content).encode())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from None

    def remove(self, paths: list[Path]) -> None:
        """Remove files; what cannot be removed stays listed."""
        gone = set()
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                gone.add(path)
        if gone & set(self.paths):
            self._paths = [each for each in self.paths if each not in gone]
            with contextlib.suppress(OSError):
                self._write()

    def led_to(self) -> set[Version]:
        """The versions that any path leads to."""
        versions = {each.folder: each for each in list_versions(self._storage)}
        found = set()
        for path in self.paths:
            with contextlib.suppress(CheckpointError):
                found |= {
                    versions[each.version]
                    for each in read_pointer(path).entries
                    if each.version in versions
                }
        return found

    def sweep(self) -> None:
        """Remove the paths of saves that a process did not live to complete.

        Nothing is removed while a live process saves to the store.
        """
        owner = OwnerLock(self._storage.root / "owner", subject="", remedy="")
        if not self.paths or owner.is_held():
            return
        lost = [each for each in self.paths if is_pointer(each) and not self._complete(each)]
        for path in lost:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                warnings.warn(
                    f"{path} was not complete when its process ended; it is removed", stacklevel=2
                )

    def _complete(self, path: Path, *, besides: str = "") -> list[Entry]:
        """What `path` leads to now, of what is complete."""
        try:
            entries = read_pointer(path).entries
        except CheckpointError:
            return []
        versions = {each.folder: each for each in list_versions(self._storage)}
        return [
            each
            for each in entries
            if each.version != besides
            and each.version in versions
            and is_published(self._storage, versions[each.version])
        ]

    def _leads_here(self, path: Path) -> bool:
        with contextlib.suppress(CheckpointError):
            return os.path.realpath(read_pointer(path).store) == os.path.realpath(
                self._storage.root
            )
        return False

    def _write(self) -> None:
        root = self._storage.root
        root.mkdir(parents=True, exist_ok=True)
        listed = [
            {"path": str(each), "relative": os.path.relpath(each, root)} for each in self.paths
        ]
        replace_file(self._file, json.dumps(listed).encode())
