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
from outlast.records import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUFFER_BYTES = 1 << 20
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
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - LEFTOVER_SECONDS
        for entry in os.scandir(path.parent):
            if entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp"):
                # Another process may remove it first; either way it is gone.
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)  # noqa: PTH108  a DirEntry has its path as text
        with temporary.open("xb", buffering=BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise DataError(_sentence(error, path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return content


def _sentence(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"No space left to write {path} ({os.strerror(error.errno)}); "
            "free some space or choose another folder"
        )
    return f"{path} cannot be written ({error.strerror or error})"
