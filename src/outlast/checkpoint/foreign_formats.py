"""Checkpoints of other programs as named tensors, read when they are needed.

DCP folders, files of torch.save, safetensors, DeepSpeed's ZeRO 0 to 2 and Megatron-core's
``torch_dist``. The last is a DCP folder with two files beside: ``metadata.json`` says which format
it is, ``common.pt`` holds what is not sharded, as torch.save writes it. Its tensors have global
shapes and names that do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from outlast.checkpoint.content import SAFETENSORS_TYPES
from outlast.checkpoint.dcp_format import DcpContent
from outlast.checkpoint.manifest import IMPORTED, MAX_DIMENSIONS
from outlast.checkpoint.storage import sentence_of
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import LoadPlanner

    from outlast.checkpoint.manifest import TensorFacts


# Zeros that are compressed, and views that repeat an element, make tensors larger than their file.
_LARGEST_SMALL, _LARGEST_RATIO = 1 << 28, 1000

STRUCTURE = IMPORTED
"""Name of the value that holds the nesting of an imported ``torch.save`` file."""


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
        mapped = zipfile.is_zipfile(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if mapped:
            _check_storages(path, found)
        return found
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
            f"{path} is no file of torch.save, or damaged: torch.load cannot read it "
            f"({type(error).__name__})"
        ) from None


def _check_storages(path: Path, root: Any) -> None:
    """See that a mapped file holds what its tensors are made of: torch maps what comes after it."""
    with zipfile.ZipFile(path) as archive:
        held = Counter(item.file_size for item in archive.infolist() if "/data/" in item.filename)
    storages: dict[int, int] = {}
    left, seen = [root], set[int]()
    while left:
        found = left.pop()
        # A file may say that something contains itself.
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor) and found.layout == torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, Mapping):
            left.extend(found.values())
        elif isinstance(found, (list, tuple)):
            left.extend(found)
    if missing := Counter(size for size in storages.values() if size) - held:
        raise CheckpointError(
            f"{path} is malformed: a tensor needs {max(missing)} bytes, which are not in it"
        )


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


class _Opaque:
    """Stands for an object that is not needed and not made."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
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
            return _Opaque
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
        chunks = (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        boxes = tuple(dict.fromkeys(chunks))
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


class _Receiver:
    """Takes one item from torch's reader, which asks no more of a planner."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self.content = bytearray()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes."""
        self.content = bytearray(value.getbuffer())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory to read into."""
        assert self.tensor is not None
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""

    def receive(self, reader: FileSystemReader, item: ReadItem) -> None:
        """Read the item; raises CheckpointError."""
        try:
            reader.read_data(LoadPlan([item]), cast("LoadPlanner", self)).wait()
        except (KeyError, RuntimeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"`{item.storage_index.fqn}` cannot be read from {reader.path}: {error}"
            ) from None


def _dcp_bytes(reader: FileSystemReader, name: str) -> torch.Tensor:
    index, zero, receiver = MetadataIndex(name), torch.Size([0]), _Receiver()
    receiver.receive(reader, ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero))
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
            index, lengths = MetadataIndex(name, chunk.offset), torch.Size(chunk.shape)
            zeros = torch.Size([0] * len(lengths))
            last[chunk] = torch.empty(lengths, dtype=dtype)
            item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, lengths)
            _Receiver(last[chunk]).receive(reader, item)
        found = last[chunk][slices_of(box, chunk.offset)]
        if box == chunk:
            last.clear()
        return found

    return read


MASTER = "master."
"""Stands before the names of DeepSpeed's float32 copies of the weights."""


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
    parts = sorted(
        path.glob("*zero_pp_rank_*_optim_states.pt"),
        # Rank 10 comes after rank 9.
        key=lambda file: [
            int(piece) if number % 2 else piece
            for number, piece in enumerate(re.split(r"(\d+)", file.name))
        ],
    )
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
            read = functools.partial(_read_flat, partitions, offset, tuple(shape))
            box = whole(tuple(shape))
            found[name] = ForeignTensor(partitions[0].dtype, tuple(shape), read, (box,))
            offset += size
        # ZeRO 2 pads a group to a multiple of this.
        if -(-offset // align) != -(-available // align):
            raise CheckpointError(
                f"{path}: the parameters of group {number} have {offset} elements, its partitions "
                f"{available}; the float32 weights cannot be told apart"
            )
    return found


def _read_flat(
    partitions: list[torch.Tensor], offset: int, shape: tuple[int, ...], box: Box
) -> torch.Tensor:
    """A box of the parameter at `offset` of what the partitions are together."""
    first, last = offset, offset + torch.Size(shape).numel()
    pieces, begin = [], 0
    for partition in partitions:
        end = begin + partition.numel()
        if begin < last and end > first:
            pieces.append(partition[max(first - begin, 0) : min(last, end) - begin])
        begin = end
    flat = torch.cat(pieces) if pieces else partitions[0][:0]
    return flat.reshape(shape)[slices_of(box)]


COMMON = "megatron.common"
"""Name of the bytes of ``common.pt``."""

COMMON_FILE, MEGATRON_FORMAT_FILE = "common.pt", "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"

MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def open_megatron(path: Path, stack: contextlib.ExitStack) -> ForeignCheckpoint:
    """All sharded tensors and objects, and ``common.pt`` as it is: nothing is unpickled.

    Raises:
        CheckpointError: When the folder is of another format, or cannot be read safely.
    """
    if (tracker := path / _TRACKER).is_file():
        newest = tracker.read_text(encoding="utf-8").strip()
        if newest != "release" and not newest.isdecimal():
            raise CheckpointError(
                f"{tracker} says {newest[:40]!r}, which is neither a number nor release"
            )
        path /= newest if newest == "release" else f"iter_{int(newest):07d}"
    file = path / MEGATRON_FORMAT_FILE
    if not file.is_file():
        raise CheckpointError(f"{path} is not complete: it has no {MEGATRON_FORMAT_FILE}")
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(file.read_bytes())
    if not isinstance(found, dict) or "sharded_backend" not in found:
        raise CheckpointError(f"{file} is not what Megatron-core writes")
    for key, value in MEGATRON_FORMAT.items():
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
    content = bytearray((path / COMMON_FILE).read_bytes())
    source.tensors[COMMON] = entry_of(COMMON, torch.frombuffer(content, dtype=torch.uint8))
    source.unprefixed.add(COMMON)
    source.dcp = dataclasses.replace(
        source.dcp, names=[*source.dcp.names, COMMON], objects=[*source.dcp.objects, COMMON]
    )
    source.notes.append(f"{COMMON_FILE} was imported as it is, as the bytes {COMMON}")
    return source


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
        raise CheckpointError(f"{path} does not exist; give the checkpoint of another program")
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
        with reading(path):
            for file in path.rglob("*") if path.is_dir() else [path]:
                # To open a pipe might take for ever.
                if file.exists() and not (file.is_file() or file.is_dir()):
                    raise CheckpointError(f"{file} is a pipe or device where a file should be")
            source = openers[kind](path, stack)
            _check(path, source)
        yield source


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Within it, whatever a library says to a malformed file is a CheckpointError.

    Args:
        what: What is read, for the error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {sentence_of(error)}") from error
    except Exception as error:
        raise CheckpointError(
            f"{what} is malformed, or of another kind: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _check(path: Path, source: ForeignCheckpoint) -> None:
    """See that what a source says of its tensors can be, before anything is made for them."""
    size = 0
    for name, tensor in source.tensors.items():
        shape = tensor.shape
        if type(name) is not str or not isinstance(tensor.dtype, torch.dtype):
            raise CheckpointError(f"{path} is malformed: `{name}` is no tensor with a name")
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise CheckpointError(f"{path} is malformed: `{name}` has the shape {shape!s:.200}")
        size += math.prod(shape) * tensor.dtype.itemsize
        for box in tensor.boxes:
            if len(box.offset) != len(shape) or not (
                all(type(n) is int and n >= 0 for n in (*box.offset, *box.shape))
                and all(end <= extent for end, extent in zip(box.end, shape, strict=True))
            ):
                raise CheckpointError(f"{path} is malformed: `{name}` has a part outside of it")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    most = _LARGEST_SMALL + _LARGEST_RATIO * sum(file.stat().st_size for file in files)
    if size > most:
        raise CheckpointError(
            f"{path} is malformed: its tensors have {size:.3g} bytes, which its files cannot hold"
        )


def _kind_of(path: Path) -> str:
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch"
    if (path / _TRACKER).is_file() or (path / MEGATRON_FORMAT_FILE).is_file():
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

    structure = values.encode(_plain(root, {}), "", put)
    flat = all(isinstance(value, torch.Tensor) for value in root.values())
    return ForeignCheckpoint(tensors, structure=None if flat else structure)


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """`value` with torch's small types as plain ones.

    Args:
        value: What was loaded.
        known: What became of the containers that were met before; each is made once.
    """
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value)
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if id(value) not in known:
        known[id(value)] = _UNDER_WAY
        if isinstance(value, Mapping):
            made: Any = {key: _plain(item, known) for key, item in value.items()}
        else:
            made = [_plain(item, known) for item in value]
        known[id(value)] = tuple(made) if isinstance(value, tuple) else made
    if known[id(value)] is _UNDER_WAY:
        raise CheckpointError(f"a {type(value).__name__} contains itself; save its tensors alone")
    return known[id(value)]


_UNDER_WAY = object()


SAFETENSORS_READ = {
    code: dtype
    for dtype, code in SAFETENSORS_TYPES.items()
    if code not in ("C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
}
"""Torch's names of the element types that every reader of safetensors knows."""


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> ForeignCheckpoint:
    """A file, or a folder with an index or with one or more files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, ForeignTensor] = {}
    files, named = _safetensors_files(path)
    for file in files:
        try:
            content = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise CheckpointError(f"{file} is no safetensors file: {error!s:.200}") from None
        for name in content.keys():  # noqa: SIM118 (no mapping)
            if name in tensors:
                raise CheckpointError(f"`{name}` is in several files of {path}")
            stored = content.get_slice(name)
            if stored.get_dtype() not in SAFETENSORS_READ:
                raise CheckpointError(f"`{name}` is of type {stored.get_dtype()}, unknown to torch")
            shape, dtype = tuple(stored.get_shape()), SAFETENSORS_READ[stored.get_dtype()]
            read = functools.partial(_read_safetensors, content, name, shape)
            tensors[name] = ForeignTensor(getattr(torch, dtype), shape, read, (whole(shape),))
    if missing := sorted(named - tensors.keys()):
        raise CheckpointError(
            f"the index of {path} names `{missing[0]:.200}`, which is in none of its files"
        )
    return ForeignCheckpoint(tensors)


_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors", re.ASCII)


def _safetensors_files(path: Path) -> tuple[list[Path], set[str]]:
    """The files, and the names of the tensors that an index says they hold."""
    if path.is_file():
        return [path], set()
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        found = (_SHARD.fullmatch(file.name) for file in files)
        for (_, total), count in Counter(shard.groups() for shard in found if shard).items():
            if count < int(total):
                raise CheckpointError(f"{path} has {count} of {int(total)} files of safetensors")
        return files, set()
    try:
        table = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(table.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is no index: it has no weight_map") from None
    files = [path / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which is missing")
    return files, {*table}


def _read_safetensors(content: Any, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    found: torch.Tensor = (
        content.get_tensor(name) if box.shape == shape else content.get_slice(name)[slices_of(box)]
    )
    return found
