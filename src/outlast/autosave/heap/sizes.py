"""How many bytes of a capture are what."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outlast.autosave.heap.blocks import geometry, lies_in_block
from outlast.autosave.heap.tensors import gradient, is_composed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from outlast.autosave.heap.names import Names

NOT_SAVED = "gradients not saved"


def sizes_of(
    tensors: Mapping[str, torch.Tensor], names: Names, reached: Collection[str]
) -> dict[str, int]:
    """Bytes of the blocks by what lies in them: parameters, buffers, optimizer, gradients, ..."""
    roles: dict[str, str] = {}
    for role, value in _roles(names.objects[path] for path in reached):
        for block in _in_blocks(value):
            roles.setdefault(geometry(block).block, role)
    found: Counter[str] = Counter()
    for row in tensors.values():
        found[roles.get(geometry(row).block, "tensors")] += row.nbytes
    return dict(found)


def _roles(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for value in values:
        match value:
            case nn.Parameter():
                yield "parameters", value
                yield "gradients", gradient(value)
            case np.ndarray():
                yield "arrays", value
            case nn.Module():
                yield from (("buffers", buffer) for buffer in value._buffers.values())
            case torch.optim.Optimizer():
                for state in value.state.values():
                    yield from (("optimizer", item) for item in _tensors_in(state))


def _tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, torch.Tensor):
        yield value


def _in_blocks(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) and is_composed(value):
        for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _in_blocks(getattr(value, name))
    elif value is not None and lies_in_block(value):
        yield value
