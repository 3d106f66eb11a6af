"""Checkpoints of other programs as named tensors, read when they are needed.

DCP folders, files of torch.save, safetensors, DeepSpeed's ZeRO 0 to 2 and Megatron-core's
``torch_dist``. The last is a DCP folder with two files beside: ``metadata.json`` says which format
it is, ``common.pt`` holds what is not sharded, as torch.save writes it. Its tensors have global
shapes and names that do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from outlast.checkpoint.dcp import DcpContent
from outlast.checkpoint.manifest import IMPORTED
from outlast.checkpoint.storage import sentence_of
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.checkpoint.manifest import TensorFacts


STRUCTURE = IMPORTED
"""Name of the value that holds the nesting of an imported ``torch.save`` file."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

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
class ForeignTensor:
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
class ForeignCheckpoint:
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

    tensors: dict[str, ForeignTensor]
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


def entry_of(name: str, tensor: torch.Tensor) -> ForeignTensor:
    """A tensor in memory, or in a mapped file; raises CheckpointError when it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(f"`{name}` cannot be imported: only dense tensors can")
    tensor, shape = tensor.detach(), tuple(tensor.shape)
    return ForeignTensor(tensor.dtype, shape, lambda box: tensor[slices_of(box)], (whole(shape),))


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


_DIGITS = re.compile(r"(\d+)/*$", re.ASCII)

_SAFE_DCP = {dcp_metadata.__name__: dcp_metadata, dcp_filesystem.__name__: dcp_filesystem}

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


def open_dcp(path: Path, _: contextlib.ExitStack) -> ForeignCheckpoint:
    """A folder of DCP's own writer.

    Tensors are read by torch's reader, which loads them with ``weights_only=True``. What is no
    tensor is copied as bytes and never unpickled.
    """
    metadata = read_metadata(path)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, True)
    tensors: dict[str, ForeignTensor] = {}
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
        tensors[name] = ForeignTensor(
            dtype, tuple(entry.size), _dcp_reader(reader, name, dtype, boxes), boxes
        )
    found = _DIGITS.search(path.name)
    planner_data = values.encode(metadata.planner_data, "planner_data", lambda *_: None)
    return ForeignCheckpoint(
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


MASTER = "master."
"""Stands before the names of DeepSpeed's float32 copies of the weights."""


