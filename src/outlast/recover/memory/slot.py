"""One state of one process in a file on tmpfs: the format, its writer and its reader.

A slot is a file of four parts, little-endian:

======== =================== ======================================================================
offset   size                content
======== =================== ======================================================================
0        64                  ``OUTLASTSLOT1``, catalogue bytes (u64), capacity of the values (u64),
                             first byte of the data (u64), CRC-32 of these
64       64                  the mark: step (i64), bytes of the values (u64), CRC-32 of the values,
                             CRC-32 of the mark; all zero while the slot is being written
128      catalogue bytes     JSON, never changed: identity, and for each tensor its name, element
                             type, global shape, box (offset, shape) and first byte in the data
...      capacity            the values as JSON, new for every step
data     the rest            the tensors' elements, row-major, each from a multiple of 64 bytes on
======== =================== ======================================================================

What one process has written another one reads, also when the first was killed: the kernel keeps
the pages. So a mark that is there was written after everything that it stands for. The data has no
checksum: it never leaves the machine's memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.errors import RecoverError
from outlast.state.box import Box, aligned

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"OUTLASTSLOT1"
_HEADER = struct.Struct("<12sQQQ")
_MARK = struct.Struct("<qQI")
_CHECK = struct.Struct("<I")
_MARK_OFFSET = 64
_CATALOGUE_OFFSET = 128
_EMPTY_MARK = bytes(_MARK.size + _CHECK.size)
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Entry:
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
    """What a slot holds, apart from the values.

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
    entries: tuple[Entry, ...]

    @property
    def data_bytes(self) -> int:
        """Of all entries, with the gaps between them."""
        return max((aligned(entry.start + entry.size) for entry in self.entries), default=0)


@dataclass(frozen=True)
class Kept:
    """A complete state of one process, found in a slot.

    Attributes:
        path: The slot.
        step: Steps done.
        catalogue: What it holds.
        values: Name to JSON value.
    """

    path: Path
    step: int
    catalogue: Catalogue
    values: dict[str, Any]


class Slot:
    """A slot that this process writes; its memory is reserved at once.

    Attributes:
        content: The whole file.
        memory: The data in it.

    Raises:
        RecoverError: When the memory cannot be had.
    """

    def __init__(self, path: Path, catalogue: Catalogue, values_bytes: int) -> None:
        self.path = path
        self.capacity = 2 * values_bytes + _PAGE_BYTES
        text = json.dumps(_to_json(catalogue)).encode()
        self._values = _CATALOGUE_OFFSET + len(text)
        data = _whole_pages(self._values + self.capacity)
        size = data + max(catalogue.data_bytes, 1)
        self.content = reserved(path, size)
        header = _HEADER.pack(_MAGIC, len(text), self.capacity, data)
        self.content[: len(header) + _CHECK.size] = header + _CHECK.pack(zlib.crc32(header))
        self.content[_CATALOGUE_OFFSET : self._values] = text
        self.memory = memoryview(self.content)[data : data + catalogue.data_bytes]

    def begin(self) -> None:
        """From now on the slot holds no state."""
        self.content[_MARK_OFFSET : _MARK_OFFSET + len(_EMPTY_MARK)] = _EMPTY_MARK

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
        mark = _MARK.pack(step, len(values), zlib.crc32(values))
        self.content[_MARK_OFFSET : _MARK_OFFSET + len(_EMPTY_MARK)] = mark + _CHECK.pack(
            zlib.crc32(mark)
        )

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


def read_slot(path: Path, identity: str) -> Kept | None:
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
            step, values_bytes, check = _MARK.unpack_from(mark)
            file.seek(_CATALOGUE_OFFSET)
            catalogue = _from_json(json.loads(file.read(length)))
            values = file.read(values_bytes)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    if catalogue.identity != identity or zlib.crc32(values) != check:
        return None
    return Kept(path, step, catalogue, json.loads(values))


def _checks(block: bytes, size: int) -> bool:
    """Whether the CRC behind the first `size` bytes is theirs."""
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

    def bytes_of(self, entry: Entry) -> memoryview:
        """The elements of `entry`."""
        return self._data[entry.start : entry.start + entry.size]

    def close(self) -> None:
        """Let go of the memory, as soon as nobody looks at it any more."""
        with contextlib.suppress(BufferError):
            self._data.release()
            self._map.close()


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _to_json(catalogue: Catalogue) -> dict[str, Any]:
    return {
        "identity": catalogue.identity,
        "everything": catalogue.everything,
        "lineage": catalogue.lineage,
        "tensors": [
            [entry.name, entry.dtype, entry.shape, entry.box.offset, entry.box.shape, entry.start]
            + [entry.size]
            for entry in catalogue.entries
        ],
    }


def _from_json(found: dict[str, Any]) -> Catalogue:
    entries = tuple(
        Entry(name, dtype, tuple(shape), Box(tuple(offset), tuple(box)), start, size)
        for name, dtype, shape, offset, box, start, size in found["tensors"]
    )
    return Catalogue(found["identity"], found["everything"], found["lineage"], entries)
