"""The heap of a program as bytes and tensors, and back into the objects of another process."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import types
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outlast.autosave.heap.kinds import FILES, put_back
from outlast.autosave.heap.names import Geometry, has_storage
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outlast.autosave.heap.names import Names

_SMALL_BYTES = 1024


@dataclass
class Captured:
    """What was found in memory.

    Attributes:
        program: All but the numbers of tensors and arrays, pickled.
        tensors: Name to a storage's content as one row; views of the live memory.
    """

    program: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def capture(names: Names, values: Any, known: Mapping[str, Any]) -> Captured:
    """Write down the named objects and `values`; nothing of tensors and arrays is copied.

    Args:
        names: Objects that exist in every process of the program.
        values: Anything else, e.g. local names; may lead to named objects.
        known: Further objects with names, which hold nothing.

    Raises:
        AutosaveError: When something can be written down in no way.
    """
    found = Captured()
    storages = _Storages(found.tensors)
    moved: dict[str, Geometry] = {}
    for path, each in names.objects.items():
        if has_storage(each):
            where = storages.place(each, path)
            before = names.geometry[path]
            address = str(each.untyped_storage().data_ptr())
            if where._replace(storage=address) != before:
                moved[path] = where
        elif isinstance(each, np.ndarray) and not each.dtype.hasobject:
            found.tensors[f"={path}"] = torch.from_numpy(each.view(np.uint8).reshape(-1))
    written = io.BytesIO()
    pickler = _Pickler(written, names, known, storages)
    pickler.dump((moved, names.held(), values))
    found.program = written.getvalue()
    return found


def restore(captured: Captured, names: Names, known: Mapping[str, Any]) -> Any:
    """Put what was captured into the objects of this process; gives `values` back.

    Raises:
        AutosaveError: When set-up has made other objects here.
    """
    storages = _Restored(captured.tensors)
    with torch.no_grad():
        for path, each in names.objects.items():
            if has_storage(each):
                storages.into(path, each)
            elif isinstance(each, np.ndarray) and f"={path}" in captured.tensors:
                each.view(np.uint8).reshape(-1)[:] = captured.tensors[f"={path}"].numpy()
    reader = _Unpickler(io.BytesIO(captured.program), names, known, storages)
    moved, held, values = reader.load()
    for path, where in moved.items():
        names.objects[path].data = storages.tensor(where)
    for path, seen in held.items():
        put_back(names.objects[path], seen)
    return values


class _Storages:
    """Gives every storage one name, however many tensors look at it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[int, str] = {}
        self._count = 0

    def place(self, tensor: torch.Tensor, path: str = "") -> Geometry:
        """How `tensor` lies in which storage; the first time, the storage is listed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._names:
            if not path:
                self._count += 1
            self._names[key] = f"={path}" if path else f"+{self._count}"
            row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            length = storage.nbytes() // tensor.element_size()
            self._tensors[self._names[key]] = row.set_(storage, 0, (length,))
        return Geometry(
            self._names[key],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )


class _Restored:
    """The storages of a capture, in the memory of this process."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._saved = tensors
        self._rows: dict[str, torch.Tensor] = {}

    def into(self, path: str, tensor: torch.Tensor) -> None:
        """Fill the storage of a named tensor, if it was listed under this name."""
        saved = self._saved.get(f"={path}")
        storage = tensor.untyped_storage()
        if saved is None or saved.numel() * saved.element_size() != storage.nbytes():
            return
        row = torch.empty(0, dtype=saved.dtype, device=tensor.device)
        row.set_(storage, 0, (saved.numel(),)).copy_(saved)
        self._rows[f"={path}"] = row

    def tensor(self, where: Geometry, device: str = "cpu") -> torch.Tensor:
        """A tensor that looks at a storage."""
        if where.storage not in self._rows:
            self._rows[where.storage] = self._saved[where.storage].clone().to(device)
        row = self._rows[where.storage]
        made = torch.empty(0, dtype=where.dtype, device=row.device)
        return made.set_(row.untyped_storage(), where.offset, where.size, where.stride)


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, names: Names, known: Mapping[str, Any], storages: _Storages
    ) -> None:
        super().__init__(file, protocol=5)
        self._names = names
        self._known = {id(each): name for name, each in known.items()}
        self._storages = storages

    def persistent_id(self, value: Any) -> Any:
        name = self._known.get(id(value))
        if name is not None:
            return ("known", name)
        path = self._names.path_of(value)
        return None if path is None else ("object", path)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._array(value)
        if isinstance(value, types.FunctionType) and not _importable(value):
            raise AutosaveError(
                f"the function `{value.__qualname__}` was made after training had begun and "
                "cannot be saved; make it before the training loop, at the top of the file"
            )
        if isinstance(value, torch.Generator):
            return _generator, (str(value.device), value.get_state())
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, weakref.ref):
            return weakref.ref, (value(),)
        if isinstance(value, FILES):
            return _reopened, _file(value)
        return NotImplemented

    def _tensor(self, value: torch.Tensor) -> Any:
        if hasattr(value, "__tensor_flatten__"):
            inner, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in inner}
            made = (type(value), parts, context, tuple(value.shape), value.stride())
            return _unflattened, made
        plain = value.detach() if value.grad_fn is not None else value
        where = self._storages.place(plain)
        kind = type(value)
        beside = {**vars(value)} if hasattr(value, "__dict__") else {}
        grad = value.grad if value.is_leaf else None
        requires_grad = value.requires_grad and value.is_leaf
        make = _Placed(where, str(value.device), kind, requires_grad)
        return _made, (make, grad, beside)

    def _array(self, value: np.ndarray) -> Any:
        if value.nbytes < _SMALL_BYTES:
            return NotImplemented
        flat = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
        return _array, (flat, str(value.dtype), value.shape)


