"""Reading a version into live tensors, one batch of host memory at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.checkpoint.format.reader import VersionReader, Wanted
from outlast.state.box import whole
from outlast.state.filling import Filling
from outlast.state.install import Saved, Targets
from outlast.state.tensors import dtype_of, opaque_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint.format.version import Contents

_COPIED_BYTES = 256 << 20


def saved_in(contents: Contents) -> Saved:
    """What a version holds."""
    return Saved(contents.catalogue.tensors, contents.values, contents.catalogue.values)


def read_into(
    targets: Targets, reader: VersionReader, done: Callable[[int], None] | None = None
) -> None:
    """Fill the live tensors of `targets`, one batch of host memory at a time.

    Raises:
        CheckpointError: When a tile is missing or damaged; tensors read before it are filled.
    """
    facts = reader.contents.catalogue.tensors
    batch: list[Filling] = []
    size = 0
    seen: set[int] = set()
    for name, tensor in targets.tensors.items():
        if name not in facts or facts[name].shape != tuple(tensor.shape) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        filling = Filling(name, tensor, facts[name])
        batch.append(filling)
        size += filling.extra_bytes
        if size > _COPIED_BYTES:
            _fill(batch, reader, done)
            batch, size = [], 0
    _fill(batch, reader, done)


def _fill(batch: list[Filling], reader: VersionReader, done: Callable[[int], None] | None) -> None:
    reader.read([Wanted(sample.name, sample.box, sample.out) for sample in batch], done)
    for filling in batch:
        filling.finish()


def whole_tensor(reader: VersionReader, name: str) -> torch.Tensor:
    """One tensor of a version, whole, on the CPU."""
    facts = reader.contents.catalogue.tensors[name]
    tensor = torch.empty(facts.shape, dtype=dtype_of(facts))
    box = whole(facts.shape)
    reader.read([Wanted(name, box, opaque_array(tensor, box))])
    return tensor
