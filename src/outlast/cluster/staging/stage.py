"""A folder on the node's own disk with copies of what lies on a shared file system.

However many processes of a node ask for a file at once, one of them copies it while the others
wait; who asks later finds it there.

Copies in a stage's folder: content, checks, locks, and eviction.

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
import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from outlast.cluster.staging.copying import (
    PART,
    ReadAhead,
    copy_file,
    digest_of,
    find,
    forget_journal,
    is_url,
)
from outlast.errors import ClusterError
from outlast.hardware.filesystem import NETWORK_TYPES, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from outlast.cluster.staging.copying import Pace, Pacing, Source


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


_POLL_SECONDS = 0.02


_TELL_SECONDS = 0.1


# Leases end with the process: what has been mapped must stay, whatever becomes of the Stage.
_leases: dict[Path, FileLock] = {}


def let_go(root: Path) -> None:
    """Give back all leases of this process on copies below `root`."""
    for path in [lease for lease in _leases if lease.is_relative_to(root)]:
        _leases.pop(path).release()


@dataclass(frozen=True)
class StagedCopy:
    """A copy that is there, whole and checked, until this process and its children end.

    Attributes:
        path: What was asked for: a file, or the folder of files.
        source: Where it is from.
        bytes: Size of all its files.
        copied_bytes: What this process has read from the source now; 0: it was there already.
        resumed_bytes: What of it another process had copied before it died.
        seconds: All that this call took.
        waited_seconds: Thereof for another process that was copying or checking.
        evicted: Sources of the copies that had to go.
        damaged: Whether an earlier copy was found damaged and was made anew.
        problem: Why `path` is the source itself and no copy; empty where it is a copy.
    """

    path: Path
    source: str
    bytes: int
    copied_bytes: int = 0
    resumed_bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    evicted: tuple[str, ...] = ()
    damaged: bool = False
    problem: str = ""

    def facts(self) -> dict[str, Any]:
        """An entry of `outlast.records.DataStaged.copies`, but for its host and processes."""
        return {**asdict(self), "path": str(self.path), "evicted": list(self.evicted)}


class Fetching:
    """One request.

    Args:
        stage: Its settings.
        root: The user's folder of the stage.
        key: Name of the copy.
        source: What is to be copied.
        staged: What is returned, with what was done for it.
        digest: xxh3-128 of its first file where it is known.
        deadline: Time of the monotonic clock by which it must be there.
        progress: Called with (bytes there, bytes in all).
    """

    def __init__(
        self,
        stage: Stage,
        root: Path,
        key: str,
        source: Source,
        staged: StagedCopy,
        *,
        digest: str | None,
        deadline: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._stage = stage
        self._root = root
        self._key = key
        self._folder = root / key
        self._source = source
        self._staged = staged
        self._digest = digest
        self._deadline = deadline
        self._progress = progress or (lambda done_bytes, all_bytes: None)
        self._claim = claim_of(root, key)

    def run(self) -> StagedCopy:
        """Take the copy that is there, make it, or wait for who makes it.

        Raises:
            ClusterError: There is no room, the source is damaged, or it took too long.
            OSError: A disk failed.
        """
        begun = told = time.monotonic()
        while True:
            if self._claim.take():
                with self._claim:
                    waited_seconds = time.monotonic() - begun
                    return replace(self._make_or_check(), waited_seconds=waited_seconds)
            if self._found_checked():
                return replace(self._staged, waited_seconds=time.monotonic() - begun)
            self._wait(self._whom)
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                self._progress(self._present_bytes(), self._source.bytes)

    def find(self) -> StagedCopy | None:
        """Take the copy that is there; None where none is whole, or it is damaged.

        A copy that somebody else reads to check it is waited for; nothing is copied.

        Raises:
            ClusterError: The check took too long.
            OSError: A disk failed.
        """
        begun = time.monotonic()
        while read_manifest(self._folder) is not None:
            if self._claim.take():
                with self._claim:
                    manifest = read_manifest(self._folder)
                    if manifest is None:
                        return None
                    if not (was_checked(self._folder, manifest) or self._check(manifest)):
                        return None
                    self._use()
                    return replace(self._staged, waited_seconds=time.monotonic() - begun)
            if self._found_checked():
                return replace(self._staged, waited_seconds=time.monotonic() - begun)
            self._wait(self._whom)
        return None

    def _found_checked(self) -> bool:
        """True if a copy is there that needs no reading; it is in use then."""
        # Nobody works on it: all who have waited may look at once.
        if self._claim.take(shared=True):
            with self._claim:
                manifest = read_manifest(self._folder)
                if manifest is not None and was_checked(self._folder, manifest):
                    self._use()
                    return True
        return False

    def _whom(self) -> str:
        return (
            f"another process of this node to stage {self._source.location}; "
            f"{self._present_bytes()} of {self._source.bytes} bytes are there"
        )

    def _wait(self, whom: Callable[[], str]) -> None:
        if time.monotonic() >= self._deadline:
            raise ClusterError(
                f"waited {self._stage.timeout_seconds:g} s (staging.timeout_seconds) for {whom()}"
            )
        time.sleep(_POLL_SECONDS)

    def _make_or_check(self) -> StagedCopy:
        manifest = read_manifest(self._folder)
        if manifest is not None:
            if was_checked(self._folder, manifest) or self._check(manifest):
                self._use()
                return self._staged
            shutil.rmtree(self._folder)
        self._folder.mkdir(exist_ok=True)
        try:
            evicted = self._make_room()
        except BaseException:
            # An empty folder goes again; a part stays, since there may be room later.
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise
        self._use()
        try:
            made = self._copy()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # A part that fills the disk would only be in everybody's way.
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return replace(made, evicted=evicted, damaged=manifest is not None)

    def _check(self, manifest: Manifest) -> bool:
        """Read all files of a copy; whether they have their digests."""
        if not has_its_sizes(self._folder, manifest):
            return False
        for file in manifest.files:
            path = self._folder / FILES / file.name
            if digest_of(path, self._stage.ahead, self._deadline) != file.digest:
                return False
        note_checked(self._folder, manifest)
        return True

    def _copy(self) -> StagedCopy:
        pacing = self._stage.pacing
        with contextlib.nullcontext() if pacing is None else pacing(self._source.location) as pace:
            return self._copy_files(pace)

    def _copy_files(self, pace: Pace | None) -> StagedCopy:
        copied = resumed = before = 0
        staged = []
        for number, file in enumerate(self._source.files):

            def told(done_bytes: int, before: int = before) -> None:
                self._progress(before + done_bytes, self._source.bytes)

            target = self._folder / FILES / file.name
            done = copy_file(
                file,
                target,
                self._stage.ahead,
                self._deadline,
                read_back=self._stage.read_back,
                direct=self._stage.direct,
                pace=pace,
                told=told,
            )
            if number == 0 and self._digest is not None and done.digest != self._digest:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise ClusterError(
                    f"{file.location} is damaged: it has the xxh3-128 {done.digest}, but "
                    f"{self._digest} is stated for it"
                )
            copied, resumed = copied + done.copied_bytes, resumed + done.resumed_bytes
            before += file.size_bytes
            staged.append(StagedFile(file.name, file.size_bytes, done.digest))
        was = self._source.files
        now = find(self._source.location, [file.name for file in was[1:]]).files
        if changed := sorted({file.location for file in set(was) ^ set(now)}):
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ClusterError(f"{', '.join(changed)} changed while it was being staged; try again")
        manifest = Manifest(self._source.location, tuple(staged))
        manifest.publish(self._folder)
        for file in self._source.files:
            forget_journal(self._folder / FILES / file.name)
        note_checked(self._folder, manifest)
        return replace(self._staged, copied_bytes=copied, resumed_bytes=resumed)

    def _make_room(self) -> tuple[str, ...]:
        """Reserve the room for the copy; returns the sources of copies that had to go for it."""
        with FileLock(self._root / ROOM) as lock:
            while not lock.take():
                self._wait(lambda: f"another process to make room in {self._stage.directory}")
            others = [
                kept_in(self._root, path)
                for path in folders_of(self._root)
                if path.name != self._key
            ]
            room = Room(
                free_bytes_at(self._root), self._stage.keep_free_bytes, self._stage.limit_bytes
            )
            present = self._present_bytes()
            lacking = room.lacking_bytes(self._source.bytes, present, others)
            evicted = []
            while lacking > 0:
                chosen = victims(others, lacking)
                if chosen is None:
                    raise no_room(self._source, present, self._stage.directory, room, others)
                for kept in chosen:
                    others.remove(kept)
                    source = source_of(self._root / kept.key)
                    if evict(self._root, kept.key):
                        evicted.append(source)
                        lacking -= kept.bytes
            note_plan(self._folder, self._source)
        return tuple(evicted)

    def _present_bytes(self) -> int:
        """Bytes of the copy that are on the disk, in whole files and parts."""
        count = 0
        for file in self._source.files:
            target = self._folder / FILES / file.name
            for path in (target, target.with_name(target.name + PART)):
                try:
                    count += path.stat().st_size
                except OSError:
                    continue
        return count

    def _use(self) -> None:
        """Note the use, and keep the copy from being evicted while this process lives."""
        path = self._root / LEASES / self._key
        if path not in _leases:
            lease = lease_of(self._root, self._key)
            while not lease.take(shared=True):
                # Somebody looks whether it may go; he will not get the claim, which is held here.
                self._wait(lambda: f"the lease {path}")
            _leases[path] = lease
        (self._folder / USED).touch()


_MOUNTS = Path("/proc/mounts")


@dataclass(frozen=True)
class Stage:
    """Copies in one directory of this node, those of each user by themselves.

    Attributes:
        directory: A directory of the node's own disk or memory; made when needed.
        limit_bytes: Most that all copies may take together; 0: no limit.
        keep_free_bytes: What is to stay free on the disk.
        timeout_seconds: Longest time for one copy, or for waiting for the one who makes it.
        read_back: Whether a copy is read from the disk, past the kernel's memory, when it is made.
        direct: Whether copies are written past the kernel's memory, where that can be done.
        ahead: How sources are read.
        pacing: How fast they are copied; None: as fast as can be.
    """

    directory: Path
    limit_bytes: int = 0
    keep_free_bytes: int = 1 << 30
    timeout_seconds: float = 3600.0
    read_back: bool = True
    direct: bool = True
    ahead: ReadAhead = field(default_factory=ReadAhead)
    pacing: Pacing | None = None

    def fetch(
        self,
        location: str,
        *,
        beside: Sequence[str] = (),
        digest: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> StagedCopy:
        """Get a copy of a file or folder, made by one process of this node.

        Args:
            location: Path, or fsspec URL.
            beside: Names in the file's own folder that come with it where they exist.
            digest: xxh3-128 of the file where it is known. It must have it, and sources of one
                name with one digest share their copy.
            progress: Called with (bytes there, bytes in all), also while waiting.

        Raises:
            ClusterError: The source is missing or damaged, there is no room, or it took too long.
        """
        found = self._fetched(location, beside, digest, progress, Fetching.run)
        assert found is not None
        return found

    def find(
        self, location: str, *, beside: Sequence[str] = (), digest: str | None = None
    ) -> StagedCopy | None:
        """The copy of a file or folder that is there, whole and checked; None: there is none yet.

        Args:
            location: As for `fetch`.
            beside: As for `fetch`.
            digest: As for `fetch`.

        Raises:
            ClusterError: As for `fetch`.
        """
        return self._fetched(location, beside, digest, None, Fetching.find)

    def _fetched(
        self,
        location: str,
        beside: Sequence[str],
        digest: str | None,
        progress: Callable[[int, int], None] | None,
        work: Callable[[Fetching], StagedCopy | None],
    ) -> StagedCopy | None:
        begun = time.monotonic()
        if not is_url(location):
            location = str(Path(location).absolute())
        source = find(location, beside)
        root = self._root()
        key = key_of(source, digest)
        deadline = begun + self.timeout_seconds
        files = root / key / FILES
        path = files if source.is_folder else files / source.files[0].name
        staged = StagedCopy(path, location, source.bytes)
        fetching = Fetching(
            self, root, key, source, staged, digest=digest, deadline=deadline, progress=progress
        )
        try:
            done = work(fetching)
        except OSError as error:
            raise ClusterError(
                f"{location} cannot be staged in {self.directory} ({error.strerror or error})"
            ) from error
        return None if done is None else replace(done, seconds=time.monotonic() - begun)

    def copies(self) -> list[tuple[str, Kept]]:
        """The sources and sizes of all copies of this user, whole or not, by last use."""
        root = self._root()
        found = [(source_of(path), kept_in(root, path)) for path in folders_of(root)]
        return sorted(found, key=lambda pair: pair[1].last_used)

    def release(self) -> None:
        """Let go of all that this process uses here, so that it may be evicted."""
        let_go(self._root())

    def _root(self) -> Path:
        root = self.directory / f"outlast-stage-{os.getuid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            for name in (CLAIMS, LEASES):
                (root / name).mkdir(exist_ok=True)
            owner = root.stat().st_uid
            mounts = _MOUNTS.read_text(encoding="latin-1") if _MOUNTS.exists() else ""
        except OSError as error:
            raise ClusterError(
                f"staging.directory = {self.directory} cannot be used ({error.strerror})"
            ) from None
        if owner != os.getuid():
            raise ClusterError(f"{root} belongs to another user; name another staging.directory")
        kind = mount_of(root.resolve(), mounts)[1]
        if kind in NETWORK_TYPES:
            raise ClusterError(
                f"staging.directory = {self.directory} lies on {kind}, which other nodes see and "
                "which reads no faster; name a directory of the node's own disk or memory"
            )
        return root
