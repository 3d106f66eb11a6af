"""Generators of the program's own functions: written down where they are suspended, made again.

A suspended generator is a frame at a site, its `yield`. In another process its function is called
again and driven, with its local names restored, to that `yield`, as the program itself is driven to
its step; then it goes on from there.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import types
from typing import TYPE_CHECKING, Any, cast

from outlast.autosave.resume.entered import entered, stack
from outlast.autosave.resume.frames import name_of
from outlast.autosave.resume.iterators import resumable
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from outlast.autosave.program.sites import Rewritten, Site
    from outlast.autosave.resume.frames import Frames
    from outlast.autosave.resume.session import Session


class Generators:
    """What rewritten generator functions call: ``__outlast__.generators``.

    Args:
        session: Of the program.
        frames: Looks at its frames.
        files: The program.

    Attributes:
        live: Whether generators do their work; False while one is driven to where it was.
        restoring: Whether the frame that asks is to take its local names over.
        paused: Whether a `with` statement on the way is being entered.
        unset: Stands for a local name that had no value.
        anew: Stands for a function, class or module that is defined or imported again.
    """

    def __init__(self, session: Session, frames: Frames, files: Iterable[Rewritten]) -> None:
        files = list(files)
        self.live = True
        self.restoring = False
        self.paused = False
        self.unset = session.unset
        self.anew = session.anew
        self._session = session
        self._frames = frames
        self._known = {body for file in files for body in file.generators}
        self._plain = {body: why for file in files for body, why in file.plain.items()}
        self._files = frozenset(str(file.source.path) for file in files)
        self._aim: Site | None = None
        self._names: dict[str, Any] = {}
        self._reached = False

    def goes(self, number: int) -> bool:
        """Whether the generator enters site `number`."""
        if self.live:
            return True
        aim = self._aim
        if aim is None or (number != aim.number and number not in aim.around):
            return False
        if not self._reached:
            self._reached = self.restoring = True
        return True

    def values(self, names: list[str]) -> list[Any]:
        """Values of local names of the generator that is driven."""
        self.restoring = False
        return [self._names.get(name, self.unset) for name in names]

    def iterate(self, number: int, iterable: Iterable[Any]) -> Iterator[Any]:
        """The iterator of loop `number`."""
        return resumable(iterable)

    def passed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """`iterator`, with an item before that stands for the one which it has given already."""
        return itertools.chain((None,), iterator)

    def delegate(self, iterator: Iterator[Any]) -> Delegate:
        """What ``yield from`` takes its items from; it lives no longer than the frame."""
        return Delegate(self, iterator)

    def entered(self, name: str) -> Any:
        """What stands for the expression of a `with`; None if it is to be evaluated."""
        if self.live:
            return None
        values = sys._getframe(1).f_locals
        found = entered(values, name, self._files) or stack(values, name, self._files)
        if found is None:
            # What the expression calls does its work.
            self.paused = self.live = True
        return found

    def proceed(self) -> None:
        """Within the `with`: go on to where the generator was."""
        self.paused = self.live = False

    def arrives(self) -> None:
        """At the `yield` where the generator was."""
        self.live = True

    def reduction(self, generator: Any) -> tuple[Any, ...]:
        """How `generator` is made again, as `object.__reduce__` gives it.

        One that cannot be gives a reduction that cannot be pickled: it is refused if it is needed.
        """
        state = inspect.getgeneratorstate(generator)
        if state == inspect.GEN_CLOSED:
            return _finished, ()
        name = name_of(generator.gi_code)
        function = _function_of(generator)
        if name not in self._known or function is None:
            return _Refused(_refusal(generator, self._plain.get(name), self._files)), ()
        frame = generator.gi_frame
        if state == inspect.GEN_CREATED:
            return _called, (function, *_arguments(generator.gi_code, frame.f_locals))
        site = self._frames.leading(frame) if state == inspect.GEN_SUSPENDED else None
        if site is None:
            return _Refused(_refusal(generator, None, self._files)), ()
        names = self._frames.names_at(frame, site, self._session.kept)
        return _made, (function,), (self._session, site.number, names), None, None, _driven

    def drive(self, generator: Any, number: int, names: dict[str, Any]) -> None:
        """Bring a new generator to the `yield` of site `number`.

        Raises:
            AutosaveError: When it is not reached.
        """
        before = (self._aim, self._names, self._reached, self.live)
        self._aim, self._names, self._reached = self._frames.sites[number], names, False
        self.live = False
        try:
            next(generator, None)
            if not self.live:
                raise AutosaveError(
                    f"the generator `{generator.gi_code.co_qualname}` did not come back to the "
                    f"`yield` in line {self._frames.sites[number].line} where it was saved; its "
                    "function must be the same in every run"
                )
        finally:
            self._aim, self._names, self._reached, self.live = before
            self.restoring = self.paused = False


class Delegate:
    """The iterator of a ``yield from``, which gives nothing new when it is come back to."""

    def __init__(self, generators: Generators, inner: Any) -> None:
        self._generators = generators
        self._inner = inner

    def __iter__(self) -> Delegate:
        return self

    def __next__(self) -> Any:
        if not self._generators.live:
            return self._generators.arrives()
        return next(self._inner)

    def send(self, value: Any) -> Any:
        """Pass a value on."""
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        """Pass an error on."""
        if hasattr(self._inner, "throw"):
            return self._inner.throw(*error)
        raise error[0]

    def close(self) -> None:
        """End the iterator within."""
        if hasattr(self._inner, "close"):
            self._inner.close()


class _Refused:
    """A callable that cannot be pickled, and says why."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __call__(self) -> Any:
        raise AutosaveError(self._sentence)

    def __reduce__(self) -> Any:
        raise AutosaveError(self._sentence)


