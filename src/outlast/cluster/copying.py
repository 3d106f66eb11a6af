"""Copies of files that can be resumed after a kill, and are checked on the disk.

While `X.part` grows, `X.journal` gets the digest of all that was written so far after every block.
Who takes over reads what is there, keeps the blocks up to which it has that digest and continues
behind them. The file takes its name only when it is whole, synced, and has been read back from the
disk with the digest that the source's bytes had on their way. Its journal stays until
`forget_journal`, so that a kill between two files of a copy costs no file.

Sources are files and folders of a file system that nodes share, or of an fsspec URL. A file is
known by name, size and *version*, something that changes with its content: the time of its last
change, an object's ETag, or a digest where the caller knows it. It is read ahead in large blocks:
parallel file systems and object stores give their bandwidth to large requests of which several are
on the way; a single reader that waits for each of them gets a fraction of it.

A copy that is written through the kernel's memory is moved twice and pushes out what others hold
there. ``O_DIRECT`` takes it from the caller's memory to the disk; offset, length and address must
be multiples of the disk's block size, which whole blocks of the read-ahead are. Where a file system
refuses (tmpfs of older kernels, some FUSE), and for the end of a file, the ordinary way is taken.

A rate limit is a token bucket. `GentlePace` makes way for others. Nobody says how busy a shared
file system is; the bandwidth that one gets does. As long as a copy moves as fast as it asks to, it
asks for a little more; when it gets clearly less, others are there, and it asks for half of what it
got. Copies that all do so converge to equal shares (Chiu and Jain 1989, Analysis of the increase
and decrease algorithms for congestion avoidance).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import math
import mmap
import os
import posixpath
import struct
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outlast.cluster.staging import Stage


ALIGNMENT_BYTES = 4096


class BlockWriter:
    """Writes a file in order, from some offset on.

    Args:
        path: The file; made when needed.
        offset: Where to begin; what is there from this byte on is cut off.
        direct: Whether to try to write past the kernel's memory.
    """

    def __init__(self, path: Path, offset: int, *, direct: bool = True) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._offset = offset
        self._direct = False
        try:
            os.ftruncate(self._descriptor, offset)
            if direct and offset % ALIGNMENT_BYTES == 0:
                self._set_direct(True)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, block: memoryview) -> None:
        """Append a block; raises OSError."""
        if self._direct and len(block) % ALIGNMENT_BYTES:
            self._set_direct(False)
        while block:
            try:
                count = os.pwrite(self._descriptor, block, self._offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)
                continue
            self._offset += count
            block = block[count:]
            if block and self._direct:
                # Cut short by a disk that is nearly full, or a signal: the rest may be unaligned.
                self._set_direct(False)

    def sync(self) -> None:
        """Wait until all is on the disk; raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        self._direct = False
        # Refused where the file system does not know it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            self._direct = wanted


SMALLEST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ReadAhead:
    """Parameters of reading a file ahead.

    Attributes:
        block_bytes: Bytes of one request, at least 1 MiB.
        blocks: Requests on the way while the block before is used; memory is one block more.
    """

    block_bytes: int = 8 << 20
    blocks: int = 4

    def __post_init__(self) -> None:
        if self.block_bytes < SMALLEST_BLOCK_BYTES:
            raise ClusterError(
                f"a read-ahead of {self.block_bytes} bytes a request is too little; use at least "
                f"{SMALLEST_BLOCK_BYTES} (staging.block_megabytes = 1)"
            )
        if self.blocks < 1:
            raise ClusterError(f"a read-ahead of {self.blocks} blocks reads nothing; use 1 or more")


