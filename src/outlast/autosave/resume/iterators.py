"""Iterators of libraries that can be pickled where their own cannot: those of progress bars.

``iter(tqdm(loader))`` and ``rich.progress.track(loader)`` are generators, which no process can hand
to another. A `ShownIterator` goes through such a generator; it is pickled as the iterator within
and the number of items so far, and shows them with a new generator afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import operator
import sys
import types
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_WITHOUT_PICKLES = (3, 14)
_BAR_SETTINGS = (
    "desc", "total", "leave", "mininterval", "maxinterval", "ascii", "disable", "unit",
    "unit_scale", "smoothing", "bar_format", "unit_divisor", "colour", "delay",
)  # fmt: skip
_BAR_PROGRESS = ("n", "total", "desc", "postfix", "disable")


class Items:
    """The items of an iteration, counted.

    Args:
        iterable: Where they come from.
        inner: The iterator within.
        given: Number of items given so far.
    """

    def __init__(self, iterable: Any, inner: Iterator[Any], given: int) -> None:
        self._iterable = iterable
        self.inner = inner
        self.given = given

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        item = next(self.inner)
        self.given += 1
        return item

    def __length_hint__(self) -> int:
        return operator.length_hint(self._iterable)


class ShownIterator:
    """Goes through an iterable as a progress bar does, and can be pickled.

    Args:
        display: The bar.
        iterable: What it shows.
        inner: An iterator of it that was begun; None begins one with the first item, as a
            generator does.
        given: Number of items that it has given.
    """

    def __init__(
        self,
        display: TqdmDisplay | RichDisplay,
        iterable: Any,
        inner: Iterator[Any] | None = None,
        given: int = 0,
    ) -> None:
        self._display = display
        self._iterable = iterable
        self._inner = inner
        self._given = given
        self._items: Items | None = None
        self._shown: Iterator[Any] = iter(())

    def __iter__(self) -> ShownIterator:
        return self

    def __next__(self) -> Any:
        if self._items is None:
            inner = iter(self._iterable) if self._inner is None else self._inner
            self._items = Items(self._iterable, inner, self._given)
            self._shown = self._display.show(self._items)
        return next(self._shown)

    def __reduce__(self) -> Any:
        return ShownIterator, (self._display, self._iterable, *self.place())

    def place(self) -> tuple[Iterator[Any] | None, int]:
        """The iterator within, and the number of items that it has given."""
        if self._items is None:
            return self._inner, self._given
        return self._items.inner, self._items.given

    def set_place(self, place: tuple[Iterator[Any] | None, int]) -> None:
        """Continue with what `place` gave."""
        self._inner, self._given = place
        self._items, self._shown = None, iter(())


@dataclass
class TqdmDisplay:
    """A bar of tqdm.

    Attributes:
        bar: The bar.
    """

    bar: Any

    def show(self, items: Items) -> Iterator[Any]:
        """Tqdm's own generator, over `items`."""
        bar = self.bar
        if items.given:
            bar.n = bar.last_print_n = items.given
        bar.iterable, iterable = items, bar.iterable
        try:
            for item in _PLAIN["tqdm"](bar):
                # The generator asks for the bar's iterable once, when it begins.
                bar.iterable = iterable
                yield item
        finally:
            bar.iterable = iterable


@dataclass
class RichDisplay:
    """Display of `rich.progress.track`, or of the method `track` of a `Progress`.

    Attributes:
        progress: The `Progress`; None makes one.
        settings: Further arguments.
    """

    progress: Any
    settings: dict[str, Any]

    def show(self, items: Items) -> Iterator[Any]:
        """Rich's own generator, over `items`."""
        settings = dict(self.settings)
        if items.given:
            settings["completed"] = settings.get("completed", 0) + items.given
        plain = "track" if self.progress is None else "Progress.track"
        own = [] if self.progress is None else [self.progress]
        found: Iterator[Any] = _PLAIN[plain](*own, items, **settings)
        return found


def resumable(iterable: Iterable[Any]) -> Iterator[Any]:
    """The iterator of `iterable`; one that can be pickled, if it is a progress bar.

    Args:
        iterable: What a loop of the program goes through.
    """
    if "tqdm" in _PLAIN and isinstance(iterable, _TQDM):
        return ShownIterator(TqdmDisplay(iterable), iterable.iterable)
    return iter(iterable)


