"""Copies in a stage's folder: content, checks, locks, and eviction.

`manifest.json` is published when all files are there and is never changed. None of this is synced:
a copy can be made again, and after a crash of the node its files are compared with their digests.

`checked.json` says in which state the files were when they were last read and had their digests. A
write changes a file's times, which no program can set back (``st_ctime``), so files in that same
state are not read again before some hours are over or the node has been started anew.

Folder of a stage::

    claims/<key>     locked exclusively while a process copies or checks this copy
    leases/<key>     locked shared by every live process that uses this copy
    room             locked exclusively while a process makes room
    <key>/           plan.json, files/..., manifest.json, checked.json, used (time of last use)

A key is a name and a hash of names, sizes and versions, so a source that has changed gets a copy of
its own and nobody loses the one that he is reading. Copies that no live process uses go when room
is needed, the one that was used longest ago first; nothing is deleted where even that would not
make enough room.

Locks are advisory locks of the kernel (``flock(2)``): taken at once or not at all, and gone with
the last process that holds the file open, however it ended, so nobody has to judge from a process
number (which containers hide and the kernel gives out again) who is alive. They hold between
processes of one node only, which is why a stage must lie on the node's own disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from outlast.cluster.staging.copying import Source


_forgotten_by_children: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """One lock on one file; the file is made when needed.

    Args:
        path: The file; its folder exists.
        inherited: Whether forked children hold it too. A child that goes on reading a copy must
            keep its lease; a child of a process that copies must not keep the claim.
    """

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self._path = path
        self._descriptor: int | None = None
        if not inherited:
            _forgotten_by_children.add(self)

    @property
    def held(self) -> bool:
        """True while this object holds its lock."""
        return self._descriptor is not None

    def take(self, *, shared: bool = False) -> bool:
        """Take the lock if it is free now, or free of exclusive holders where `shared`.

        Raises:
            OSError: The file cannot be made, or its file system knows no locks.
        """
        if self.held:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Whoever had it before may have deleted the file: then this lock keeps nobody out.
            current = os.path.samestat(os.fstat(descriptor), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            current = False
        except BaseException:
            os.close(descriptor)
            raise
        if not current:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def delete(self) -> None:
        """Delete the file of a lock that is held, and give it back; others make a new one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _forget_in_child() -> None:
    # Closing a copy of the descriptor leaves the parent's lock as it is.
    for lock in list(_forgotten_by_children):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


MANIFEST = "manifest.json"
CHECKED = "checked.json"
FILES = "files"
FORMAT = "outlast-stage"
VERSION = 1
CHECK_AGAIN_SECONDS = 6 * 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class StagedFile:
    """One file of a copy.

    Attributes:
        name: Below the folder of the copy.
        size_bytes: Its size.
        digest: xxh3-128 of its content, hexadecimal.
    """

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A whole copy.

    Attributes:
        source: Path or URL that it was copied from.
        files: All files, the first one being what was asked for.
    """

    source: str
    files: tuple[StagedFile, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def publish(self, folder: Path) -> None:
        """Write it into the folder of the copy; raises OSError."""
        publish(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(self)})


def publish(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is seen whole or not at all; raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in the folder of a copy; None where there is no whole copy."""
    content = _read(folder / MANIFEST)
    try:
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return None
        files = tuple(
            StagedFile(str(file["name"]), int(file["size_bytes"]), str(file["digest"]))
            for file in content["files"]
        )
        return Manifest(str(content["source"]), files)
    except (KeyError, TypeError, ValueError):
        return None


def has_its_sizes(folder: Path, manifest: Manifest) -> bool:
    """True if every file is there with its size."""
    try:
        return all(
            (folder / FILES / file.name).stat().st_size == file.size_bytes
            for file in manifest.files
        )
    except OSError:
        return False


def note_checked(folder: Path, manifest: Manifest) -> None:
    """Note that all files have just been found to have their digests; raises OSError."""
    publish(folder / CHECKED, {"time": time.time(), **_state_of(folder, manifest)})


def was_checked(
    folder: Path, manifest: Manifest, again_seconds: float = CHECK_AGAIN_SECONDS
) -> bool:
    """True if the files are as they were when they were last read, which is not long ago."""
    content = _read(folder / CHECKED)
    at = content.pop("time", None)
    if not isinstance(at, float) or not 0.0 <= time.time() - at < again_seconds:
        return False
    try:
        return content == _state_of(folder, manifest)
    except OSError:
        return False


