"""The copies in a stage's root folder: their sizes, who uses them, and how they go.

::

    claims/<key>     locked exclusively while a process copies or checks this copy
    leases/<key>     locked shared by every live process that uses this copy
    room             locked exclusively while a process makes room
    <key>/           plan.json, files/..., manifest.json, checked.json, used (time of last use)

A key is a name and a hash of names, sizes and versions, so a source that has changed gets a copy of
its own and nobody loses the one that he is reading.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from typing import TYPE_CHECKING

import xxhash

from outlast.cluster.staging.locks import FileLock
from outlast.cluster.staging.manifest import MANIFEST, publish
from outlast.cluster.staging.space import Kept

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.cluster.staging.source import Source

CLAIMS = "claims"
LEASES = "leases"
ROOM = "room"
PLAN = "plan.json"
USED = "used"
_LONGEST_NAME = 60


def key_of(source: Source, digest: str | None) -> str:
    """Name of the folder of a copy: equal for equal files, and for equal content where it is known.

    Args:
        source: What is copied.
        digest: The xxh3-128 of its first file where it is known.
    """
    known: list[object] = [[file.name, file.size_bytes, file.version] for file in source.files]
    if digest is None:
        known.append(source.location)
    else:
        first = source.files[0]
        known[0] = [first.name, first.size_bytes, digest]
    last = source.location.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", last)[-_LONGEST_NAME:].lstrip(".")
    return f"{name}-{xxhash.xxh3_64_hexdigest(json.dumps(known).encode())}"


def claim_of(root: Path, key: str) -> FileLock:
    """The right to work on a copy; ends with the process, not with its children."""
    return FileLock(root / CLAIMS / key)


def lease_of(root: Path, key: str) -> FileLock:
    """The use of a copy; ends with the process and its children."""
    return FileLock(root / LEASES / key, inherited=True)


def folders_of(root: Path) -> list[Path]:
    """The folders of all copies, whole or not."""
    return [path for path in root.iterdir() if path.is_dir() and path.name not in (CLAIMS, LEASES)]


def note_plan(folder: Path, source: Source) -> None:
    """Note what the copy in `folder` will be; raises OSError."""
    publish(folder / PLAN, {"source": source.location, "bytes": source.bytes})


def source_of(folder: Path) -> str:
    """Where a copy is from; the folder's name where that is not known."""
    for name in (MANIFEST, PLAN):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((folder / name).read_bytes())["source"])
    return folder.name


def kept_in(root: Path, folder: Path) -> Kept:
    """What a copy takes, and whether a live process works on it or uses it."""
    size = 0
    for path in folder.rglob("*"):
        # Others work here: a file may be gone by now.
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    planned = size
    if not (folder / MANIFEST).exists():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            planned = max(size, int(json.loads((folder / PLAN).read_bytes())["bytes"]))
    last_used = 0.0
    for name in (USED, PLAN):
        with contextlib.suppress(OSError):
            last_used = max(last_used, (folder / name).stat().st_mtime)
    with claim_of(root, folder.name) as claim, lease_of(root, folder.name) as lease:
        busy = not (claim.take() and lease.take())
    return Kept(folder.name, size, planned, last_used, busy)


def evict(root: Path, key: str) -> bool:
    """Delete a copy unless somebody has begun to use it; whether it is gone."""
    with claim_of(root, key) as claim, lease_of(root, key) as lease:
        if not (claim.take() and lease.take()):
            return False
        # Renamed first: what a kill leaves behind is no copy any more.
        doomed = root / f".evicted-{key}"
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (root / key).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        lease.delete()
        claim.delete()
    return True
