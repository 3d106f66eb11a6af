"""Folders of torch.distributed.checkpoint as named tensors, read when they are needed."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from outlast.checkpoint.convert.source import Entry, Source, entry_of, slices_of
from outlast.checkpoint.dcp.content import DcpContent
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box

_DIGITS = re.compile(r"(\d+)/*$", re.ASCII)

_SAFE_DCP = {
    dcp_metadata.__name__: dcp_metadata,
    dcp_filesystem.__name__: dcp_filesystem,
}
_SAFE_DCP_NAMES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_StoragePrefix",
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_UNUSED = {
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    _MEGATRON: {"MCoreSavePlan"},
}
"""Parts of plans, which Megatron-core may keep beside the metadata and nobody needs."""


class _Unused:
    """Stands for an object that is not needed and not made."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    # Anything else could be called by the pickle.
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"the layout {name}")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's ``.metadata``, and makes nothing but what that consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _SAFE_DCP and name in _SAFE_DCP_NAMES:
            return getattr(_SAFE_DCP[module], name)
        if (module, name) == (_MEGATRON, "MCoreMetadata"):
            return Metadata
        if name in _UNUSED.get(module, ()):
            return _Unused
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath", "WindowsPath"):
            return lambda *parts: "/".join(parts)
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_metadata(path: Path) -> Metadata:
    """The ``.metadata`` of a folder, of which only the classes that it consists of are made.

    Raises:
        CheckpointError: When there is more in it, or it names files outside of the folder.
    """
    try:
        with (path / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}/.metadata is not what DCP writes ({error}); it is not read further"
        ) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path}/.metadata is not what DCP writes")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path}/.metadata names {info.relative_path}, outside of {path}")
    return metadata


def open_dcp(path: Path, _: contextlib.ExitStack) -> Source:
    """A folder of DCP's own writer.

    Tensors are read by torch's reader, which loads them with ``weights_only=True``. What is no
    tensor is copied as bytes and never unpickled.
    """
    metadata = read_metadata(path)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, True)
    tensors: dict[str, Entry] = {}
    objects, trained = [], []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            objects.append(name)
            tensors[name] = entry_of(name, _dcp_bytes(reader, name))
            continue
        if entry.properties.requires_grad:
            trained.append(name)
        boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        dtype = entry.properties.dtype
        tensors[name] = Entry(
            dtype, tuple(entry.size), _dcp_reader(reader, name, dtype, boxes), boxes
        )
    found = _DIGITS.search(path.name)
    planner_data = values.encode(metadata.planner_data, "planner_data", lambda *_: None)
    return Source(
        tensors,
        dcp=DcpContent(list(tensors), objects, trained, planner_data),
        step=None if found is None else int(found[1]),
    )


class _Receiver(LoadPlanner):
    """Takes one item from torch's reader."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self.content = bytearray()

    def set_up_planner(self, *_: Any) -> None:
        """Nothing is planned."""

    def create_local_plan(self) -> LoadPlan:
        """Nothing is planned."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing is planned."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes."""
        self.content = bytearray(value.getbuffer())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory to read into."""
        assert self.tensor is not None
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


def _dcp_bytes(reader: FileSystemReader, name: str) -> torch.Tensor:
    index, zero = MetadataIndex(name), torch.Size([0])
    receiver = _Receiver()
    _receive(reader, ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero), receiver)
    if not receiver.content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(receiver.content, dtype=torch.uint8)


def _dcp_reader(
    reader: FileSystemReader, name: str, dtype: torch.dtype, boxes: tuple[Box, ...]
) -> Callable[[Box], torch.Tensor]:
    """Reads parts of DCP's chunks; the chunk of the last call is kept, as torch reads it whole."""
    last: dict[Box, torch.Tensor] = {}

    def read(box: Box) -> torch.Tensor:
        chunk = next(name for name in boxes if name.overlap(box) == box)
        if chunk not in last:
            last.clear()
            index = MetadataIndex(name, chunk.offset)
            lengths = torch.Size(chunk.shape)
            zeros = torch.Size([0] * len(lengths))
            receiver = _Receiver(torch.empty(lengths, dtype=dtype))
            item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, lengths)
            _receive(reader, item, receiver)
            assert receiver.tensor is not None
            last[chunk] = receiver.tensor
        found = last[chunk][slices_of(box, chunk.offset)]
        if box == chunk:
            last.clear()
        return found

    return read


def _receive(reader: FileSystemReader, item: ReadItem, receiver: _Receiver) -> None:
    try:
        reader.read_data(LoadPlan([item]), receiver).wait()
    except (KeyError, RuntimeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"`{item.storage_index.fqn}` cannot be read from {reader.path}: {error}"
        ) from None
