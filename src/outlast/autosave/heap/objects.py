"""Contents of objects: their items and attributes as they are, never copies of them.

The content of an object in one process, put into the object of the same name in another, makes
that object the same: what the content leads to has names there, or is written down with it.

A class with dynamic attributes (``__getattr__``) is not asked for them: its answer often reads an
attribute that ``__init__`` sets, which an object that is being read back does not have yet.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import importlib
import inspect
import itertools
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping


ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range, slice,
    types.BuiltinFunctionType, types.ModuleType, np.dtype, np.generic,
)  # fmt: skip
"""What has no state of its own, or none that a program could change."""


PLAIN_ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
"""The types of most atoms, to pass over many at once."""


_CLOSED = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.distributed",
    "torch._C", "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio",
    "socket", "_socket", "ssl", "subprocess", "queue", "_queue", "weakref", "importlib", "typing",
    "tqdm", "outlast.autosave",
    # Services that are told how training goes.
    "wandb", "tensorboard", "tensorboardX", "torch.utils.tensorboard", "mlflow", "comet_ml",
    "neptune", "clearml", "aim", "rich", "requests", "urllib3", "http", "grpc", "boto3", "botocore",
    "fsspec", "s3fs", "huggingface_hub",
)  # fmt: skip
"""Modules whose objects are not looked into: their state is that of a process, not of training."""


_OPEN: tuple[type, ...] = (
    nn.Module, torch.Tensor, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler,
    Dataset, Sampler, DataLoader,
)  # fmt: skip
"""What is looked into wherever it was defined."""


def is_closed(kind: type) -> bool:
    """Return True if objects of a class are left as set-up makes them."""
    if kind.__name__ == "DTensorSpec":
        return False
    return in_closed_module(kind.__module__) and not issubclass(kind, _OPEN)


def is_of_process(value: Any) -> bool:
    """Return True if a hook, wrapped as it may be, belongs to a library that is not looked into."""
    match value:
        case functools.partial():
            return is_of_process(value.func)
        case types.MethodType():
            return is_closed(type(value.__self__))
        case types.FunctionType():
            return in_closed_module(value.__module__)
    # Asked for an attribute, some objects of torch raise errors of their own.
    own = getattr(value, "__dict__", None)
    hook = own.get("hook") if isinstance(own, dict) else None
    return hook is not None and is_of_process(hook)


def in_closed_module(name: Any) -> bool:
    """Return True if a module of this name is one whose objects are not looked into."""
    return f"{name}.".startswith(tuple(f"{item}." for item in _CLOSED))


def is_builtin_iterator(kind: type) -> bool:
    """Return True for the class of one of Python's own iterators, which is written by value."""
    return (
        issubclass(kind, Iterator)
        and kind.__module__ in ("builtins", "itertools")
        and kind is not types.GeneratorType
    )


_COMPILERS = "_torchdynamo"
"""Attributes that torch.compile leaves on functions and modules begin so; they are its own."""


class Content(NamedTuple):
    """Content of an object.

    Attributes:
        kind: Name of the kind of object, which says how it is put back.
        items: What it holds in the way of its kind, e.g. a list's items.
        attributes: Names and values of its attributes, one after the other.
    """

    kind: str
    items: tuple[Any, ...]
    attributes: tuple[Any, ...] = ()


def same(before: Content | None, after: Content | None) -> bool:
    """Return True if two contents are the same: the same objects, or equal atoms."""
    if before is None or after is None:
        return before is after
    return (
        before.kind == after.kind
        and _same_parts(before.items, after.items)
        and _same_parts(before.attributes, after.attributes)
    )


