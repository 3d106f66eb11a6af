"""The heap of a program as bytes and tensors, and back into the objects of another process.

From the values to be captured every named object is reached that they lead to, and what each holds
is written down if it counts. Objects that set-up has made and that nothing leads to any more are
left out, unless they have changed: somebody may hold them where nobody can look.

Whether a block of memory has changed since the last save is not asked here. Versions of tensors do
not tell: NumPy, `.data`, batch normalization and custom operators write past them. The content
hashes of the store do, at the price of reading each block once per save, and what has not changed
is written once.

Tensors and arrays are written as places in blocks of memory, functions made later by their code
and what they enclose, everything else as pickle does it.
"""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import pickle
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from outlast.autosave.heap.names import (
    CHAIN_ADVICE,
    CLASS_ADVICE,
    SetupDiffersError,
    Unsaveable,
    advice_for,
    has_marks,
    locate,
    name_of,
    settled_content,
)
from outlast.autosave.heap.objects import (
    LARGEST_BYTES,
    PLAIN_ATOMS,
    Results,
    Unpickler,
    cell_content,
    flat,
    is_builtin_iterator,
    is_importable,
    is_loose,
    module_named,
    own_attributes,
    put_attributes,
    reduce_with_dynamic_attributes,
    side_effect_free,
)
from outlast.autosave.heap.tensors import (
    Blocks,
    Geometry,
    Gradient,
    ParametrizedClass,
    RestoredBlocks,
    class_from,
    class_of,
    gradient,
    hooks_of,
    is_composed,
    lies_in_block,
    set_gradient,
    set_hooks,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FunctionType

    from outlast.autosave.heap.names import Names
    from outlast.autosave.heap.objects import Content
    from outlast.autosave.heap.tensors import GradientUse


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
        """Identity that stands for a named object, or for the `id()` of one."""
        if type(value) is int:
            if value < _LOWEST_ADDRESS:
                return None
            path = self._names.path_at(value)
            if path is None:
                self._addresses.add(value)
                return None
            self._reach(path)
            return ("address", path)
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

    def reducer_override(self, value: Any) -> Any:  # noqa: PLR0912 (one case for each kind)
        """Reduce objects that pickle cannot write, or not so that they are the same afterwards."""
        reduce = self._names.kinds.reducer(value)
        if reduce is not None:
            return reduce(value)
        match value:
            case torch.Tensor():
                return self._tensor(value)
            case np.ndarray() if type(value) is np.ndarray and lies_in_block(value):
                return _array, (self._stand_in, self._blocks.place(value))
            case np.memmap():
                if not isinstance(value.base, np.ndarray) and value.mode in ("r", "r+", "w+"):
                    mode = "r" if value.mode == "r" else "r+"
                    return np.memmap, (value.filename, value.dtype, mode, value.offset, value.shape)
                return NotImplemented
            case types.FunctionType():
                if is_importable(value) and not self._names.is_later(value):
                    return NotImplemented
                if self._ask is not None:
                    self._ask(value)
                return _reduced_function(value)
            case type() if "<locals>" in value.__qualname__:
                raise Unsaveable(value, "define this class at the top of its file")
            case types.CellType():
                return _cell, (), cell_content(value).items, None, None, _fill_cell
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
        return reduce_with_dynamic_attributes(value)

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
        where = self._blocks.place(value)
        placed = Placed(
            where, type(value), value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg()
        )
        beside = (gradient(value), own_attributes(value), hooks_of(value))
        if beside[:2] == (None, {}) and not any(beside[2]):
            return _tensor, (self._stand_in, placed)
        return _tensor, (self._stand_in, placed), beside, None, None, _set_beside


class Reader(Unpickler):
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
    """Let an iterator of a list continue at its place, which may lie behind what is there so far.

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


def _fill_cell(cell: types.CellType, state: tuple[Any, ...]) -> None:
    if state:
        cell.cell_contents = state[0]


class _Gone:
    """Stand-in for the lost referent of a weak reference."""


def _reference(target: Any) -> weakref.ref[Any]:
    return weakref.ref(_Gone() if target is None else target)


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made


@dataclass
class Captured:
    """Captured memory of a program.

    Attributes:
        program: All but the numbers of tensors and arrays, pickled.
        tensors: Name to a block of memory as one row; views of the live memory. Names of blocks
            that set-up makes begin with ``=``, those of later ones with ``+``.

    """

    program: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Header:
    """Header of a capture, read before the rest.

    Attributes:
        places: Path of each named tensor and array to how it lies in its block.
        types: Path of each named object that is mentioned to its class's name after set-up.
        became: Path to class, where that is another one now.
        next_hook: Number of the next hook that a module will be given.
        written: Paths of the tensors that the program has written to since set-up.
        lost: Paths of the tensors and optimizers that were not saved: nothing led to them.
    """

    places: dict[str, Geometry]
    types: dict[str, str]
    became: dict[str, type | ParametrizedClass]
    next_hook: int
    written: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()


@side_effect_free()
def capture(
    names: Names,
    values: Any,
    known: Mapping[str, Any],
    gradients: GradientUse | None = None,
    ask: Callable[[FunctionType], None] | None = None,
) -> Captured:
    """Write down `values` and the named objects they lead to; no block of memory is copied.

    Args:
        names: Objects that exist in every process of the program.
        values: Anything, e.g. local names.
        known: Further objects with names, which hold nothing.
        gradients: Tells which gradients need not be saved; None saves all.
        ask: Asked whether a function may be written by value; raises an error where not.

    Raises:
        Unsaveable: When something can be written down in no way.
    """
    return _Capture(names, known, gradients, ask).of(values)


@side_effect_free()
def restore(
    captured: Captured, names: Names, known: Mapping[str, Any], gradients: GradientUse | None = None
) -> Any:
    """Put what was captured into the objects of this process; gives `values` back.

    Raises:
        SetupDiffersError: When set-up has made other objects here.
    """
    header, body = Unpickler(io.BytesIO(captured.program)).load()
    RemovableHandle.next_id = max(RemovableHandle.next_id, header.next_hook)
    for path, saved_type in header.types.items():
        if path not in names.objects:
            raise SetupDiffersError(path, "was there when the program was saved, and is not now")
        type_now = name_of(names.types[path])
        if type_now != saved_type:
            raise SetupDiffersError(
                path, f"was a {saved_type} when the program was saved, and is a {type_now}"
            )
    for path, kind in header.became.items():
        names.objects[path].__class__ = class_from(kind)
    blocks = _fill(captured.tensors, header.places, names)
    names.count_as_written(header.written)
    names.lost = header.lost
    reader = Reader(io.BytesIO(body), names, known, blocks)
    values = reader.load()
    held: dict[str, Content] = {}
    while (more := reader.load()) is not None:
        held |= more
    # Keys of dictionaries and members of sets first: their hashes may depend on what they hold.
    for hashed in (False, True):
        for path, seen in held.items():
            if (seen.kind in ("dict", "set", "weak")) is hashed:
                value = names.objects[path]
                kept = seen
                if has_marks(seen):
                    now = names.kinds.of(value).content(value)
                    kept = settled_content(seen, now, functools.partial(names.renewed, path))
                names.kinds.of(value).put(value, kept)
                if gradients and seen.kind == "tensor" and isinstance(seen.items[1], Gradient):
                    gradients.expect(path, value)
    return values


def _fill(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, Geometry], names: Names
) -> RestoredBlocks:
    """Put the numbers back, in place where set-up has made as much room for them."""
    blocks = RestoredBlocks(tensors)
    with torch.no_grad():
        for name in tensors:
            value = names.objects.get(name[1:]) if name[0] == "=" else None
            if value is not None and lies_in_block(value):
                blocks.into(name, value)
        for path, where in places.items():
            value = names.objects[path]
            if blocks.lies(value, where):
                continue
            if not isinstance(value, torch.Tensor):
                size = f"{value.shape} of {value.dtype}"
                raise SetupDiffersError(
                    path, f"was an array {where.size} of {where.dtype}, and is one {size}"
                )
            value.data = blocks.tensor(where)
    return blocks


class _Capture:
    def __init__(
        self,
        names: Names,
        known: Mapping[str, Any],
        gradients: GradientUse | None,
        ask: Callable[[FunctionType], None] | None,
    ) -> None:
        self._names = names
        self._known = known
        self._gradients = gradients
        self._found = Captured()
        self._blocks = Blocks(self._found.tensors, names.now_at())
        self._file = io.BytesIO()
        self._writer = Writer(self._file, names, known, self._blocks, self._mention, ask)
        self._reached: set[str] = set()
        self._waiting: list[str] = []
        self._mentioned: set[str] = set()
        self._places: dict[str, Geometry] = {}

    def of(self, values: Any) -> Captured:
        self._write(values)
        self._follow()
        for path in self._names.objects:
            if path not in self._reached and self._names.touched(path):
                self._reach(path)
        self._follow()
        self._write(None)
        names = self._names
        mentioned = self._mentioned | self._places.keys()
        names.lost = frozenset(
            path
            for path, value in names.objects.items()
            if path not in self._reached and isinstance(value, torch.Tensor | torch.optim.Optimizer)
        )
        header = _Header(
            self._places,
            {path: name_of(names.types[path]) for path in mentioned},
            {
                path: class_of(names.objects[path])
                for path in mentioned
                if type(names.objects[path]) is not names.types[path]
            },
            RemovableHandle.next_id,
            frozenset(path for path in self._places if names.is_written(path)),
            names.lost,
        )
        self._writer.refuse_addresses()
        for path, kind in header.became.items():
            try:
                pickle.dumps(kind)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                # Its class is another one now, which no other process could find.
                raise Unsaveable(names.objects[path], CLASS_ADVICE, root=path) from error
        self._found.program = pickle.dumps((header, self._file.getvalue()), protocol=5)

        return self._found

    def _reach(self, path: str) -> None:
        if path not in self._reached:
            self._reached.add(path)
            self._waiting.append(path)

    def _mention(self, path: str) -> None:
        self._mentioned.add(path)
        self._reach(path)

    def _follow(self) -> None:
        """Write down what the named objects hold that were reached, and so on from there."""
        while self._waiting:
            held: dict[str, Content] = {}
            while self._waiting:
                self._look(self._waiting.pop(), held)
            if held:
                self._mentioned |= held.keys()
                self._write(held)

    def _look(self, path: str, held: dict[str, Content]) -> None:
        value = self._names.objects[path]
        if lies_in_block(value):
            self._places[path] = self._blocks.place(value)
        now, dead = self._names.held(path), None
        gradients = self._gradients if isinstance(value, torch.Tensor) else None
        if gradients and gradients.is_dead(value) and (dead := gradient(value)) is not None:
            now = now or self._names.kinds.of(value).content(value)
            assert now is not None
            now = now._replace(items=(now.items[0], gradients.stand_in(value), *now.items[2:]))
        if now is not None and not (isinstance(value, Results) and self._is_large(now)):
            held[path] = now
        for beyond in self._names.led_to(path):
            if dead is None or self._names.objects[beyond] is not dead:
                self._reach(beyond)

    def _is_large(self, content: Content) -> bool:
        """Return True if content cannot be written, or brings many bytes that have no names."""
        tensors: dict[str, torch.Tensor] = {}
        file, blocks = io.BytesIO(), Blocks(tensors, self._names.blocks)
        try:
            Writer(file, self._names, self._known, blocks, lambda path: None).dump(content)
        except Exception:
            # Whatever the pickling of a class of somebody else's raises.
            return True
        later = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("+"))
        return file.tell() + later > LARGEST_BYTES

    def _write(self, part: Any) -> None:
        try:
            self._writer.dump(part)
        except Exception as error:
            if isinstance(error, AutosaveError) and not isinstance(error, Unsaveable):
                raise
            # Whatever the pickling of a class of somebody else's raises.
            raise self._explained(part) or error from error

    def _explained(self, part: Any) -> Unsaveable | None:
        """The refusal of what in `part`, values or contents by path, cannot be written down."""
        if not (isinstance(part, dict) and part.keys() <= self._names.objects.keys()):
            return self._refusal(part, None)
        failing = (path for path, content in part.items() if self._error_of(content) is not None)
        path = next(failing, None)
        return None if path is None else self._refusal(self._names.objects[path], path)

    def _refusal(self, value: Any, root: str | None) -> Unsaveable | None:
        path, culprit = locate(self._names.kinds, value, self._error_of)
        error = self._error_of(culprit)
        advice = error.advice if isinstance(error, Unsaveable) else advice_for(culprit)
        if isinstance(error, RecursionError):
            advice = CHAIN_ADVICE
        return Unsaveable(culprit, advice, path, root)

    def _error_of(self, part: Any) -> Exception | None:
        blocks = Blocks({}, self._names.blocks)
        writer = Writer(io.BytesIO(), self._names, self._known, blocks, lambda path: None)
        try:
            writer.dump(part)
        except Exception as error:
            return error
        return None
