"""Slots: one state of one process in a file on tmpfs, its format, and the room for it.

A slot is a file of four parts, little-endian:

======== =================== ======================================================================
offset   size                content
======== =================== ======================================================================
0        64                  ``OUTLASTSLOT2``, catalogue bytes (u64), capacity of the values (u64),
                             first byte of the data (u64), CRC-32 of these
64       64                  the mark: step (i64), bytes of the values (u64), XXH3 of the data
                             (u64), CRC-32 of the values, CRC-32 of the mark; all zero while the
                             slot is being written
128      catalogue bytes     JSON, never changed: identity, and for each tensor its name, element
                             type, global shape, box (offset, shape) and first byte in the data
...      capacity            the values as JSON, new for every step
data     the rest            the tensors' elements, row-major, each from a multiple of 64 bytes on
======== =================== ======================================================================

What one process has written another one reads, also when the first was killed: the kernel keeps
the pages. So a mark that is there was written after everything that it stands for. A state is
restored only if its data still have the checksum in the mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import struct
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import xxhash

from outlast.errors import RecoverError
from outlast.hardware.detect import memory_available_bytes
from outlast.state.box import Box, aligned

if TYPE_CHECKING:
    from pathlib import Path


_MAGIC = b"OUTLASTSLOT2"
_HEADER = struct.Struct("<12sQQQ")
_MARK = struct.Struct("<qQQI")
_CHECK = struct.Struct("<I")
_MARK_OFFSET = 64
_CATALOGUE_OFFSET = 128
_EMPTY_MARK = bytes(_MARK.size + _CHECK.size)
_PAGE_BYTES = 4096
_SHARE_OF_AVAILABLE = 0.5
_LEFTOVER_SECONDS = 86400.0
_OWNER = "in-use"
_BLOCK_BYTES = 512
_GENERATION = "generation-"


@dataclass(frozen=True)
class SlotEntry:
    """A box of a tensor in a slot.

    Attributes:
        name: Of the tensor.
        dtype: Torch's name of the element type, without ``torch.``.
        shape: Of the whole tensor.
        box: What the slot holds of it.
        start: First byte in the slot's data.
        size: In bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    start: int
    size: int


