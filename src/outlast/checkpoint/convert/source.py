"""What conversions have in common: tensors of another program's checkpoint, and their pieces."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outlast.checkpoint.format.manifest import IMPORTED
from outlast.errors import CheckpointError
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.checkpoint.dcp.content import DcpContent
    from outlast.checkpoint.format.manifest import TensorFacts

STRUCTURE = IMPORTED
"""Name of the value that holds the nesting of an imported ``torch.save`` file."""


@dataclass(frozen=True)
class Converted:
    """What was converted.

    Attributes:
        step: Step of the store's version.
        tensors: Number of tensors.
        bytes: Their bytes.
        notes: What was left out or should be known, a sentence each.
    """

    step: int
    tensors: int
    bytes: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A tensor of a source.

    Attributes:
        dtype: Type of its elements.
        shape: Global shape.
        read: The content of a box of it, on the CPU.
        boxes: The boxes in which it lies there.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], torch.Tensor]
    boxes: tuple[Box, ...]


@dataclass
class Source:
    """An opened checkpoint.

    Attributes:
        tensors: Name to tensor.
        unprefixed: Names that no prefix is put before.
        structure: JSON of everything that was saved, with ``{"!tensor": ".NAME"}`` for tensors, if
            there was more than tensors under names.
        dcp: What DCP's metadata says, for DCP's checkpoints.
        step: Steps done, if the source says so.
        notes: What a person should know of it, a sentence each.
    """

    tensors: dict[str, Entry]
    unprefixed: set[str] = field(default_factory=set)
    structure: Any = None
    dcp: DcpContent | None = None
    step: int | None = None
    notes: list[str] = field(default_factory=list)


def slices_of(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """Slices that pick `box` out of an array that begins at `origin`."""
    first = origin or (0,) * len(box.shape)
    return tuple(
        slice(offset - base, offset - base + extent)
        for offset, extent, base in zip(box.offset, box.shape, first, strict=True)
    )


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """A tensor in memory, or in a mapped file; raises CheckpointError when it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(f"`{name}` cannot be imported: only dense tensors can")
    tensor, shape = tensor.detach(), tuple(tensor.shape)
    return Entry(tensor.dtype, shape, lambda box: tensor[slices_of(box)], (whole(shape),))


def load_restricted(path: Path) -> Any:
    """``torch.load(weights_only=True)``, its pages read when they are used where that is possible.

    Raises:
        CheckpointError: When the file needs more than tensors and plain values.
    """
    try:
        if zipfile.is_zipfile(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = re.search(r"(?:GLOBAL|class|global|type) [`']?([\w.]+\.\w+)", str(error))
        what = f"Python objects ({reason[1]})" if reason else "Python objects"
        raise CheckpointError(
            f"{path} holds {what} that torch.load(weights_only=True) refuses, because loading them "
            "could run any program; where you trust it, load it with weights_only=False and save "
            "its tensors alone"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read by torch.load: {str(error).partition(chr(10))[0]}"
        ) from None


def split_rows(box: Box, facts: TensorFacts, limit: int) -> Iterator[Box]:
    """`box` in pieces of about `limit` bytes, cut in its first dimension at the tile grid."""
    if box.elements * facts.itemsize <= limit or not box.shape:
        yield box
        return
    row_bytes = box.elements // box.shape[0] * facts.itemsize
    step = facts.steps[0]
    rows = max(limit // row_bytes // step, 1) * step
    first, end = box.offset[0], box.offset[0] + box.shape[0]
    while first < end:
        last = min((first // rows + 1) * rows, end)
        yield Box((first, *box.offset[1:]), (last - first, *box.shape[1:]))
        first = last
