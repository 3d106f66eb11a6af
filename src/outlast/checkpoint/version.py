"""Versions on disk: one directory for each, published by a rename, verified by hashes.

    checkpoints/
      step-00000200/             published: complete and, if it verifies, trusted
        __0_0.distcp .metadata   files of torch.distributed.checkpoint
        manifest.json            {"format": 1, "step": 200, "world_size": 2, "files": {...}}
      step-00000300.partial/     being written, or left behind by a killed process
      step-00000100.damaged1/    did not verify when it was wanted; never used again

No pointer says which version is the latest: that is the newest directory that verifies.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_PREFIX = "step-"
_PARTIAL = ".partial"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Version:
    """A published version: its step and its directory."""

    step: int
    path: Path


def published_path(root: Path, step: int) -> Path:
    """Where the version of `step` lives once it is published."""
    return root / f"{_PREFIX}{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    """Where the version of `step` is written before it is published."""
    return root / f"{_PREFIX}{step:08d}{_PARTIAL}"


def list_versions(root: Path) -> list[Version]:
    """All published versions below `root`, oldest first, verified or not."""
    found = []
    if root.is_dir():
        for path in root.iterdir():
            digits = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and digits.isdigit() and path.is_dir():
                found.append(Version(int(digits), path))
    return sorted(found, key=lambda version: version.step)


def publish(partial: Path, target: Path, step: int, world_size: int) -> int:
    """Seal the files in `partial` with a manifest and rename it to `target`, durably.

    Returns:
        Size of the version's files in bytes.
    """
    files: dict[str, dict[str, int | str]] = {}
    size = 0
    for path in sorted(partial.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "xxh3_128": _hash(path)}
        size += path.stat().st_size
    manifest = {
        "format": FORMAT_VERSION,
        "step": step,
        "world_size": world_size,
        "files": files,
    }
    with (partial / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    partial.rename(target)
    _sync(target.parent)
    return size


def verify(version: Version) -> None:
    """Check every file of `version` against its manifest.

    Raises:
        CheckpointError: Naming the file that is missing, cut or changed.
    """
    try:
        manifest = json.loads((version.path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT_VERSION or manifest["step"] != version.step:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{version.path / MANIFEST} is missing or damaged") from None
    for name, expected in files.items():
        path = version.path / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes where {expected['bytes']} were written"
            )
        if _hash(path) != expected["xxh3_128"]:
            raise CheckpointError(f"{path} does not have the content that was written")


def set_aside(version: Version) -> Path:
    """Rename a version that does not verify, so that it is neither trusted nor counted again."""
    number = 1
    while (target := version.path.with_name(f"{version.path.name}.damaged{number}")).exists():
        number += 1
    version.path.rename(target)
    return target


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
