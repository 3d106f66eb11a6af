"""A framework's checkpoint dictionary as a store can hold it, and back."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import whole
from outlast.state.tensors import dtype_of, opaque_array

if TYPE_CHECKING:
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

KEY = "checkpoint"
"""Name of the dictionary among what a version holds."""

_PICKLED = "outlast.pickled"
_WORDS = (type(None), bool, int, float, complex, str, bytes)
_ARRAYS = (torch.Tensor, nn.Parameter, np.ndarray)
_COMPARED_BYTES = 1 << 20


def plain(value: Any, path: str = KEY) -> Any:
    """`value` with bytes, which `restored` unpickles, in place of what JSON has no word for.

    Raises:
        CheckpointError: Naming the path of an object that cannot be pickled.
    """
    if type(value) in (*_WORDS, *_ARRAYS) or isinstance(value, (DTensor, np.generic)):
        return value
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{path}.{n}") for n, item in enumerate(value))
    if type(value) in (set, frozenset) and all(type(item) in _WORDS for item in value):
        return value
    if type(value) in (dict, OrderedDict) and all(type(key) in _WORDS for key in value):
        found = type(value)((key, plain(item, f"{path}.{key}")) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):
            found.__dict__.update(plain(attributes, f"{path}.__dict__"))
        return found
    try:
        return {_PICKLED: pickle.dumps(value, protocol=5)}
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}` is of type {type(value).__name__}, which cannot be saved: {error}"
        ) from None


def restored(value: Any, *, unpickle: bool) -> Any:
    """Return what `plain` was given.

    Raises:
        CheckpointError: When there are pickled objects, and they must not be unpickled.
    """
    if isinstance(value, dict):
        if value.keys() == {_PICKLED}:
            if not unpickle:
                raise CheckpointError(
                    "the checkpoint has objects in it that can only be unpickled, which "
                    "weights_only = True forbids; load it with weights_only = False"
                )
            return pickle.loads(value[_PICKLED])
        found = type(value)((key, restored(item, unpickle=unpickle)) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):
            found.__dict__.update(restored(attributes, unpickle=unpickle))
        return found
    if type(value) in (list, tuple):
        return type(value)(restored(item, unpickle=unpickle) for item in value)
    return value


def described(content: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """JSON of the content without its tensors, and marks that differ when these do.

    Large tensors, and those on a device, are told apart by their memory and version counter, which
    a change in place through ``.data`` does not count.
    """
    marks: list[Any] = []

    def put(name: str, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            marks.append((name, _mark(value)))
            return "torch"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            marks.append((name, str(value.dtype), value.shape, _digest(value.tobytes())))
            return "numpy"
        return None

    return values.encode(content, KEY, put), tuple(marks)


def read_content(storage: Storage, contents: Contents, tree: Any = None) -> dict[str, Any]:
    """The dictionary that a version holds, its tensors on the CPU.

    Args:
        storage: Where the version lies.
        contents: Its manifests.
        tree: JSON of the content without its tensors; None: that of the version.

    Raises:
        CheckpointError: When a tensor is missing or damaged.
    """
    if KEY not in contents.values:
        raise CheckpointError(
            f"{storage.location}/{contents.version.folder} was saved from live modules; load it "
            "into modules, not as a dictionary"
        )
    facts = contents.catalogue.tensors
    tensors = {name: torch.empty(fact.shape, dtype=dtype_of(fact)) for name, fact in facts.items()}
    with VersionReader(storage, contents) as reader:
        boxes = {name: whole(fact.shape) for name, fact in facts.items()}
        reader.read(
            [Wanted(name, boxes[name], opaque_array(tensor)) for name, tensor in tensors.items()]
        )

    def get(name: str, kind: str) -> Any:
        return tensors[name].numpy() if kind == "numpy" else tensors[name]

    found: dict[str, Any] = values.decode(contents.values[KEY] if tree is None else tree, get)
    return found


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    facts = (tensor.dtype, tuple(tensor.shape))
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or size > _COMPARED_BYTES:
        return (*facts, str(tensor.device), tensor.data_ptr(), tensor._version)
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (*facts, _digest(memory.numpy().tobytes()))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
