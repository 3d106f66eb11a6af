"""The order of a set, which depends on what it has held before.

Members lie in a table by their hashes; what it has lost leaves gaps, which push others aside and
decide when the table changes its size. The layout is read from memory, as no function tells it, and
made again by filling a set in the order of its slots, with fillers for the gaps that are taken out.
Of large sets and tables it is not: they keep their order only where a new set has the same, and
those that have lost members are refused where it has another.
"""

from __future__ import annotations

import ctypes
import os
from operator import is_
from typing import Any, NamedTuple

import numpy as np

MANY = 30_000
"""Members and gaps from which on the layout is given up; it would take long to make it again."""

LARGEST_TABLE = 1 << 18
"""Slots from which on it is."""

_LOST = -1
_UNSIGNED = (1 << 64) - 1
_PROBES = 9
_SHIFT = 5
"""How Python looks for a slot: the next ones, then elsewhere by more bits of the hash."""

_FIXED = frozenset({int, bool})
_NUMBERS = (int, float, complex, np.number, np.bool_)
_FILL, _MASK, _TABLE = 2, 4, 5
"""Words of a set's object that have the slots in use, their number less one, and their place."""


class Layout(NamedTuple):
    """How a set lies in its table.

    Attributes:
        size: Number of slots; 0 where it cannot be read, is too large, or is another one in every
            process.
        places: Slot of each member, in their order.
        gaps: Slots of members that it has lost.
    """

    size: int = 0
    places: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()


class _Filler:
    """Takes a slot.

    Args:
        slot: Its number.
    """

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __hash__(self) -> int:
        return self._slot


def layout(value: Any) -> Layout:
    """How a set lies in its table.

    Texts and objects have other hashes in every process, so no program can rely on their order.
    """
    if not _READABLE or _word(value, _FILL) > MANY or not _have_same_hashes(value):
        return Layout()
    size = _word(value, _MASK) + 1
    if size > LARGEST_TABLE:
        return Layout()
    entries = (ctypes.c_ssize_t * (2 * size)).from_address(_word(value, _TABLE))
    used = [
        (slot, mark)
        for slot, (key, mark) in enumerate(zip(entries[::2], entries[1::2], strict=True))
        if key
    ]
    places = tuple(slot for slot, mark in used if mark != _LOST)
    return Layout(size, places, tuple(slot for slot, mark in used if mark == _LOST))


def fill(value: Any, members: tuple[Any, ...], wanted: Layout) -> bool:
    """Fill a set so that it gives `members` in this order, and has this layout.

    Returns:
        Whether that could be done; if not, it has the members.
    """
    fillers = [_Filler(slot) for slot in wanted.gaps]
    following = [*fillers, *_in_turn(members, wanted)]
    ways = [0, *(len(following) >> index for index in range(len(following).bit_length()))]
    for first in ways if wanted.size else ():
        set.clear(value)
        # Python makes room for as many as a dictionary has before it takes the first.
        set.update(value, dict.fromkeys(following[:first]))
        set.update(value, following[first:])
        for filler in fillers:
            set.discard(value, filler)
        if layout(value) == wanted and all(map(is_, set.__iter__(value), members)):
            return True
    set.clear(value)
    set.update(value, members)
    return False


def keeps_order(value: Any) -> bool:
    """Whether another process can give a set its order, where that is the same in every run.

    Of a set whose layout is given up, the order is that of now: what comes to it later may lie
    elsewhere than it would have. One that has only grown may have another order; there are many
    such sets of what was seen, and hardly one whose order counts.
    """
    if not _have_same_hashes(value):
        return True
    found, members, made = layout(value), tuple(set.__iter__(value)), set[Any]()
    if fill(made, members, found):
        return True
    return not found.size and (not _has_gaps(value) or all(map(is_, made, members)))


def _has_gaps(value: Any) -> bool:
    return not _READABLE or _word(value, _FILL) != _word(value, _FILL + 1)


def _in_turn(members: tuple[Any, ...], wanted: Layout) -> list[Any]:
    """Members in an order in which each finds the slots taken that were taken when it came."""
    taken = set(wanted.gaps)
    waiting = list(zip(members, wanted.places, strict=False))
    done: list[Any] = []
    grown = True
    while waiting and grown:
        now = [node for node in waiting if _finds(*node, wanted.size, taken)]
        done += [member for member, _ in now]
        taken |= {slot for _, slot in now}
        waiting = [node for node in waiting if node[1] not in taken]
        grown = bool(now)
    return [*done, *(member for member, _ in waiting)]


def _finds(member: Any, slot: int, size: int, taken: set[int]) -> bool:
    """Whether a member comes to a slot, when certain others are taken."""
    mask = size - 1
    perturbed = hash(member) & _UNSIGNED
    start = perturbed & mask
    for _ in range(size):
        near = _PROBES if start + _PROBES <= mask else 0
        for index in range(start, start + near + 1):
            if index not in taken:
                return index == slot
        perturbed >>= _SHIFT
        start = (start * 5 + 1 + perturbed) & mask
    return False


def _have_same_hashes(values: Any) -> bool:
    return _FIXED.issuperset(map(type, values)) or all(map(_has_same_hash, values))


def _has_same_hash(value: Any) -> bool:
    """Whether every process gives a value the same hash."""
    if isinstance(value, (tuple, frozenset)):
        return _have_same_hashes(value)
    if isinstance(value, _NUMBERS):
        # What is no number has its address as its hash.
        return bool(value == value)  # noqa: PLR0124
    fixed = os.environ.get("PYTHONHASHSEED", "random") != "random"
    return fixed and isinstance(value, (str, bytes))


def _word(value: Any, place: int) -> int:
    size = ctypes.sizeof(ctypes.c_ssize_t)
    return ctypes.c_ssize_t.from_address(id(value) + place * size).value


def _is_readable() -> bool:
    """Whether sets lie in memory as those of CPython 3.11 to 3.13 do."""
    probe = {1, 2, 3}
    probe.discard(2)
    return [_word(probe, item) for item in (_FILL, _FILL + 1, _MASK)] == [3, 2, 7]


_READABLE = _is_readable()
