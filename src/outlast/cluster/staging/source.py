"""What is staged: files and folders of a file system that nodes share, or of an fsspec URL.

A file is known by name, size and *version*, something that changes with its content: the time of
its last change, an object's ETag, or a digest where the caller knows it.
"""

from __future__ import annotations

import os
import posixpath
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL_BYTES = 1 << 20
_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.25
_VERSION_FIELDS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")


@dataclass(frozen=True)
class SourceFile:
    """One file that is to be copied.

    Attributes:
        name: Path below the folder of the copy, with forward slashes.
        location: Path or URL.
        size_bytes: Its size.
        version: Changes with the content.
    """

    name: str
    location: str
    size_bytes: int
    version: str


@dataclass(frozen=True)
class Source:
    """A file, with what belongs to it, or a folder.

    Attributes:
        location: Path or URL.
        files: All its files; of a file, itself first.
        is_folder: Whether it is a folder.
    """

    location: str
    files: tuple[SourceFile, ...]
    is_folder: bool

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)


class Reader(Protocol):
    """An open file; several threads may read parts of it at once."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on; raises OSError where that fails."""

    def close(self) -> None:
        """Give the file back."""


def is_url(location: str) -> bool:
    """Whether `location` is an fsspec URL and no path."""
    return "://" in location


def find(location: str, beside: Sequence[str] = ()) -> Source:
    """What is at a path or URL.

    Args:
        location: A file, or a folder with all files below it.
        beside: Names in a file's own folder that belong to it and are taken where they exist.

    Raises:
        ClusterError: Nothing is there, it cannot be listed, or a size is not known.
    """
    try:
        found = _find_remote(location, beside) if is_url(location) else _find(location, beside)
    except ClusterError:
        raise
    except FileNotFoundError:
        raise ClusterError(f"{location} does not exist, so it cannot be staged") from None
    except Exception as error:
        # The clients of object stores raise classes of their own.
        raise ClusterError(f"{location} cannot be looked at ({_words(error)})") from error
    if not found.files:
        raise ClusterError(f"the folder {location} holds no file to stage")
    return found


def open_reader(file: SourceFile) -> Reader:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened.
    """
    if is_url(file.location):
        return _RemoteReader(file)
    return LocalReader(Path(file.location))


class LocalReader:
    """Reads with ``preadv``, straight into the caller's memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self._path} ends at byte {offset + done}: it was cut meanwhile")
            done += count

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


class _RemoteReader:
    """Asks an fsspec file system for ranges; tries again where it fails."""

    def __init__(self, file: SourceFile) -> None:
        self._filesystem, self._path = _filesystem_of(file.location)
        self._location = file.location

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        for attempt in range(_ATTEMPTS):
            try:
                content = self._filesystem.cat_file(
                    self._path, start=offset, end=offset + len(view)
                )
                break
            except FileNotFoundError:
                raise
            except Exception as error:
                if attempt + 1 == _ATTEMPTS:
                    raise OSError(f"{self._location} cannot be read ({_words(error)})") from error
            time.sleep(pause_seconds)
            pause_seconds *= 2
        if len(content) != len(view):
            raise OSError(
                f"{self._location} gave {len(content)} bytes where {len(view)} from byte {offset} "
                "were asked for; its server must know ranges, and the file must not change"
            )
        view[:] = content

    def close(self) -> None:
        """Nothing is held."""


def _find(location: str, beside: Sequence[str]) -> Source:
    path = Path(location)
    if path.is_dir():
        inside = sorted(item for item in path.rglob("*") if item.is_file())
        listed = [_local_file(name, name.relative_to(path).as_posix()) for name in inside]
        return Source(location, tuple(listed), is_folder=True)
    companions = [path.with_name(name) for name in beside]
    found = [_companion(companion) for companion in companions if companion.is_file()]
    return Source(location, (_local_file(path, path.name), *found), is_folder=False)


def _local_file(path: Path, name: str) -> SourceFile:
    facts = path.stat()
    return SourceFile(name, str(path), facts.st_size, f"mtime {facts.st_mtime_ns}")


def _companion(path: Path) -> SourceFile:
    """A small file that belongs to another, known by its content: copies of it are as good."""
    file = _local_file(path, path.name)
    if file.size_bytes > _SMALL_BYTES:
        return file
    return replace(file, version=f"xxh3-128 {xxhash.xxh3_128_hexdigest(path.read_bytes())}")


def _find_remote(location: str, beside: Sequence[str]) -> Source:
    filesystem, path = _filesystem_of(location)
    filesystem.invalidate_cache()
    facts = filesystem.info(path)
    if facts["type"] == "directory":
        inside: dict[str, Any] = filesystem.find(path, detail=True)
        root = path.rstrip("/") + "/"
        listed = [
            _remote_file(filesystem, item, _safe(name.removeprefix(root), location))
            for name, item in sorted(inside.items())
        ]
        return Source(location, tuple(listed), is_folder=True)
    files = [_remote_file(filesystem, facts, posixpath.basename(path))]
    for name in beside:
        try:
            companion = filesystem.info(posixpath.join(posixpath.dirname(path), name))
        except FileNotFoundError:
            continue
        files.append(_remote_file(filesystem, companion, name))
    return Source(location, tuple(files), is_folder=False)


def _safe(name: str, location: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ClusterError(f"{location} lists the file {name!r}, which lies outside it")
    return name


def _remote_file(filesystem: Any, facts: dict[str, Any], name: str) -> SourceFile:
    location = filesystem.unstrip_protocol(facts["name"])
    size = facts.get("size")
    if size is None:
        raise ClusterError(f"the server of {location} does not say how large it is")
    known = {field: str(facts[field]) for field in _VERSION_FIELDS if facts.get(field)}
    version = " ".join(f"{field} {value}" for field, value in known.items())
    return SourceFile(name, location, int(size), version)


def _filesystem_of(location: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except (ValueError, ImportError) as error:
        raise ClusterError(
            f"{location} cannot be used: {error}; install the fsspec package of its protocol"
        ) from None
    return filesystem, path


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__
