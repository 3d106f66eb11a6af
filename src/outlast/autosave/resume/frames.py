"""Frames of a running program that lead to its step: their places, contexts, generators, refusals.

A suspended generator is a frame at a site, its `yield`. In another process its function is called
again and driven, with its local names restored, to that `yield`, as the program itself is driven to
its step; then it continues from there.

*Refusals* say what cannot be saved, with its place in the program's text and the remedy.

*Shared variables.* The closure of a function is written by value when the function was made after
set-up and its definition is not one that resuming executes again, as of a `lambda` in a list.
The running function has the variable, too; each of them would continue with one of its own.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import io
import itertools
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from outlast.autosave.heap.kinds import QUEUES
from outlast.autosave.heap.objects import cell_content, vars_of
from outlast.autosave.program.scopes import attribute_line, binding_line, bindings_of, code_names
from outlast.autosave.program.source import Loop, Rewritten, Site, body_name
from outlast.autosave.resume.iterators import resumable
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from types import CellType, CodeType, FrameType, FunctionType

    from outlast.autosave.heap.names import Names, Unsaveable
    from outlast.autosave.program.source import Body, SourceFile
    from outlast.autosave.resume.session import Session


MODULE = "<module>"


class Place(NamedTuple):
    """Place of a frame in the program.

    Attributes:
        body: Number of its body in the program.
        site: Number of the innermost site there; None for a frame that was never entered again.
        names: Its live local names and their values; none of a module, whose names are global.
    """

    body: int
    site: int | None
    names: dict[str, Any]


class Frames:
    """Looks at frames by the sites of a rewritten program.

    Args:
        files: The program.

    Attributes:
        sites: Number to site.
    """

    def __init__(self, files: Iterable[Rewritten]) -> None:
        files = list(files)
        self.sites: dict[int, Site] = {site.number: site for file in files for site in file.sites}
        self._leading: dict[str, list[Site]] = {}
        for site in self.sites.values():
            if site.kind in ("call", "yield"):
                self._leading.setdefault(site.body, []).append(site)
        self._numbers: dict[str, int] = {}
        for file in files:
            # In the order of their lines, which a change above them leaves as it is.
            place = f"{file.source.path}:"
            for body in sorted(
                file.bodies, key=lambda body: int(body.removeprefix(place).partition(":")[0])
            ):
                self._numbers[body] = len(self._numbers)

    def of(self, frame: FrameType | None) -> list[FrameType]:
        """The frames of bodies on the way to training, outermost first, up to `frame`."""
        found = []
        while frame is not None:
            if name_of(frame.f_code) in self._numbers:
                found.append(frame)
            frame = frame.f_back
        return found[::-1]

    def places(
        self, frame: FrameType, number: int, kept: Callable[[Site, str, Any], Any]
    ) -> list[Place]:
        """Places of all frames up to `frame`, which is at site `number`.

        Args:
            frame: The innermost.
            number: Of its site.
            kept: Gives what is kept of a local name at a site, for its value.
        """
        found = []
        for outer in self.of(frame):
            site = self.sites[number] if outer is frame else self.leading(outer)
            names = {} if outer.f_code.co_name == MODULE else self.names_at(outer, site, kept)
            found.append(Place(self.body_of(outer), self.number_of(site), names))
        return found

    def names_at(
        self, frame: FrameType, site: Site | None, kept: Callable[[Site, str, Any], Any]
    ) -> dict[str, Any]:
        """The live local names of a frame at a site."""
        if site is None:
            return {}
        values = {_as_written(name): f_name for name, f_name in frame.f_locals.items()}
        return {
            name: kept(site, name, values[name]) for name in sorted(site.names) if name in values
        }

    def matches(self, frame: FrameType, number: int, target: list[Place]) -> int | None:
        """The depth of `frame`, if the way to `target` leads through site `number` there."""
        frames = self.of(frame)
        if not self._on_way(frames, target):
            return None
        aim = target[len(frames) - 1].site
        if aim is None or (number != aim and number not in self.sites[aim].around):
            return None
        return len(frames) - 1

    def is_left(self, frame: FrameType, target: list[Place]) -> bool:
        """Return True if `frame` is in a call that is to be left, since the way leads elsewhere."""
        frames = self.of(frame)
        return (
            not self._on_way(frames, target)
            and len(frames) > 1
            and self.leading(frames[-2]) is not None
        )

    def _on_way(self, frames: list[FrameType], target: list[Place]) -> bool:
        """Return True if the way to `target` leads through these frames."""
        return len(frames) <= len(target) and all(
            self._numbers[name_of(frame.f_code)] == place.body
            and (frame is frames[-1] or self.number_of(self.leading(frame)) == place.site)
            for frame, place in zip(frames, target, strict=False)
        )

    def body_of(self, frame: FrameType) -> int:
        """Number of the body that a frame of the way executes."""
        return self._numbers[name_of(frame.f_code)]

    def leading(self, frame: FrameType) -> Site | None:
        """The call, or the `yield`, that a frame is in."""
        # Line and column where the expression ends that the frame is computing.
        positions = frame.f_code.co_positions()
        _, line, _, column = next(
            itertools.islice(positions, frame.f_lasti // 2, None), (None, None, None, None)
        )
        if line is None or column is None:
            # Python can be told not to keep columns.
            line, column = frame.f_lineno, None
        sites = self._leading.get(name_of(frame.f_code), ())
        return next((site for site in sites if site.covers(line, column)), None)

    @staticmethod
    def number_of(site: Site | None) -> int | None:
        """Number of a site, if there is one."""
        return None if site is None else site.number


def name_of(code: CodeType) -> str:
    """Name of the body that code was made from, as its sites have it."""
    return body_name(code.co_filename, code.co_qualname, code.co_firstlineno)


def _as_written(name: str) -> str:
    """A local name as the program has it: in methods, Python puts the class before ``__name``."""
    end = name.find("__", 2)
    private = name[:1] == "_" and name[1:2] != "_" and end > 0 and not name.endswith("__")
    return name[end:] if private else name


class EnteredContext:
    """Stands for the expression of a `with` whose value has come back with the local names.

    It is not entered a second time, which would begin a file again; it is left as usual.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *error: Any) -> Any:
        return self._value.__exit__(*error)


