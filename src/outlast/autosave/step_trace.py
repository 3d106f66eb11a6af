"""Dispatch trace of a step: all its reads and writes of storages, in order.

Every operation of torch passes here with its schema, which says what it writes; autograd's
backward pass and the optimizer's step are operations like any other. Some schemas do not tell the
truth (batch normalisation writes its running statistics without saying so, and collectives write
all that they are given), and those of other people's operations may not: for these the contents
before and after are compared. A write that does not cover the whole storage leaves something of
what was there, so it counts as a read as well.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType


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
    """Return True for a tensor or an array with numbers of its own that can be read."""
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


Window = Literal["always", "late", "early"]
"""When a tensor is written first in a step: never, from the optimizer's step on, or before it."""


WeakStorage = StorageWeakRef
"""Holds no memory, but the place of a storage among others."""


_Role = Literal["read", "view", "update", "overwrite", "statistics", "unsure"]


_OVERWRITES = frozenset({
    "copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "geometric_", "cauchy_", "log_normal_", "_foreach_zero_", "_foreach_copy_",
})  # fmt: skip


_ANNOTATED = frozenset({"aten", "prims", "prim", "_c10d_functional", "inductor"})


_WRITES_ALL = frozenset({"c10d"})


_COPIES = frozenset({"pin_memory", "to", "contiguous", "reshape"})


_OUT_OF_SIGHT = frozenset({
    "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_",
})  # fmt: skip


@dataclass(slots=True)
class Access:
    """Accesses of a step to one storage.

    Attributes:
        first: How it was touched first; None when not at all.
        written: Whether an operation writes it.
        early: Whether it is written before the first optimizer's step.
        escaped: Whether its address was given out, so that it may be used out of sight.
        born: Whether the step has made it.
    """

    first: Literal["read", "write"] | None = None
    written: bool = False
    early: bool = False
    escaped: bool = False
    born: bool = False


@dataclass
class Accesses:
    """Accesses of one step to all storages.

    Attributes:
        optimizer_begun: Whether an optimizer's step has begun.
        untold: Operations that wrote what their schema does not say, e.g. `mylib::update`.
        skipped: Why the step was not traced; empty when it was.
        places: Storage's key to the line that wrote it, of storages that nobody has named.
    """

    optimizer_begun: bool = False
    untold: set[str] = field(default_factory=set)
    skipped: str = ""
    places: dict[int, str] = field(default_factory=dict)
    _of: dict[int, Access] = field(default_factory=dict)
    _alive: dict[int, WeakStorage] = field(default_factory=dict)

    def at(self, key: int) -> Access | None:
        """Accesses of the step to a storage, by its key; None for one that was not touched."""
        return self._of.get(key)

    def keys(self) -> frozenset[int]:
        """Keys of the storages that were there before the step and that it touched."""
        return frozenset(key for key, item in self._of.items() if not item.born)

    def written(self) -> frozenset[int]:
        """Of these, what it wrote."""
        return frozenset(key for key in self.keys() if self._of[key].written)


class Argument(NamedTuple):
    """An argument of an operation that may hold tensors: its place, name and what becomes of it."""

    position: int
    name: str
    role: _Role


def storage_key(tensor: torch.Tensor) -> int:
    """Tells storages apart, for as long as somebody holds one or a weak reference to it."""
    return int(tensor.untyped_storage()._cdata)