@contextmanager
def resumable_bars() -> Iterator[None]:
    """Within, progress bars of tqdm and rich give iterators that can be pickled."""
    with ExitStack() as stack:
        if "tqdm" in _PLAIN:
            stack.enter_context(_set(_TQDM, "__iter__", resumable))
        if "track" in _PLAIN:
            stack.enter_context(_set(_RICH, "track", _track))
            stack.enter_context(_set(_RICH.Progress, "track", _track_with))
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _track(sequence: Any, description: str = "Working...", **settings: Any) -> ShownIterator:
    return ShownIterator(RichDisplay(None, {"description": description, **settings}), sequence)


def _track_with(progress: Any, sequence: Any, *more: Any, **settings: Any) -> ShownIterator:
    names = ("total", "completed", "task_id", "description", "update_period")
    settings |= dict(zip(names, more, strict=False))
    return ShownIterator(RichDisplay(progress, settings), sequence)


def _reduced_bar(bar: Any) -> Any:
    settings = {name: getattr(bar, name) for name in _BAR_SETTINGS if hasattr(bar, name)}
    if not getattr(bar, "dynamic_miniters", True):
        settings["miniters"] = bar.miniters
    if getattr(bar, "dynamic_ncols", None):
        settings["dynamic_ncols"] = True
    if bar.pos < 0:
        settings["position"] = -bar.pos
    file = getattr(bar, "fp", None)
    file = getattr(file, "_wrapped", file)
    if file is sys.stdout or (file is not None and file is not sys.stderr):
        settings["file"] = file
    return _bar, (type(bar), bar.iterable, settings, _bar_progress(bar))


def _bar(kind: Any, iterable: Any, settings: dict[str, Any], progress: dict[str, Any]) -> Any:
    made = kind(iterable, initial=progress["n"], **settings)
    _set_bar_progress(made, progress)
    return made


def _bar_progress(bar: Any) -> dict[str, Any]:
    return {name: getattr(bar, name, None) for name in _BAR_PROGRESS}


def _set_bar_progress(bar: Any, progress: dict[str, Any]) -> None:
    if progress["disable"]:
        bar.close()
    for name, value in progress.items():
        if name != "disable" and (value is not None or hasattr(bar, name)):
            setattr(bar, name, value)
    if not progress["disable"]:
        bar.last_print_n = progress["n"]


def _reduced_itertool(value: Any) -> Any:
    name = type(value).__name__
    if sys.version_info >= _WITHOUT_PICKLES:
        raise AutosaveError(
            f"a loop goes through itertools.{name}, which Python {sys.version_info.major}."
            f"{sys.version_info.minor} cannot save; use Python 3.13, or write `for item in "
            "iterable` and count by a variable"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return value.__reduce_ex__(4)
        except TypeError:
            raise AutosaveError(
                f"a loop goes through itertools.{name}, which cannot be saved; make a list of it "
                "before the loop, or write out what it does"
            ) from None


def _refuse_generator(value: Any) -> Any:
    frame = value.gi_frame
    line = value.gi_code.co_firstlineno if frame is None else frame.f_lineno
    raise AutosaveError(
        f"the generator `{value.gi_code.co_qualname}` ({value.gi_code.co_filename}, line {line}) "
        "is under way and cannot be saved; iterate over what it takes its items from, or make it "
        "a class with __iter__ and __next__"
    )


def _found(name: str) -> Any:
    """A module that is installed; None for one that is not."""
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        return None
    return importlib.import_module(name)


_PLAIN: dict[str, Callable[..., Any]] = {}
"""The generators of the libraries themselves."""

_std, _RICH = _found("tqdm.std"), _found("rich.progress")
_TQDM: Any = None if _std is None else _std.tqdm
if _TQDM is not None:
    _PLAIN["tqdm"] = _TQDM.__iter__
if _RICH is not None:
    _PLAIN["track"], _PLAIN["Progress.track"] = _RICH.track, _RICH.Progress.track

REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    types.GeneratorType: _refuse_generator,
    **{
        variable: _reduced_itertool
        for variable in vars(itertools).values()
        if isinstance(variable, type)
    },
    **({} if _TQDM is None else {_TQDM: _reduced_bar}),
}
"""How objects of these types, and of types derived from them, are pickled."""

IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    ShownIterator: (ShownIterator.place, ShownIterator.set_place),
    **({} if _TQDM is None else {_TQDM: (_bar_progress, _set_bar_progress)}),
}
"""Types whose objects are put back in place: what they hold, and how to make them hold it."""