class EnteredExitStack(EnteredContext):
    """Stands for an `ExitStack` that has come back, with what is to be done at its end.

    What it has entered and concerns the process, as `torch.autocast`, is entered anew.
    """

    def __init__(self, value: contextlib.ExitStack, files: frozenset[str]) -> None:
        super().__init__(value)
        self._contexts: list[Any] = [
            context
            for _, leave in value._exit_callbacks  # type: ignore[attr-defined]
            if hasattr(context := getattr(leave, "__self__", None), "__enter__")
            and not isinstance(context, io.IOBase)
            and not is_own(context, files)
        ]

    def __enter__(self) -> Any:
        for context in self._contexts:
            context.__enter__()
        return super().__enter__()


class Held:
    """A context that a `with` statement of the program enters.

    One of the program's own is saved, and while resuming it is not entered again: what is done at
    its beginning has been done. Nor is it ended on the way to a place behind it. Every other one,
    as `torch.autocast` or a profiler, concerns the process; it is made and entered anew.

    Args:
        session: Of the program.
        context: What it enters.
        own: Whether the program's own text says what is done at its beginning and end.
        came_back: Whether it is in a context that was saved.
        value: What the context gave when it was entered.
    """

    def __init__(
        self,
        session: Session,
        context: Any,
        *,
        own: bool,
        came_back: bool = False,
        value: Any = None,
    ) -> None:
        self._session = session
        self._context = context
        self._own = own
        self._came_back = came_back
        self._value = value

    def __enter__(self) -> Any:
        if not self._came_back:
            self._value = self._context.__enter__()
        self._came_back = False
        return self._value

    def __exit__(self, *error: Any) -> Any:
        if self._session.live or not self._own:
            return self._context.__exit__(*error)
        # Kept, since a generator that is let go of runs to its end.
        self._session.abandoned.append(self._context)
        return None

    def __reduce__(self) -> Any:
        if not self._own:
            return _no_context, ()
        return _came_back, (self._session, self._context, self._value)