def _refusal(generator: Any, why: str | None, files: frozenset[str]) -> str:
    code, frame = generator.gi_code, generator.gi_frame
    where = f"{code.co_filename}, line {frame.f_lineno if frame else code.co_firstlineno}"
    if generator.gi_running:
        return (
            f"{where}: the generator `{code.co_qualname}` is running while the program is saved; "
            "move the training loop out of it"
        )
    if why is not None:
        return f"the generator `{code.co_qualname}` is under way and cannot be saved: {why}"
    if code.co_name == "<genexpr>":
        return (
            f"{where}: a generator expression is under way and cannot be saved; write it as a "
            "generator function at the top of the file, or as a list"
        )
    owner = "this file" if code.co_filename in files else "a library"
    return (
        f"{where}: the generator `{code.co_qualname}` of {owner} is under way and cannot be saved; "
        "iterate over what it takes its items from, or write a generator function in the script"
    )


def _function_of(generator: Any) -> types.FunctionType | None:
    """The function that a generator is of: the generator itself holds it."""
    return next(
        (
            referent
            for referent in gc.get_referents(generator)
            if isinstance(referent, types.FunctionType) and referent.__code__ is generator.gi_code
        ),
        None,
    )


def _arguments(code: types.CodeType, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What a generator was called with that has not begun."""
    count, more = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    positional = [values[name] for name in names[:count]]
    words = {name: values[name] for name in names[count : count + more]}
    rest = count + more
    if code.co_flags & inspect.CO_VARARGS:
        positional += values[names[rest]]
        rest += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        words |= values[names[rest]]
    return positional, words


def _finished() -> Iterator[Any]:
    return iter(())


def _called(function: Callable[..., Any], positional: list[Any], words: dict[str, Any]) -> Any:
    return function(*positional, **words)


def _made(function: types.FunctionType) -> Generator[Any, Any, Any]:
    code = function.__code__
    words = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    made = function(*[None] * code.co_argcount, **dict.fromkeys(words))
    return cast("Generator[Any, Any, Any]", made)


def _driven(generator: Any, state: tuple[Session, int, dict[str, Any]]) -> None:
    session, number, names = state
    session.generators.drive(generator, number, names)
