"""Digests of what tensors and arrays hold, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def digest(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """128 bits that stand for the type, the shape and every bit of the numbers.

    Args:
        value: A strided or sparse tensor on any device, or an array without Python objects.
    """
    if isinstance(value, np.ndarray):
        made = xxhash.xxh3_128(f"{value.dtype} {value.shape}".encode())
        made.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
        return made.hexdigest()
    plain = value.detach()
    made = xxhash.xxh3_128(f"{plain.dtype} {tuple(plain.shape)} {plain.layout}".encode())
    for part in _dense_parts(plain):
        flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        made.update(flat.cpu().numpy().data)
    return made.hexdigest()


def digests(objects: Mapping[str, Any]) -> dict[str, str]:
    """Name to digest, of those of the `objects` that hold numbers."""
    return {name: digest(object_) for name, object_ in objects.items() if holds_numbers(object_)}


def holds_numbers(value: Any) -> bool:
    """Whether a value is a tensor or an array with numbers of its own that can be read."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return (
        isinstance(value, torch.Tensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.device.type != "meta"
        and value.layout != torch.jagged
    )


def changed_over(boundaries: Iterable[Mapping[str, str]]) -> frozenset[str]:
    """Names whose digest is not the same at all boundaries, or that are missing at some."""
    seen = list(boundaries)
    names = frozenset[str]().union(*seen)
    return frozenset(name for name in names if len({number.get(name) for number in seen}) > 1)


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.strided:
        return [tensor.int_repr() if tensor.is_quantized else tensor]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if by_row:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
