"""Kinds of objects: their references, their contents, and the way to put them back.

*Sets.* Members lie in a table by their hashes; what it has lost leaves gaps, which push others
aside and decide when the table changes its size. The layout is read from memory, as no function
tells it, and made again by filling a set in the order of its slots, with fillers for the gaps that
are taken out. Of large sets and tables it is not: they keep their order only where a new set has
the same, and those that have lost members are refused where it has another.

*Python's own objects*, as queues, arrays, streams and C data, show what they hold in no attribute.
What is not known here is left as set-up makes it. Of such objects that can be pickled a digest
tells whether they have changed, and then the program is refused.

*Large plain data.* A list of a million rows is not worth a million names. It is named as a whole,
and whether it has changed is told by a digest of all of it, at the speed of pickling in C.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import datetime
import decimal
import enum
import functools
import gc
import hashlib
import io
import itertools
import multiprocessing.synchronize
import os
import pickle
import queue
import random
import re
import sqlite3
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from outlast.autosave.heap import objects
from outlast.autosave.heap.objects import (
    ATOMS,
    PLAIN_ATOMS,
    Children,
    Content,
    Results,
    attributes,
    flat,
    has_attributes,
    is_builtin_iterator,
    is_closed,
    is_loose,
    pairs,
    put_attributes,
    same,
)
from outlast.autosave.heap.tensors import (
    array_content,
    array_put,
    of_array,
    of_tensor,
    tensor_content,
    tensor_put,
)
from outlast.errors import AutosaveError

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
    """Layout of a set in its hash table.

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
    """Layout of a set in its hash table.

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
    """Return True if another process can give a set its order, where that is the same in every run.

    Of a set whose layout is given up, the order is that of now: what comes to it later may lie
    elsewhere than it would have. One that has only grown may have another order; there are many
    such sets of what was seen, and hardly one whose order counts.
    """
    if not _have_same_hashes(value):
        return True
    found, members, made = layout(value), tuple(set.__iter__(value)), set[Any]()
    if fill(made, members, found):
        return True
    has_gaps = not _READABLE or _word(value, _FILL) != _word(value, _FILL + 1)
    return not found.size and (not has_gaps or all(map(is_, made, members)))


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
    """Return True if a member comes to a slot, when certain others are taken."""
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
    """Return True if every process gives a value the same hash."""
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
    """Return True if sets lie in memory as those of CPython 3.11 to 3.13 do."""
    probe = {1, 2, 3}
    probe.discard(2)
    return [_word(probe, item) for item in (_FILL, _FILL + 1, _MASK)] == [3, 2, 7]


_READABLE = _is_readable()


C_DATA: Any = ctypes.c_int.__mro__[-2]
"""What all objects of `ctypes` derive from."""

_POINTERS = frozenset("PzZO")
_HASHES = frozenset(
    {"_hashlib", "_blake2", "_md5", "_sha1", "_sha256", "_sha512", "_sha2", "_sha3"}
)
_UNCHANGING = frozenset({
    object, type(type.__call__), type(str.join), datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, datetime.timezone, decimal.Decimal, re.Pattern, re.Match,
})  # fmt: skip
"""What holds nothing that could change."""

EVENTS = (threading.Event, multiprocessing.synchronize.Event)
QUEUES = (queue.Queue, queue.SimpleQueue)
STREAMS = (io.BytesIO, io.StringIO)
_FACTORIES = ("row_factory", "text_factory")

_PLAIN_ATTRIBUTES = frozenset({*vars(queue.Queue()), *vars(threading.Event())})
"""Attributes of Python's own that concern the process."""

_HAS_LIST = sys.version_info < (3, 13)
"""Whether a `SimpleQueue` keeps its items in a list, the last ones of which wait."""


