"""What cannot be saved or not be found again, said with its path and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outlast.autosave.heap.kinds import Kinds

Path = tuple[str, ...]


class Unsaveable(AutosaveError):  # noqa: N818 (what it says reads as a sentence)
    """Something can be written down in no way.

    Args:
        value: What it is.
        advice: The smallest change that would help.
        path: The steps that lead there, e.g. ``("[0]", "['writer']", ".lock")``: from the values
            that were to be captured, or from the object `root`.
        root: Name of the named object that leads there; None for the values themselves.

    Attributes:
        type: Name of its class.
    """

    def __init__(self, value: Any, advice: str, path: Path = (), root: str | None = None) -> None:
        self.type = name_of(type(value))
        self.advice = advice
        self.path = path
        self.root = root
        self.value = value
        place = (root or "") + "".join(path)
        what = f"`{place}`, a {self.type}," if place else f"a {self.type}"
        super().__init__(f"{what} cannot be saved: {advice}")


class SetupDiffersError(AutosaveError):
    """Set-up has not made the same objects as when the program was saved.

    Args:
        path: Name of the object.
        sentence: What is wrong with it.
    """

    def __init__(self, path: str, sentence: str) -> None:
        self.path = path
        super().__init__(f"`{path}` {sentence}; set-up must make the same objects in every run")


def advice_for(value: Any) -> str:
    """The smallest change that would let the program be saved in spite of `value`."""
    module = type(value).__module__.split(".")[0]
    if type(value).__name__ in ("generator", "coroutine", "async_generator"):
        return "make it a class with `__next__`, or make it before the training loop"
    if module in ("_thread", "threading", "concurrent", "multiprocessing", "queue", "_queue"):
        return "it belongs to a process; make it before the training loop, so that set-up makes it"
    if module in ("socket", "_socket", "ssl", "subprocess", "asyncio", "_io"):
        return "it is a connection of a process; make it before the training loop"
    return (
        "make it before the training loop, so that set-up makes it, or give its class a "
        "`__reduce__` that says how to make it again"
    )


CHAIN_ADVICE = "it is a chain of too many links for Python to follow; keep its links in a list"
CLASS_ADVICE = (
    "it was given another class after set-up, which cannot be found by its name; do so before the "
    "training loop, so that set-up does it, or define the class at the top of its file"
)
HIDDEN_ADVICE = (
    "it has changed since set-up, and what it holds cannot be seen; keep that in a list, a "
    "dictionary or an attribute"
)
ORDER_ADVICE = (
    "the order of its members comes from what it held before, and cannot be made again; keep "
    "them as the keys of a dictionary, or go through `sorted(...)` of it"
)
_LINKS = 6
"""Steps of a path that are said of a chain."""


def locate(
    kinds: Kinds, value: Any, error_of: Callable[[Any], BaseException | None]
) -> tuple[Path, Any]:
    """The innermost part of `value` that cannot be written down, and the steps to it.

    Args:
        kinds: Tells what an object leads to.
        value: What cannot be written down.
        error_of: Tries to write something down.
    """
    steps: list[str] = []
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for step, item in _parts(kinds, value):
            error = None if id(item) in seen else error_of(item)
            if error is not None:
                steps.append(step)
                value = item
                break
        else:
            break
        if isinstance(error, RecursionError) and len(steps) == _LINKS:
            break
    return tuple(steps), value


def _parts(kinds: Kinds, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, (set, frozenset)):
        yield from (("{...}", item) for item in value)
    elif isinstance(value, (list, tuple)) and hasattr(value, "_fields"):
        names = value._fields
        yield from ((f".{name}", item) for name, item in zip(names, value, strict=True))
    else:
        for form, key, item in kinds.of(value).children(value):
            yield form % (key,), item


def name_of(kind: type) -> str:
    """A class's name, with its module unless it is one of Python's own."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
