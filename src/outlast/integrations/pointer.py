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
from outlast.checkpoint.version import is_published
from outlast.errors import CheckpointError
from outlast.records import OwnerLock, replace_file

if TYPE_CHECKING:
    from outlast.checkpoint import Version
    from outlast.checkpoint.storage import LocalStorage

_FORMAT = "outlast checkpoint file 1"
_START = f'{{"format": "{_FORMAT}"'.encode()
_LIST = "files.json"


@dataclass(frozen=True)
class Entry:
    """Target of a path.

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
    """Return whether `path` is such a file."""
    try:
        return _is_pointer(path)
    except OSError:
        return False


def _is_pointer(path: Path) -> bool:
    """As `is_pointer`; raises OSError where a file is there, and cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def read_pointer(path: Path) -> Pointer:
    """The content of `path`.

    Raises:
        CheckpointError: When it is no such file.
    """
    try:
        found = _look(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if found is None:
        what = "is no checkpoint file of Outlast" if path.exists() else "is not there"
        raise CheckpointError(f"{path} {what}")
    return found


def _look(path: Path) -> Pointer | None:
    """The content of `path`; None where nothing, or a file of another kind, is there.

    Raises:
        CheckpointError: When it is damaged.
        OSError: When it cannot be read.
    """
    if not _is_pointer(path):
        return None
    try:
        found = json.loads(path.read_bytes())
        entries = [Entry(entry["version"], entry.get("values")) for entry in found["entries"]]
        return Pointer(Path(os.path.normpath(path.parent / found["store"])), entries)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


class PointerList:
    """The paths that lead to a store.

    They are listed in a file of the store. Where that is lost, it is not known which versions paths
    lead to: all that are there are listed as to be kept in the new one.

    Args:
        storage: The store.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self._file = storage.root / _LIST
        self._paths: list[Path] | None = None
        self._kept: set[str] = set()

    def load(self) -> None:
        """Read the list, if that has not been done.

        Raises:
            CheckpointError: When it cannot be read.
        """
        _ = self.paths

    @property
    def paths(self) -> list[Path]:
        """All of them, the oldest first; also where the store was moved or copied with them.

        Raises:
            CheckpointError: When the list cannot be read.
        """
        if self._paths is None:
            listed, paths = self._listed(), list[Path]()
            for name in listed or ():
                if "version" in name:
                    self._kept.add(name["version"])
                    continue
                near = os.path.normpath(self._storage.root / name["relative"])
                found = {path: self._leads_here(path) for path in (Path(name["path"]), Path(near))}
                # What cannot be read now may be one.
                sure = [path for path, leads in found.items() if leads]
                unsure = [path for path, leads in found.items() if leads is None]
                paths += sure or unsure
            if listed is None:
                self._keep_all()
            self._paths = [*dict.fromkeys(paths)]
            if listed is None and self._kept:
                with contextlib.suppress(OSError):
                    self._write()
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
        try:
            before = self._complete(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except CheckpointError:
            before = []
        before = [item for item in before if item.version != entry.version]
        entries = [entry, *before[:1]]
        listed = [{"version": entry.version, "values": entry.values} for entry in entries]
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
        """Remove files; what cannot be removed stays listed.

        Raises:
            CheckpointError: When the list cannot be read.
        """
        gone = set()
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                gone.add(path)
        if gone & set(self.paths):
            self._paths = [path for path in self.paths if path not in gone]
            with contextlib.suppress(OSError):
                self._write()

    def led_to(self) -> set[Version]:
        """The versions that any path leads to, or one beside it that was copied or renamed.

        Raises:
            CheckpointError: When the list, a path, or a folder with one cannot be read.
        """
        self._take_up()
        found = {*self._kept}
        for path in self.paths:
            try:
                pointer = _look(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
            found |= {entry.version for entry in pointer.entries} if pointer else set()
        return {version for version in list_versions(self._storage) if version.folder in found}

    def sweep(self) -> None:
        """Remove the paths of saves that a process did not live to complete.

        Nothing is removed while a live process saves to the store.
        """
        owner = OwnerLock(self._storage.root / "owner", subject="", remedy="")
        try:
            paths = self.paths
        except CheckpointError:
            # Told where versions would be deleted.
            return
        if not paths or owner.is_held():
            return
        for path in paths:
            with contextlib.suppress(OSError, CheckpointError):
                if not is_pointer(path) or self._complete(path):
                    continue
                path.unlink(missing_ok=True)
                warnings.warn(
                    f"{path} was not complete when its process ended; it is removed", stacklevel=2
                )

    def _complete(self, path: Path) -> list[Entry]:
        """Return what `path` leads to now, of what is complete.

        Raises:
            CheckpointError: When it is damaged.
            OSError: When it cannot be read.
        """
        pointer = _look(path)
        versions = {version.folder: version for version in list_versions(self._storage)}
        return [
            name
            for name in (pointer.entries if pointer else ())
            if name.version in versions and is_published(self._storage, versions[name.version])
        ]

    def _listed(self) -> list[dict[str, str]] | None:
        """Read the file; None where it is lost.

        Raises:
            CheckpointError: When it cannot be read.
        """
        try:
            found = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be read: {error.strerror}") from None
        except ValueError:
            return None
        whole = isinstance(found, list) and all(
            isinstance(name, dict) and ("version" in name or {"path", "relative"} <= {*name})
            for name in found
        )
        return found if whole else None

    def _keep_all(self) -> None:
        """Have all versions kept that are there now, since paths may lead to any of them."""
        versions = list_versions(self._storage)
        self._kept = {
            version.folder for version in versions if is_published(self._storage, version)
        }
        if self._kept:
            warnings.warn(
                f"{self._file}, the list of the files that lead to this store, is lost: its "
                f"{len(self._kept)} versions are kept, whether a file leads to them or not",
                stacklevel=2,
            )

    def _take_up(self) -> None:
        """Add what leads here from beside the known paths: copies, and files with new names."""
        known = {*self.paths}
        for folder in dict.fromkeys(path.parent for path in self.paths):
            try:
                beside = [path for path in folder.iterdir() if path not in known]
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
            self._paths = [*self.paths, *(item for item in beside if self._leads_here(item))]
        if known != {*self.paths}:
            with contextlib.suppress(OSError):
                self._write()

    def _leads_here(self, path: Path) -> bool | None:
        """Return whether `path` leads to this store; None where it cannot be read."""
        try:
            pointer = _look(path)
        except (OSError, CheckpointError):
            return None
        here = os.path.realpath(self._storage.root)
        return pointer is not None and os.path.realpath(pointer.store) == here

    def _write(self) -> None:
        root = self._storage.root
        root.mkdir(parents=True, exist_ok=True)
        listed = [
            {"path": str(path), "relative": os.path.relpath(path, root)} for path in self.paths
        ]
        listed += [{"version": name} for name in sorted(self._kept)]
        replace_file(self._file, json.dumps(listed).encode())