def _state_of(folder: Path, manifest: Manifest) -> dict[str, Any]:
    files = {}
    for file in manifest.files:
        facts = (folder / FILES / file.name).stat()
        files[file.name] = [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    return {"boot": _boot(), "files": files}


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Kept:
    """A copy, whole or in part, that takes room in a stage.

    Attributes:
        key: Name of its folder.
        bytes: What it takes.
        planned_bytes: What it will take when it is whole.
        last_used: When it was used last, seconds since the epoch.
        busy: Whether a live process uses it or works on it.
    """

    key: str
    bytes: int
    planned_bytes: int
    last_used: float
    busy: bool


@dataclass(frozen=True)
class Room:
    """Space limits of a stage.

    Attributes:
        free_bytes: Free on its file system.
        keep_free_bytes: What is to stay free there.
        limit_bytes: Most that all copies may take together; 0: no limit.
    """

    free_bytes: int
    keep_free_bytes: int
    limit_bytes: int

    def lacking_bytes(self, total_bytes: int, present_bytes: int, others: Iterable[Kept]) -> int:
        """Bytes to be freed before a copy can be made; 0 or less: nothing.

        Args:
            total_bytes: What the copy takes when it is whole.
            present_bytes: What of it is there already.
            others: All other copies.
        """
        held = list(others)
        # What others are about to write is as good as taken.
        coming = sum(max(kept.planned_bytes - kept.bytes, 0) for kept in held if kept.busy)
        lacking = total_bytes - present_bytes + coming + self.keep_free_bytes - self.free_bytes
        if self.limit_bytes:
            used = sum(kept.bytes for kept in held) + coming
            lacking = max(lacking, used + total_bytes - self.limit_bytes)
        return lacking


def victims(kept: Sequence[Kept], lacking_bytes: int) -> list[Kept] | None:
    """The copies to delete so that `lacking_bytes` are freed, least recently used first.

    Returns:
        As few as that order allows; None where all that are not busy would not be enough.
    """
    chosen: list[Kept] = []
    freed = 0
    for kept_item in sorted(kept, key=lambda kept: (kept.last_used, kept.key)):
        if freed >= lacking_bytes:
            break
        if not kept_item.busy and kept_item.bytes > 0:
            chosen.append(kept_item)
            freed += kept_item.bytes
    return chosen if freed >= lacking_bytes else None


def free_bytes_at(directory: Path) -> int:
    """Bytes that this user may still write to the file system of a directory."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def no_room(
    source: Source, present_bytes: int, directory: Path, room: Room, others: Sequence[Kept]
) -> ClusterError:
    """The sentence for a copy that there is no room for."""
    facts = [f"{_size(room.free_bytes)} are free"]
    if room.keep_free_bytes:
        facts.append(f"{_size(room.keep_free_bytes)} are to stay free")
    if room.limit_bytes:
        facts.append(f"all copies may take {_size(room.limit_bytes)} (staging.limit_gigabytes)")
    if busy := sum(other.planned_bytes for other in others if other.busy):
        facts.append(f"{_size(busy)} are copies that live processes use")
    return ClusterError(
        f"{source.location} needs {_size(source.bytes - present_bytes)} in {directory}, but "
        f"{', '.join(facts)}: free some space, raise the limit or name another staging.directory"
    )


def _size(count: int) -> str:
    if count < 1e7:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB"


CLAIMS = "claims"
LEASES = "leases"
ROOM = "room"
PLAN = "plan.json"
USED = "used"
_LONGEST_NAME = 60


def key_of(source: Source, digest: str | None) -> str:
    """Name of the folder of a copy: equal for equal files, and for equal content where it is known.

    Args:
        source: What is copied.
        digest: The xxh3-128 of its first file where it is known.
    """
    known: list[object] = [[file.name, file.size_bytes, file.version] for file in source.files]
    if digest is None:
        known.append(source.location)
    else:
        first = source.files[0]
        known[0] = [first.name, first.size_bytes, digest]
    last = source.location.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", last)[-_LONGEST_NAME:].lstrip(".")
    return f"{name}-{xxhash.xxh3_64_hexdigest(json.dumps(known).encode())}"


def claim_of(root: Path, key: str) -> FileLock:
    """The right to work on a copy; ends with the process, not with its children."""
    return FileLock(root / CLAIMS / key)


def lease_of(root: Path, key: str) -> FileLock:
    """The use of a copy; ends with the process and its children."""
    return FileLock(root / LEASES / key, inherited=True)


def folders_of(root: Path) -> list[Path]:
    """The folders of all copies, whole or not."""
    return [path for path in root.iterdir() if path.is_dir() and path.name not in (CLAIMS, LEASES)]


def note_plan(folder: Path, source: Source) -> None:
    """Note what the copy in `folder` will be; raises OSError."""
    publish(folder / PLAN, {"source": source.location, "bytes": source.bytes})


def source_of(folder: Path) -> str:
    """Origin of a copy; the folder's name where that is not known."""
    for name in (MANIFEST, PLAN):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((folder / name).read_bytes())["source"])
    return folder.name


def kept_in(root: Path, folder: Path) -> Kept:
    """Size of a copy, and True if a live process works on it or uses it."""
    size = 0
    for path in folder.rglob("*"):
        # Others work here: a file may be gone by now.
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    planned = size
    if not (folder / MANIFEST).exists():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            planned = max(size, int(json.loads((folder / PLAN).read_bytes())["bytes"]))
    last_used = 0.0
    for name in (USED, PLAN):
        with contextlib.suppress(OSError):
            last_used = max(last_used, (folder / name).stat().st_mtime)
    with claim_of(root, folder.name) as claim, lease_of(root, folder.name) as lease:
        busy = not (claim.take() and lease.take())
    return Kept(folder.name, size, planned, last_used, busy)


def evict(root: Path, key: str) -> bool:
    """Delete a copy unless somebody has begun to use it; whether it is gone."""
    with claim_of(root, key) as claim, lease_of(root, key) as lease:
        if not (claim.take() and lease.take()):
            return False
        # Renamed first: what a kill leaves behind is no copy any more.
        doomed = root / f".evicted-{key}"
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (root / key).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        lease.delete()
        claim.delete()
    return True
