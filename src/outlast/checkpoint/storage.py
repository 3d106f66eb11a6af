"""Storage of a store's files: a local or shared file system, or any fsspec URL.

Every file appears complete or not at all: it is written under a temporary name, synced and
renamed, and the directory is synced; an object store makes an uploaded object visible at once.
A large object goes to S3 in parts, a few at a time. Nothing is ever changed in place. A process
that has lost its lease (see `outlast.records.lease`) makes nothing visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import shutil
import stat
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from outlast.errors import CheckpointError, OutlastError
from outlast.records import check_lease, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from numpy.typing import NDArray

T = TypeVar("T")
TEMPORARY = ".tmp"
# Of files that are read as a whole: manifests.
_LONGEST_READ = 1 << 31
# Protocols of object stores whose clients make mode "xb" a condition of the request itself.
_CONDITIONAL = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
# Up to this size, an object is one request.
_PART_BYTES = 16 << 20
# S3 takes 10,000 parts; after so many, parts are twice as large.
_PARTS_ALIKE = 2500
_PARTS_AT_ONCE = 4
_UPLOAD = "outlast-upload"


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn the exceptions of an object store's client, of its own classes, into OSError."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14: it reads, or fails where touching would be fatal."""


class PendingFile:
    """A file that is being written; it appears when the block of `Storage.create` ends well."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @_as_os_errors()
    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)


def rank_folder(rank: int) -> str:
    """Name of the folder of a rank that has a store of its own in a place."""
    return f"rank-{rank:05d}"


def storage_of(place: str | os.PathLike[str]) -> Storage:
    """The storage at a path or fsspec URL.

    Raises:
        CheckpointError: When the URL's protocol is unknown or its package is not installed.
    """
    text = os.fspath(place)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(Path(text))
    if protocol in ("file", "local"):
        return LocalStorage(Path(rest))
    return FsspecStorage(text)


def publish(storage: Storage, name: str, content: bytes) -> None:
    """Write a small file that two writers must not both write.

    Raises:
        FileExistsError: When it is there with other content.
        OSError: When the storage fails.
    """
    try:
        with storage.create(name, exclusive=True) as file:
            file.write(content)
    except FileExistsError:
        # A client that lost the answer to its request asks again, and finds its own file.
        if storage.read(name) != content:
            raise


def in_background(work: Callable[[], T]) -> Future[T]:
    """Do what asks a storage that may hang in a thread, which nobody waits for at the end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    asks = threading.current_thread().name
    threading.Thread(target=run, name=f"{asks}-storage", daemon=True).start()
    return future


class UnreadableError(CheckpointError):
    """Something that may be whole: the storage failed to say."""


def within(seconds: float, work: Callable[[], T], location: str) -> T:
    """Do what asks a storage that may hang, in a thread that is left behind when it does.

    Raises:
        UnreadableError: When `work` takes longer than `seconds`.
    """
    return answer_of(in_background(work), seconds, location)


def answer_of(future: Future[T], seconds: float | None, location: str) -> T:
    """The result of what asks a storage that may hang; None: of one that is waited for.

    Raises:
        UnreadableError: When it takes longer than `seconds`.
    """
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise UnreadableError(
            f"{location} did not answer within {seconds:g} s (timeout_seconds); see whether the "
            "storage hangs"
        ) from None


def _taken(name: str) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST,
        f"another process has written {name} meanwhile: two runs save to this store; end one of "
        "them, or give it a store of its own",
    )


