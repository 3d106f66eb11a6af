"""One file, copied so that it can be gone on with after a kill, and checked on the disk.

While `X.part` grows, `X.journal` gets the digest of all that was written so far after every block.
Who takes over reads what is there, keeps the blocks up to which it has that digest and goes on
behind them. The file
takes its name only when it is whole, synced, and has been read back from the disk with the digest
that the source's bytes had on their way. Its journal stays until `forget_journal`, so that a kill
between two files of a copy costs no file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

from outlast.cluster.staging.readahead import ReadAhead, blocks_of
from outlast.cluster.staging.source import LocalReader, SourceFile, open_reader
from outlast.cluster.staging.writing import BlockWriter
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

PART = ".part"
JOURNAL = ".journal"
_NOTE = struct.Struct("<Q")


class Pace(Protocol):
    """How fast a copy may be; `outlast.cluster.storage` has such."""

    @property
    def block_bytes(self) -> int:
        """How much to ask for at once, so that the flow is even."""

    def take(self, size_bytes: int, deadline_seconds: float, /) -> None:
        """Wait until so many bytes may be copied; raises ClusterError at the deadline."""


Pacing = Callable[[str], "AbstractContextManager[Pace | None]"]
"""Gives the pace of the copy of a source; entered when it begins, left at its end."""


@dataclass(frozen=True)
class Copied:
    """What was done for one file.

    Attributes:
        digest: xxh3-128 of its content, hexadecimal.
        copied_bytes: Read from the source now.
        resumed_bytes: Found in the part that another process had left.
    """

    digest: str
    copied_bytes: int
    resumed_bytes: int


def copy_file(
    file: SourceFile,
    target: Path,
    ahead: ReadAhead,
    deadline: float,
    *,
    read_back: bool = True,
    direct: bool = True,
    pace: Pace | None = None,
    told: Callable[[int], None] = lambda done_bytes: None,
) -> Copied:
    """Copy a file to `target`, going on with a part that is there.

    Args:
        file: What is copied.
        target: Its name; the part and the journal lie beside it.
        ahead: How the source is read.
        deadline: Time of the monotonic clock by which all must be done.
        read_back: Whether the copy is read from the disk before it gets its name.
        direct: Whether it is written past the kernel's memory, where that can be done.
        pace: How fast; None: as fast as can be.
        told: Called with the bytes of this file that are there, after every block.

    Raises:
        OSError: A read or a write failed.
        ClusterError: The copy does not have the digest of what was read, or came too late.
    """
    part, journal = target.with_name(target.name + PART), target.with_name(target.name + JOURNAL)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.replace(part)
    with journal.open("a+b", buffering=0) as notes:
        present = min(file.size_bytes, part.stat().st_size) if part.exists() else 0
        kept, whole = _keep(part, notes.fileno(), present, ahead, deadline)
        done = kept
        told(done)
        reader, writer = open_reader(file), BlockWriter(part, kept, direct=direct)
        try:
            for block in blocks_of(reader, kept, file.size_bytes, ahead, deadline):
                if pace is not None:
                    _take(pace, len(block), deadline)
                whole.update(block)
                writer.write(block)
                _append(notes.fileno(), _NOTE.pack(_note(whole)))
                done += len(block)
                told(done)
            writer.sync()
        finally:
            writer.close()
            reader.close()
    if read_back and digest_of(part, ahead, deadline, from_disk=True) != whole.hexdigest():
        part.unlink()
        journal.unlink()
        raise ClusterError(
            f"the copy of {file.location} at {target} does not read back as it was written: the "
            "disk is failing; name another staging.directory"
        )
    part.replace(target)
    return Copied(whole.hexdigest(), done - kept, kept)


def _take(pace: Pace, size_bytes: int, deadline: float) -> None:
    """Wait until a block may be copied, in pieces that are no longer than the pace likes."""
    while size_bytes > 0:
        piece = min(size_bytes, pace.block_bytes)
        try:
            pace.take(piece, max(deadline - time.monotonic(), 0.0))
        except ClusterError as error:
            raise ClusterError(f"{error} (staging.timeout_seconds)") from None
        size_bytes -= piece


def forget_journal(target: Path) -> None:
    """Delete what was needed to go on with the copy at `target`, which is whole."""
    target.with_name(target.name + JOURNAL).unlink(missing_ok=True)


def _keep(
    part: Path, notes: int, present_bytes: int, ahead: ReadAhead, deadline: float
) -> tuple[int, xxhash.xxh3_128]:
    """Bytes of the part that are as they were written, and their digest; cuts the journal to it."""
    header = _NOTE.pack(ahead.block_bytes)
    content = os.pread(notes, os.fstat(notes).st_size, 0)
    noted = content[_NOTE.size :] if content.startswith(header) else b""
    stop = min(len(noted) // _NOTE.size * ahead.block_bytes, present_bytes)
    kept, whole = 0, xxhash.xxh3_128()
    if stop:
        reader = LocalReader(part)
        try:
            for number, block in enumerate(blocks_of(reader, 0, stop, ahead, deadline)):
                longer = whole.copy()
                longer.update(block)
                if _NOTE.unpack_from(noted, number * _NOTE.size)[0] != _note(longer):
                    break
                kept, whole = kept + len(block), longer
        finally:
            reader.close()
    os.ftruncate(notes, 0)
    _append(notes, header + noted[: -(-kept // ahead.block_bytes) * _NOTE.size])
    return kept, whole


def _note(digest: xxhash.xxh3_128) -> int:
    """What the journal holds of a digest: its low 64 bits."""
    return digest.intdigest() & (2**64 - 1)


def digest_of(path: Path, ahead: ReadAhead, deadline: float, *, from_disk: bool = False) -> str:
    """The xxh3-128 of a file on the node's disk, hexadecimal, read in order in large blocks.

    Args:
        path: The file.
        ahead: How it is read.
        deadline: Time of the monotonic clock by which it must be read.
        from_disk: Whether to drop what the kernel holds of it in memory first; the file is synced.

    Raises:
        OSError: It cannot be read.
        ClusterError: It was not read in time.
    """
    digest = xxhash.xxh3_128()
    reader = LocalReader(path)
    try:
        size = path.stat().st_size
        if from_disk:
            drop_from_memory(path)
        for block in blocks_of(reader, 0, size, ahead, deadline):
            digest.update(block)
    finally:
        reader.close()
    return digest.hexdigest()


def drop_from_memory(path: Path) -> None:
    """Ask the kernel to forget its pages of a file that is synced; no more than a hint."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _append(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
