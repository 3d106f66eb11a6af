"""A folder on the node's own disk with copies of what lies on a shared file system.

However many processes of a node ask for a file at once, one of them copies it while the others
wait; who asks later finds it there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cluster.staging.copies import (
    CLAIMS,
    FILES,
    LEASES,
    ROOM,
    USED,
    FileLock,
    Manifest,
    Room,
    StagedFile,
    claim_of,
    evict,
    folders_of,
    free_bytes_at,
    has_its_sizes,
    kept_in,
    key_of,
    lease_of,
    no_room,
    note_checked,
    note_plan,
    read_manifest,
    source_of,
    victims,
    was_checked,
)
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
    from collections.abc import Callable, Sequence

    from outlast.cluster.staging.copies import Kept
    from outlast.cluster.staging.copying import Pace, Pacing, Source


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
