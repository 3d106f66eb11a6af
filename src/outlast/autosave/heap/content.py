"""What an object holds: its items and attributes as they are, never copies of them.

The content of an object in one process, put into the object of the same name in another, makes
that object the same: what the content leads to has names there, or is written down with it.
"""

from __future__ import annotations

import copyreg
import itertools
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.autosave.heap.atoms import ATOMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_COMPILERS = "_torchdynamo"
"""Attributes that torch.compile leaves on functions and modules begin so; they are its own."""

_slots: dict[type, tuple[str, ...]] = {}


class Content(NamedTuple):
    """What an object holds.

    Attributes:
        kind: Name of the kind of object, which says how it is put back.
        items: What it holds in the way of its kind, e.g. a list's items.
        attributes: Names and values of its attributes, one after the other.
    """

    kind: str
    items: tuple[Any, ...]
    attributes: tuple[Any, ...] = ()


def same(before: Content | None, after: Content | None) -> bool:
    """Whether an object holds what it held: the same objects, or equal atoms."""
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
    """What `flat` has laid flat."""
    return zip(parts[::2], parts[1::2], strict=True)


def slot_names(kind: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class keep outside their dictionary."""
    if kind not in _slots:
        _slots[kind] = tuple(copyreg._slotnames(kind))  # type: ignore[attr-defined]
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
    """Whether an object can have attributes of its own."""
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slot_names(type(value)))


def put_attributes(value: Any, parts: tuple[Any, ...]) -> None:
    """Give an object the attributes that `parts` lists, and no others."""
    others = dict(pairs(parts))
    for name in slot_names(type(value)):
        if name in others:
            object.__setattr__(value, name, others.pop(name))
        elif _is_set(value, name):
            object.__delattr__(value, name)
    put_own_attributes(value, others)


def _is_set(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True