def make_directory(path: Path) -> None:
    """Make `path` and the parents that are missing, and sync each into the one that holds it."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


class LocalStorage:
    """A directory of a local or shared (POSIX) file system.

    Its files have names such as ``step-00000100-a1/rank-00000.json``.

    Attributes:
        root: The directory; it stays the same when the program changes its working directory.
        location: Its path, for people.
        address: Its path or URL, for another process.
        reads_at_once: Reads of a few MiB that are asked for together at the least.
    """

    reads_at_once = 1

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.location, self.address = str(root), str(self.root)

    def folders(self) -> list[str]:
        """Names of the folders below the root; empty when there is none."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if _is_folder(entry))

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files in `folder`; empty when it is missing."""
        found = {}
        try:
            entries = os.scandir(self.root / folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return {}
            raise
        with entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    try:
                        if not entry.is_dir():
                            found[entry.name] = entry.stat().st_size
                    except OSError as error:
                        if error.errno != errno.ELOOP:
                            raise
                        found[entry.name] = 0
        return found

    def read(self, name: str) -> bytes:
        """A whole file; raises FileNotFoundError."""
        descriptor = _open_file(self.root / name)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if size > _LONGEST_READ:
                raise CheckpointError(
                    f"{self.root / name} has {size} bytes; no file of its kind has more than "
                    f"{_LONGEST_READ}"
                )
            return file.read()

    def open(self, name: str) -> _LocalReader:
        """Open a file for reads of parts; raises FileNotFoundError."""
        return _LocalReader(self.root / name)

    @contextlib.contextmanager
    def create(self, name: str, *, exclusive: bool = False) -> Iterator[PendingFile]:
        """A file that appears when the block ends well: temporary name, fsync, rename, fsync.

        Args:
            name: Of the file.
            exclusive: Whether the block ends with FileExistsError where there is one by then.
        """
        target = self.root / name
        make_directory(target.parent)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
        try:
            with temporary.open("xb") as file:
                yield PendingFile(file)
                file.flush()
                os.fsync(file.fileno())
            check_lease()
            # That nobody makes it in between is what the lock on the store sees to.
            if exclusive and target.exists():
                raise _taken(str(target))
            temporary.replace(target)
            sync_directory(target.parent)
        finally:
            # Its own failure must not hide the first one.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Delete a folder with all its files, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link to itself is none.
        if error.errno == errno.ELOOP:
            return False
        raise


def _open_file(path: Path) -> int:
    """The descriptor of a file for reading; what is no file, such as a pipe, might never answer.

    Raises:
        OSError: When it cannot be opened.
        CheckpointError: When it is no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        kinds = {errno.ELOOP: "link to itself", errno.ENXIO: "socket"}
        if error.errno in kinds:
            raise CheckpointError(
                f"{path} is a {kinds[error.errno]} where a file should be"
            ) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kinds = {stat.S_IFIFO: "pipe", stat.S_IFDIR: "directory"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise CheckpointError(f"{path} is a {kind} where a file should be")
    os.set_blocking(descriptor, True)
    return descriptor


class _LocalReader:
    """An open file of which parts are read; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open_file(path)
        self.size = os.fstat(self._descriptor).st_size
        self._mapping = threading.Lock()
        self._map: mmap.mmap | None = None
        self._unmappable = False

    def read_into(self, offset: int, memory: NDArray[np.uint8]) -> int:
        """Fill `memory` with the bytes from `offset`; returns how many there are."""
        done = 0
        # One call reads at most 2 GiB, and may be interrupted by a signal.
        while done < memory.size:
            if hasattr(os, "preadv"):
                count = os.preadv(self._descriptor, [memory[done:].data], offset + done)
            else:
                part = os.pread(self._descriptor, memory.size - done, offset + done)
                count = len(part)
                memory[done : done + count] = np.frombuffer(part, np.uint8)
            if not count:
                break
            done += count
        return done

    def read(self, offset: int, length: int) -> memoryview:
        """`length` bytes from `offset`; fewer where the file ends."""
        memory = np.empty(length, np.uint8)
        return memory[: self.read_into(offset, memory)].data

    @contextlib.contextmanager
    def mapped(self, offset: int, length: int) -> Iterator[NDArray[np.uint8] | None]:
        """The bytes from `offset` in the page cache, without a copy; None where that cannot be.

        A file that cannot be read is no signal here, as it is with a plain mapping: it gives None,
        and `read_into` says why.
        """
        first = offset - offset % mmap.PAGESIZE
        span = first, offset + length - first
        try:
            with self._mapping:
                if self._map is None and not self._unmappable:
                    self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
            if self._map is None or offset + length > len(self._map):
                raise OSError(errno.EFAULT, "it is not mapped")
            self._map.madvise(_POPULATE_READ, *span)
        except (OSError, ValueError, AttributeError):
            self._unmappable = True
            yield None
            return
        yield np.frombuffer(self._map, np.uint8, length, offset)
        # What was read is no memory of this process any longer.
        self._map.madvise(mmap.MADV_DONTNEED, *span)

    def close(self) -> None:
        """Give the file back."""
        self._map = None
        os.close(self._descriptor)


class FsspecStorage:
    """A folder behind an fsspec URL, such as ``s3://bucket/run`` or ``memory://run``.

    Whatever the client of the object store raises comes as an OSError with its words.

    Attributes:
        location: The URL, for people.
        address: The same.
        reads_at_once: As of `LocalStorage`.
    """

    reads_at_once = 8

    def __init__(self, url: str) -> None:
        import fsspec

        self.location = self.address = url.rstrip("/")
        try:
            self._filesystem, root = fsspec.core.url_to_fs(self.location)
        except (ValueError, ImportError) as error:
            raise CheckpointError(
                f"{url} cannot be used: {error}; install the fsspec package of its protocol, or "
                "give a directory"
            ) from None
        except Exception as error:
            raise CheckpointError(
                f"{url} cannot be used: {type(error).__name__}: {error}"
            ) from error
        self._root = PurePosixPath(root)
        protocols = self._filesystem.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else {*protocols}

    def folders(self) -> list[str]:
        """Names of the folders below the root; empty when there is none."""
        return sorted(name for name, entry in self._list("") if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files in `folder`; empty when it is missing."""
        return {
            name: entry["size"] for name, entry in self._list(folder) if entry["type"] == "file"
        }

    @_as_os_errors()
    def read(self, name: str) -> bytes:
        """A whole file; raises FileNotFoundError."""
        content: bytes = self._filesystem.cat_file(self._path(name))
        return content

    @_as_os_errors()
    def open(self, name: str) -> _FsspecReader:
        """Open a file for reads of parts; raises FileNotFoundError."""
        path = self._path(name)
        return _FsspecReader(self._filesystem, path, self._filesystem.size(path))

    @contextlib.contextmanager
    def create(self, name: str, *, exclusive: bool = False) -> Iterator[PendingFile]:
        """An object that appears when the block ends well.

        An exclusive one is a conditional put where the object store has one (S3 and those like it,
        Google Cloud Storage, Azure); elsewhere, one that appears between the look and the write is
        overwritten.
        """
        path = self._path(name)
        if exclusive:
            with _as_os_errors():
                if self._filesystem.exists(path):
                    raise _taken(path)
        upload = self._upload(path, exclusive=exclusive)
        try:
            yield PendingFile(upload)
            check_lease()
            upload.commit()
        except BaseException:
            # Its own failure must not hide the first one.
            with contextlib.suppress(Exception):
                upload.discard()
            raise

    def refuses(self, name: str, content: bytes) -> bool:
        """Return whether the object store refuses to write over an object that is there.

        Args:
            name: Of one that was just written.
            content: What it holds, and will hold where nothing is refused.

        Raises:
            OSError: When the storage fails.
        """
        upload = self._upload(self._path(name), exclusive=True)
        upload.write(content)
        try:
            upload.commit()
        except FileExistsError:
            return True
        return False

    @_as_os_errors()
    def drop_uploads(self, prefix: str) -> None:
        """Drop what writers that were killed have sent of objects whose names begin so.

        Only S3 keeps it, unseen and for ever.
        """
        if not self._is_s3:
            return
        ask, (bucket, key, _) = (
            self._filesystem.call_s3,
            self._filesystem.split_path(str(self._root)),
        )
        found = ask("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/{prefix}".lstrip("/"))
        for left in found.get("Uploads", ()):
            which = {"Key": left["Key"], "UploadId": left["UploadId"]}
            ask("abort_multipart_upload", Bucket=bucket, **which)

    @property
    def _is_s3(self) -> bool:
        return bool(self._protocols & {"s3", "s3a"})

    def _upload(self, path: str, *, exclusive: bool) -> _Upload:
        with _as_os_errors():
            # Object stores have no folders.
            if not self._protocols & _CONDITIONAL:
                self._filesystem.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            mode = "xb" if exclusive and self._protocols & _CONDITIONAL else "wb"
            return (_S3Upload if self._is_s3 else _Upload)(self._filesystem, path, mode)

    @_as_os_errors()
    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    @_as_os_errors()
    def remove_folder(self, name: str) -> None:
        """Delete all objects below a name."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    @_as_os_errors()
    def _list(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        self._filesystem.invalidate_cache()
        try:
            entries = self._filesystem.ls(self._path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(PurePosixPath(entry["name"].rstrip("/")).name, entry) for entry in entries]

    def _path(self, name: str) -> str:
        return str(self._root / name)


class _Upload:
    """An object on its way; a small one is sent when it is complete.

    Args:
        filesystem: Of fsspec.
        path: The object's.
        mode: ``wb``, or ``xb`` when none may be there.
    """

    def __init__(self, filesystem: Any, path: str, mode: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._mode = mode
        self._buffer = bytearray()
        self._file: Any = None

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; what fills a part is sent."""
        self._buffer += memoryview(data)
        while len(self._buffer) > (size := self._part_bytes):
            part = bytes(memoryview(self._buffer)[:size])
            del self._buffer[:size]
            self._send(part)

    @_as_os_errors()
    def commit(self) -> None:
        """Let the object appear.

        Raises:
            FileExistsError: When none may be there, and one of another writer is.
            OSError: When the storage fails; it may have appeared all the same.
        """
        try:
            self._send(bytes(self._buffer))
            self._file.close()
            self._file.commit()
        except FileExistsError:
            raise _taken(self._path) from None

    def discard(self) -> None:
        """Drop what has been sent."""
        if self._file is not None:
            self._file.discard()
            # Else its last reference would complete it.
            self._file.closed = True

    @property
    def _part_bytes(self) -> int:
        return _PART_BYTES

    def _send(self, part: bytes) -> None:
        if self._file is None:
            # With autocommit off, the object appears at commit() and is dropped by discard().
            self._file = self._filesystem.open(self._path, self._mode, autocommit=False)
        self._file.write(part)


class _S3Upload(_Upload):
    """The same on S3: parts go in parallel, and the object says which upload it is of."""

    def __init__(self, filesystem: Any, path: str, mode: str) -> None:
        super().__init__(filesystem, path, mode)
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._label = {_UPLOAD: uuid.uuid4().hex}
        self._parts: list[str] = []
        self._sent = 0
        self._under_way: deque[Future[dict[str, Any]]] = deque()

    @property
    def _part_bytes(self) -> int:
        return _PART_BYTES << self._sent // _PARTS_ALIKE

    def _send(self, part: bytes) -> None:
        if self._file is None:
            begun = self._call("create_multipart_upload", Metadata=self._label).result()
            self._file = {"UploadId": begun["UploadId"]}
        if len(self._under_way) == _PARTS_AT_ONCE:
            self._settle()
        self._sent += 1
        asked = self._call("upload_part", Body=part, PartNumber=self._sent, **self._file)
        self._under_way.append(asked)

    @_as_os_errors()
    def commit(self) -> None:
        """Let the object appear: by one request, of which a condition is that none is there."""
        condition = {"IfNoneMatch": "*"} if self._mode == "xb" else {}
        body = bytes(self._buffer)
        try:
            if self._file is None:
                self._call("put_object", Body=body, Metadata=self._label, **condition).result()
                return
            self._send(body)
            while self._under_way:
                self._settle()
            parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(self._parts, 1)]
            self._call(
                "complete_multipart_upload",
                MultipartUpload={"Parts": parts},
                **self._file,
                **condition,
            ).result()
        except Exception:
            # A client that lost the answer to its request asks again, and is refused.
            try:
                label = self._call("head_object").result()["Metadata"]
            except Exception:
                label = None
            if label is not None and label.get(_UPLOAD) == self._label[_UPLOAD]:
                return
            if condition and label is not None:
                raise _taken(self._path) from None
            raise
        finally:
            self._filesystem.invalidate_cache(self._path)

    def discard(self) -> None:
        """Drop what has been sent."""
        for asked in self._under_way:
            asked.cancel()
        if self._file is not None:
            self._call("abort_multipart_upload", **self._file).result()

    def _settle(self) -> None:
        self._parts.append(self._under_way.popleft().result()["ETag"])

    def _call(self, method: str, **arguments: Any) -> Future[dict[str, Any]]:
        asks = self._filesystem._call_s3(method, **self._object, **arguments)
        return asyncio.run_coroutine_threadsafe(asks, self._filesystem.loop)


