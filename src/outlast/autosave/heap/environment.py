"""Values that set-up takes from the environment, and that the next start may have otherwise.

As long as training leaves such a value as set-up gave it, the one of the new start counts.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from outlast.autosave.heap.atoms import PLAIN_ATOMS
from outlast.autosave.heap.content import Content, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping


class FromEnvironment(NamedTuple):
    """Stands in a save for a value that set-up takes from the environment.

    Attributes:
        value: What it was.
    """

    value: Any


def marked(
    now: Iterable[tuple[Any, Any]], before: Mapping[Any, Any], names: Collection[str]
) -> dict[Any, Any]:
    """Values by key, with those marked that come from the environment and have not changed.

    Args:
        now: Keys and values.
        before: Those of set-up.
        names: Keys of which the values come from the environment.
    """
    return {
        key: FromEnvironment(value)
        if type(key) is str
        and key in names
        and key in before
        and _is_plain(value)
        and type(before[key]) is type(value)
        and before[key] == value
        else value
        for key, value in now
    }


def settled(
    values: Mapping[Any, Any], now: Mapping[Any, Any], changed: Callable[[str], None]
) -> dict[Any, Any]:
    """Values by key, with those of this start in place of the marked ones.

    Args:
        values: As they were saved.
        now: Those of this start's set-up.
        changed: Told the key of each that is another one now.
    """
    found = {}
    for key, value in values.items():
        found[key] = value
        if type(value) is FromEnvironment:
            found[key] = now.get(key, value.value)
            if not _is_plain(found[key]):
                found[key] = value.value
            if found[key] != value.value:
                changed(key)
    return found


def marked_content(
    now: Content, before: Content | None, names: frozenset[str], cell: str = ""
) -> Content:
    """A content with its values from the environment marked.

    Args:
        now: The content.
        before: That of set-up.
        names: Names whose values come from the environment.
        cell: Name of the variable that functions share, where this is its content.
    """
    if before is None:
        return now
    items = now.items
    if now.kind == "cell" and items:
        both = marked([(cell, items[0])], dict(zip([cell], before.items, strict=False)), names)
        items = tuple(both.values())
    if now.kind == "dict" and not names.isdisjoint(_texts(items[::2])):
        items = _flat(marked(pairs(items), dict(pairs(before.items)), names))
    attributes = now.attributes
    if not names.isdisjoint(_texts(attributes[::2])):
        attributes = _flat(marked(pairs(attributes), dict(pairs(before.attributes)), names))
    return now._replace(items=items, attributes=attributes)


def settled_content(seen: Content, now: Content | None, changed: Callable[[str], None]) -> Content:
    """A saved content with this start's values from the environment."""
    items, attributes = seen.items, seen.attributes
    if seen.kind == "cell" and _has_marks(items):
        own = dict(zip(["it"], now.items, strict=False)) if now else {}
        items = tuple(settled({"it": items[0]}, own, changed).values())
    if seen.kind == "dict" and _has_marks(items):
        items = _flat(settled(dict(pairs(items)), dict(pairs(now.items)) if now else {}, changed))
    if _has_marks(attributes):
        own = dict(pairs(now.attributes)) if now else {}
        attributes = _flat(settled(dict(pairs(attributes)), own, changed))
    return seen._replace(items=items, attributes=attributes)


def has_marks(seen: Content) -> bool:
    """Whether there are marks in a saved content."""
    return _has_marks(seen.items) or _has_marks(seen.attributes)


def _has_marks(parts: tuple[Any, ...]) -> bool:
    return any(type(part) is FromEnvironment for part in parts)


def _texts(keys: tuple[Any, ...]) -> Iterable[str]:
    return (key for key in keys if type(key) is str)


def _flat(values: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(part for pair in values.items() for part in pair)


def _is_plain(value: Any) -> bool:
    """Whether a value is text, a number, a path, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return type(value) in PLAIN_ATOMS or isinstance(value, PurePath)