def _no_context() -> None:
    """Stands for a context that is not saved."""


def _came_back(session: Session, context: Any, value: Any) -> Held:
    return Held(session, context, own=True, came_back=True, value=value)


def is_own(context: Any, files: frozenset[str]) -> bool:
    """Return True if the program's own text says what a context does at its end."""
    generator = getattr(context, "gen", None)
    if isinstance(generator, types.GeneratorType):
        return generator.gi_code.co_filename in files
    module = sys.modules.get(type(context).__module__)
    return getattr(module, "__file__", None) in files


def entered_context(value: Any, files: frozenset[str], *, own: bool) -> EnteredContext | None:
    """Stand-in for what a `with` binds, if that came back as it was: a file, a bar, a stack.

    Args:
        value: Of the name that it binds; None where it binds none.
        files: Of the program.
        own: Whether objects of the program's classes are taken as they came back, too.
    """
    if value is None or not hasattr(value, "__exit__"):
        return None
    is_bar = type(value).__module__.split(".")[0] == "tqdm"
    if isinstance(value, io.IOBase) or is_bar or (own and is_own(value, files)):
        return EnteredContext(value)
    return EnteredExitStack(value, files) if isinstance(value, contextlib.ExitStack) else None


class _Entry(NamedTuple):
    """Count of the entries into a body from one place.

    Attributes:
        by: The body, the calling frame, its statement, and the how manieth time that was executed.
        times: How often.
        wrapped: Why it cannot be entered again: after set-up, something of the program called it
            that is not on the way, and would be done twice. None where nothing did.
        unseen: Whether it was called after set-up by a statement that is not on the way.
    """

    by: tuple[int, int, int | None, int]
    times: int
    wrapped: str | None
    unseen: bool


class Entries:
    """Remembers for each function on the way how it was called.

    Args:
        frames: Looks at the frames of the program.
        files: Of the program.
    """

    def __init__(self, frames: Frames, files: frozenset[str]) -> None:
        self._frames = frames
        self._files = files
        self._entries: dict[int, _Entry] = {}

    def entered(self, frames: list[FrameType], visit: int, *, in_setup: bool) -> None:
        """The innermost of the frames on the way begins.

        Args:
            frames: The frames on the way, outermost first.
            visit: The how manieth time the statement is executed that called it.
            in_setup: Whether the next process does the same in its set-up.
        """
        depth, body = len(frames) - 1, self._frames.body_of(frames[-1])
        caller, site = 0, None
        if depth:
            caller, site = id(frames[-2]), self._frames.number_of(self._frames.leading(frames[-2]))
        by = (body, caller, site, visit)
        before = self._entries.get(depth)
        times = before.times + 1 if before is not None and before.by == by else 1
        wrapped = None if in_setup or not depth else self._between(frames[-2], frames[-1])
        self._entries = {place: entry for place, entry in self._entries.items() if place < depth}
        unseen = depth > 0 and site is None and not in_setup
        self._entries[depth] = _Entry(by, times, wrapped, unseen)

    def refuse_unseen(self, frames: list[FrameType]) -> None:
        """Refuse a way through calls that cannot be told from others.

        Raises:
            AutosaveError: For a function that was called more than once by one statement, or
                after set-up in a way that is not seen.
        """
        for depth, frame in enumerate(frames):
            entry = self._entries.get(depth)
            if entry is None:
                continue
            code = frame.f_code
            if entry.wrapped is not None:
                raise AutosaveError(entry.wrapped)
            if entry.times > 1 or entry.unseen:
                raise AutosaveError(
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` trains, and "
                    "was called several times, or after other training, in a way that is not seen "
                    "in the program's text (by a library, through a list or a wrapper), so that it "
                    "cannot be resumed in this call; call it by its name, in a loop of its own"
                )

    def _between(self, outer: FrameType, inner: FrameType) -> str | None:
        """Obstacle between two frames of the way, in words; None for nothing."""
        name, line = inner.f_code.co_name, inner.f_code.co_firstlineno
        between = inner.f_back
        while between is not None and between is not outer:
            code = between.f_code
            if code.co_filename in self._files:
                return (
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` calls "
                    f"`{name}`, which trains, in a way that is not seen in the program's text, so "
                    "that it cannot be resumed; call it by its name there"
                )
            if code in _DECORATED and is_own(between.f_locals["self"], self._files):
                return (
                    f"{inner.f_code.co_filename}, line {line}: `{name}`, which trains, is "
                    "decorated with a context of the program, whose beginning would be done "
                    "twice; enter it by a `with` statement in the function"
                )
            between = between.f_back
        return None


