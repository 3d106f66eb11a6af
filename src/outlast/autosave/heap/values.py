"""What has no name is written down by value: a pickle that refers to named objects and blocks.

Tensors and arrays are written as places in blocks of memory, functions made later by their code
and what they enclose, everything else as pickle does it.
"""

from __future__ import annotations

import importlib
import marshal
import pickle
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.autosave.heap.answering import reduced_answering
from outlast.autosave.heap.atoms import PLAIN_ATOMS, is_builtin_iterator
from outlast.autosave.heap.blocks import Blocks, Geometry, RestoredBlocks, lies_in_block
from outlast.autosave.heap.content import flat, own_attributes, put_attributes
from outlast.autosave.heap.modules import is_importable, is_loose, module_named
from outlast.autosave.heap.parametrized import ParametrizedClass, class_from, class_of
from outlast.autosave.heap.refusal import SetupDiffersError, Unsaveable
from outlast.autosave.heap.tensors import (
    gradient,
    hooks_of,
    is_composed,
    set_gradient,
    set_hooks,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Mapping

    from outlast.autosave.heap.names import Names


_LOWEST_ADDRESS = 1 << 40
"""Numbers from here on may be addresses of objects: what `id()` gives."""


class _TheBlocks:
    """Stands in the pickle for the blocks of memory of the process that reads it."""


class Placed(NamedTuple):
    """Stands for a tensor's numbers in the pickle.

    Attributes:
        where: How it lies in its block.
        kind: Its class.
        requires_grad: Whether it asks for a gradient.
        is_leaf: Whether it is no result of a computation that a backward pass could go through.
        conjugate: Whether it is read as the conjugate of what lies there.
        negative: Whether it is read as the negative of what lies there.
    """

    where: Geometry
    kind: type
    requires_grad: bool
    is_leaf: bool
    conjugate: bool
    negative: bool


class Writer(pickle.Pickler):
    """Pickles values.

    Args:
        file: Where to.
        names: Objects that are referred to by name.
        known: Further such objects.
        blocks: The blocks of memory of the capture.
        reach: Told the name of each named object that is referred to.
        ask: Asked whether a function may be written by value; raises an error where not.
    """

    def __init__(  # noqa: PLR0917 (what a pickle is made with)
        self,
        file: io.BytesIO,
        names: Names,
        known: Mapping[str, Any],
        blocks: Blocks,
        reach: Callable[[str], None],
        ask: Callable[[types.FunctionType], None] | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self._ask = ask
        self._names = names
        self._known = {id(known_item): name for name, known_item in known.items()}
        self._blocks = blocks
        self._reach = reach
        self._stand_in = _TheBlocks()
        self._addresses: set[int] = set()
        self._written: set[int] = set()

    def persistent_id(self, value: Any) -> Any:
        """What stands for a named object, and for the `id()` of one."""
        if type(value) is int:
            return self._address(value) if value >= _LOWEST_ADDRESS else None
        path = self._names.path_of(value)
        if path is not None:
            self._reach(path)
            return ("object", path)
        name = self._known.get(id(value))
        if name is not None:
            return ("known", name)
        if value is self._stand_in:
            return ("blocks", "")
        if type(value) not in PLAIN_ATOMS:
            self._written.add(id(value))
        return None

    def refuse_addresses(self) -> None:
        """At the end: refuse what refers by `id()` to objects that another process makes anew.

        Raises:
            AutosaveError: When there is such a number.
        """
        if not self._addresses.isdisjoint(self._written):
            raise AutosaveError(
                "a collection of the program has the `id()` of an object that was made after "
                "set-up, and which is another one in every process; use the object itself as a "
                "key, or a name for it"
            )

    def _address(self, value: int) -> Any:
        path = self._names.path_at(value)
        if path is None:
            self._addresses.add(value)
            return None
        self._reach(path)
        return ("address", path)

    def reducer_override(self, value: Any) -> Any:  # noqa: PLR0912 (one case for each kind)
        """How to write down what pickle cannot, or not so that it is the same afterwards."""
        reduce = self._names.kinds.reducer(value)
        if reduce is not None:
            return reduce(value)
        match value:
            case torch.Tensor():
                return self._tensor(value)
            case np.ndarray() if type(value) is np.ndarray and lies_in_block(value):
                where, _ = self._blocks.place(value)
                return _array, (self._stand_in, where)
            case np.memmap():
                return _memory_map(value)
            case types.FunctionType():
                if is_importable(value) and not self._names.is_later(value):
                    return NotImplemented
                if self._ask is not None:
                    self._ask(value)
                return _reduced_function(value)
            case type() if "<locals>" in value.__qualname__:
                raise Unsaveable(value, "define this class at the top of its file")
            case types.CellType():
                return _cell, (), _cell_state(value), None, None, _fill_cell
            case types.CodeType():
                return _code, (marshal.dumps(value),)
            case types.ModuleType() if is_loose(value):
                return _loose_module, (value.__name__,), dict(vars(value))
            case types.ModuleType():
                return module_named, (value.__name__,)
            case types.MethodType():
                return _method, (value.__func__, value.__self__)
            case types.MappingProxyType():
                return _view_of, (dict(value),)
            case staticmethod() | classmethod():
                return type(value), (value.__func__,)
            case property():
                return property, (value.fget, value.fset, value.fdel, value.__doc__)
            case weakref.WeakSet():
                return weakref.WeakSet, (list(value),)
            case weakref.WeakKeyDictionary() | weakref.WeakValueDictionary():
                return type(value), (dict(value.items()),)
            case weakref.ref():
                return _reference, (value(),)
            case torch.Generator():
                return _generator, (str(value.device), value.get_state())
            case torch.nn.Module() if isinstance(kind := class_of(value), ParametrizedClass):
                state = flat(own_attributes(value))
                return _bare, (kind,), state, None, None, put_attributes
            case torch.optim.Optimizer():
                state = flat(own_attributes(value))
                made = (type(value),)
                return _bare, made, state, None, None, put_attributes
            case _ if is_builtin_iterator(type(value)):
                return _reduced_iterator(value)
        return reduced_answering(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        if is_composed(value):
            inner, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(value, name) for name in inner}
            state: Any = (gradient(value), {}) if gradient(value) is not None else None
            made = (type(value), parts, context, tuple(value.shape), value.stride())
            parameter = isinstance(value, torch.nn.Parameter)
            return _composed, (made, parameter, value.requires_grad), state, None, None, _set_beside
        if not lies_in_block(value) or value.is_quantized:
            return NotImplemented
        where, _ = self._blocks.place(value)
        placed = Placed(
            where,
            type(value),
            value.requires_grad,
            value.is_leaf,
            value.is_conj(),
            value.is_neg(),
        )
        beside = (gradient(value), own_attributes(value), hooks_of(value))
        if beside[:2] == (None, {}) and not any(beside[2]):
            return _tensor, (self._stand_in, placed)
        return _tensor, (self._stand_in, placed), beside, None, None, _set_beside


class Reader(pickle.Unpickler):
    """Reads what a `Writer` wrote, in a process that has objects of the same names.

    Args:
        file: Where from.
        names: The named objects.
        known: The further ones.
        blocks: The blocks of memory of the capture.
    """

    def __init__(
        self, file: io.BytesIO, names: Names, known: Mapping[str, Any], blocks: RestoredBlocks
    ) -> None:
        super().__init__(file)
        self._names = names
        self._known = known
        self._blocks = blocks

    def find_class(self, module: str, name: str) -> Any:
        """A class or function that is found by its name."""
        try:
            return super().find_class(module, name)
        except AttributeError:
            raise AutosaveError(
                f"`{module}.{name}` was there when the program was saved, and set-up does not "
                "define it; define it at the top of its file, before the training loop"
            ) from None

    def persistent_load(self, identity: Any) -> Any:
        """The object that is referred to."""
        kind, name = identity
        if kind == "blocks":
            return self._blocks
        if kind == "known":
            return self._known[name]
        if name not in self._names.objects:
            raise SetupDiffersError(name, "was there when the program was saved, and is not now")
        found = self._names.objects[name]
        return id(found) if kind == "address" else found


class _Unsaved(torch.autograd.Function):
    """The place of a computation that led to a tensor, and that was not saved."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AutosaveError(
            "a backward pass goes through a tensor that was computed before the program was saved, "
            "and the graph of that computation is not saved; detach the tensor before the next "
            "step, or do its backward pass in the step that computes it"
        )


def _tensor(blocks: RestoredBlocks, placed: Placed) -> torch.Tensor:
    made = blocks.tensor(placed.where)
    if placed.conjugate:
        made = made.conj()
    if placed.negative:
        made = torch._neg_view(made)
    if issubclass(placed.kind, torch.nn.Parameter):
        made = torch.nn.Parameter(made, placed.requires_grad)
    elif not placed.is_leaf:
        with torch.enable_grad():
            made = _Unsaved.apply(torch.zeros((), requires_grad=True), made)  # type: ignore[no-untyped-call]
    elif placed.requires_grad:
        made.requires_grad_()
    return made if type(made) is placed.kind else made.as_subclass(placed.kind)


def _set_beside(made: torch.Tensor, beside: tuple[Any, ...]) -> None:
    grad, attributes, *hooks = beside
    if grad is not None:
        set_gradient(made, grad)
    if attributes:
        made.__dict__.update(attributes)
    if hooks:
        set_hooks(made, hooks[0])


def _composed(made: Any, parameter: bool, requires_grad: bool) -> torch.Tensor:
    kind, parts, context, size, stride = made
    found: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
    if parameter:
        return torch.nn.Parameter(found.detach(), requires_grad)
    return found


def _bare(kind: type | ParametrizedClass) -> Any:
    return object.__new__(class_from(kind))


def _array(blocks: RestoredBlocks, where: Geometry) -> np.ndarray:
    return blocks.array(where)


def _memory_map(value: Any) -> Any:
    if not isinstance(value.base, np.ndarray) and value.mode in ("r", "r+", "w+"):
        mode = "r" if value.mode == "r" else "r+"
        return np.memmap, (value.filename, value.dtype, mode, value.offset, value.shape)
    return NotImplemented


def _reduced_function(value: types.FunctionType) -> Any:
    state = {
        "__defaults__": value.__defaults__,
        "__kwdefaults__": value.__kwdefaults__,
        "__qualname__": value.__qualname__,
        "__module__": value.__module__,
        "__doc__": value.__doc__,
        "__dict__": own_attributes(value),
    }
    module = value.__globals__["__name__"]
    made = (value.__code__, module, value.__name__, value.__closure__)
    return _function, made, state, None, None, _set_function


def _function(
    code: types.CodeType, module: str, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    found = vars(importlib.import_module(module))
    return types.FunctionType(code, found, name, None, closure)


def _set_function(value: types.FunctionType, state: dict[str, Any]) -> None:
    for name, item in state.items():
        setattr(value, name, item)


def _loose_module(name: str) -> types.ModuleType:
    # Its class is not found by the name that it has.
    return types.ModuleType(name)


def _reduced_iterator(value: Any) -> Any:
    made = value.__reduce__()
    match made:
        case (_, (list() | bytearray() as items,), int() as place):
            return *made[:2], (items, place), None, None, _set_place
    return made


def _set_place(iterator: Any, state: tuple[Any, int]) -> None:
    """Let an iterator of a list go on at its place, which may lie behind what is there so far.

    A list that set-up has made is filled when all that was saved has been read.
    """
    items, place = state
    kind: Any = list if isinstance(items, list) else bytearray
    missing = max(0, place + 1 - len(items))
    kind.extend(items, bytes(missing))
    iterator.__setstate__(place)
    kind.__delitem__(items, slice(len(items) - missing, None))


def _code(text: bytes) -> types.CodeType:
    code: types.CodeType = marshal.loads(text)
    return code


def _method(function: Callable[..., Any], owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


def _view_of(items: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(items)


def _cell() -> types.CellType:
    return types.CellType()


def _cell_state(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _fill_cell(cell: types.CellType, state: tuple[Any, ...]) -> None:
    if state:
        cell.cell_contents = state[0]


class _Gone:
    """What a weak reference referred to that is no more."""


def _reference(target: Any) -> weakref.ref[Any]:
    return weakref.ref(_Gone() if target is None else target)


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made