class _Opaque:
    """Stands for an object of DeepSpeed's, which is not needed and not made."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass


def _load_deepspeed(path: Path) -> dict[str, Any]:
    """As `load_restricted`, with empty objects in place of those of DeepSpeed's classes."""
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        needed = []
    stand_ins: list[Any] = [
        (type("_Opaque", (_Opaque,), {}), name) for name in needed if name.startswith("deepspeed.")
    ]
    with torch.serialization.safe_globals(stand_ins):
        found = load_restricted(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not what DeepSpeed writes")
    return found


def open_deepspeed(path: Path, _: contextlib.ExitStack) -> ForeignCheckpoint:
    """The module's weights and, of ZeRO 1 and 2, the float32 copies that the optimizer keeps.

    The flat layout of those is the one that DeepSpeed's zero_to_fp32.py undoes: each rank holds an
    equal part of each parameter group, padded; ``param_shapes`` lists what is in a group.
    """
    if (path / "latest").is_file():
        path = path / Path((path / "latest").read_text().strip()).name
    files = sorted(path.glob("mp_rank_*_model_states.pt"))
    if not files and any(path.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{path} is of ZeRO stage 3, which is not supported; convert it with DeepSpeed's "
            "zero_to_fp32.py and import the result"
        )
    if len(files) != 1:
        raise CheckpointError(
            f"{path} holds {len(files)} mp_rank_*_model_states.pt; only checkpoints without tensor "
            "parallelism, of one such file, can be imported"
        )
    states = _load_deepspeed(files[0])
    module = states.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{files[0]} is not what DeepSpeed writes: it has no module")
    tensors = {
        name: entry_of(name, tensor)
        for name, tensor in module.items()
        if isinstance(tensor, torch.Tensor)
    }
    step = states.get("global_steps")
    source = ForeignCheckpoint(tensors, step=step if isinstance(step, int) else None)
    parts = sorted(path.glob("*zero_pp_rank_*_optim_states.pt"), key=_natural)
    if not parts or not states.get("param_shapes"):
        source.notes.append("only the module's weights were imported: no ZeRO partitions are there")
        return source
    # The flat float32 tensors: one list of parameter groups for each rank.
    flats = []
    for file in parts:
        content = _load_deepspeed(file).get("optimizer_state_dict")
        if not isinstance(content, Mapping) or "zero_stage" not in content:
            raise CheckpointError(f"{file} is not what ZeRO writes: it has no zero_stage")
        stage = content["zero_stage"]
        stage = stage.arguments[0] if isinstance(stage, _Opaque) else int(stage)
        if stage > 2:
            raise CheckpointError(f"{path} is of ZeRO stage {stage}; stages 1 and 2 are supported")
        count = content.get("partition_count", len(parts))
        count = max(count) if isinstance(count, (list, tuple)) else count
        if count != len(parts):
            raise CheckpointError(
                f"{path} has {len(parts)} *_optim_states.pt, but {count} ranks saved it; it is not "
                "complete, or holds files of another save"
            )
        flats.append(list(content["single_partition_of_fp32_groups"]))
    for name, entry in _master_weights(path, states["param_shapes"], flats).items():
        source.tensors[MASTER + name] = entry
        source.unprefixed.add(MASTER + name)
    for name, original in dict(states.get("shared_params") or {}).items():
        if MASTER + original in source.tensors:
            source.tensors[MASTER + name] = source.tensors[MASTER + original]
            source.unprefixed.add(MASTER + name)
    source.notes.append(
        f"float32 weights of the optimizer are named {MASTER}*; its moments were not imported"
    )
    return source


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts rank 10 after rank 9."""
    return [
        (piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece)
        for piece in re.split(r"(\d+)", path.name)
    ]


def _master_weights(
    path: Path, groups: list[Mapping[str, torch.Size]], flats: list[list[torch.Tensor]]
) -> dict[str, ForeignTensor]:
    """Every parameter's float32 copy, from the partitions in which it lies."""
    found: dict[str, ForeignTensor] = {}
    align = 2 * len(flats)
    for number, shapes in enumerate(groups):
        partitions = [of_rank[number].reshape(-1) for of_rank in flats]
        available = sum(partition.numel() for partition in partitions)
        offset = 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            found[name] = ForeignTensor(
                partitions[0].dtype,
                tuple(shape),
                _flat_reader(partitions, offset, tuple(shape)),
                (whole(tuple(shape)),),
            )
            offset += size
        # ZeRO 2 pads a group to a multiple of this.
        if -(-offset // align) != -(-available // align):
            raise CheckpointError(
                f"{path}: the parameters of group {number} have {offset} elements, its partitions "
                f"{available}; the float32 weights cannot be told apart"
            )
    return found


def _flat_reader(
    partitions: list[torch.Tensor], offset: int, shape: tuple[int, ...]
) -> Callable[[Box], torch.Tensor]:
    def read(box: Box) -> torch.Tensor:
        first, last = offset, offset + torch.Size(shape).numel()
        pieces, begin = [], 0
        for partition in partitions:
            end = begin + partition.numel()
            if begin < last and end > first:
                pieces.append(partition[max(first - begin, 0) : min(last, end) - begin])
            begin = end
        flat = torch.cat(pieces) if pieces else partitions[0][:0]
        return flat.reshape(shape)[slices_of(box)]

    return read


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
    """Return whether the folder is a checkpoint of Megatron-core's, or holds some of them."""
    return (path / _TRACKER).is_file() or (path / _FORMAT).is_file()


def open_megatron(path: Path, stack: contextlib.ExitStack) -> ForeignCheckpoint:
    """All sharded tensors and objects, and ``common.pt`` as it is: nothing is unpickled.

    Raises:
        CheckpointError: When the folder is of another format, or cannot be read safely.
    """
    if (tracker := path / _TRACKER).is_file():
        path = _newest(path, tracker.read_text(encoding="utf-8").strip())
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
        source.dcp, names=[*source.dcp.names, COMMON], objects=[*source.dcp.objects, COMMON]
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


KINDS = ("dcp", "torch", "safetensors", "deepspeed", "megatron")


@contextlib.contextmanager
def open_source(path: Path, kind: str) -> Iterator[ForeignCheckpoint]:
    """Open the checkpoint at `path`.

    Args:
        path: File or folder.
        kind: One of `KINDS`, or ``auto``.

    Raises:
        CheckpointError: When it is missing, of no known kind, or cannot be read safely.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    openers: dict[str, Callable[[Path, contextlib.ExitStack], ForeignCheckpoint]] = {
        "dcp": open_dcp,
        "torch": _open_torch,
        "safetensors": _open_safetensors,
        "deepspeed": open_deepspeed,
        "megatron": open_megatron,
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
    if is_megatron(path):
        return "megatron"
    if (path / ".metadata").is_file():
        return "dcp"
    if (path / "latest").is_file() or any(path.glob("*_model_states.pt")):
        return "deepspeed"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    raise CheckpointError(
        f"{path} is no checkpoint of a known kind: a folder of DCP holds .metadata, one of "
        "DeepSpeed *_model_states.pt, one of Hugging Face *.safetensors, one of Megatron-core "
        "metadata.json"
    )


def _open_torch(path: Path, _: contextlib.ExitStack) -> ForeignCheckpoint:
    """A file of ``torch.save``, loaded with ``weights_only=True``: nothing in it is executed."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file of torch.save")
    root = load_restricted(path)
    if not isinstance(root, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(root).__name__}; a dictionary of tensors is needed"
        )
    tensors: dict[str, ForeignTensor] = {}

    def put(name: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensors[name[1:]] = entry_of(name[1:], value)
        return "torch"

    structure = values.encode(_plain(root), "", put)
    flat = all(isinstance(value, torch.Tensor) for value in root.values())
    return ForeignCheckpoint(tensors, structure=None if flat else structure)


def _plain(value: Any) -> Any:
    """`value` with torch's small types as plain ones."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
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


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> ForeignCheckpoint:
    """A file, or a folder with an index or with one or more files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, ForeignTensor] = {}
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
            tensors[name] = ForeignTensor(
                _SAFETENSORS_DTYPES[stored.get_dtype()],
                shape,
                _safetensors_reader(content, name, shape),
                (whole(shape),),
            )
    return ForeignCheckpoint(tensors)


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