@dataclass(frozen=True)
class Catalogue:
    """Contents of a slot, apart from the values.

    Attributes:
        identity: Of the run; a slot of another one is not read.
        everything: Digest of the names of all tensors and values of all processes; see `digest_of`.
        lineage: Drawn by the processes that keep together; tells their states from those of others
            with the same numbers.
        entries: In the order of their data.
    """

    identity: str
    everything: str
    lineage: str
    entries: tuple[SlotEntry, ...]

    @property
    def data_bytes(self) -> int:
        """Of all entries, with the gaps between them."""
        return max((aligned(entry.start + entry.size) for entry in self.entries), default=0)

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return {
            "identity": self.identity,
            "everything": self.everything,
            "lineage": self.lineage,
            "tensors": [
                [item.name, item.dtype, item.shape, item.box.offset, item.box.shape, item.start]
                + [item.size]
                for item in self.entries
            ],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Catalogue:
        """The inverse of `to_json`."""
        entries = tuple(
            SlotEntry(name, dtype, tuple(shape), Box(tuple(offset), tuple(box)), start, size)
            for name, dtype, shape, offset, box, start, size in found["tensors"]
        )
        return cls(found["identity"], found["everything"], found["lineage"], entries)


@dataclass(frozen=True)
class SlotState:
    """A complete state of one process, found in a slot.

    Attributes:
        path: The slot.
        step: Steps done.
        catalogue: What it holds.
        values: Name to JSON value.
        digest: XXH3 of the data, when it was published.
    """

    path: Path
    step: int
    catalogue: Catalogue
    values: dict[str, Any]
    digest: int

    def damage(self) -> str:
        """Why the data is not what was published; empty where it is. Reads all of it."""
        try:
            reader = SlotReader(self.path)
        except RecoverError as error:
            return str(error)
        try:
            sound = reader.digest(self.catalogue.data_bytes) == self.digest
        finally:
            reader.close()
        return "" if sound else f"{self.path} of step {self.step} is damaged (its checksum differs)"


class Slot:
    """A slot that this process writes; its memory is reserved at once.

    Attributes:
        content: The whole file.
        memory: The data in it.
        step: Steps done in the state that it holds; -1: none is complete.

    Raises:
        RecoverError: When the memory cannot be had.
    """

    def __init__(self, path: Path, catalogue: Catalogue, values_bytes: int) -> None:
        self.path, self.step = path, -1
        self.capacity = 2 * values_bytes + _PAGE_BYTES
        text = json.dumps(catalogue.to_json()).encode()
        self._values = _CATALOGUE_OFFSET + len(text)
        data = -(-(self._values + self.capacity) // _PAGE_BYTES) * _PAGE_BYTES
        size = data + max(catalogue.data_bytes, 1)
        self.content = reserved(path, size)
        header = _HEADER.pack(_MAGIC, len(text), self.capacity, data)
        self.content[: len(header) + _CHECK.size] = header + _CHECK.pack(zlib.crc32(header))
        self.content[_CATALOGUE_OFFSET : self._values] = text
        self.memory = memoryview(self.content)[data : data + catalogue.data_bytes]

    def begin(self) -> None:
        """From now on the slot holds no state."""
        self.content[_MARK_OFFSET : _MARK_OFFSET + len(_EMPTY_MARK)] = _EMPTY_MARK
        self.step = -1

    def publish(self, step: int, values: bytes) -> None:
        """All data is in place: the slot holds the state after `step` steps.

        Raises:
            RecoverError: When the values have grown beyond the slot's room for them.
        """
        if len(values) > self.capacity:
            raise RecoverError(
                f"the values of the state have grown to {len(values)} bytes, more than the "
                f"{self.capacity} reserved in memory; keep large data in tensors"
            )
        self.content[self._values : self._values + len(values)] = values
        digest = xxhash.xxh3_64_intdigest(self.memory)
        mark = _MARK.pack(step, len(values), digest, zlib.crc32(values))
        self.content[_MARK_OFFSET : _MARK_OFFSET + len(_EMPTY_MARK)] = mark + _CHECK.pack(
            zlib.crc32(mark)
        )
        self.step = step

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        # Somebody may still look at it; then it goes with the last look.
        with contextlib.suppress(BufferError):
            self.memory.release()
            self.content.close()


def reserved(path: Path, size: int) -> mmap.mmap:
    """A new file of `size` bytes of memory that is there, mapped.

    Raises:
        RecoverError: When so much cannot be had.
    """
    descriptor = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # Without it a full tmpfs would be a SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
        cause = "it is full" if full else error.strerror
        if descriptor >= 0:
            path.unlink(missing_ok=True)
        raise RecoverError(
            f"{size / 1e6:.1f} MB of memory cannot be had in {path.parent}: {cause}"
        ) from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_slot(path: Path, identity: str) -> SlotState | None:
    """The state in the slot at `path`; None where none is complete, or it is another run's."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size + _CHECK.size)
            if not _checks(header, _HEADER.size):
                return None
            magic, length, _, _ = _HEADER.unpack_from(header)
            file.seek(_MARK_OFFSET)
            mark = file.read(_MARK.size + _CHECK.size)
            if magic != _MAGIC or mark == _EMPTY_MARK or not _checks(mark, _MARK.size):
                return None
            step, values_bytes, digest, check = _MARK.unpack_from(mark)
            file.seek(_CATALOGUE_OFFSET)
            catalogue = Catalogue.from_json(json.loads(file.read(length)))
            values = file.read(values_bytes)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    if catalogue.identity != identity or zlib.crc32(values) != check:
        return None
    return SlotState(path, step, catalogue, json.loads(values), digest)


def _checks(block: bytes, size: int) -> bool:
    """Return whether the CRC behind the first `size` bytes is theirs."""
    if len(block) < size + _CHECK.size:
        return False
    return bool(_CHECK.unpack_from(block, size)[0] == zlib.crc32(block[:size]))


class SlotReader:
    """The data of a kept state, mapped.

    Raises:
        RecoverError: When the file is gone.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise RecoverError(f"{path} cannot be read: {error}") from None
        data = _HEADER.unpack_from(self._map)[3]
        self._data = memoryview(self._map)[data:]

    def bytes_of(self, entry: SlotEntry) -> memoryview:
        """The elements of `entry`."""
        return self._data[entry.start : entry.start + entry.size]

    def digest(self, size: int) -> int:
        """XXH3 of the first `size` bytes of the data."""
        return int(xxhash.xxh3_64_intdigest(self._data[:size]))

    def close(self) -> None:
        """Let go of the memory, as soon as nobody looks at it any more."""
        with contextlib.suppress(BufferError):
            self._data.release()
            self._map.close()


def run_folder(memory: Path, run: str) -> Path:
    """Folder of the states of a run below `memory`; each user has a place of their own."""
    return memory / f"outlast-{os.getuid()}" / run


def generation_folder(folder: Path, number: int) -> Path:
    """Folder of the states of a generation's processes."""
    return folder / f"{_GENERATION}{number}"


def generations(folder: Path) -> list[int]:
    """The numbers of the generations that are in `folder`, ascending."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    found = [name.removeprefix(_GENERATION) for name in names if name.startswith(_GENERATION)]
    return sorted(int(name) for name in found if name.isdecimal())


def check_capacity(folder: Path, size: int, own: Path) -> None:
    """Refuse to take more than half of the memory that the node has available.

    Args:
        folder: Where it would be taken; made if need be.
        size: In bytes, of all processes of the node.
        own: What lies here is the run's already, and goes when the new states are complete.

    Raises:
        RecoverError: With all figures.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RecoverError(f"{folder} cannot be made: {error.strerror}") from None
    available = float(psutil.virtual_memory().available)
    if (limited := memory_available_bytes()) is not None:
        # What the control group of this job has left.
        available = min(available, limited)
    for path in own.rglob("*"):
        with contextlib.suppress(OSError):
            available += path.stat().st_blocks * _BLOCK_BYTES
    if size > min(free, _SHARE_OF_AVAILABLE * available):
        raise RecoverError(
            f"two copies of the state take {size / 1e6:.1f} MB of the node's memory; {folder} has "
            f"room for {free / 1e6:.1f} MB, and of the {available / 1e6:.1f} MB that are available "
            "half may be taken"
        )


class Claim:
    """Says that a live process uses `folder`, until it is closed or the process dies.

    Raises:
        RecoverError: When the folder cannot be used, or is another user's.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.parent.stat().st_uid != os.getuid():
                raise RecoverError(f"{folder.parent} is another user's; set recover.memory")
            self._file = (folder / _OWNER).open("a")
            # Several processes of a run hold it together.
            fcntl.flock(self._file, fcntl.LOCK_SH)
        except OSError as error:
            raise RecoverError(f"{folder} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """The folder is in use no more."""
        self._file.close()


def remove_path(path: Path) -> None:
    """Delete a file or a folder, if it is there and may be deleted."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_run(folder: Path) -> None:
    """Give the memory of a run back."""
    remove_path(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_old_runs(memory: Path, keep: str) -> None:
    """Remove what this user's dead runs have left for a day, but for the run `keep`."""
    place = run_folder(memory, keep).parent
    with contextlib.suppress(OSError):
        for folder in list(place.iterdir()):
            if folder.name != keep and _is_leftover(folder):
                remove_run(folder)


def _is_leftover(folder: Path) -> bool:
    """Return whether nobody has used `folder` for a day: the lock of a dead process is gone."""
    try:
        with (folder / _OWNER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return False
    return time.time() - newest > _LEFTOVER_SECONDS