def of_beside(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """References of the attributes that a class of the program has added."""
    for name, item in _beside(value).items():
        if type(item) not in PLAIN_ATOMS:
            yield ".%s", name, item


def _beside(value: Any) -> dict[str, Any]:
    if is_closed(type(value)):
        return {}
    return {name: own for name, own in attributes(value).items() if name not in _PLAIN_ATTRIBUTES}


def _put_beside(value: Any, seen: Content) -> None:
    if not is_closed(type(value)):
        own = attributes(value)
        plain = {name: own[name] for name in own.keys() & _PLAIN_ATTRIBUTES}
        put_attributes(value, flat(plain | dict(pairs(seen.attributes))))


def of_queue(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """References of a queue."""
    yield from (("[%d]", place, item) for place, item in enumerate(_waiting(value)))
    yield from of_beside(value)


def queue_content(value: Any) -> Content:
    """Items waiting in a queue, and the number of unfinished ones."""
    unfinished = getattr(value, "unfinished_tasks", 0)
    return Content("queue", (unfinished, *_waiting(value)), flat(_beside(value)))


def queue_put(value: Any, seen: Content) -> None:
    """Fill a queue with what waited in it."""
    _put_beside(value, seen)
    unfinished, *waiting = seen.items
    if isinstance(value, queue.SimpleQueue):
        with contextlib.suppress(queue.Empty):
            while True:
                queue.SimpleQueue.get(value, block=False)
        for node in waiting:
            queue.SimpleQueue.put(value, node)
        return
    with value.mutex:
        value.queue.clear()
        value.queue.extend(waiting)
        value.unfinished_tasks = unfinished
        value.not_empty.notify_all()
        value.not_full.notify_all()


def _waiting(value: Any) -> tuple[Any, ...]:
    if isinstance(value, queue.SimpleQueue):
        # Taken out and put back they could come to a thread that waits in another order.
        found = gc.get_referents(value)
        if not _HAS_LIST:
            return tuple(found[: value.qsize()])
        items = next(name for name in found if type(name) is list)
        return tuple(items[len(items) - value.qsize() :])
    with value.mutex:
        return tuple(value.queue)


def array_bytes(value: Any) -> Content:
    """The numbers of an `array.array`."""
    return Content("numbers", (value.tobytes(),), flat(_beside(value)))


def array_bytes_put(value: Any, seen: Content) -> None:
    """Put the numbers of an `array.array` back; in its own memory where they are as many."""
    found = array.array(value.typecode, seen.items[0])
    if len(found) == len(value):
        with memoryview(value) as own:
            own[:] = found
    else:
        value[:] = found
    _put_beside(value, seen)


def bytes_content(value: Any) -> Content:
    """The bytes of a `bytearray`."""
    return Content("bytes", (bytes(value),), flat(_beside(value)))


def bytes_put(value: Any, seen: Content) -> None:
    """Put the bytes of a `bytearray` back."""
    value[:] = seen.items[0]
    _put_beside(value, seen)


def stream_content(value: Any) -> Content:
    """Content of a stream in memory, and its place; nothing of a closed one."""
    state = () if value.closed else _kind_of_stream(value).__getstate__(value)[:-1]
    return Content("stream", state, flat(_beside(value)))


def stream_put(value: Any, seen: Content) -> None:
    """Give a stream in memory what it held."""
    if seen.items:
        _kind_of_stream(value).__setstate__(value, (*seen.items, None))
    else:
        value.close()
    _put_beside(value, seen)


def _kind_of_stream(value: Any) -> Any:
    return next(stream for stream in STREAMS if isinstance(value, stream))


def c_data_content(value: Any) -> Content | None:
    """The bytes of C data; None where they have addresses of this process."""
    if _has_addresses(type(value)):
        return None
    return Content("bytes of C", (bytes(value),), flat(_beside(value)))


def c_data_put(value: Any, seen: Content) -> None:
    """Put the bytes of C data back where they lay."""
    ctypes.memmove(ctypes.addressof(value), seen.items[0], ctypes.sizeof(value))
    _put_beside(value, seen)


def has_addresses(value: Any) -> bool:
    """Return True if an object is C data with addresses of this process."""
    return isinstance(value, C_DATA) and _has_addresses(type(value))


def _has_addresses(kind: Any) -> bool:
    fields = getattr(kind, "_fields_", None)
    if fields is not None:
        return any(_has_addresses(field[1]) for field in fields)
    inner = getattr(kind, "_type_", None)
    if isinstance(inner, str):
        return inner in _POINTERS
    return not (issubclass(kind, ctypes.Array) and not _has_addresses(inner))


def of_context_variable(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Value of a context variable, as a reference."""
    yield from ((".%s()", "get", item) for item in context_variable_content(value).items)


def context_variable_content(value: Any) -> Content:
    """Value of a context variable, if it has one."""
    context = contextvars.copy_context()
    return Content("context variable", (context[value],) if value in context else ())


def context_variable_put(value: Any, seen: Content) -> None:
    """Set a context variable as it was."""
    if seen.items:
        value.set(seen.items[0])
    elif value in contextvars.copy_context():
        raise AutosaveError(
            f"the context variable `{value.name}` was not set when the program was saved, and "
            "set-up sets it now; set it in every run, or in none"
        )


def database_content(value: Any) -> Content | None:
    """All of an SQLite database in memory; None of one in a file, and of a closed connection."""
    places = database_places(value)
    if not places or any(places.values()):
        return None
    factories = tuple(getattr(value, name) for name in _FACTORIES)
    state = (value.isolation_level, value.in_transaction)
    # Of one without a table there is nothing to serialize.
    data = {
        name: value.serialize(name=name)
        for name in places
        if _rows_of(value, f'PRAGMA "{name}".page_count') != [(0,)]
    }
    if "temp" in data:
        raise AutosaveError(
            "an SQLite database in memory has temporary tables, which cannot be saved; create them "
            "without TEMP, or before each step"
        )
    return Content("database", (data, factories, state), flat(_beside(value)))


def database_put(value: Any, seen: Content) -> None:
    """Put a database in memory back, and begin the transaction that it was in."""
    data, factories, (level, in_transaction) = seen.items
    if value.in_transaction:
        value.commit()
    with contextlib.closing(sqlite3.connect(":memory:")) as other:
        if "main" in data:
            # Put in directly, it would pull away the pages of a statement that set-up has begun.
            other.deserialize(data["main"])
            other.backup(value)
    for name, datum in data.items():
        if name != "main":
            value.deserialize(datum, name=name)
    for name, factory in zip(_FACTORIES, factories, strict=True):
        setattr(value, name, factory)
    value.isolation_level = level
    if in_transaction:
        value.execute("BEGIN")
    _put_beside(value, seen)


def cursor_content(value: Any) -> Content | None:
    """Nothing of a cursor that has given all its rows.

    Raises:
        AutosaveError: When there are more.
    """
    # It lets its statement go behind the last row.
    if any(type(referent).__name__ == "Statement" for referent in gc.get_referents(value)):
        raise AutosaveError(
            "an SQLite cursor of the program has rows that have not been read, and cannot be "
            "saved; read them all at once, with fetchall()"
        )
    return None


def database_places(value: Any) -> dict[str, str]:
    """Name of each database of a connection to its file, empty in memory; none of a closed one."""
    try:
        return {name: file for _, name, file in _rows_of(value, "PRAGMA database_list")}
    except sqlite3.ProgrammingError:
        return {}


def _rows_of(value: Any, statement: str) -> list[Any]:
    cursor = sqlite3.Cursor(value)
    # Past the program's own ways to make rows.
    cursor.row_factory = None
    factory, value.text_factory = value.text_factory, str
    try:
        return cursor.execute(statement).fetchall()
    finally:
        value.text_factory = factory


def event_content(value: Any) -> Content:
    """State of an event: set or not."""
    return Content("event", (value.is_set(),), flat(_beside(value)))


def event_put(value: Any, seen: Content) -> None:
    """Set an event, or take it back."""
    if seen.items[0] != value.is_set():
        (value.set if seen.items[0] else value.clear)()
    _put_beside(value, seen)


def children_drawn(value: Any) -> int:
    """Number of children that the seed of a NumPy generator, or a seed itself, has spawned."""
    seed = value if isinstance(value, np.random.SeedSequence) else _seed_of(value)
    return int(getattr(seed, "n_children_spawned", 0))


def draw_children(value: Any, count: int) -> None:
    """Have a seed give the children that it had given, so that the next ones are others."""
    missing = count - children_drawn(value)
    if missing > 0:
        seed: Any = value if isinstance(value, np.random.SeedSequence) else _seed_of(value)
        seed.spawn(missing)


def _seed_of(value: Any) -> Any:
    return getattr(getattr(value, "bit_generator", value), "seed_seq", None)


def hidden_digest(value: Any) -> bytes | None:
    """A digest of what an object without attributes holds; None where none can be had."""
    if isinstance(value, C_DATA):
        return hashlib.blake2b(bytes(value), digest_size=16).digest()
    module = type(value).__module__.partition(".")[0]
    # Of other libraries, objects may be tables of many gigabytes.
    if type(value) in _UNCHANGING or module not in sys.stdlib_module_names:
        return None
    try:
        if module in _HASHES:
            return bytes(value.digest())
        return hashlib.blake2b(pickle.dumps(value, protocol=5), digest_size=16).digest()
    except Exception:
        # Whatever the pickling of a class of somebody else's raises.
        return None


Reducer = Callable[[Any], tuple[Any, ...]]
"""Gives what `__reduce_ex__` gives: how to make such an object again."""


State = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]
"""Gives the state of an object that stays, and sets it in the same object of another process."""


_KEYS = (str, int, float, bool, bytes, type(None))
"""Keys of dictionaries that are written into names."""


def _refuse_entropy(own: Any) -> Any:
    raise AutosaveError(
        "a random.SystemRandom of the program draws from the machine, so that no run can be "
        "repeated; use random.Random with a seed"
    )


def _set_generator(owner: Any, bits: Any, state: tuple[Any, int]) -> None:
    bits.state = state[0]
    draw_children(owner, state[1])


_RANDOM: dict[type, State] = {
    random.SystemRandom: (_refuse_entropy, lambda own, state: None),
    random.Random: (lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.RandomState: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
    np.random.Generator: (
        lambda own: (own.bit_generator.state, children_drawn(own)),
        lambda own, state: _set_generator(own, own.bit_generator, state),
    ),
    np.random.BitGenerator: (
        lambda own: (own.state, children_drawn(own)),
        lambda own, state: _set_generator(own, own, state),
    ),
    np.random.SeedSequence: (children_drawn, draw_children),
    torch.Generator: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
}


class Role(enum.Enum):
    """Ways to write down the objects of a kind.

    ATOM: as they are, without a name. VALUE: as a value each time, since they cannot be changed in
    place. STATE: by name, with their state each time. NAMED: by name, with what they hold when it
    counts. CLOSED: by name, and left as set-up makes them.
    """

    ATOM = enum.auto()
    VALUE = enum.auto()
    STATE = enum.auto()
    NAMED = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True)
class Kind:
    """Functions for the objects of a kind.

    Attributes:
        role: How they are written down.
        children: What one leads to.
        content: What one holds now; None where it is left as it is.
        put: Makes one hold what was seen.
        of_program: Whether only those count that the program's own objects hold; what libraries
            keep in such objects concerns the process.
    """

    role: Role
    children: Callable[[Any], Children] = lambda value: ()
    content: Callable[[Any], Content | None] = lambda value: None
    put: Callable[[Any, Content], None] = lambda value, seen: None
    of_program: bool = False


class Kinds:
    """Tells the kind of any object.

    Args:
        reducers: Type to how its objects are made again, where they cannot be pickled as they are.
        states: Type to how the state of its objects is asked and set.
    """

    def __init__(self, reducers: Mapping[type, Reducer], states: Mapping[type, State]) -> None:
        self._reducers = dict(reducers)
        self._states = _RANDOM | dict(states)
        self._known: dict[type, Kind] = {}
        self._reduced: dict[type, Reducer | None] = {}

    def of(self, value: Any) -> Kind:
        """The kind of `value`."""
        kind = type(value)
        if kind is types.ModuleType and is_loose(value):
            return _OBJECT
        if kind not in self._known:
            self._known[kind] = self._kind(kind)
        return self._known[kind]

    def is_opaque(self, value: Any) -> bool:
        """Return True if an object hides its content, or has none."""
        kind = self.of(value)
        return kind is _OBJECT and not has_attributes(value)

    def reducer(self, value: Any) -> Reducer | None:
        """The reducer given for objects like `value`."""
        kind = type(value)
        if kind not in self._reduced:
            found = (put for key, put in self._reducers.items() if issubclass(kind, key))
            self._reduced[kind] = next(found, None)
        return self._reduced[kind]

    def _kind(self, kind: type) -> Kind:
        for key, (get, put) in self._states.items():
            if issubclass(kind, key):
                return _state_kind(get, put)
        for key, reduce in self._reducers.items():
            if issubclass(kind, key):
                if is_closed(key):
                    # What set-up makes stays; only what comes later is made again.
                    return Kind(Role.CLOSED)
                return Kind(Role.VALUE, functools.partial(_of_reduction, reduce))
        if issubclass(kind, ATOMS):
            return Kind(Role.ATOM)
        if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo"):
            return Kind(
                Role.CLOSED, lambda value: [(".%s", "_orig_mod", value._modules["_orig_mod"])]
            )
        for types_, found in _KINDS:
            if issubclass(kind, types_):
                return found
        if is_builtin_iterator(kind):
            return Kind(Role.VALUE, functools.partial(_of_reduction, _plain_reduction))
        return Kind(Role.CLOSED) if is_closed(kind) else _OBJECT


def _state_kind(get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> Kind:
    return Kind(
        Role.STATE,
        content=lambda value: Content("state", (get(value),)),
        put=lambda value, seen: put(value, seen.items[0]),
    )


def _of_dict(value: Any) -> Children:
    if type(value) is dict and not value:
        return
    if not PLAIN_ATOMS.issuperset(map(type, dict.values(value))):
        for place, (key, item) in enumerate(dict.items(value)):
            if type(item) not in PLAIN_ATOMS:
                if isinstance(key, _KEYS):
                    yield "[%r]", key, item
                else:
                    yield "[value %d]", place, item
    if not PLAIN_ATOMS.issuperset(map(type, dict.keys(value))):
        for place, key in enumerate(dict.keys(value)):
            if not isinstance(key, _KEYS):
                yield "[key %d]", place, key
    if type(value) is not dict:
        yield from objects.of_attributes(value)


def _dict_content(value: Any) -> Content:
    if type(value) is dict:
        return Content("dict", flat(value))
    beside = attributes(value)
    if isinstance(value, defaultdict):
        beside = {**beside, "default_factory": value.default_factory}
    # Past what a class may have made of this method.
    items: Any = OrderedDict.items if isinstance(value, OrderedDict) else dict.items
    return Content("dict", tuple(itertools.chain.from_iterable(items(value))), flat(beside))


def _dict_put(value: Any, seen: Content) -> None:
    # Past what a class of the program may have made of these methods.
    plain: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    plain.clear(value)
    for key, item in pairs(seen.items):
        plain.__setitem__(value, key, item)
    beside = dict(pairs(seen.attributes))
    if isinstance(value, defaultdict):
        value.default_factory = beside.pop("default_factory")
    put_attributes(value, flat(beside))


def _of_items(value: Any) -> Children:
    if not PLAIN_ATOMS.issuperset(map(type, value)):
        for place, item in enumerate(value):
            if type(item) not in PLAIN_ATOMS:
                yield "[%d]", place, item
    if type(value) not in (list, tuple, deque):
        yield from objects.of_attributes(value)


def _items_content(value: Any) -> Content:
    if type(value) is list:
        return Content("items", tuple(value))
    return Content("items", tuple(value), flat(attributes(value)))


def _items_put(value: Any, seen: Content) -> None:
    plain: Any = list if isinstance(value, list) else deque
    if not same(Content("items", tuple(value)), Content("items", seen.items)):
        # An iterator of a deque ends when that changes.
        plain.clear(value)
        plain.extend(value, seen.items)
    put_attributes(value, seen.attributes)


def _set_put(value: Any, seen: Content) -> None:
    layout, *members = seen.items
    fill(value, tuple(members), layout)
    put_attributes(value, seen.attributes)


def _of_weak_mapping(value: Any) -> Children:
    for place, (key, item) in enumerate(list(value.items())):
        yield from (("[key %d]", place, key), ("[value %d]", place, item))


def _mapping_put(value: Any, seen: Content) -> None:
    value.clear()
    value.update(dict(pairs(seen.items)))


def _of_members(*names: str) -> Callable[[Any], Children]:
    return lambda value: ((".%s", name, getattr(value, name)) for name in names)


def _of_partial(value: Any) -> Children:
    return (*_of_members("func", "args", "keywords")(value), *objects.of_attributes(value))


def _partial_content(value: Any) -> Content:
    return Content("partial", (value.func, value.args, value.keywords), flat(attributes(value)))


def _partial_put(value: Any, seen: Content) -> None:
    value.__setstate__((*seen.items, None))
    put_attributes(value, seen.attributes)


def _plain_reduction(value: Any) -> Any:
    with warnings.catch_warnings():
        # Python 3.12 announces that iterators of itertools will not be copied one day.
        warnings.simplefilter("ignore", DeprecationWarning)
        return value.__reduce__()


def _of_reduction(reduce: Reducer, value: Any) -> Children:
    try:
        parts = reduce(value)
    except (TypeError, AutosaveError):
        # Whoever wants to write it down is told; it may be that nobody does.
        return
    yield from (("<%d>", place, part) for place, part in enumerate(parts[1:3]))


def _object_content(value: Any) -> Content | None:
    beside = attributes(value)
    return Content("object", (), flat(beside)) if beside or has_attributes(value) else None


def _hidden(
    content: Callable[[Any], Content | None],
    put: Callable[[Any, Content], None],
    children: Callable[[Any], Children] = of_beside,
) -> Kind:
    return Kind(Role.NAMED, children, content, put, of_program=True)


_OBJECT = Kind(
    Role.NAMED,
    objects.of_attributes,
    _object_content,
    lambda value, seen: put_attributes(value, seen.attributes),
)


_FUNCTION = Kind(Role.NAMED, objects.of_function, objects.function_content, objects.function_put)


_WEAK_MAPPING = Kind(
    Role.NAMED, _of_weak_mapping, lambda value: Content("weak", flat(value)), _mapping_put
)


def _weak_set_put(value: Any, seen: Content) -> None:
    value.clear()
    value.update(seen.items)


_WEAK_SET = Kind(Role.NAMED, content=lambda value: Content("weak", tuple(value)), put=_weak_set_put)


_CONTEXT_VARIABLE = Kind(
    Role.NAMED,
    of_context_variable,
    context_variable_content,
    context_variable_put,
)


_KINDS: tuple[tuple[Any, Kind], ...] = (
    (type, Kind(Role.NAMED, objects.of_class, objects.class_content, objects.class_put)),
    (torch.Tensor, Kind(Role.NAMED, of_tensor, tensor_content, tensor_put)),
    (np.ndarray, Kind(Role.NAMED, of_array, array_content, array_put)),
    # What is in them has no names of its own, so that it can be left out.
    (
        Results,
        Kind(Role.NAMED, content=lambda value: Content("dict", flat(value)), put=_mapping_put),
    ),
    (dict, Kind(Role.NAMED, _of_dict, _dict_content, _dict_put)),
    ((list, deque), Kind(Role.NAMED, _of_items, _items_content, _items_put)),
    (
        set,
        Kind(
            Role.NAMED,
            objects.of_attributes,
            lambda value: Content("set", (layout(value), *value), flat(attributes(value))),
            _set_put,
        ),
    ),
    (tuple, Kind(Role.VALUE, _of_items)),
    (frozenset, Kind(Role.VALUE)),
    (bytearray, Kind(Role.NAMED, of_beside, bytes_content, bytes_put)),
    (array.array, _hidden(array_bytes, array_bytes_put)),
    (STREAMS, _hidden(stream_content, stream_put)),
    (C_DATA, _hidden(c_data_content, c_data_put)),
    (EVENTS, _hidden(event_content, event_put)),
    (QUEUES, _hidden(queue_content, queue_put, of_queue)),
    # The C data in a `multiprocessing.Value` or `Array`.
    (SynchronizedBase, Kind(Role.NAMED, _of_members("_obj"), of_program=True)),
    (contextvars.ContextVar, _CONTEXT_VARIABLE),
    # Of the thread that trains.
    (threading.local, _OBJECT),
    (sqlite3.Cursor, _hidden(cursor_content, lambda value, seen: None)),
    (
        sqlite3.Connection,
        _hidden(
            database_content,
            database_put,
            lambda value: (*_of_members(*_FACTORIES)(value), *of_beside(value)),
        ),
    ),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _WEAK_MAPPING),
    (weakref.WeakSet, _WEAK_SET),
    (types.FunctionType, _FUNCTION),
    (types.CellType, Kind(Role.NAMED, objects.of_cell, objects.cell_content, objects.cell_put)),
    (types.MethodType, Kind(Role.VALUE, _of_members("__self__", "__func__"))),
    (types.MethodWrapperType, Kind(Role.VALUE)),
    ((staticmethod, classmethod), Kind(Role.NAMED, _of_members("__func__"))),
    (property, Kind(Role.NAMED, _of_members("fget", "fset", "fdel"))),
    (functools.partial, Kind(Role.NAMED, _of_partial, _partial_content, _partial_put)),
)


class _NotPlainError(Exception):
    """Something other than plain data was met."""


class _PlainPickler(pickle.Pickler):
    # Asked about everything but Python's own text, numbers and containers.
    def reducer_override(self, value: Any) -> Any:
        raise _NotPlainError


def digest_if_plain(value: Any) -> bytes | None:
    """A digest of plain data; None for what holds anything else.

    It also tells which equal parts are one object. Flat data, whose items are all text and numbers,
    counts as anything else: to compare its items one by one is cheaper.
    """
    items = value.values() if isinstance(value, dict) else value
    if _FLAT.issuperset(map(type, items)):
        return None
    found = hashlib.blake2b(digest_size=16)
    # A file that keeps only the digest of what is written.
    file: Any = types.SimpleNamespace(write=found.update)
    try:
        _PlainPickler(file, protocol=5).dump(value)
    except (_NotPlainError, RecursionError):
        return None
    return found.digest()


_FLAT = frozenset({type(None), bool, int, float, complex, str, bytes})
