"""A folder on the node's own disk with copies of what lies on a shared file system.

However many processes of a node ask for a file at once, one of them copies it while the others
wait; who asks later finds it there.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cluster.staging.fetching import Fetching, let_go
from outlast.cluster.staging.folders import CLAIMS, LEASES, folders_of, kept_in, key_of, source_of
from outlast.cluster.staging.manifest import FILES
from outlast.cluster.staging.readahead import ReadAhead
from outlast.cluster.staging.source import find, is_url
from outlast.errors import ClusterError
from outlast.hardware.filesystem import NETWORK_TYPES, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.cluster.staging.copying import Pacing
    from outlast.cluster.staging.fetching import Fetched
    from outlast.cluster.staging.space import Kept

_MOUNTS = Path("/proc/mounts")


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
        work: Callable[[Fetching], Fetched | None],
    ) -> StagedCopy | None:
        begun = time.monotonic()
        if not is_url(location):
            location = str(Path(location).absolute())
        source = find(location, beside)
        root = self._root()
        key = key_of(source, digest)
        deadline = begun + self.timeout_seconds
        fetching = Fetching(
            self, root, key, source, digest=digest, deadline=deadline, progress=progress
        )
        try:
            done = work(fetching)
        except OSError as error:
            raise ClusterError(
                f"{location} cannot be staged in {self.directory} ({error.strerror or error})"
            ) from error
        if done is None:
            return None
        files = root / key / FILES
        return StagedCopy(
            path=files if source.is_folder else files / source.files[0].name,
            source=location,
            bytes=source.bytes,
            copied_bytes=done.copied_bytes,
            resumed_bytes=done.resumed_bytes,
            seconds=time.monotonic() - begun,
            waited_seconds=done.waited_seconds,
            evicted=done.evicted,
            damaged=done.damaged,
        )

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
