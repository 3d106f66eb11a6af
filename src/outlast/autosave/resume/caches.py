"""Caches of `functools.lru_cache` that can be looked into, for functions of the program.

Python's own hides what it holds. A function that is cached may have drawn random numbers or made a
tensor that was changed since; computed again it would give another. Of functions whose results are
many bytes, or cannot be written down, nothing is saved: they are computed again.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from outlast.autosave.heap.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_plain_cache, _plain_lru_cache = functools.cache, functools.lru_cache
_MISSING = object()


@contextmanager
def visible_caches(files: frozenset[str]) -> Iterator[None]:
    """Within, functions that these files decorate with `cache` and `lru_cache` show their caches.

    Args:
        files: Of the program.
    """

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if sys._getframe(1).f_code.co_filename not in files:
            return _plain_lru_cache(maxsize, typed)
        if callable(maxsize):
            return _cached(maxsize, 128, typed)
        return lambda function: _cached(function, maxsize, typed)

    def cache(function: Callable[..., Any], /) -> Any:
        if sys._getframe(1).f_code.co_filename not in files:
            return _plain_cache(function)
        return _cached(function, None, typed=False)

    functools.cache, functools.lru_cache = cache, lru_cache
    try:
        yield
    finally:
        functools.cache, functools.lru_cache = _plain_cache, _plain_lru_cache


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Callable[..., Any]:
    """What Python's `lru_cache` makes of a function, with its results in a variable."""
    results = Results()
    counts = {"hits": 0, "misses": 0}

    @functools.wraps(function)
    def wrapper(*args: Any, **words: Any) -> Any:
        if torch.compiler.is_compiling():
            # As with Python's own, what is compiled has the function itself.
            return function(*args, **words)
        key: Any = (args, tuple(words.items()))
        if typed:
            key = (key, *map(type, args), *map(type, words.values()))
        found = results.get(key, _MISSING)
        if found is not _MISSING:
            counts["hits"] += 1
            results.move_to_end(key)
            return found
        counts["misses"] += 1
        made = function(*args, **words)
        if maxsize != 0:
            results[key] = made
            if maxsize is not None and len(results) > max(maxsize, 0):
                results.popitem(last=False)
        return made

    def cache_info() -> Any:
        return functools._CacheInfo(counts["hits"], counts["misses"], maxsize, len(results))

    def cache_clear() -> None:
        results.clear()
        counts.update(hits=0, misses=0)

    made: Any = wrapper
    made.cache_info, made.cache_clear = cache_info, cache_clear
    made.cache_parameters = lambda: {"maxsize": maxsize, "typed": typed}
    return made  # type: ignore[no-any-return]
