"""Checkpoints of torch.save, Hugging Face and DCP as named tensors, read when they are needed."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from outlast.checkpoint.convert.deepspeed import open_deepspeed
from outlast.checkpoint.convert.source import Entry, Source, entry_of, load_restricted, slices_of
from outlast.checkpoint.dcp.content import DcpContent
from outlast.checkpoint.format.storage import sentence_of
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("dcp", "torch", "safetensors", "deepspeed")

_DIGITS = re.compile(r"(\d+)/*$", re.ASCII)


@contextlib.contextmanager
def open_source(path: Path, kind: str) -> Iterator[Source]:
    """Open the checkpoint at `path`.

    Args:
        path: File or folder.
        kind: One of `KINDS`, or ``auto``.

    Raises:
        CheckpointError: When it is missing, of no known kind, or cannot be read safely.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    openers: dict[str, Callable[[Path, contextlib.ExitStack], Source]] = {
        "dcp": _open_dcp,
        "torch": _open_torch,
        "safetensors": _open_safetensors,
        "deepspeed": open_deepspeed,
    }
    kind = _kind_of(path) if kind == "auto" else kind
    if kind not in openers:
        raise CheckpointError(f'kind = "{kind}" is unknown; take auto, {", ".join(KINDS)}')
    with contextlib.ExitStack() as stack:
        try:
            source = openers[kind](path, stack)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {sentence_of(error)}") from error
        yield source


def _kind_of(path: Path) -> str:
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch"
    if (path / ".metadata").is_file():
        return "dcp"
    if (path / "latest").is_file() or any(path.glob("*_model_states.pt")):
        return "deepspeed"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    raise CheckpointError(
        f"{path} is no checkpoint of a known kind: a folder of DCP holds .metadata, one of "
        "DeepSpeed *_model_states.pt, one of Hugging Face *.safetensors"
    )


def _open_torch(path: Path, _: contextlib.ExitStack) -> Source:
    """A file of ``torch.save``, loaded with ``weights_only=True``: nothing in it is executed."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file of torch.save")
    root = load_restricted(path)
    if not isinstance(root, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(root).__name__}; a dictionary of tensors is needed"
        )
    tensors: dict[str, Entry] = {}

    def put(name: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensors[name[1:]] = entry_of(name[1:], value)
        return "torch"

    structure = values.encode(_plain(root), "", put)
    flat = all(isinstance(value, torch.Tensor) for value in root.values())
    return Source(tensors, structure=None if flat else structure)


def _plain(value: Any) -> Any:
    """`value` with torch's small types as plain ones."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value)
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> Source:
    """A file, or a folder with an index or with one or more files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Entry] = {}
    for file in _safetensors_files(path):
        try:
            content = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise CheckpointError(f"{file} is no safetensors file: {error}") from None
        for name in content.keys():  # noqa: SIM118 (no mapping)
            if name in tensors:
                raise CheckpointError(f"`{name}` is in several files of {path}")
            stored = content.get_slice(name)
            if stored.get_dtype() not in _SAFETENSORS_DTYPES:
                raise CheckpointError(f"`{name}` is of type {stored.get_dtype()}, unknown to torch")
            shape = tuple(stored.get_shape())
            tensors[name] = Entry(
                _SAFETENSORS_DTYPES[stored.get_dtype()],
                shape,
                _safetensors_reader(content, name, shape),
                (whole(shape),),
            )
    return Source(tensors)


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is no index: it has no weight_map") from None
    files = [path / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which is missing")
    return files


def _safetensors_reader(
    content: Any, name: str, shape: tuple[int, ...]
) -> Callable[[Box], torch.Tensor]:
    def read(box: Box) -> torch.Tensor:
        whole_one = not shape or box.shape == shape
        found: torch.Tensor = (
            content.get_tensor(name) if whole_one else content.get_slice(name)[slices_of(box)]
        )
        return found

    return read


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


def _open_dcp(path: Path, _: contextlib.ExitStack) -> Source:
    """A folder of DCP's own writer.

    Its ``.metadata`` is a pickle; only the classes that DCP's metadata consists of are made from
    it. Tensors are read by torch's reader, which loads them with ``weights_only=True``. What is no
    tensor is copied as bytes and never unpickled.
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
        boxes = tuple(Box(tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks)
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
        chunk = next(each for each in boxes if each.overlap(box) == box)
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