def weak_storage(tensor: torch.Tensor) -> WeakStorage:
    """Lets a storage be freed, but keeps its key from being used again."""
    return WeakStorage(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@contextmanager
def traced_step() -> Iterator[Accesses]:
    """Trace the step within.

    A compiled program is not traced, since its operations are the compiler's: `skipped` says so.
    """
    found = Accesses()
    if compiled():
        found.skipped = "the program is compiled with torch.compile, whose code is not traced"
        yield found
        return
    trace = _Trace(found)
    begins = register_optimizer_step_pre_hook(trace.optimizer_begins)
    try:
        with _Escapes(trace), trace:
            yield found
    finally:
        begins.remove()


def compiled() -> bool:
    """Return True if torch.compile has compiled anything in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return utilities is not None and utilities.counters["frames"].get("total", 0) > 0


@functools.cache
def arguments_of(operation: Any) -> tuple[Argument, ...]:
    """The arguments of an operation that may hold tensors, by its schema and what is known."""
    schema = operation._schema
    namespace, _, name = schema.name.rpartition("::")
    found = []
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        role: _Role = "read"
        if argument.alias_info is not None and argument.alias_info.is_write:
            role = "overwrite" if argument.is_out or name in _OVERWRITES else "update"
        elif argument.alias_info is not None and namespace == "aten" and name not in _COPIES:
            role = "view"
        elif namespace in _WRITES_ALL:
            role = "update"
        elif argument.name.startswith("running_") and "backward" not in name:
            role = "statistics"
        elif namespace not in _ANNOTATED:
            role = "unsure"
        found.append(Argument(position, argument.name, role))
    return tuple(found)


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes down what operations do."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What is compiled is not traced, so there is nothing to keep the compiler from.
        return False

    def __init__(self, found: Accesses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def optimizer_begins(self, *_: Any) -> None:
        self._found.optimizer_begun = True

    def escapes(self, tensor: torch.Tensor) -> None:
        self._access(tensor).escaped = True
        self._reads(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(type_.__torch_dispatch__ is not _PLAIN for type_ in types):
            # A tensor made of tensors comes again as operations on its parts.
            return NotImplemented
        kwargs = kwargs or {}
        found = self._found
        unsure = self._note(func, args, kwargs)
        before = {name: digest(item) for name, item in unsure.items()}
        result = func(*args, **kwargs)
        for name, item in unsure.items():
            if digest(item) != before[name]:
                found.untold.add(str(func._schema.name) if hasattr(func, "_schema") else str(func))
                self._writes(item)
        for tensor in _tensors(result):
            key = storage_key(tensor)
            if key not in found._of:
                found._of[key] = Access(born=True)
                found._alive[key] = weak_storage(tensor)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> dict[str, torch.Tensor]:
        """Note reads before writes; gives what may be written although the schema is silent."""
        unsure: dict[str, Any] = {}
        written: list[torch.Tensor] = []
        known = isinstance(func, torch._ops.OpOverload)
        if not known:
            unsure[""] = [args, kwargs]
        for position, name, role in arguments_of(func) if known else ():
            value = args[position] if position < len(args) else kwargs.get(name)
            if role == "unsure":
                unsure[name] = value
                continue
            for tensor in _tensors(value):
                self._access(tensor)
                # A view looks at no numbers, and whole new ones need none of those before.
                if role != "view" and (role != "overwrite" or not _whole(tensor)):
                    self._reads(tensor)
                if role in ("update", "overwrite") or (
                    role == "statistics" and _trains(func, args, kwargs)
                ):
                    written.append(tensor)
        found: dict[str, torch.Tensor] = {}
        for name, value in unsure.items():
            for place, tensor in enumerate(_tensors(value)):
                self._reads(tensor)
                if not self._access(tensor).born and holds_numbers(tensor):
                    found[f"{name}[{place}]"] = tensor
        for tensor in written:
            self._writes(tensor)
        return found

    def _access(self, tensor: torch.Tensor) -> Access:
        key = storage_key(tensor)
        found = self._found._of.get(key)
        if found is None:
            found = self._found._of[key] = Access()
            self._found._alive[key] = weak_storage(tensor)
        return found

    def _reads(self, tensor: torch.Tensor) -> None:
        access = self._access(tensor)
        if access.first is None:
            access.first = "read"

    def _writes(self, tensor: torch.Tensor) -> None:
        access = self._access(tensor)
        access.first = access.first or "write"
        if not (access.written or access.born):
            self._found.places[storage_key(tensor)] = _place()
        access.written = True
        access.early |= not self._found.optimizer_begun


class _Escapes(TorchFunctionMode):
    """Notes down tensors whose memory is given to others than torch."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _OUT_OF_SIGHT and args and _has_storage(args[0]):
            self._trace.escapes(args[0])
        return func(*args, **(kwargs or {}))


_PLAIN = torch.Tensor.__torch_dispatch__


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if _has_storage(value):
            yield value
        elif value.layout == torch.sparse_coo:
            yield from (value._indices(), value._values())
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _has_storage(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not hasattr(value, "__tensor_flatten__")
    )


def _whole(tensor: torch.Tensor) -> bool:
    """Return True if a tensor covers its storage, each place once."""
    covered = tensor.numel() * tensor.element_size()
    return covered == tensor.untyped_storage().nbytes() and bool(
        torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    )


def _trains(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return True if a normalisation updates its statistics, or if it cannot be told."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "training":
            return bool(args[position] if position < len(args) else kwargs.get(argument.name, True))
    return True


def _place() -> str:
    """The line of the program that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "contextlib" not in file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


_LIBRARIES = (f"{torch.__path__[0]}/", f"{Path(__file__).parent}/")
