"""Contents of Python's own objects that no attribute shows: queues, arrays, streams, C data.

What is not known here is left as set-up makes it. Of such objects that can be pickled a digest
tells whether they have changed, and then the program is refused.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import datetime
import decimal
import gc
import hashlib
import io
import multiprocessing.synchronize
import pickle
import queue
import re
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.autosave.heap.objects import (
    PLAIN_ATOMS,
    Content,
    attributes,
    flat,
    is_closed,
    pairs,
    put_attributes,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    own = attributes(value)
    return {name: own_item for name, own_item in own.items() if name not in _PLAIN_ATTRIBUTES}


def _put_beside(value: Any, seen: Content) -> None:
    if is_closed(type(value)):
        return
    own = attributes(value)
    plain = {name: own_item for name, own_item in own.items() if name in _PLAIN_ATTRIBUTES}
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


def of_shared(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The C data in a `multiprocessing.Value` or `Array`."""
    yield ".%s", "_obj", value._obj


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


def of_database(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Row factory and text factory of a database connection."""
    yield from ((".%s", name, getattr(value, name)) for name in _FACTORIES)
    yield from of_beside(value)


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
    seed: Any = value if isinstance(value, np.random.SeedSequence) else _seed_of(value)
    missing = count - children_drawn(value)
    if missing > 0:
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
