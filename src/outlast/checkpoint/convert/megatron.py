"""Megatron-core's distributed checkpoints (``torch_dist``) as named tensors, and back.

Such a folder is one of torch.distributed.checkpoint, with two files beside its own:
``metadata.json`` says which format it is, ``common.pt`` holds what is not sharded, as torch.save
writes it. Sharded tensors have global shapes and names that do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import torch

from outlast.checkpoint.convert.source import entry_of
from outlast.checkpoint.convert.torch_dcp import open_dcp, read_metadata
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.checkpoint.convert.source import Source

COMMON = "megatron.common"
"""Name of the bytes of ``common.pt``."""

_FORMAT, _COMMON_FILE = "metadata.json", "common.pt"
_TRACKER = "latest_checkpointed_iteration.txt"
_WRITTEN = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def is_megatron(path: Path) -> bool:
    """Whether the folder is a checkpoint of Megatron-core's, or holds some of them."""
    return (path / _TRACKER).is_file() or (path / _FORMAT).is_file()


def open_megatron(path: Path, stack: contextlib.ExitStack) -> Source:
    """All sharded tensors and objects, and ``common.pt`` as it is: nothing is unpickled.

    Raises:
        CheckpointError: When the folder is of another format, or cannot be read safely.
    """
    if (tracker := path / _TRACKER).is_file():
        path = _newest(path, tracker.read_text(encoding="utf-8").strip())
    _check_format(path)
    # Pieces of parameters, reshaped by the ranks that saved them.
    if flattened := getattr(read_metadata(path), "mcore_data", None):
        raise CheckpointError(
            f"{path} was saved by Megatron-core before 0.14, which flattens tensors such as "
            f"`{next(iter(flattened))}`; load and save it with a newer one, and import the result"
        )
    source = open_dcp(path, stack)
    assert source.dcp is not None
    content = bytearray((path / _COMMON_FILE).read_bytes())
    source.tensors[COMMON] = entry_of(COMMON, torch.frombuffer(content, dtype=torch.uint8))
    source.unprefixed.add(COMMON)
    source.dcp = dataclasses.replace(
        source.dcp,
        names=[*source.dcp.names, COMMON],
        objects=[*source.dcp.objects, COMMON],
    )
    source.notes.append(f"{_COMMON_FILE} was imported as it is, as the bytes {COMMON}")
    return source


def write_megatron_files(folder: Path, common: bytes | None) -> None:
    """Make a folder that DCP has written one that Megatron-core loads.

    Args:
        folder: Of DCP.
        common: Content of ``common.pt``; None: an empty dictionary.
    """
    if common is None:
        empty = io.BytesIO()
        torch.save({}, empty)
        common = empty.getvalue()
    (folder / _COMMON_FILE).write_bytes(common)
    # Last, as Megatron-core does: a folder without it is not complete.
    (folder / _FORMAT).write_text(json.dumps(_WRITTEN), encoding="utf-8")


def _newest(path: Path, iteration: str) -> Path:
    if iteration == "release":
        return path / "release"
    if not iteration.isdecimal():
        raise CheckpointError(
            f"{path / _TRACKER} says {iteration[:40]!r}, which is neither a number nor release"
        )
    return path / f"iter_{int(iteration):07d}"


def _check_format(path: Path) -> None:
    file = path / _FORMAT
    if not file.is_file():
        raise CheckpointError(f"{path} is not complete: it has no {_FORMAT}")
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(file.read_bytes())
    if not isinstance(found, dict) or "sharded_backend" not in found:
        raise CheckpointError(f"{file} is not what Megatron-core writes")
    for key, value in _WRITTEN.items():
        # Versions of the backends may be left out.
        if found.get(key, value) != value:
            raise CheckpointError(
                f"{path} has {key} = {found[key]!r}, and {value!r} is supported; let Megatron-core "
                "write it anew with --ckpt-format torch_dist"
            )
