"""What a captured program holds besides numbers of tensors, as flat text that can be compared.

Pickled bytes of equal states differ (they tell which equal texts are one object), so they are
read into inert stand-ins and written as one line for each value.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONG = 120
_MANY = 1_000_000
"""Values from which on what is met twice is told once."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def flat_values(program: bytes, blocks: Mapping[str, str]) -> dict[str, str]:
    """Location to value, of everything in `Captured.program`.

    What is met twice is told twice: equal objects need not be one in a program that was resumed.

    Args:
        program: As `heap.capture` writes it.
        blocks: Name of each block of memory to what it is to be called.
    """
    found: dict[str, str] = {}
    told: set[int] = set()
    waiting: list[tuple[str, Any, _Within]] = [
        (location, value, None) for location, value in reversed(_loaded(program))
    ]
    while waiting:
        location, value, within = waiting.pop()
        if isinstance(value, str) and value in blocks:
            found[_unused(location, found)] = blocks[value]
        elif isinstance(value, _ATOMS):
            found[_unused(location, found)] = _short(repr(value))
        elif isinstance(value, (set, frozenset)):
            found[_unused(location, found)] = _short(" ".join(sorted(map(_name, value))))
        elif isinstance(value, type):
            found[_unused(location, found)] = value.__qualname__
        elif not _is_within(value, within) and (id(value) not in told or len(found) < _MANY):
            told.add(id(value))
            inner = (id(value), within)
            waiting.extend((where, item, inner) for where, item in _parts(location, value))
    return found


_Within = Any
"""Identities of the objects around a value, the nearest first: `(identity, those around)`."""


def _is_within(value: Any, within: _Within) -> bool:
    while within is not None:
        identity, within = within
        if identity == id(value):
            return True
    return False


def _loaded(program: bytes) -> list[tuple[str, Any]]:
    """The pickles that a captured program consists of, as `heap.capture` writes them.

    First how things lie in memory; then the values, and the contents of named objects in turn.
    """
    header, body = _Reader(io.BytesIO(program)).load()
    reader = _Reader(io.BytesIO(body))
    found = [("memory", header), ("frames", reader.load())]
    while (contents := reader.load()) is not None:
        found += [(path, content) for path, content in contents.items()]
    return found


def _parts(location: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{location}[{_name(key)}]", item) for key, item in reversed(value.items())]
    if isinstance(value, _Inert):
        return [(location, type(value)), (location, value.parts)]
    # Contents of objects are names and values in turn.
    before = [None, *value]
    return [
        (f"{location}.{last}" if isinstance(last, str) else f"{location}[{place}]", item)
        for place, (last, item) in enumerate(zip(before, value, strict=False))
    ]


def _name(value: Any) -> str:
    if isinstance(value, _Inert):
        return f"{type(value).__qualname__}{tuple(map(_name, value.parts))}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_name, value))})"
    return repr(value) if isinstance(value, _ATOMS) else type(value).__qualname__


def _unused(location: str, found: dict[str, str]) -> str:
    while location in found:
        location += "'"
    return location


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:20]}... ({len(text)} characters, {xxhash.xxh3_64_hexdigest(text.encode())})"


class _Inert:
    """Stands for an object of any class: keeps what it is made of."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        made = super().__new__(cls)
        made.parts = [*args, *([kwargs] if kwargs else [])]
        return made

    parts: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def append(self, value: Any) -> None:
        """As of a list."""
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        """As of a list."""
        self.parts.extend(values)

    def add(self, value: Any) -> None:
        """As of a set."""
        self.parts.append(value)


@functools.cache
def _inert(module: str, name: str) -> type[_Inert]:
    return type(name, (_Inert,), {"__qualname__": f"{module}.{name}"})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _inert(module, name)

    def persistent_load(self, identity: Any) -> Any:
        return _inert("named", str(identity))()