def blocks_of(
    reader: Reader, start: int, stop: int, ahead: ReadAhead, deadline: float
) -> Iterator[memoryview]:
    """The bytes [start, stop) of a file in order.

    Args:
        reader: The open file.
        start: First byte.
        stop: One past the last byte.
        ahead: Size and number of requests.
        deadline: Time of the monotonic clock by which the last block must have come.

    Yields:
        Blocks of `ahead.block_bytes`, the last one shorter; each is valid until the next is taken.

    Raises:
        OSError: A read failed.
        ClusterError: A block did not come by the deadline.
    """
    size = ahead.block_bytes
    offsets = range(start, stop, size)
    slots = min(ahead.blocks + 1, len(offsets))
    if slots == 0:
        return
    # Memory that is written again and again: fresh memory would cost a page fault for each page.
    memories = [mmap.mmap(-1, min(size, stop - start)) for _ in range(slots)]
    workers = min(ahead.blocks, slots)
    executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="outlast-stage")

    def read(number: int) -> memoryview:
        offset = offsets[number]
        view = memoryview(memories[number % slots])[: min(size, stop - offset)]
        reader.read_into(view, offset)
        return view

    try:
        coming = {number: executor.submit(read, number) for number in range(slots)}
        for number in range(len(offsets)):
            left_seconds = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            try:
                yield coming.pop(number).result(left_seconds)
            except concurrent.futures.TimeoutError:
                raise ClusterError(
                    f"byte {offsets[number]} of {stop} did not come within the time allowed "
                    "(staging.timeout_seconds); see whether the storage still answers"
                ) from None
            if (following := number + slots) < len(offsets):
                coming[following] = executor.submit(read, following)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


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
    """True if `location` is an fsspec URL and no path."""
    return "://" in location


def find(location: str, beside: Sequence[str] = ()) -> Source:
    """List the files at a path or URL.

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
        listed = [_local_file(file, file.relative_to(path).as_posix()) for file in inside]
        return Source(location, tuple(listed), is_folder=True)
    found = [_local_file(path, path.name)]
    for companion in (path.with_name(name) for name in beside):
        if companion.is_file():
            file = _local_file(companion, companion.name)
            if file.size_bytes <= _SMALL_BYTES:
                # Known by its content: copies of it are as good.
                digest = xxhash.xxh3_128_hexdigest(companion.read_bytes())
                file = replace(file, version=f"xxh3-128 {digest}")
            found.append(file)
    return Source(location, tuple(found), is_folder=False)


def _local_file(path: Path, name: str) -> SourceFile:
    facts = path.stat()
    return SourceFile(name, str(path), facts.st_size, f"mtime {facts.st_mtime_ns}")


def _find_remote(location: str, beside: Sequence[str]) -> Source:
    filesystem, path = _filesystem_of(location)
    filesystem.invalidate_cache()
    facts = filesystem.info(path)
    if facts["type"] == "directory":
        inside: dict[str, Any] = filesystem.find(path, detail=True)
        root = path.rstrip("/") + "/"
        listed = []
        for full, item in sorted(inside.items()):
            name = full.removeprefix(root)
            if name.startswith("/") or ".." in name.split("/"):
                raise ClusterError(f"{location} lists the file {name!r}, which lies outside it")
            listed.append(_remote_file(filesystem, item, name))
        return Source(location, tuple(listed), is_folder=True)
    files = [_remote_file(filesystem, facts, posixpath.basename(path))]
    for name in beside:
        try:
            companion = filesystem.info(posixpath.join(posixpath.dirname(path), name))
        except FileNotFoundError:
            continue
        files.append(_remote_file(filesystem, companion, name))
    return Source(location, tuple(files), is_folder=False)


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


PART = ".part"
JOURNAL = ".journal"
_NOTE = struct.Struct("<Q")


class Pace(Protocol):
    """Rate limit of a copy, such as `TokenBucket`."""

    @property
    def block_bytes(self) -> int:
        """Bytes to ask for at once, so that the flow is even."""

    def take(self, size_bytes: int, deadline_seconds: float, /) -> None:
        """Wait until so many bytes may be copied; raises ClusterError at the deadline."""


def copy_file(
    file: SourceFile, target: Path, stage: Stage, deadline: float, told: Callable[[int], None]
) -> tuple[str, int, int]:
    """Copy a file to `target`, continuing with a part that is there.

    Args:
        file: What is copied.
        target: Its name; the part and the journal lie beside it.
        stage: Whose copy it is: how the source is read, how fast, and whether the copy is read from
            the disk before it gets its name.
        deadline: Time of the monotonic clock by which all must be done.
        told: Called with the bytes of this file that are there, after every block.

    Returns:
        xxh3-128 of its content, hexadecimal; bytes read from the source now; bytes found in the
        part that another process had left.

    Raises:
        OSError: A read or a write failed.
        ClusterError: The copy does not have the digest of what was read, or came too late.
    """
    part, journal = target.with_name(target.name + PART), target.with_name(target.name + JOURNAL)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.replace(part)
    ahead, pace = stage.ahead, stage.pace
    with journal.open("a+b", buffering=0) as notes:
        present = min(file.size_bytes, part.stat().st_size) if part.exists() else 0
        kept, whole = _keep(part, notes.fileno(), present, ahead, deadline)
        done = kept
        told(done)
        with closing(open_reader(file)) as reader, closing(BlockWriter(part, kept)) as writer:
            for block in blocks_of(reader, kept, file.size_bytes, ahead, deadline):
                waiting_bytes = 0 if pace is None else len(block)
                while pace is not None and waiting_bytes > 0:
                    piece = min(waiting_bytes, pace.block_bytes)
                    try:
                        pace.take(piece, max(deadline - time.monotonic(), 0.0))
                    except ClusterError as error:
                        raise ClusterError(f"{error} (staging.timeout_seconds)") from None
                    waiting_bytes -= piece
                whole.update(block)
                writer.write(block)
                _append(notes.fileno(), _NOTE.pack(_note(whole)))
                done += len(block)
                told(done)
            writer.sync()
    if stage.read_back and digest_of(part, ahead, deadline, from_disk=True) != whole.hexdigest():
        part.unlink()
        journal.unlink()
        raise ClusterError(
            f"the copy of {file.location} at {target} does not read back as it was written: the "
            "disk is failing; name another staging.directory"
        )
    part.replace(target)
    return whole.hexdigest(), done - kept, kept


def forget_journal(target: Path) -> None:
    """Delete what was needed to continue with the copy at `target`, which is whole."""
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
        with closing(LocalReader(part)) as reader:
            for number, block in enumerate(blocks_of(reader, 0, stop, ahead, deadline)):
                longer = whole.copy()
                longer.update(block)
                if _NOTE.unpack_from(noted, number * _NOTE.size)[0] != _note(longer):
                    break
                kept, whole = kept + len(block), longer
    os.ftruncate(notes, 0)
    _append(notes, header + noted[: -(-kept // ahead.block_bytes) * _NOTE.size])
    return kept, whole


def _note(digest: xxhash.xxh3_128) -> int:
    """Entry of the journal for a digest: its low 64 bits."""
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
    with closing(LocalReader(path)) as reader:
        if from_disk:
            drop_from_memory(path)
        for block in blocks_of(reader, 0, path.stat().st_size, ahead, deadline):
            digest.update(block)
    return digest.hexdigest()


def drop_from_memory(path: Path) -> None:
    """Ask the kernel to forget its pages of a file that is synced; no more than a hint."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _append(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 64 << 10