def _no_entry() -> None:
    """Stands for a decorated function."""


_DECORATED = frozenset({contextlib.ContextDecorator()(_no_entry).__code__})
"""What calls functions that are decorated with a context."""


class Generators:
    """Calls of rewritten generator functions: ``__outlast__.generators``.

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
        """Return True if the generator enters site `number`."""
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
        """Iterator from which ``yield from`` takes its items; it lives no longer than the frame."""
        return Delegate(self, iterator)

    def entered(self, name: str) -> Any:
        """Context that stands for the expression of a `with`; None if it is to be evaluated."""
        if self.live:
            return None
        value = sys._getframe(1).f_locals.get(name)
        found = entered_context(value, self._files, own=True)
        if found is None:
            # What the expression calls does its work.
            self.paused = self.live = True
        return found

    def proceed(self) -> None:
        """Within the `with`: continue to where the generator was."""
        self.paused = self.live = False

    def arrives(self) -> None:
        """At the `yield` where the generator was."""
        self.live = True

    def reduction(self, generator: Any) -> tuple[Any, ...]:
        """Reduce `generator`, as `object.__reduce__` does.

        One that cannot be gives a reduction that cannot be pickled: it is refused if it is needed.
        """
        state = inspect.getgeneratorstate(generator)
        if state == inspect.GEN_CLOSED:
            return _finished, ()
        name = name_of(generator.gi_code)
        # The function that a generator is of: the generator itself holds it.
        function = next(
            (
                referent
                for referent in gc.get_referents(generator)
                if isinstance(referent, types.FunctionType)
                and referent.__code__ is generator.gi_code
            ),
            None,
        )
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


def _arguments(code: types.CodeType, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a generator that has not begun."""
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


PLACES, MODULES, FOREIGN = 1, 2, 6
"""Where a session's values have its frames, its modules and what other modules hold."""


def located(
    error: Unsaveable, files: Sequence[SourceFile], frames: Sequence[FrameType]
) -> AutosaveError:
    """The refusal with file and line of the name, or of the attribute, that leads there.

    Args:
        error: What could not be written down.
        files: The program.
        frames: Of its bodies on the way to the step, outermost first.
    """
    path, found = list(error.path), None
    if error.root is not None:
        found = _of_root(error.root, path, files, frames)
    elif len(path) > 3 and path[0] == f"[{PLACES}]":
        depth, name = int(path[1][1:-1]), ast.literal_eval(path[3][1:-1])
        found = _in_frame(frames[depth], name, path[4:], files)
    elif len(path) > 2 and path[0] == f"[{MODULES}]":
        module, name = (ast.literal_eval(part[1:-1]) for part in path[1:3])
        found = _in_module(module, name, path[3:], files)
    if found is None:
        return error
    file, number, name = found
    line = "" if number is None else f", line {number}"
    return AutosaveError(
        f"{file.name()}{line}: `{name}`, a {error.type}, cannot be saved: {error.advice}"
    )


_Binding = tuple["SourceFile", int | None, str]
"""A file of the program, the line where a name gets its value there, and what it is called."""


