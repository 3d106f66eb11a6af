"""Locks between the processes of one node, which a dead process cannot keep.

They are advisory locks of the kernel (``flock(2)``) on small files: taken at once or not at all,
and gone with the last process that holds the file open, however it ended, so nobody has to judge
from a process number (which containers hide and the kernel gives out again) who is alive. They hold
between processes of one node only, which is why a stage must lie on the node's own disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_forgotten_by_children: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """One lock on one file; the file is made when needed.

    Args:
        path: The file; its folder exists.
        inherited: Whether forked children hold it too. A child that goes on reading a copy must
            keep its lease; a child of a process that copies must not keep the claim.
    """

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self._path = path
        self._descriptor: int | None = None
        if not inherited:
            _forgotten_by_children.add(self)

    @property
    def held(self) -> bool:
        """Whether this object holds its lock."""
        return self._descriptor is not None

    def take(self, *, shared: bool = False) -> bool:
        """Take the lock if it is free now, or free of exclusive holders where `shared`.

        Raises:
            OSError: The file cannot be made, or its file system knows no locks.
        """
        if self.held:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Whoever had it before may have deleted the file: then this lock keeps nobody out.
            current = os.path.samestat(os.fstat(descriptor), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            current = False
        except BaseException:
            os.close(descriptor)
            raise
        if not current:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def delete(self) -> None:
        """Delete the file of a lock that is held, and give it back; others make a new one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _forget_in_child() -> None:
    # Closing a copy of the descriptor leaves the parent's lock as it is.
    for lock in list(_forgotten_by_children):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
