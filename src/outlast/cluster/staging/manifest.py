"""What a copy consists of, and when its content was last compared with its digests.

`manifest.json` is published when all files are there and is never changed. None of this is synced:
a copy can be made again, and after a crash of the node its files are compared with their digests.

`checked.json` says in which state the files were when they were last read and had their digests. A
write changes a file's times, which no program can set back (``st_ctime``), so files in that same
state are not read again before some hours are over or the node has been started anew.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHECKED = "checked.json"
FILES = "files"
FORMAT = "outlast-stage"
VERSION = 1
CHECK_AGAIN_SECONDS = 6 * 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class StagedFile:
    """One file of a copy.

    Attributes:
        name: Below the folder of the copy.
        size_bytes: Its size.
        digest: xxh3-128 of its content, hexadecimal.
    """

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A whole copy.

    Attributes:
        source: Path or URL that it was copied from.
        files: All files, the first one being what was asked for.
    """

    source: str
    files: tuple[StagedFile, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def publish(self, folder: Path) -> None:
        """Write it into the folder of the copy; raises OSError."""
        publish(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(self)})


def publish(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is seen whole or not at all; raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in the folder of a copy; None where there is no whole copy."""
    content = _read(folder / MANIFEST)
    try:
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return None
        files = tuple(
            StagedFile(str(file["name"]), int(file["size_bytes"]), str(file["digest"]))
            for file in content["files"]
        )
        return Manifest(str(content["source"]), files)
    except (KeyError, TypeError, ValueError):
        return None


def has_its_sizes(folder: Path, manifest: Manifest) -> bool:
    """Whether every file is there with its size."""
    try:
        return all(
            (folder / FILES / file.name).stat().st_size == file.size_bytes
            for file in manifest.files
        )
    except OSError:
        return False


def note_checked(folder: Path, manifest: Manifest) -> None:
    """Note that all files have just been found to have their digests; raises OSError."""
    publish(folder / CHECKED, {"time": time.time(), **_state_of(folder, manifest)})


def was_checked(
    folder: Path, manifest: Manifest, again_seconds: float = CHECK_AGAIN_SECONDS
) -> bool:
    """Whether the files are as they were when they were last read, which is not long ago."""
    content = _read(folder / CHECKED)
    at = content.pop("time", None)
    if not isinstance(at, float) or not 0.0 <= time.time() - at < again_seconds:
        return False
    try:
        return content == _state_of(folder, manifest)
    except OSError:
        return False


def _state_of(folder: Path, manifest: Manifest) -> dict[str, Any]:
    files = {}
    for file in manifest.files:
        facts = (folder / FILES / file.name).stat()
        files[file.name] = [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    return {"boot": _boot(), "files": files}


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
