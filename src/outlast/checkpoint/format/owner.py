"""The lock that keeps a second writer out of a store in a file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.checkpoint.format.storage import make_directory
from outlast.errors import CheckpointError, RunError
from outlast.records import OwnerLock

if TYPE_CHECKING:
    from outlast.checkpoint.format.storage import LocalStorage


def own(
    storage: LocalStorage, *, remedy: str = "wait for it to end, or save to another directory"
) -> OwnerLock:
    """Take the lock; the store's directory is made if missing.

    Args:
        storage: The store.
        remedy: What to do when it is taken.

    Raises:
        CheckpointError: When a live process holds it, named by host and pid, or the directory
            cannot be made.
    """
    try:
        make_directory(storage.root)
    except OSError as error:
        raise CheckpointError(f"{storage.root} cannot be made: {error.strerror}") from None
    lock = OwnerLock(
        storage.root / "owner", subject=f"the checkpoint store {storage.root}", remedy=remedy
    )
    try:
        lock.acquire()
    except RunError as error:
        raise CheckpointError(str(error)) from None
    return lock