_BLOCK_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 3600.0
_BURST_SECONDS = 0.1
"""How much rate that was not used may be made up for later."""


class TokenBucket:
    """Lets bytes pass at a rate, in any number of threads.

    Args:
        bytes_per_s: The rate; infinite for no limit, 0 to let nothing pass for now.

    Raises:
        ClusterError: For a rate below 0.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self._changed = threading.Condition()
        self._rate = _checked(bytes_per_s)
        self._level = 0.0
        self._at = time.monotonic()
        self._stopped = False
        self._passed = 0

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self._rate

    @property
    def passed_bytes(self) -> int:
        """Bytes let pass since the beginning."""
        return self._passed

    @property
    def block_bytes(self) -> int:
        """Bytes to copy between two calls of `take`, so that the flow is even."""
        if math.isinf(self._rate):
            return BLOCK_BYTES
        even = int(self._rate * _BLOCK_SECONDS)
        return min(max(even, _SMALLEST_BLOCK_BYTES), BLOCK_BYTES)

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate; whoever waits continues at the new one."""
        with self._changed:
            self._refill()
            self._rate = _checked(bytes_per_s)
            self._refill()
            self._changed.notify_all()

    def take(self, size: int, deadline_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
        """Let `size` bytes pass: waits until the rate allows for them.

        Args:
            size: Bytes.
            deadline_seconds: Longest wait.

        Raises:
            ClusterError: When the bucket was stopped, or at the deadline.
        """
        with self._changed:
            end = time.monotonic() + deadline_seconds
            self._refill()
            self._level -= 0.0 if math.isinf(self._rate) else size
            while self._level < 0.0 and not math.isinf(self._rate):
                if self._stopped:
                    raise ClusterError("the transfer was stopped")
                left = end - time.monotonic()
                if left <= 0:
                    raise ClusterError(
                        f"a transfer waited {deadline_seconds:g} s for bandwidth: raise its cap "
                        "or its deadline"
                    )
                self._changed.wait(min(-self._level / self._rate, left) if self._rate else left)
                self._refill()
            if self._stopped:
                raise ClusterError("the transfer was stopped")
            self._passed += size

    def stop(self) -> None:
        """Let nobody pass any more; whoever waits or comes gets a ClusterError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _refill(self) -> None:
        now = time.monotonic()
        if math.isinf(self._rate):
            self._level = 0.0
        else:
            self._level += (now - self._at) * self._rate
            self._level = min(self._level, _BURST_SECONDS * self._rate)
        self._at = now


def _checked(bytes_per_s: float) -> float:
    if not bytes_per_s >= 0:
        raise ClusterError(f"bytes_per_s = {bytes_per_s}: give 0 or more")
    return bytes_per_s


TOLERANCE = 0.8
"""Getting less than this share of the rate means that others are there."""
DECREASE = 0.5
"""What is then asked for, as a share of what was got."""
INCREASE = 0.05
"""What is added otherwise, as a share of the most."""
_LEAST_BYTES_PER_S = 1e6
_LEAST_SHARE = 0.1


class Backoff:
    """Chooses the rate of a copy from the bandwidth that it gets.

    Args:
        most_bytes_per_s: Never ask for more; finite, e.g. what a copy gets when it is alone.
        least_bytes_per_s: Never ask for less, or the copy would not end.
        start_bytes_per_s: The first rate; None: half of the most.

    Raises:
        ClusterError: For rates between which there is none.
    """

    def __init__(
        self,
        most_bytes_per_s: float,
        *,
        least_bytes_per_s: float = _LEAST_BYTES_PER_S,
        start_bytes_per_s: float | None = None,
    ) -> None:
        if not (0 < least_bytes_per_s <= most_bytes_per_s and math.isfinite(most_bytes_per_s)):
            raise ClusterError(
                f"least_bytes_per_s = {least_bytes_per_s} and most_bytes_per_s = "
                f"{most_bytes_per_s}: give finite rates, the least not above the most"
            )
        self._most, self._least = most_bytes_per_s, least_bytes_per_s
        first = 0.5 * most_bytes_per_s if start_bytes_per_s is None else start_bytes_per_s
        self._rate = min(max(first, least_bytes_per_s), most_bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """The rate to ask for now."""
        return self._rate

    def observe(self, size_bytes: float, seconds: float) -> float:
        """Learn what was got; returns the rate to ask for from now on.

        Args:
            size_bytes: What was moved with the present rate asked for; some seconds' worth of it,
                or the noise of single writes decides.
            seconds: How long it took.
        """
        if size_bytes > 0 and seconds > 0:
            got = size_bytes / seconds
            if got < TOLERANCE * self._rate:
                self._rate = max(DECREASE * got, self._least)
            else:
                self._rate = min(self._rate + INCREASE * self._most, self._most)
        return self._rate


class GentlePace:
    """A pace for one background copy that finds its rate by `Backoff`.

    Call `take` before each block is written; the time until the next call tells what was got.

    Args:
        backoff: Chooses the rate.
        window_seconds: For how long bandwidth is measured before the rate changes.
    """

    def __init__(self, backoff: Backoff, window_seconds: float = 2.0) -> None:
        self._backoff = backoff
        self._window_seconds = window_seconds
        self._bucket = TokenBucket(backoff.bytes_per_s)
        self._since: float | None = None
        self._last = 0.0
        self._moved = 0

    @classmethod
    def below(cls, most_bytes_per_s: float) -> GentlePace:
        """A pace that finds its rate below a limit, and never stops."""
        least = min(_LEAST_BYTES_PER_S, _LEAST_SHARE * most_bytes_per_s)
        return cls(Backoff(most_bytes_per_s, least_bytes_per_s=least))

    @property
    def bytes_per_s(self) -> float:
        """The present rate."""
        return self._bucket.bytes_per_s

    @property
    def block_bytes(self) -> int:
        """Bytes to move between two calls of `take`."""
        return self._bucket.block_bytes

    def take(self, size_bytes: int, deadline_seconds: float = 3600.0) -> None:
        """Wait until so many bytes may be moved.

        Raises:
            ClusterError: At the deadline.
        """
        now = time.monotonic()
        # A pause between two copies says nothing about the file system.
        paused = self._since is None or now - self._last > self._window_seconds
        if self._since is not None and not paused and now - self._since >= self._window_seconds:
            self._bucket.set_rate(self._backoff.observe(self._moved, now - self._since))
            paused = True
        if paused:
            self._since, self._moved = now, 0
        self._bucket.take(size_bytes, deadline_seconds)
        self._moved += size_bytes
        self._last = time.monotonic()