def _of_root(
    root: str, path: list[str], files: Sequence[SourceFile], frames: Sequence[FrameType]
) -> _Binding | None:
    """Of an object that set-up has made: the attribute set last, else the name that it has."""
    for step in reversed(path):
        if step.startswith("."):
            for file in files:
                if (line := attribute_line(file.tree, step[1:])) is not None:
                    return file, line, root[root.find(":") + 1 :] + "".join(path)
    depth, colon, name = root.partition(":")
    if colon and depth.isdigit() and name.isidentifier():
        return _in_frame(frames[int(depth)], name, path, files)
    module, _, name = root.rpartition(".")
    return _in_module(module, name, path, files) if name.isidentifier() else None


def _in_frame(
    frame: FrameType, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    found = _body_of(frame, files)
    if found is None:
        return None
    file, body = found
    return file, binding_line(body, name, frame.f_lineno), name + "".join(path)


def _in_module(
    module: str, name: str, path: list[str], files: Iterable[SourceFile]
) -> _Binding | None:
    place = getattr(sys.modules.get(module), "__file__", None)
    for file in files:
        if str(file.path) == place:
            return file, binding_line(file.tree, name, sys.maxsize), name + "".join(path)
    return None


_KEEP = frozenset(
    {"add", "append", "appendleft", "extend", "insert", "put", "register", "setdefault", "update"}
)
"""Methods that keep what they are given."""


def refuse_shared(
    frames: Iterable[FrameType], files: Sequence[SourceFile]
) -> Callable[[FunctionType], None]:
    """Check each function that is written by value.

    Args:
        frames: Those on the way to the step.
        files: The program.

    Returns:
        Raises an `AutosaveError` where the function shares a variable that may change.
    """
    running = [frame for frame in frames if frame.f_code.co_cellvars]

    def ask(function: FunctionType) -> None:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for frame in running:
            if not function.__qualname__.startswith(f"{frame.f_code.co_qualname}.<locals>."):
                continue
            values = frame.f_locals
            for name, cell in cells.items():
                shared = name in frame.f_code.co_cellvars and name in values
                shared = shared and _value_of(cell) is values[name]
                found = _body_of(frame, files) if shared else None
                if found is not None and _changes(found[1], name, frame, code):
                    raise AutosaveError(
                        f"{code.co_filename}, line {code.co_firstlineno}: "
                        f"`{function.__qualname__}` was made after set-up and shares the variable "
                        f"`{name}` with `{frame.f_code.co_qualname}`, which is still running; keep "
                        "it in a list or an attribute of an object, which both of them refer to"
                    )

    return ask


def _value_of(cell: CellType) -> Any:
    """Value of a variable that functions share; the cell itself where there is none."""
    return next(iter(cell_content(cell).items), cell)


def _body_of(frame: FrameType, files: Iterable[SourceFile]) -> tuple[SourceFile, Body] | None:
    """The body of the program that a frame executes, and its file."""
    code = frame.f_code
    names = (code.co_qualname, code.co_firstlineno)
    return next(
        (
            (file, body)
            for file in files
            if str(file.path) == code.co_filename
            for body in file.bodies()
            if code_names(file.tree, body) == names
        ),
        None,
    )


def _changes(body: Body, name: str, frame: FrameType, code: CodeType) -> bool:
    """Return True if a variable of a body may get another value while a function has it.

    Args:
        body: Where the variable is.
        name: Its name.
        frame: Executes the body.
        code: Of a function that was made there.
    """
    if any(isinstance(node, ast.Nonlocal) and name in node.names for node in ast.walk(body)):
        return True
    stores, made = list(bindings_of(body, name)), code.co_firstlineno
    loops = [node for node in ast.walk(body) if isinstance(node, Loop)]
    if "<locals>" in code.co_qualname.removeprefix(f"{frame.f_code.co_qualname}.<locals>."):
        # It is made whenever the function within is called.
        return len(stores) > 1 or any(_has(loop, line) for loop in loops for line in stores)
    return any(
        line > made or _changes_next_turn(body, loops, line, made, frame.f_lineno)
        for line in stores
    )


def _changes_next_turn(body: Body, loops: list[Loop], line: int, made: int, now: int) -> bool:
    """Return True if a value from above a function's making changes while the function is in use.

    In the next turn of a loop around both it does, but then another function is made.
    """
    turn = _innermost([loop for loop in loops if _has(loop, made)], line)
    if turn is None:
        return False
    from_an_earlier_turn = _has(turn, now) and now < made
    return from_an_earlier_turn or _innermost(loops, line) is not turn or _is_kept(body, made, turn)


def _is_kept(body: Body, made: int, turn: Loop) -> bool:
    """Return True if the statement in a line puts something where it outlives a turn."""
    statements = (node for node in ast.walk(body) if isinstance(node, ast.stmt) and node != body)
    match min(
        (statement for statement in statements if _has(statement, made)), key=_lines, default=None
    ):
        case ast.Assign(targets=targets):
            places = [target for target in targets if not isinstance(target, ast.Name)]
        case ast.AugAssign(target=target):
            places = [target]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr, value=value))) if attr in _KEEP:
            places = [value]
        case _:
            return False
    fresh = {
        node.id
        for node in ast.walk(turn)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return any(_root(place) not in fresh for place in places)


def _root(place: ast.expr) -> str | None:
    while isinstance(place, (ast.Attribute, ast.Subscript)):
        place = place.value
    return place.id if isinstance(place, ast.Name) else None


def _innermost(loops: list[Loop], line: int) -> Loop | None:
    return min((loop for loop in loops if _has(loop, line)), key=_lines, default=None)


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


_FILLS = frozenset({"put", "put_nowait"})


_DEPTH = 3


_MANY = 100


_AT_MOST = 10_000
"""How far a queue is looked for, in how many items of a collection, in how many objects."""


def refuse_fed_queues(names: Names, files: frozenset[str]) -> None:
    """Refuse a program one of whose threads puts things into one of its queues.

    Args:
        names: All that set-up has named.
        files: Of the program.

    Raises:
        AutosaveError: With the thread's file and line.
    """
    if threading.active_count() == 1:
        return
    queues = {
        id(object_): path
        for path, object_ in names.objects.items()
        if isinstance(object_, QUEUES) and names.is_own(path)
    }
    for frame in _filling(files) if queues else ():
        code = frame.f_code
        # Its local variables, and the global ones that its code names.
        used = list(frame.f_locals.values())
        used += [frame.f_globals[name] for name in code.co_names if name in frame.f_globals]
        seen = (item for value in used for item in _reached(value, files, _DEPTH))
        for item in itertools.islice(seen, _AT_MOST):
            if id(item) in queues:
                raise AutosaveError(
                    f"{code.co_filename}, line {code.co_firstlineno}: `{code.co_name}` fills a "
                    f"queue in a thread (`{queues[id(item)]}`), and what the thread has done so "
                    "far cannot be saved; fill it in the training loop, or use a DataLoader with "
                    "workers"
                )


def _filling(files: frozenset[str]) -> Iterator[FrameType]:
    """Frames of living threads that are of the program and fill a container."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread is threading.main_thread() else frames.get(thread.ident or 0)
        while frame is not None:
            code = frame.f_code
            if code.co_filename in files and not _FILLS.isdisjoint(code.co_names):
                yield frame
            frame = frame.f_back


def _reached(value: Any, files: frozenset[str], depth: int) -> Iterator[Any]:
    """Objects reachable from an object, and itself."""
    yield value
    inner: Iterable[Any] = ()
    match value:
        case _ if depth == 0:
            return
        case list() | tuple():
            inner = value[:_MANY]
        case dict():
            inner = list(value.values())[:_MANY]
        case types.MethodType():
            inner = (value.__self__,)
        case _ if not isinstance(value, types.ModuleType) or (
            getattr(value, "__file__", None) in files
        ):
            inner = list(vars_of(value).values())
    for item in inner:
        yield from _reached(item, files, depth - 1)
