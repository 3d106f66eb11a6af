"""The memory that tensors and arrays look at, each block named once however many look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.autosave.heap.tensors import has_storage, is_block, owner_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class Geometry(NamedTuple):
    """How a tensor or an array lies in a block of memory.

    Attributes:
        block: Name of the block, or its address in this process.
        dtype: Of the elements.
        size: Length of each dimension.
        stride: Elements, of arrays bytes, from one to the next in each dimension.
        offset: Elements, of arrays bytes, from the start of the block.
        device: Where the block is.
    """

    block: str
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str


def lies_in_block(value: Any) -> bool:
    """Whether a value is a tensor or an array whose numbers lie in a block of memory."""
    if isinstance(value, torch.Tensor):
        return has_storage(value)
    return isinstance(value, np.ndarray) and value.flags.writeable and is_block(value)


def geometry(value: Any) -> Geometry:
    """How a tensor or an array lies in memory; the block is given by its address."""
    if isinstance(value, torch.Tensor):
        device, stride = str(value.device), tuple(value.stride())
        block = _address(value.untyped_storage(), device)
        return Geometry(
            block, value.dtype, tuple(value.shape), stride, int(value.storage_offset()), device
        )
    owner = owner_of(value)
    base: Any = owner.base
    if isinstance(base, torch.Tensor):
        storage = base.untyped_storage()
        start, block = storage.data_ptr(), _address(storage, "cpu")
    else:
        start = owner.__array_interface__["data"][0]
        block = f"cpu:{start}:{owner.nbytes}"
    offset = value.__array_interface__["data"][0] - start
    return Geometry(block, value.dtype, value.shape, value.strides, offset, "cpu")


def row_of(value: Any) -> torch.Tensor:
    """The whole block that a tensor or an array looks at, as one row.

    Of the dtype of `value`, where torch has it and the block holds whole elements; else bytes.
    """
    if isinstance(value, torch.Tensor):
        return _storage_row(value.untyped_storage(), value)
    owner = owner_of(value)
    base: Any = owner.base
    if isinstance(base, torch.Tensor):
        return _storage_row(base.untyped_storage(), base)
    line = owner.ravel(order="K")
    try:
        return torch.from_numpy(line)
    except TypeError:
        return torch.from_numpy(line.view(np.uint8))


def _storage_row(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    whole = storage.nbytes() % like.element_size() == 0 and not like.is_quantized
    dtype = like.dtype if whole else torch.uint8
    length = storage.nbytes() // (like.element_size() if whole else 1)
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, 0, (length,), (1,))


def _address(storage: torch.UntypedStorage, device: str) -> str:
    return f"{device}:{storage.data_ptr()}:{storage.nbytes()}"


class Blocks:
    """Names the blocks of a capture.

    Args:
        tensors: Where the blocks are listed when they are first looked at.
        known: Address to name of blocks that set-up makes in every process.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], known: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = dict(known)
        self._later = 0

    def place(self, value: Any) -> tuple[Geometry, bool]:
        """How a tensor or an array lies in its block, and whether the block was not yet listed."""
        found = geometry(value)
        name = self._names.get(found.block)
        if name is None:
            self._later += 1
            name = self._names[found.block] = f"+{self._later}"
        new = name not in self._tensors
        if new:
            self._tensors[name] = row_of(value)
        return found._replace(block=name), new


class RestoredBlocks:
    """The blocks of a capture, in the memory of this process."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._saved = tensors
        self._rows: dict[str, torch.Tensor] = {}

    def into(self, name: str, value: Any) -> None:
        """Fill the block that `value` looks at, if it is as large as what was saved."""
        saved, row = _as_bytes(self._saved[name]), _as_bytes(row_of(value))
        if saved.numel() == row.numel():
            self._rows[name] = row.copy_(saved)

    def tensor(self, where: Geometry) -> torch.Tensor:
        """A tensor that looks at a block."""
        row = self._row(where)
        made = torch.empty(0, dtype=where.dtype, device=row.device)
        return made.set_(row.untyped_storage(), where.offset, where.size, where.stride)

    def array(self, where: Geometry) -> np.ndarray:
        """An array that looks at a block."""
        row = self._row(where).numpy()
        return np.ndarray(where.size, where.dtype, row, where.offset, where.stride)

    def lies(self, value: Any, where: Geometry) -> bool:
        """Whether a tensor or an array looks at its block in the way it did."""
        now = geometry(value)
        block = geometry(self._row(where)).block
        return now == where._replace(block=block)

    def _row(self, where: Geometry) -> torch.Tensor:
        if where.block not in self._rows:
            saved = _as_bytes(self._saved[where.block])
            self._rows[where.block] = saved.clone().to(where.device)
        return self._rows[where.block]


def _as_bytes(row: torch.Tensor) -> torch.Tensor:
    size = (row.untyped_storage().nbytes(),)
    if row.storage_offset() or row.numel() * row.element_size() != size[0]:
        return row.detach().contiguous().view(torch.uint8)
    made = torch.empty(0, dtype=torch.uint8, device=row.device)
    return made.set_(row.untyped_storage(), 0, size, (1,))
