"""Checkpoints of other programs as named tensors, read when they are needed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outlast.checkpoint.convert.deepspeed import open_deepspeed
from outlast.checkpoint.convert.megatron import is_megatron, open_megatron
from outlast.checkpoint.convert.source import Entry, Source, entry_of, load_restricted, slices_of
from outlast.checkpoint.convert.torch_dcp import open_dcp
from outlast.checkpoint.format.storage import sentence_of
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("dcp", "torch", "safetensors", "deepspeed", "megatron")


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
