"""Facts about a file system: free space, the price of fsync, and whether rename replaces safely.

Checkpoints are published by writing, fsyncing and renaming; this module tries those operations for
real in a temporary directory and cleans up.
"""

import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from outlast.errors import HardwareError
from outlast.hardware.figure import Unavailable

MOUNTS = Path("/proc/mounts")
FSYNC_BYTES = 4096
FSYNC_REPEATS = 7
RENAME_REPEATS = 50

NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "glusterfs", "fuse.sshfs", "9p"}
)
MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True, kw_only=True)
class FileSystemFacts:
    """A file system as seen from one directory.

    Attributes:
        path: The directory that was probed.
        mount_point: Where its file system is mounted.
        type: For example "ext4", "lustre", "tmpfs".
        free_bytes: Free for this user.
        total_bytes: Size.
        fsync_seconds: Median time to write 4 KiB and fsync the file.
        rename_is_atomic: True where a concurrent reader always saw the old or the new file whole
            while it was replaced. Says nothing about a power failure.
        directory_fsync: True where a directory can be fsynced, so that a rename becomes durable.
    """

    path: str
    mount_point: str
    type: str
    free_bytes: int
    total_bytes: int
    fsync_seconds: float
    rename_is_atomic: bool
    directory_fsync: bool | Unavailable

    @property
    def is_network(self) -> bool:
        """True if other machines see the same files."""
        return self.type in NETWORK_TYPES

    @property
    def is_memory(self) -> bool:
        """True if the files vanish with the machine."""
        return self.type in MEMORY_TYPES


def probe(path: Path | str) -> FileSystemFacts:
    """Measure the file system under a directory. Takes well under a second on a healthy disk.

    Args:
        path: An existing directory that this process may write to.

    Raises:
        HardwareError: The directory is missing or cannot be written to.
    """
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise HardwareError(f"{path} is not a directory: make it, or name another one")
    space = os.statvfs(directory)
    try:
        mounts = MOUNTS.read_text(encoding="latin-1")
    except OSError:
        mounts = ""
    mount_point, kind = mount_of(directory, mounts)
    try:
        with tempfile.TemporaryDirectory(prefix=".outlast-probe-", dir=directory) as scratch:
            return FileSystemFacts(
                path=str(directory),
                mount_point=mount_point,
                type=kind,
                free_bytes=space.f_bavail * space.f_frsize,
                total_bytes=space.f_blocks * space.f_frsize,
                fsync_seconds=_fsync_seconds(Path(scratch)),
                rename_is_atomic=_rename_is_atomic(Path(scratch)),
                directory_fsync=_directory_fsync(Path(scratch)),
            )
    except OSError as error:
        raise HardwareError(f"{directory} cannot be written to: {error.strerror}") from error


def mount_of(directory: Path, mounts: str) -> tuple[str, str]:
    """Find the mount that holds a directory.

    Args:
        directory: An absolute path without links.
        mounts: Text of `/proc/mounts`; a later mount hides an earlier one at the same place.

    Returns:
        The mount point and the file system's type; ("/", "unknown") where nothing matches.
    """
    best = ("/", "unknown")
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].encode("latin-1").decode("unicode_escape")
        if directory.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, words[2])
    return best


def _fsync_seconds(scratch: Path) -> float:
    block = os.urandom(FSYNC_BYTES)
    taken = []
    for repeat in range(FSYNC_REPEATS):
        with (scratch / f"fsync-{repeat}").open("wb") as file:
            start = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _rename_is_atomic(scratch: Path) -> bool:
    target = scratch / "target"
    versions = (b"a" * FSYNC_BYTES, b"b" * FSYNC_BYTES)
    target.write_bytes(versions[0])
    torn = threading.Event()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                whole = target.read_bytes() in versions
            except OSError:
                whole = False
            if not whole:
                torn.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for repeat in range(RENAME_REPEATS):
            fresh = scratch / "fresh"
            fresh.write_bytes(versions[repeat % 2])
            fresh.replace(target)
    finally:
        done.set()
        reader.join()
    return not torn.is_set()


def _directory_fsync(scratch: Path) -> bool | Unavailable:
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        return Unavailable(f"fsync of a directory fails here: {error.strerror}")
    finally:
        os.close(descriptor)
    return True
