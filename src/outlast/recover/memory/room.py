"""Room for states in a node's memory, and what runs have left there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from typing import TYPE_CHECKING

import psutil

from outlast.errors import RecoverError
from outlast.hardware.detect import memory_available_bytes

if TYPE_CHECKING:
    from pathlib import Path

_SHARE_OF_AVAILABLE = 0.5
_LEFTOVER_SECONDS = 86400.0
_OWNER = "in-use"
_BLOCK_BYTES = 512


def run_folder(memory: Path, run: str) -> Path:
    """Where the states of a run lie below `memory`; each user has a place of their own."""
    return memory / f"outlast-{os.getuid()}" / run


def check_room(folder: Path, size: int, own: Path) -> None:
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
    available = _available_bytes() + _used_bytes(own)
    if size > min(free, _SHARE_OF_AVAILABLE * available):
        raise RecoverError(
            f"two copies of the state take {size / 1e6:.1f} MB of the node's memory; {folder} has "
            f"room for {free / 1e6:.1f} MB, and of the {available / 1e6:.1f} MB that are available "
            "half may be taken"
        )


def _available_bytes() -> float:
    """Memory that this node, or the control group of this job, has left."""
    found = float(psutil.virtual_memory().available)
    limited = memory_available_bytes()
    return found if limited is None else min(found, limited)


def _used_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * _BLOCK_BYTES
    return total


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


def remove(path: Path) -> None:
    """Delete a file or a folder; what is gone already is all right."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Give the memory of a run back."""
    remove(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def clean(memory: Path, keep: str) -> None:
    """Remove what this user's dead runs have left for a day, but for the run `keep`."""
    place = run_folder(memory, keep).parent
    with contextlib.suppress(OSError):
        for folder in list(place.iterdir()):
            if folder.name != keep and _is_leftover(folder):
                forget(folder)


def _is_leftover(folder: Path) -> bool:
    """Whether nobody has used `folder` for a day: the lock of a dead process is gone."""
    try:
        with (folder / _OWNER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return False
    return time.time() - newest > _LEFTOVER_SECONDS