@dataclass(frozen=True)
class _Placed:
    """Stands for a tensor's numbers in the pickled program."""

    where: Geometry
    device: str
    kind: type
    requires_grad: bool


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, names: Names, known: Mapping[str, Any], storages: _Restored
    ) -> None:
        super().__init__(file)
        self._names = names
        self._known = known
        self._storages = storages

    def persistent_load(self, identity: Any) -> Any:
        kind, name = identity
        if kind == "known":
            return self._known[name]
        if name not in self._names.objects:
            raise AutosaveError(
                f"`{name}` was there when the program was saved, but its set-up has not made it "
                "this time; set-up must do the same in every run"
            )
        return self._names.objects[name]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == "_made":
            return functools.partial(_made, self._storages)
        return super().find_class(module, name)


def _made(
    storages: _Restored,
    placed: _Placed,
    grad: torch.Tensor | None,
    beside: dict[str, Any],
) -> torch.Tensor:
    made = storages.tensor(placed.where, placed.device)
    if issubclass(placed.kind, torch.nn.Parameter):
        made = torch.nn.Parameter(made, placed.requires_grad)
    elif placed.kind is not torch.Tensor:
        made = made.as_subclass(placed.kind)
    made.requires_grad_(placed.requires_grad)
    made.grad = grad
    made.__dict__.update(beside)
    return made


def _unflattened(
    kind: Any, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
) -> torch.Tensor:
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
    return made


def _array(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return flat.numpy().view(dtype).reshape(shape)


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _file(value: Any) -> tuple[str, str, str | None, int]:
    value.flush()
    return (value.name, value.mode, getattr(value, "encoding", None), value.tell())


def _reopened(name: str, mode: str, encoding: str | None, position: int) -> Any:
    again = mode.replace("w", "r+") if "+" not in mode else mode.replace("w", "r")
    made = Path(name).open(again, encoding=encoding)  # noqa: SIM115 (the program closes it)
    if "r" not in mode:
        made.truncate(position)
    made.seek(position)
    return made


def _importable(value: Callable[..., Any]) -> bool:
    return "<locals>" not in value.__qualname__ and "<lambda>" not in value.__qualname__
