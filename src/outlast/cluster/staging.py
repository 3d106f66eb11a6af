"""Training data on the nodes that read it: the section [staging] of a job.

    from outlast.cluster.staging import Stage
    stage = Stage(Path("/local/scratch"), limit_bytes=200 << 30)
    copy = stage.fetch("s3://corpus/train.bin", beside=["train.json"])   # one process copies
    copy.path                                                            # on the node's own disk

A stager for the trainer, prefetching, burst-buffer directives. As a program, ``python -m
outlast.cluster.staging [--beside-training] JOB.TOML [section.key=value ...]`` prefetches on this
node, for `prefetch_command`, once on each; ``outlast cluster prefetch`` does the same for a person.
With --beside-training it makes way for what else runs there.

A burst buffer: Slurm hands the lines that begin with the site's directive to its plugin, which
makes room and copies files while the job still waits in the queue. They are in the plugin's own
language: DataWarp's and Rabbit's are known here, another site's comes from the job file. Sources:
Slurm's Burst Buffer Guide; DataWarp User Guide (S-2558); the Near Node Flash project's "Rabbit User
Interactions".
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from outlast.cluster.copying import (
    PART,
    GentlePace,
    ReadAhead,
    TokenBucket,
    copy_file,
    digest_of,
    find,
    forget_journal,
    is_url,
)
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, ClusterError, OutlastError
from outlast.hardware.filesystem import NETWORK_TYPES, mount_of
from outlast.records.claims import FileLock
from outlast.records.directory import replace_file
from outlast.records.lease import json_object
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.cluster.copying import Pace, Source
    from outlast.job import Job, StagingSection

CLAIMS = "claims"
LEASES = "leases"
ROOM = "room"
PLAN = "plan.json"
USED = "used"
MANIFEST = "manifest.json"
CHECKED = "checked.json"
FILES = "files"
FORMAT = "outlast-stage"
VERSION = 1
CHECK_AGAIN_SECONDS = 6 * 3600.0
_LONGEST_NAME = 60
_POLL_SECONDS = 0.02
_TELL_SECONDS = 0.1
_MOUNTS = Path("/proc/mounts")
# Leases end with the process: what has been mapped must stay, whatever becomes of the Stage.
_leases: dict[Path, FileLock] = {}


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


def publish(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is seen whole or not at all; raises OSError."""
    replace_file(path, (json.dumps(content) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}


def read_manifest(folder: Path) -> tuple[StagedFile, ...] | None:
    """The files of a copy, the first being what was asked for; None where it is not whole."""
    content = _read(folder / MANIFEST)
    try:
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return None
        return tuple(
            StagedFile(str(file["name"]), int(file["size_bytes"]), str(file["digest"]))
            for file in content["files"]
        )
    except (KeyError, TypeError, ValueError):
        return None


def note_checked(folder: Path, files: Sequence[StagedFile]) -> None:
    """Note that all files have just been found to have their digests; raises OSError."""
    publish(folder / CHECKED, {"time": time.time(), **_state_of(folder, files)})


def was_checked(folder: Path, files: Sequence[StagedFile]) -> bool:
    """True if the files are as they were when they were last read, which is not long ago."""
    content = _read(folder / CHECKED)
    at = content.pop("time", None)
    if not isinstance(at, float) or not 0.0 <= time.time() - at < CHECK_AGAIN_SECONDS:
        return False
    with contextlib.suppress(OSError):
        return content == _state_of(folder, files)
    return False


def _state_of(folder: Path, files: Sequence[StagedFile]) -> dict[str, Any]:
    found = {}
    for file in files:
        facts = (folder / FILES / file.name).stat()
        found[file.name] = [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    return {"boot": boot_identity(), "files": found}


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


def lacking_bytes(
    stage: Stage, free_bytes: int, total_bytes: int, present_bytes: int, others: Sequence[Kept]
) -> int:
    """Bytes to be freed before a copy can be made; 0 or less: nothing.

    Args:
        stage: With its limits.
        free_bytes: Free on its file system.
        total_bytes: What the copy takes when it is whole.
        present_bytes: What of it is there already.
        others: All other copies.
    """
    # What others are about to write is as good as taken.
    coming = sum(max(kept.planned_bytes - kept.bytes, 0) for kept in others if kept.busy)
    lacking = total_bytes - present_bytes + coming + stage.keep_free_bytes - free_bytes
    if stage.limit_bytes:
        used = sum(kept.bytes for kept in others) + coming
        lacking = max(lacking, used + total_bytes - stage.limit_bytes)
    return lacking


def victims(kept: Sequence[Kept], lacking_bytes: int) -> list[Kept] | None:
    """The copies to delete so that `lacking_bytes` are freed, least recently used first.

    Returns:
        As few as that order allows; None where all that are not busy would not be enough.
    """
    chosen: list[Kept] = []
    for item in sorted(kept, key=lambda kept: (kept.last_used, kept.key)):
        if lacking_bytes <= 0:
            break
        if not item.busy and item.bytes > 0:
            chosen.append(item)
            lacking_bytes -= item.bytes
    return chosen if lacking_bytes <= 0 else None


def no_room(
    source: Source, present_bytes: int, stage: Stage, free_bytes: int, others: Sequence[Kept]
) -> ClusterError:
    """The sentence for a copy that there is no room for."""
    facts = [f"{_size(free_bytes)} are free"]
    if stage.keep_free_bytes:
        facts.append(f"{_size(stage.keep_free_bytes)} are to stay free")
    if stage.limit_bytes:
        facts.append(f"all copies may take {_size(stage.limit_bytes)} (staging.limit_gigabytes)")
    if busy := sum(other.planned_bytes for other in others if other.busy):
        facts.append(f"{_size(busy)} are copies that live processes use")
    return ClusterError(
        f"{source.location} needs {_size(source.bytes - present_bytes)} in {stage.directory}, but "
        f"{', '.join(facts)}: free some space, raise the limit or name another staging.directory"
    )


def _size(count: int) -> str:
    if count < 1e7:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB"


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


def source_of(folder: Path) -> str:
    """Origin of a copy; the folder's name where that is not known."""
    known = {**_read(folder / PLAN), **_read(folder / MANIFEST)}
    return str(known.get("source", folder.name))


def kept_in(root: Path, folder: Path) -> Kept:
    """Size of a copy, and True if a live process works on it or uses it."""
    size = 0
    for path in folder.rglob("*"):
        # Others work here: a file may be gone by now.
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    planned = size
    if not (folder / MANIFEST).exists():
        with contextlib.suppress(ValueError, TypeError):
            planned = max(size, int(_read(folder / PLAN).get("bytes", 0)))
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


@dataclass
class Fetching:
    """One request.

    Attributes:
        stage: Its settings.
        folder: Of the copy, in the user's folder of the stage.
        source: What is to be copied.
        staged: What is returned, with what was done for it.
        digest: xxh3-128 of its first file where it is known.
        deadline: Time of the monotonic clock by which it must be there.
        progress: Called with (bytes there, bytes in all); None: nobody is told.
    """

    stage: Stage
    folder: Path
    source: Source
    staged: StagedCopy
    digest: str | None
    deadline: float
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._root, self._key = self.folder.parent, self.folder.name
        self._claim = claim_of(self._root, self._key)

    def get(self, *, make: bool) -> StagedCopy | None:
        """Take the copy that is there, wait for who makes or checks it, or make it.

        Args:
            make: Whether to make it; if not, None is returned where none is whole, or it is
                damaged.

        Raises:
            ClusterError: There is no room, the source is damaged, or it took too long.
            OSError: A disk failed.
        """
        begun = told = time.monotonic()
        while make or read_manifest(self.folder) is not None:
            if self._claim.take():
                with self._claim:
                    waited = time.monotonic() - begun
                    found = self._make_or_check(make=make)
                    return None if found is None else replace(found, waited_seconds=waited)
            if self._found_checked():
                return replace(self.staged, waited_seconds=time.monotonic() - begun)
            self._wait(
                lambda: (
                    f"another process of this node to stage {self.source.location}; "
                    f"{self._present_bytes()} of {self.source.bytes} bytes are there"
                )
            )
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                self._tell(self._present_bytes())
        return None

    def _tell(self, done_bytes: int) -> None:
        if self.progress is not None:
            self.progress(done_bytes, self.source.bytes)

    def _found_checked(self) -> bool:
        """True if a copy is there that needs no reading; it is in use then."""
        # Nobody works on it: all who have waited may look at once.
        if self._claim.take(shared=True):
            with self._claim:
                manifest = read_manifest(self.folder)
                if manifest is not None and was_checked(self.folder, manifest):
                    self._use()
                    return True
        return False

    def _wait(self, whom: Callable[[], str]) -> None:
        if time.monotonic() >= self.deadline:
            raise ClusterError(
                f"waited {self.stage.timeout_seconds:g} s (staging.timeout_seconds) for {whom()}"
            )
        time.sleep(_POLL_SECONDS)

    def _make_or_check(self, *, make: bool) -> StagedCopy | None:
        manifest = read_manifest(self.folder)
        if manifest is not None and (was_checked(self.folder, manifest) or self._check(manifest)):
            self._use()
            return self.staged
        if not make:
            return None
        if manifest is not None:
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        try:
            evicted = self._make_room()
        except BaseException:
            # An empty folder goes again; a part stays, since there may be room later.
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise
        self._use()
        try:
            made = self._copy()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # A part that fills the disk would only be in everybody's way.
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return replace(made, evicted=evicted, damaged=manifest is not None)

    def _check(self, files: Sequence[StagedFile]) -> bool:
        """Read all files of a copy; whether they have their sizes and digests."""
        paths = [self.folder / FILES / file.name for file in files]
        sized = zip(paths, files, strict=True)
        try:
            if any(path.stat().st_size != file.size_bytes for path, file in sized):
                return False
        except OSError:
            return False
        for path, file in zip(paths, files, strict=True):
            if digest_of(path, self.stage.ahead, self.deadline) != file.digest:
                return False
        note_checked(self.folder, files)
        return True

    def _copy(self) -> StagedCopy:
        copied = resumed = before = 0
        staged: list[StagedFile] = []

        def told(done_bytes: int) -> None:
            self._tell(before + done_bytes)

        for file in self.source.files:
            target = self.folder / FILES / file.name
            digest, read, found = copy_file(file, target, self.stage, self.deadline, told)
            if not staged and self.digest is not None and digest != self.digest:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise ClusterError(
                    f"{file.location} is damaged: it has the xxh3-128 {digest}, but {self.digest} "
                    "is stated for it"
                )
            copied, resumed, before = copied + read, resumed + found, before + file.size_bytes
            staged.append(StagedFile(file.name, file.size_bytes, digest))
        was = self.source.files
        now = find(self.source.location, [file.name for file in was[1:]]).files
        if changed := sorted({file.location for file in set(was) ^ set(now)}):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ClusterError(f"{', '.join(changed)} changed while it was being staged; try again")
        manifest = {"source": self.source.location, "files": [asdict(file) for file in staged]}
        publish(self.folder / MANIFEST, {"format": FORMAT, "version": VERSION, **manifest})
        for file in self.source.files:
            forget_journal(self.folder / FILES / file.name)
        note_checked(self.folder, staged)
        return replace(self.staged, copied_bytes=copied, resumed_bytes=resumed)

    def _make_room(self) -> tuple[str, ...]:
        """Reserve the room for the copy; returns the sources of copies that had to go for it."""
        with FileLock(self._root / ROOM) as lock:
            while not lock.take():
                self._wait(lambda: f"another process to make room in {self.stage.directory}")
            folders = [path for path in folders_of(self._root) if path.name != self._key]
            others = [kept_in(self._root, path) for path in folders]
            free, present = shutil.disk_usage(self._root).free, self._present_bytes()
            lacking = lacking_bytes(self.stage, free, self.source.bytes, present, others)
            evicted = []
            while lacking > 0:
                chosen = victims(others, lacking)
                if chosen is None:
                    raise no_room(self.source, present, self.stage, free, others)
                for kept in chosen:
                    others.remove(kept)
                    source = source_of(self._root / kept.key)
                    if evict(self._root, kept.key):
                        evicted.append(source)
                        lacking -= kept.bytes
            facts = {"source": self.source.location, "bytes": self.source.bytes}
            publish(self.folder / PLAN, facts)
        return tuple(evicted)

    def _present_bytes(self) -> int:
        """Bytes of the copy that are on the disk, in whole files and parts."""
        count = 0
        for file in self.source.files:
            target = self.folder / FILES / file.name
            for path in (target, target.with_name(target.name + PART)):
                with contextlib.suppress(OSError):
                    count += path.stat().st_size
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
        (self.folder / USED).touch()


@dataclass(frozen=True)
class Stage:
    """Copies in one directory of this node, those of each user by themselves.

    However many processes of a node ask for a file at once, one of them copies it while the others
    wait; who asks later finds it there.

    `manifest.json` is published when all files are there and is never changed. A copy can be made
    again, and after a crash of the node its files are compared with their digests. `checked.json`
    says in which state the files were when they were last read and had their digests. A write
    changes a file's times, which no program can set back (``st_ctime``), so files in that same
    state are not read again before some hours are over or the node has been started anew.

    Folder of a stage::

        claims/<key>     locked exclusively while a process copies or checks this copy
        leases/<key>     locked shared by every live process that uses this copy
        room             locked exclusively while a process makes room
        <key>/           plan.json, files/..., manifest.json, checked.json, used (time of last use)

    A key is a name and a hash of names, sizes and versions, so a source that has changed gets a
    copy of its own and nobody loses the one that he is reading. Copies that no live process uses go
    when room is needed, the one that was used longest ago first; nothing is deleted where even that
    would not make enough room. Locks are those of `outlast.records.claims.FileLock`. They hold
    between processes of one node only, which is why a stage must lie on the node's own disk.

    Attributes:
        directory: A directory of the node's own disk or memory; made when needed.
        limit_bytes: Most that all copies may take together; 0: no limit.
        keep_free_bytes: What is to stay free on the disk.
        timeout_seconds: Longest time for one copy, or for waiting for the one who makes it.
        read_back: Whether a copy is read from the disk, past the kernel's memory, when it is made.
        ahead: How sources are read.
        pace: How fast they are copied, all together; None: as fast as can be.
    """

    directory: Path
    limit_bytes: int = 0
    keep_free_bytes: int = 1 << 30
    timeout_seconds: float = 3600.0
    read_back: bool = True
    ahead: ReadAhead = field(default_factory=ReadAhead)
    pace: Pace | None = None

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
        found = self._fetched(location, beside, digest, progress, make=True)
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
        return self._fetched(location, beside, digest, None, make=False)

    def _fetched(
        self,
        location: str,
        beside: Sequence[str],
        digest: str | None,
        progress: Callable[[int, int], None] | None,
        *,
        make: bool,
    ) -> StagedCopy | None:
        begun = time.monotonic()
        if not is_url(location):
            location = str(Path(location).absolute())
        source = find(location, beside)
        folder = self._root() / key_of(source, digest)
        path = folder / FILES if source.is_folder else folder / FILES / source.files[0].name
        staged = StagedCopy(path, location, source.bytes)
        deadline = begun + self.timeout_seconds
        fetching = Fetching(self, folder, source, staged, digest, deadline, progress)
        try:
            done = fetching.get(make=make)
        except OSError as error:
            raise ClusterError(
                f"{location} cannot be staged in {self.directory} ({error.strerror or error})"
            ) from error
        return None if done is None else replace(done, seconds=time.monotonic() - begun)

    def release(self) -> None:
        """Let go of all that this process uses here, so that it may be evicted."""
        root = self._root()
        for path in [lease for lease in _leases if lease.is_relative_to(root)]:
            _leases.pop(path).release()

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


BESIDE = "--beside-training"
_NICE = 19
_NOT_YET = "this node has no copy yet"
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True)
class NodeStager:
    """Gets one token file to this node, as [staging] says; travels to worker processes.

    Attributes:
        settings: The section, with a directory.
        most_bytes_per_s: Most that a node may take by a plan; 0: no limit but that of the section.
        pace: Of all copies together, for a prefetch that makes way for others; it does not travel.
    """

    settings: StagingSection
    most_bytes_per_s: float = 0.0
    pace: Pace | None = None

    @property
    def timeout_seconds(self) -> float:
        """Longest time that one file may take."""
        return self.settings.timeout_seconds

    def __call__(
        self,
        source: str,
        beside: tuple[str, ...] = (),
        digest: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> StagedCopy:
        """Get a file to this node; with staging.wait = false, only if it is there already.

        With a burst buffer, a file of its name and size in staging.directory is the site's copy
        and is used as it is.

        Args:
            source: Path, or URL.
            beside: Names beside it that belong to it.
            digest: xxh3-128 that it must have, where that is known.
            progress: Called with (bytes there, bytes in all).

        Raises:
            ClusterError: There can be no copy, and it is required or the source is a URL.
        """
        try:
            if (given := self._given(source, beside)) is not None:
                return given
            stage = self._stage()
            if not self.settings.wait and not is_url(source):
                found = stage.find(source, beside=beside, digest=digest)
                return found if found is not None else _in_place(source, _NOT_YET)
            return stage.fetch(source, beside=beside, digest=digest, progress=progress)
        except ClusterError as error:
            if self.settings.required or is_url(source) or not Path(source).exists():
                raise
            return _in_place(source, f"{error}", "staging.required = false")

    def _stage(self) -> Stage:
        settings, pace = self.settings, self.pace
        if pace is None:
            caps = [1e6 * settings.megabytes_per_s, self.most_bytes_per_s]
            pace = TokenBucket(min(cap for cap in caps if cap)) if any(caps) else None
        return Stage(
            directory_of(settings),
            limit_bytes=round(settings.limit_gigabytes * 1e9),
            keep_free_bytes=round(settings.keep_free_gigabytes * 1e9),
            timeout_seconds=settings.timeout_seconds,
            read_back=settings.read_back,
            ahead=ReadAhead(settings.block_megabytes << 20, settings.read_ahead),
            pace=pace,
        )

    def _given(self, source: str, beside: tuple[str, ...]) -> StagedCopy | None:
        if self.settings.burst_buffer == "off" or is_url(source):
            return None
        folder, original = directory_of(self.settings), Path(source)
        wanted = [original, *(original.with_name(name) for name in beside)]
        size = 0
        for item in (file for file in wanted if file.exists()):
            path = folder / item.name
            if not path.is_file() or path.samefile(item):
                return None
            if path.stat().st_size != item.stat().st_size:
                return None
            size += path.stat().st_size
        return StagedCopy(folder / original.name, source, size) if size else None


def stager_for(settings: StagingSection, most_bytes_per_s: float = 0.0) -> NodeStager | None:
    """The stager that [staging] asks for; None where it names no directory.

    Args:
        settings: The section.
        most_bytes_per_s: Most that a node may take by a plan; 0: no limit but that of the section.
    """
    return NodeStager(settings, most_bytes_per_s) if settings.directory else None


def _in_place(source: str, why: str, setting: str = "staging.wait = false") -> StagedCopy:
    size = Path(source).stat().st_size
    return StagedCopy(
        Path(source), source, size, problem=f"{why}; {source} is read in place ({setting})"
    )


def directory_of(settings: StagingSection, environment: Mapping[str, str] = os.environ) -> Path:
    """staging.directory with this node's environment variables in it.

    Raises:
        ClusterError: A variable is not set, or the path is not absolute.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1).strip("{}")
        if not environment.get(name):
            raise ClusterError(
                f"staging.directory = {settings.directory!r} needs the environment variable "
                f"{name}, which is not set on this node; set it or name a directory"
            )
        return environment[name]

    return Path(_VARIABLE.sub(value, settings.directory)).expanduser().absolute()


def token_files_of(job: Job) -> list[str]:
    """The token files that the processes of a job will open, as far as they are there now.

    Text is tokenised into the run's directory when it first starts; before that there are none.
    """
    if job.data.source == "tokens":
        found = []
        for name in (*job.data.train, *job.data.validation):
            path = name if is_url(name) else str(Path(name).expanduser())
            matches = [] if is_url(name) else sorted(glob.glob(path, recursive=True))  # noqa: PTH207
            found += matches or [path]
        return found
    folder = Path(job.run.directory) / job.run.name / "data"
    files = [folder / name for name in ("train.bin", "validation.bin")]
    return [str(file) for file in files if file.is_file()]


def header_name(file: str) -> str:
    """Name of the header beside a `.bin` file; empty for others, which have none."""
    name = file.rpartition("/")[2]
    return name.removesuffix(".bin") + ".json" if name.endswith(".bin") else ""


def stated_digest(file: str) -> str | None:
    """The xxh3-128 that a token file's header states (docs/data.md); None without one."""
    if is_url(file) or not header_name(file):
        return None
    try:
        header = json.loads(Path(file).with_name(header_name(file)).read_bytes())
        return str(header["file_hash"]) if header["format"] == "outlast-tokens" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prefetch(
    job: Job, *, beside_training: bool = False, progress: Callable[[int, int], None] | None = None
) -> list[StagedCopy]:
    """Get the tokens of a job to this node before its processes ask for them.

    To be called once on each node (`srun --ntasks-per-node=1`) while the link before is still
    training, or as the first thing of a link; processes that start meanwhile wait for what is
    already on its way. The copies stay when this process ends. Nothing is done where
    staging.directory is empty, and nothing is tokenised.

    Args:
        job: Checked.
        beside_training: Whether to take at most staging.prefetch_megabytes_per_s, and less where
            others want the same bandwidth.
        progress: Called with (bytes there, bytes in all) of a file.

    Raises:
        ClusterError: A copy cannot be made.
    """
    if not job.staging.directory:
        return []
    settings = job.staging.model_copy(update={"required": True, "wait": True})
    pace = None
    if beside_training:
        # What one copy has learnt of the file system, the next one knows.
        pace = GentlePace.below(1e6 * settings.prefetch_megabytes_per_s)
    required = NodeStager(settings, pace=pace)
    found = []
    for source in token_files_of(job):
        beside = tuple(name for name in (header_name(source),) if name)
        found.append(required(source, beside, stated_digest(source), progress))
    return found


def told(job: Job, copies: Sequence[StagedCopy]) -> list[str]:
    """Report of `prefetch` for a job, a line for each file."""
    if not job.staging.directory:
        return ["nothing to do: staging.directory is empty, so tokens are read where they are"]
    if not copies:
        return ["nothing to do yet: the text is tokenised when the run first starts"]
    lines = []
    for copy in copies:
        size = f"{copy.bytes / 1e6:,.1f} MB"
        if not copy.copied_bytes:
            lines.append(f"{copy.source}: {size} are at {copy.path} already")
            continue
        rate = copy.copied_bytes / 1e6 / max(copy.seconds, 1e-9)
        line = f"{copy.source}: {size} to {copy.path} in {copy.seconds:.1f} s ({rate:,.0f} MB/s)"
        lines.append(line + "".join(f"; evicted {name}" for name in copy.evicted))
    return lines


def prefetch_command(
    python: str, job_file: Path, nodes: int, *, beside_training: bool = False
) -> tuple[str, ...]:
    """The words that prefetch on every node of a Slurm job, beside what else runs there.

    Args:
        python: The interpreter.
        job_file: The job, as every node sees it.
        nodes: Number of nodes.
        beside_training: As for `prefetch`.
    """
    spread = ("--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1")
    options = (BESIDE,) if beside_training else ()
    return ("srun", *spread, python, "-m", "outlast.cluster.staging", *options, str(job_file))


_LINES = {
    "datawarp": (
        "#DW jobdw type=scratch access_mode=striped capacity={gigabytes}GB",
        "#DW stage_in type=file source={source} destination=$DW_JOB_STRIPED/{name}",
    ),
    "rabbit": (
        "#DW jobdw type=xfs capacity={gigabytes}GB name=outlast",
        "#DW copy_in source={source} destination=$DW_JOB_outlast/{name}",
    ),
}
_SAFE = re.compile(r"[A-Za-z0-9@%+=:,./_~-]+")
_SPARE = 1.1


def directives(settings: StagingSection, files: Sequence[tuple[str, int]]) -> list[str]:
    """The lines for a batch script.

    Args:
        settings: The section [staging].
        files: Absolute path and size in bytes of every file that is to be copied.

    Returns:
        The lines, which belong after the #SBATCH lines and before the first command; none where
        staging.burst_buffer is off.

    Raises:
        ClusterError: A path cannot stand in a directive, or two files have one name.
    """
    if settings.burst_buffer == "off":
        return []
    names = [Path(path).name for path, _ in files]
    for (path, _), name in zip(files, names, strict=True):
        if not _SAFE.fullmatch(path):
            raise ClusterError(
                f"{path!r} cannot stand in a burst-buffer directive; give the file a name of "
                "letters, digits, dots, dashes and underscores"
            )
        if names.count(name) > 1:
            raise ClusterError(
                f"two files are called {name}, which would be one in the burst buffer; rename one"
            )
    templates = _LINES.get(settings.burst_buffer, tuple(settings.burst_buffer_lines))
    wanted = settings.burst_buffer_gigabytes or sum([size for _, size in files]) * _SPARE / 1e9
    capacity = str(max(math.ceil(wanted), 1))
    lines = []
    for template in templates:
        line = template.replace("{gigabytes}", capacity)
        if "{source}" in line or "{name}" in line:
            lines += [
                line.replace("{source}", path).replace("{name}", name)
                for (path, _), name in zip(files, names, strict=True)
            ]
        else:
            lines.append(line)
    return lines


def job_directives(job: Job) -> list[str]:
    """The lines for the batch script of a job, for its token files and their headers.

    Raises:
        ClusterError: As `directives`; also where a file does not exist, or is a URL.
    """
    found: list[tuple[str, int]] = []
    for file in token_files_of(job) if job.staging.burst_buffer != "off" else ():
        if is_url(file):
            raise ClusterError(
                f"{file} is a URL, which a burst buffer cannot copy; set staging.burst_buffer to "
                '"off", and each node copies it itself'
            )
        path = Path(file).absolute()
        if not path.is_file():
            raise ClusterError(f"{path} does not exist, so no burst buffer can copy it")
        header = path.with_name(header_name(file) or path.name)
        both = [path, header] if header != path and header.is_file() else [path]
        found += [(str(item), item.stat().st_size) for item in both]
    return directives(job.staging, found)


def main(arguments: list[str]) -> int:
    """Prefetch the tokens of a job; returns the exit code."""
    from outlast.job import load_job

    beside = arguments[:1] == [BESIDE]
    arguments = arguments[1:] if beside else arguments
    if not arguments:
        print(__doc__, file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        job = load_job(Path(arguments[0]), arguments[1:])
        if beside:
            os.nice(_NICE)
        print("\n".join(told(job, prefetch(job, beside_training=beside))), flush=True)
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
