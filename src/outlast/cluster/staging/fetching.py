"""One request for a copy: take it, wait for who makes it, or make it."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.cluster.staging.copying import PART, copy_file, digest_of, forget_journal
from outlast.cluster.staging.folders import (
    LEASES,
    ROOM,
    USED,
    claim_of,
    evict,
    folders_of,
    kept_in,
    lease_of,
    note_plan,
    source_of,
)
from outlast.cluster.staging.locks import FileLock
from outlast.cluster.staging.manifest import (
    FILES,
    Manifest,
    StagedFile,
    has_its_sizes,
    note_checked,
    read_manifest,
    was_checked,
)
from outlast.cluster.staging.source import find
from outlast.cluster.staging.space import Room, free_bytes_at, no_room, victims
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outlast.cluster.staging.copying import Pace
    from outlast.cluster.staging.source import Source
    from outlast.cluster.staging.stage import Stage

_POLL_SECONDS = 0.02
_TELL_SECONDS = 0.1
# Leases end with the process: what has been mapped must stay, whatever becomes of the Stage.
_leases: dict[Path, FileLock] = {}


def let_go(root: Path) -> None:
    """Give back all leases of this process on copies below `root`."""
    for path in [lease for lease in _leases if lease.is_relative_to(root)]:
        _leases.pop(path).release()


@dataclass(frozen=True)
class Fetched:
    """What was done for a copy that is now there; see `outlast.cluster.staging.StagedCopy`."""

    copied_bytes: int = 0
    resumed_bytes: int = 0
    waited_seconds: float = 0.0
    evicted: tuple[str, ...] = ()
    damaged: bool = False


class Fetching:
    """One request.

    Args:
        stage: Its settings.
        root: The user's folder of the stage.
        key: Name of the copy.
        source: What is to be copied.
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
        self._digest = digest
        self._deadline = deadline
        self._progress = progress or (lambda done_bytes, all_bytes: None)
        self._claim = claim_of(root, key)

    def run(self) -> Fetched:
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
                return Fetched(waited_seconds=time.monotonic() - begun)
            self._wait(self._whom)
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                self._progress(self._present_bytes(), self._source.bytes)

    def find(self) -> Fetched | None:
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
                    return Fetched(waited_seconds=time.monotonic() - begun)
            if self._found_checked():
                return Fetched(waited_seconds=time.monotonic() - begun)
            self._wait(self._whom)
        return None

    def _found_checked(self) -> bool:
        """Whether a copy is there that needs no reading; it is in use then."""
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

    def _make_or_check(self) -> Fetched:
        manifest = read_manifest(self._folder)
        if manifest is not None:
            if was_checked(self._folder, manifest) or self._check(manifest):
                self._use()
                return Fetched()
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

    def _copy(self) -> Fetched:
        pacing = self._stage.pacing
        with contextlib.nullcontext() if pacing is None else pacing(self._source.location) as pace:
            return self._copy_files(pace)

    def _copy_files(self, pace: Pace | None) -> Fetched:
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
        self._refuse_if_changed()
        manifest = Manifest(self._source.location, tuple(staged))
        manifest.publish(self._folder)
        for file in self._source.files:
            forget_journal(self._folder / FILES / file.name)
        note_checked(self._folder, manifest)
        return Fetched(copied, resumed)

    def _refuse_if_changed(self) -> None:
        was = self._source.files
        now = find(self._source.location, [file.name for file in was[1:]]).files
        if changed := sorted({file.location for file in set(was) ^ set(now)}):
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ClusterError(f"{', '.join(changed)} changed while it was being staged; try again")

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
                for number in chosen:
                    others.remove(number)
                    source = source_of(self._root / number.key)
                    if evict(self._root, number.key):
                        evicted.append(source)
                        lacking -= number.bytes
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
