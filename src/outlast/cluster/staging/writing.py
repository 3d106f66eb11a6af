"""Large blocks written to the node's disk past the kernel's memory, where its file system can.

A copy that is written through the kernel's memory is moved twice and pushes out what others hold
there. ``O_DIRECT`` takes it from the caller's memory to the disk; offset, length and address must
be multiples of the disk's block size, which whole blocks of the read-ahead are. Where a file system
refuses (tmpfs of older kernels, some FUSE), and for the end of a file, the ordinary way is taken.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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

    @property
    def direct(self) -> bool:
        """Whether the next block is written past the kernel's memory."""
        return self._direct

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