def _same_parts(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    if len(before) != len(after):
        return False
    return all(map(is_, before, after)) or all(map(_same_part, before, after))


def _same_part(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        return _same_parts(before, after)
    if isinstance(before, (torch.Tensor, np.ndarray)) or not isinstance(before, ATOMS):
        return False
    # Of two floats that are no numbers the same text is enough.
    return bool(before == after) or repr(before) == repr(after)


def flat(pairs: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Keys and values, one after the other."""
    return tuple(itertools.chain.from_iterable(pairs.items()))


def pairs(parts: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Pairs of keys and values that `flat` has laid flat."""
    return zip(parts[::2], parts[1::2], strict=True)


_slots: dict[type, tuple[str, ...]] = {}


def slot_names(kind: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class keep outside their dictionary.

    Without those that a subclass hides behind an attribute of its own, as SymPy's ``Integer`` does
    with ``q``: an object of it has no such slot.
    """
    if kind not in _slots:
        names = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        _slots[kind] = tuple(
            name
            for name in names
            if inspect.isdatadescriptor(inspect.getattr_static(kind, name, None))
        )
    return _slots[kind]


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes that lie in an object's own dictionary."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def own_attributes(value: Any) -> dict[str, Any]:
    """The attributes in an object's own dictionary that are not torch.compile's."""
    return {
        name: item for name, item in vars_of(value).items() if not str(name).startswith(_COMPILERS)
    }


def put_own_attributes(value: Any, others: dict[str, Any]) -> None:
    """Give an object these attributes in its own dictionary, and no others."""
    own = vars_of(value)
    others |= {name: own_item for name, own_item in own.items() if str(name).startswith(_COMPILERS)}
    if list(own) != list(others):
        own.clear()
    own.update(others)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object itself, those in slots included."""
    found = own_attributes(value)
    for name in slot_names(type(value)):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return found


def has_attributes(value: Any) -> bool:
    """Return True if an object can have attributes of its own."""
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slot_names(type(value)))


def put_attributes(value: Any, parts: tuple[Any, ...]) -> None:
    """Give an object the attributes that `parts` lists, and no others."""
    others = dict(pairs(parts))
    for name in slot_names(type(value)):
        if name in others:
            object.__setattr__(value, name, others.pop(name))
        else:
            with contextlib.suppress(AttributeError):
                object.__delattr__(value, name)
    put_own_attributes(value, others)


def is_importable(value: Any) -> bool:
    """Return True if a class or a function is found by its own name."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def is_loose(module: ModuleType) -> bool:
    """Return True for a module that a program has made itself, and that no import finds."""
    own = vars(module)
    return (
        type(module) is ModuleType
        and "__file__" not in own
        and own.get("__spec__") is own.get("__loader__") is None
    )


def module_named(name: str) -> ModuleType:
    """The module of this name, imported if it has not been.

    Raises:
        ModuleNotFoundError: When there is none.
    """
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        outer, _, inner = name.rpartition(".")
        found = getattr(module_named(outer), inner, None) if outer else None
        if not isinstance(found, ModuleType):
            raise
        return found


Children = Iterable[tuple[str, Any, Any]]
"""The end of a name as a format, what to put into it, and the object."""


_KEPT = frozenset({
    *dir(type), *dir(object), "__slots__", "__orig_bases__", "__parameters__", "__match_args__",
    "__type_params__", "__final__", "__static_attributes__", "__firstlineno__", "__slotnames__",
})  # fmt: skip
"""Names in a class that Python, and its `typing` and `dataclasses`, give values to."""


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def of_attributes(value: Any) -> Children:
    """References of the attributes of an object."""
    for name, attribute in attributes(value).items():
        if type(attribute) not in PLAIN_ATOMS:
            yield ".%s", name, attribute


def of_function(value: Any) -> Children:
    """References of a function: its closure, its default arguments, its attributes."""
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
    """Return True if a function holds nothing that could change except attributes."""
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
    now = value.__defaults__
    # The tuple was made anew, of what set-up has given if that is what it had.
    kept = now and positional and len(now) == len(positional) and all(map(is_, now, positional))
    if not kept and now is not positional:
        value.__defaults__ = positional
    if value.__kwdefaults__ is not named:
        value.__kwdefaults__ = named


def of_cell(value: Any) -> Children:
    """Reference of a closure cell."""
    with contextlib.suppress(ValueError):
        yield ".%s", "cell_contents", value.cell_contents


def cell_content(value: Any) -> Content:
    """Content of a closure cell, if it has any."""
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
    """References of a class."""
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
    """Return True for a variable of a class that Python keeps there, or a method of its own."""
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


_PROTOCOL = 5


def reduce_with_dynamic_attributes(value: Any) -> Any:
    """Reduce an object with dynamic attributes without asking it; NotImplemented for any other."""
    kind = type(value)
    if isinstance(value, type) or not hasattr(kind, "__getattr__") or hasattr(kind, "__setstate__"):
        return NotImplemented
    reduced = value.__reduce_ex__(_PROTOCOL)
    if not isinstance(reduced, tuple) or not 3 <= len(reduced) <= 5 or reduced[2] is None:
        return reduced
    return *reduced, *[None] * (5 - len(reduced)), _put


def _put(value: Any, state: Any) -> None:
    """Set the state of an object without a ``__setstate__`` as ``pickle`` does."""
    slots = None
    if isinstance(state, tuple):
        state, slots = state
    if state:
        object.__getattribute__(value, "__dict__").update(state)
    for name, slot in (slots or {}).items():
        object.__setattr__(value, name, slot)


@contextlib.contextmanager
def side_effect_free() -> Iterator[None]:
    """No subclass of tensors answers for itself, and nothing is collected, as long as this lasts.

    A walk makes many small objects that all live until it ends; to search them for garbage again
    and again would cost more than the walk.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        if collects:
            gc.enable()


LARGEST_BYTES = 1 << 20
"""What the results of one function may take in a save."""


class Results(OrderedDict[Any, Any]):
    """The results of a cached function, by its arguments."""


_MOVED = {
    f"outlast.autosave.{folder}.{old}": f"outlast.autosave.{folder}.{new}"
    for folder, new, olds in (
        ("heap", "objects", "atoms content modules code answering undisturbed results"),
        ("heap", "tensors", "blocks gradients parametrized sizes"),
        ("heap", "kinds", "order plain hidden"),
        ("heap", "names", "environment refusal"),
        ("heap", "capture", "values"),
        ("resume", "session", "augmented objects"),
        ("resume", "frames", "entered entries generators"),
        ("resume", "loaders", "samplers draws watched workers stateful"),
        ("resume", "files", "logs first_sizes handlers tables"),
        ("resume", "modules", "foreign"),
        ("resume", "process", "switches caches paths randomness"),
    )
    for old in olds.split()
}
_RENAMED = {
    ("outlast.autosave.resume.entered", "_nothing"): "_no_context",
    ("outlast.autosave.resume.handlers", "_made"): "_made_handler",
    ("outlast.autosave.resume.tables", "_made"): "_made_writer",
}


class Unpickler(pickle.Unpickler):
    """Reads also what an older version of Outlast wrote, whose modules had other names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of that name."""
        name = _RENAMED.get((module, name), name)
        return super().find_class(_MOVED.get(module, module), name)
