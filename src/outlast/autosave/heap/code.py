"""What functions, the variables they share, and classes lead to and hold."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

from outlast.autosave.heap.atoms import PLAIN_ATOMS
from outlast.autosave.heap.content import Content, attributes, flat, pairs, put_attributes

Children = Iterable[tuple[str, Any, Any]]
"""The end of a name as a format, what to put into it, and the object."""

_KEPT = frozenset({
    *dir(type), *dir(object), "__slots__", "__orig_bases__", "__parameters__", "__match_args__",
    "__type_params__", "__final__", "__static_attributes__", "__firstlineno__", "__slotnames__",
})  # fmt: skip
"""Names in a class that Python, and its `typing` and `dataclasses`, give values to."""

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def of_attributes(value: Any) -> Children:
    """What the attributes of an object lead to."""
    for name, attribute in attributes(value).items():
        if type(attribute) not in PLAIN_ATOMS:
            yield ".%s", name, attribute


def of_function(value: Any) -> Children:
    """What a function leads to: what it encloses, its default arguments, its attributes."""
    compiled = vars(value).get("_torchdynamo_orig_callable")
    if compiled is not None:
        yield ".%s", "__wrapped__", compiled
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        yield ".<%s>", name, cell
    yield ".%s", "__defaults__", value.__defaults__
    yield ".%s", "__kwdefaults__", value.__kwdefaults__
    yield from of_attributes(value)


def is_bare_function(value: Any) -> bool:
    """Whether a function holds nothing that could change, unless somebody gives it attributes."""
    return (
        isinstance(value, types.FunctionType)
        and not value.__closure__
        and not value.__kwdefaults__
        and PLAIN_ATOMS.issuperset(map(type, value.__defaults__ or ()))
        and not value.__dict__
    )


def function_content(value: Any) -> Content | None:
    """Attributes and default arguments of a function; None of one wrapped by torch.compile."""
    if "_torchdynamo_orig_callable" in vars(value):
        return None
    defaults = (value.__defaults__, value.__kwdefaults__)
    return Content("function", defaults, flat(attributes(value)))


def function_put(value: Any, seen: Content) -> None:
    """Give a function its attributes and default arguments."""
    put_attributes(value, seen.attributes)
    if not seen.items:
        # Saved by a version that kept the attributes alone.
        return
    positional, named = seen.items
    # The tuple was made anew, of what set-up has given if that is what it had.
    if not _same_items(value.__defaults__, positional):
        value.__defaults__ = positional
    if value.__kwdefaults__ is not named:
        value.__kwdefaults__ = named


def _same_items(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(mine is its for mine, its in zip(one, other, strict=True))


def of_cell(value: Any) -> Children:
    """What a variable that functions share holds."""
    with contextlib.suppress(ValueError):
        yield ".%s", "cell_contents", value.cell_contents


def cell_content(value: Any) -> Content:
    """What such a variable holds, if anything."""
    try:
        return Content("cell", (value.cell_contents,))
    except ValueError:
        return Content("cell", ())


def cell_put(value: Any, seen: Content) -> None:
    """Give such a variable what it held."""
    if seen.items:
        value.cell_contents = seen.items[0]
    else:
        with contextlib.suppress(ValueError):
            del value.cell_contents


def of_class(value: Any) -> Children:
    """What a class leads to."""
    for name, variable in vars(value).items():
        if type(variable) not in PLAIN_ATOMS and (
            isinstance(variable, types.FunctionType) or not _is_of_python(name, variable)
        ):
            yield ".%s", name, variable


def class_content(value: Any) -> Content:
    """The variables of a class, and those that it derives from."""
    return Content("class", value.__bases__, flat(_class_variables(value)))


def _class_variables(value: Any) -> dict[str, Any]:
    return {
        name: variable
        for name, variable in vars(value).items()
        if not _is_of_python(name, variable) and not isinstance(variable, _DESCRIPTORS)
    }


def _is_of_python(name: str, value: Any) -> bool:
    """Whether a variable of a class is one that Python keeps there, or a method of its own."""
    special = name.startswith("__") and name.endswith("__")
    return special and (
        name in _KEPT
        or name.startswith("__dataclass_")
        or not isinstance(value, (*PLAIN_ATOMS, list, dict, set, tuple))
    )


def class_put(value: Any, seen: Content) -> None:
    """Give a class its variables."""
    if seen.items and value.__bases__ != seen.items:
        value.__bases__ = seen.items
    others, now = dict(pairs(seen.attributes)), _class_variables(value)
    for name in now:
        if name not in others:
            type.__delattr__(value, name)
    for name, other in others.items():
        if now.get(name) is not other:
            type.__setattr__(value, name, other)


def of_wrapper(value: Any) -> Children:
    """What a static or class method leads to."""
    yield ".%s", "__func__", value.__func__


def of_property(value: Any) -> Children:
    """What a property leads to."""
    yield from ((".%s", name, getattr(value, name)) for name in ("fget", "fset", "fdel"))
