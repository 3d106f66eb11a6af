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
import re
import shutil
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
_PUBLISHED = re.compile(_PREFIX + r"(\d{8}|[1-9]\d{8,})", re.ASCII)
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
            named = _PUBLISHED.fullmatch(path.name)
            if named and path.is_dir():
                found.append(Version(int(named[1]), path))
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
        CheckpointError: Naming the file that is missing, cut, changed or cannot be read.
    """
    manifest_path = version.path / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text())
        if manifest["format"] != FORMAT_VERSION or manifest["step"] != version.step:
            raise ValueError
        files = [
            (name, each["bytes"], each["xxh3_128"]) for name, each in manifest["files"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{manifest_path} is missing or damaged") from None
    for name, size, digest in files:
        path = version.path / name
        try:
            _check(path, size, digest)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def remove(version: Version) -> None:
    """Delete `version`; when it is cut short, what is left does not look like a version."""
    leftover = partial_path(version.path.parent, version.step)
    shutil.rmtree(leftover, ignore_errors=True)
    version.path.rename(leftover)
    shutil.rmtree(leftover)


def remove_partial(root: Path, before: int) -> None:
    """Delete what killed processes left behind of versions of steps smaller than `before`."""
    for path in root.glob(f"{_PREFIX}*{_PARTIAL}"):
        named = _PUBLISHED.fullmatch(path.name.removesuffix(_PARTIAL))
        if named and int(named[1]) < before:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(version: Version) -> Path:
    """Rename a version that does not verify, so that it is neither trusted nor counted again."""
    number = 1
    while (target := version.path.with_name(f"{version.path.name}.damaged{number}")).exists():
        number += 1
    version.path.rename(target)
    return target


def _check(path: Path, size: int, digest: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes where {size} were written")
    if _hash(path) != digest:
        raise CheckpointError(f"{path} does not have the content that was written")


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
