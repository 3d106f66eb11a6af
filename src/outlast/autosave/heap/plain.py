"""Large plain data: lists and dictionaries of nothing but text and numbers, however nested.

A list of a million rows is not worth a million names. It is named as a whole, and whether it has
changed is told by a digest of all of it, at the speed of pickling in C.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any


class _NotPlainError(Exception):
    """Something other than plain data was met."""


class _Digest(io.RawIOBase):
    """A file that keeps only the digest of what is written."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


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
    file = _Digest()
    try:
        _PlainPickler(file, protocol=5).dump(value)
    except (_NotPlainError, RecursionError):
        return None
    return file.digest()


_FLAT = frozenset({type(None), bool, int, float, complex, str, bytes})
