"""Memory that the trainer stages into and the writer process reads from."""

from __future__ import annotations

import contextlib
import mmap
import os

# Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23


class Arena:
    """A piece of anonymous shared memory with a file descriptor that a child can inherit.

    Its pages are touched at once, so that no save pays for their first use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("outlast-checkpoint")
        os.ftruncate(self.descriptor, size)
        # An empty file cannot be mapped.
        self._map = mmap.mmap(self.descriptor, size) if size else None
        self.memory = memoryview(self._map) if self._map is not None else memoryview(bytearray())
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(_MADV_POPULATE_WRITE)

    def detach(self) -> None:
        """Close the descriptor, which no child will need; the memory stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Give the memory back, as soon as nobody uses it any more."""
        self.detach()
        # Somebody may still look at it; then it goes with the last look.
        with contextlib.suppress(BufferError):
            self.memory.release()
            if self._map is not None:
                self._map.close()
