"""Results that a function of the program keeps, to be computed again where they are many bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from outlast.autosave.heap.content import Content, flat, pairs

LARGEST_BYTES = 1 << 20
"""What the results of one function may take in a save."""


class Results(OrderedDict[Any, Any]):
    """The results of a cached function, by its arguments."""


def results_content(value: Results) -> Content:
    """Arguments and results."""
    return Content("dict", flat(value))


def results_put(value: Results, seen: Content) -> None:
    """Give a function the results that it had."""
    value.clear()
    value.update(pairs(seen.items))
