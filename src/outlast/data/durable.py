"""Publishing a file so that a reader sees either all of it or nothing.

The bytes go to a hidden temporary name beside the target, are synced to the disk, and only then
take the target's name. A writer that is killed leaves the hidden file; the next writer of the
same target removes leftovers that nobody has written to for an hour.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from outlast.errors import DataError
from outlast.records import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEFTOVER_SECONDS = 3600.0


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the name `path`, durably, when the block succeeds.

    When the block fails, `path` is as it was before and the temporary file is gone.

    Args:
        path: Name to publish; missing folders are created.

    Yields:
        The temporary file, open for writing bytes.

    Raises:
        DataError: The disk is full, or the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - LEFTOVER_SECONDS
        for entry in path.parent.iterdir():
            if entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp"):
                # Another process may remove it first; either way it is gone.
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < oldest:
                        entry.unlink()
        with replacing(path) as file:
            yield file
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"No space left to write {path} ({os.strerror(error.errno)}); "
                "free some space or choose another folder"
            ) from error
        raise DataError(f"{path} cannot be written ({error.strerror or error})") from error


def publish_json(path: Path, content: dict[str, Any]) -> None:
    """Publish a JSON object as `path`, in one step.

    Raises:
        DataError: The disk is full, or the place cannot be written.
    """
    with publishing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: The file cannot be read or does not hold a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as JSON ({reason})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return content
