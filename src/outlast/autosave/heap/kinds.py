"""How each kind of object is looked into: what it leads to, what it holds, how it is put back.

An object's *content* is shallow: its items or attributes as they are, never copies of them. The
same content in another process, put into the object of the same name there, makes it the same.
"""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import random
import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range, slice,
    types.BuiltinFunctionType, types.ModuleType, np.dtype, np.generic,
)  # fmt: skip
"""What has no state of its own, or none that a program could change."""

PASSED_ON: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter({})), type(iter(range(0))), type(iter("")),
    type(iter({}.items())), type(iter({}.values())), type(iter(set())), type(reversed([])),
    enumerate, zip, map, filter, itertools.islice, itertools.chain, itertools.cycle,
    itertools.count, itertools.repeat, tuple, frozenset, types.MethodType, types.MethodWrapperType,
)  # fmt: skip
"""What is written down as a value each time, since it cannot be changed in place."""

RANDOM: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.RandomState: (
        lambda own: own.get_state(),
        lambda own, state: own.set_state(state),
    ),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
    torch.Generator: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
}
"""Sources of random numbers: their state, and how to set it."""

FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)


class Content(NamedTuple):
    """What an object holds: the kind of look, and what was seen."""

    kind: str
    parts: tuple[Any, ...]


def children(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: PLR0912
    """What `value` leads to, each with the end of its name."""
    if isinstance(value, dict):
        for place, (key, each) in enumerate(value.items()):
            if isinstance(key, (str, int, float, bool, bytes, type(None))):
                yield f"[{key!r}]", each
            else:
                yield f"[key {place}]", key
                yield f"[value {place}]", each
    elif isinstance(value, (list, tuple, deque)):
        for place, each in enumerate(value):
            yield f"[{place}]", each
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f".<{name}>", cell
        yield ".__defaults__", value.__defaults__
        yield ".__kwdefaults__", value.__kwdefaults__
        yield from ((f".{name}", each) for name, each in vars(value).items())
    elif isinstance(value, types.CellType):
        try:
            yield "", value.cell_contents
        except ValueError:
            return
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, type):
        yield from ((f".{name}", each) for name, each in own_attributes(value).items())
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    else:
        yield from ((f".{name}", each) for name, each in attributes(value).items())


def content(value: Any) -> Content | None:  # noqa: PLR0912
    """What `value` holds; None for what can only be written down as a whole, or not at all.

    Tensors and arrays give what is beside their numbers.
    """
    found: tuple[Any, ...]
    for kind, (state, _) in RANDOM.items():
        if isinstance(value, kind):
            return Content("random", (state(value),))
    if isinstance(value, types.CellType):
        try:
            return Content("cell", (value.cell_contents,))
        except ValueError:
            return Content("cell", ())
    if isinstance(value, type):
        return Content("class", _flat(own_attributes(value)))
    if isinstance(value, torch.Tensor):
        grad = value.grad if value.is_leaf else None
        return Content("tensor", (value.requires_grad, grad, *_flat(vars_of(value))))
    if isinstance(value, np.ndarray):
        return Content("array", ())
    if isinstance(value, types.FunctionType):
        return Content("object", ((), *_flat(vars(value))))
    if isinstance(value, bytearray):
        return Content("bytes", (bytes(value),))
    if isinstance(value, dict):
        found = tuple(itertools.chain.from_iterable(value.items()))
        kind_name = "dict"
    elif isinstance(value, (list, deque, set)):
        found, kind_name = tuple(value), "items"
    else:
        found, kind_name = (), "object"
    beside = attributes(value)
    if kind_name == "object" and not beside and not _has_attributes(value):
        return None
    return Content(kind_name, (found, *_flat(beside)))


def put_back(value: Any, seen: Content) -> None:
    """Make `value` hold what was `seen`."""
    kind, parts = seen
    if kind == "random":
        next(put for each, (_, put) in RANDOM.items() if isinstance(value, each))(value, parts[0])
    elif kind == "cell":
        if parts:
            value.cell_contents = parts[0]
    elif kind == "class":
        for name, each in _pairs(parts):
            setattr(value, name, each)
    elif kind == "tensor":
        requires_grad, grad, *others = parts
        if value.is_leaf:
            value.requires_grad_(requires_grad)
            value.grad = grad
        _put_attributes(value, dict(_pairs(tuple(others))))
    elif kind == "bytes":
        value[:] = parts[0]
    elif kind in ("dict", "items", "object"):
        items, *others = parts
        if kind == "dict":
            dict.clear(value)
            for key, each in _pairs(items):
                dict.__setitem__(value, key, each)
        elif kind == "items":
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items)
        _put_attributes(value, dict(_pairs(tuple(others))))


def same(before: Content, after: Content) -> bool:
    """Whether an object holds what it held: the same objects, or equal atoms."""
    return before.kind == after.kind and _same_parts(before.parts, after.parts)


def _same_parts(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return len(before) == len(after) and all(map(_same_part, before, after))


def _same_part(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, torch.Tensor):
        # Of the states of generators.
        return before.grad_fn is None and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, np.ndarray):
        return bool(np.array_equal(before, after))
    if isinstance(before, tuple):
        return _same_parts(before, after)
    if isinstance(before, dict):
        return _same_parts(_flat(before), _flat(after))
    return isinstance(before, ATOMS) and (before == after or repr(before) == repr(after))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object itself, those in slots included."""
    found = dict(vars_of(value))
    slots: list[str] = copyreg._slotnames(type(value)) if _looks_inside(value) else []  # type: ignore[attr-defined]
    for name in slots:
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes that lie in an object's own dictionary."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def own_attributes(value: type) -> dict[str, Any]:
    """The variables of a class, without what makes it a class."""
    return {
        name: each
        for name, each in vars(value).items()
        if not (name.startswith("__") and name.endswith("__"))
        and not isinstance(
            each, (types.FunctionType, staticmethod, classmethod, property, *_DESCRIPTORS)
        )
    }


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property)


def _of_tensor(value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    if value.is_leaf and value.grad is not None:
        yield ".grad", value.grad
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        yield from ((f".{name}", getattr(value, name)) for name in names)
        yield ".__context__", context
    yield from ((f".{name}", each) for name, each in vars_of(value).items())


def _looks_inside(value: Any) -> bool:
    return not isinstance(value, (types.FunctionType, type, torch.Tensor, np.ndarray))


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or bool(copyreg._slotnames(type(value)))  # type: ignore[attr-defined]


def _flat(pairs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(pairs.items()))


def _pairs(parts: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _put_attributes(value: Any, others: dict[str, Any]) -> None:
    own = vars_of(value)
    for name in [each for each in own if each not in others]:
        del own[name]
    for name, each in others.items():
        if name in own or hasattr(value, "__dict__"):
            own[name] = each
        else:
            object.__setattr__(value, name, each)
