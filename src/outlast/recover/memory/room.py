"""Room for states in a node's memory, and what runs have left there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from typing import TYPE_CHECKING

import psutil

from outlast.errors import RecoverError
from outlast.records.process import boot_identity, started_seconds

if TYPE_CHECKING:
    from pathlib import Path

_SHARE_OF_AVAILABLE = 0.5
_LEFTOVER_SECONDS = 86400.0
_OWNER = "owner.json"


def run_folder(memory: Path, run: str) -> Path:
    """Where the states of a run lie below `memory`; each user has a place of their own."""
    return memory / f"outlast-{os.getuid()}" / run


def check_room(folder: Path, size: int) -> None:
    """Refuse to take more than half of the memory that the node has available.

    Args:
        folder: Where it would be taken; made if need be.
        size: In bytes, of this process.

    Raises:
        RecoverError: With both figures.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RecoverError(f"{folder} cannot be made: {error.strerror}") from None
    available = psutil.virtual_memory().available
    if size > min(free, _SHARE_OF_AVAILABLE * available):
        raise RecoverError(
            f"two copies of the state take {size / 1e6:.1f} MB of memory; {folder} has room for "
            f"{free / 1e6:.1f} MB, and {available / 1e6:.1f} MB are available on the node, of "
            "which half may be taken"
        )


def claim(folder: Path) -> None:
    """Say who uses `folder`, so that others do not take it for a leftover.

    Raises:
        RecoverError: When it cannot be written.
    """
    process = psutil.Process()
    owner = {
        "boot": boot_identity(),
        "process": process.pid,
        "started": started_seconds(process),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _OWNER).write_text(json.dumps(owner), encoding="ascii")
    except OSError as error:
        raise RecoverError(f"{folder} cannot be written: {error.strerror}") from None


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
    try:
        newest = max(each.stat().st_mtime for each in (folder, *folder.rglob("*")))
        owner = json.loads((folder / _OWNER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    if time.time() - newest < _LEFTOVER_SECONDS:
        return False
    if owner.get("boot") != boot_identity():
        # Of another container or boot: nobody here can tell whether it lives.
        return False
    try:
        return bool(started_seconds(psutil.Process(owner["process"])) != owner["started"])
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, TypeError):
        return False