class _FsspecReader:
    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem = filesystem
        self._path = path
        self.size = size

    @_as_os_errors()
    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer where the object ends."""
        end = min(offset + length, self.size)
        if end <= offset:
            return b""
        content: bytes = self._filesystem.cat_file(self._path, start=offset, end=end)
        return content

    @contextlib.contextmanager
    def mapped(self, offset: int, length: int) -> Iterator[None]:
        """None: objects are no files."""
        del offset, length
        yield None

    def read_into(self, offset: int, memory: NDArray[np.uint8]) -> int:
        """Fill `memory` with the bytes from `offset`; returns how many there are."""
        content = self.read(offset, memory.size)
        memory[: len(content)] = np.frombuffer(content, np.uint8)
        return len(content)

    def close(self) -> None:
        """Nothing is held."""


_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 16 << 10


# With a bandwidth cap, blocks are as small as this time allows, so that the flow is even.
_BLOCK_SECONDS = 0.1


class Rate(Protocol):
    """Lets the bytes of a copy pass when it is their time."""

    @property
    def block_bytes(self) -> int:
        """Bytes to copy between two calls of `take`; may change."""

    def take(self, size_bytes: int, /) -> None:
        """Wait until so many bytes may be copied; an exception makes the copy fail."""


Pacing = Callable[[int], "AbstractContextManager[Rate]"]
"""Gives the rate of one copy of the version of a step; entered when it begins, left at its end."""


class RateLimiter:
    """The pace of one copy: a context manager around it.

    Args:
        bytes_per_second: Most that the copy takes; None: no limit.
        stop: Set when the store is closed.
        rate: What the caller of the store has to say; None: nothing.

    Attributes:
        asked: When the storage was asked for what is under way, as `time.monotonic` says; None:
            the copy waits for its turn, or has not begun.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        stop: threading.Event,
        rate: AbstractContextManager[Rate] | None = None,
    ) -> None:
        self._cap = bytes_per_second
        self._stop = stop
        self._free_at = 0.0
        self._asked = rate
        self._rate: Rate | None = None
        self._given_up = threading.Event()
        self.asked: float | None = None
        even = _BLOCK_BYTES if bytes_per_second is None else int(bytes_per_second * _BLOCK_SECONDS)
        self._block_bytes = min(max(even, _SMALLEST_BLOCK_BYTES), _BLOCK_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes to copy between two calls of `take`."""
        if self._rate is None:
            return self._block_bytes
        return max(min(self._block_bytes, self._rate.block_bytes), _SMALLEST_BLOCK_BYTES)

    def take(self, size: int) -> None:
        """Count `size` bytes; raises CheckpointError when the copy is to end."""
        self.asked = None
        if self._rate is not None and size:
            self._rate.take(size)
        if self._cap is not None:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._cap
            self._stop.wait(self._free_at - now)
        if self._stop.is_set():
            raise CheckpointError("the store was closed")
        if self._given_up.is_set():
            raise CheckpointError("the copy was given up")
        self.asked = time.monotonic()

    def give_up(self) -> None:
        """Let the copy end as soon as the storage answers."""
        self._given_up.set()

    def __enter__(self) -> RateLimiter:
        if self._asked is not None:
            self._rate = self._asked.__enter__()
        self.asked = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rate is not None and self._asked is not None:
            self._rate = None
            # The copy has ended, well or not; what comes now says nothing about it.
            with contextlib.suppress(Exception):
                self._asked.__exit__(kind, error, trace)


Storage: TypeAlias = LocalStorage | FsspecStorage
RangeReader: TypeAlias = _LocalReader | _FsspecReader


def sentence_of(error: OSError) -> str:
    """Describe a failure in the operating system's words, with the remedy where there is one."""
    words = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        words += "; free some space or keep fewer checkpoints"
    return words


def describe_failure(error: Exception) -> str:
    """Describe any failure of a storage, of whose clients some have errors of their own."""
    if isinstance(error, OutlastError):
        return str(error)
    return sentence_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
