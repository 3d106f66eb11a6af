"""Names for all that a program's set-up has made: the paths that lead there.

Values that set-up takes from the environment may differ at the next start: as long as training
leaves such a value as set-up gave it, the one of the new start counts.

Set-up is the same in every process that runs the program, so a path leads to the same object in
each. It is taken when the first training loop is reached; what is made later has no name, and is
written down as a value.
"""

from __future__ import annotations

import argparse
import builtins
import contextvars
import sys
import threading
import types
import weakref
from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from outlast.autosave.heap.kinds import (
    Kind,
    Kinds,
    Reducer,
    Role,
    State,
    digest_if_plain,
    has_addresses,
    hidden_digest,
    keeps_order,
)
from outlast.autosave.heap.objects import (
    PLAIN_ATOMS,
    Content,
    flat,
    is_bare_function,
    is_builtin_iterator,
    is_importable,
    is_of_process,
    pairs,
    same,
    side_effect_free,
)
from outlast.autosave.heap.tensors import HOOKS, Geometry, geometry, lies_in_block
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping


class FromEnvironment(NamedTuple):
    """Stands in a save for a value that set-up takes from the environment.

    Attributes:
        value: What it was.
    """

    value: Any


def marked(
    now: Iterable[tuple[Any, Any]], before: Mapping[Any, Any], names: Collection[str]
) -> dict[Any, Any]:
    """Values by key, with those marked that come from the environment and have not changed.

    Args:
        now: Keys and values.
        before: Those of set-up.
        names: Keys of which the values come from the environment.
    """
    return {
        key: FromEnvironment(value)
        if type(key) is str
        and key in names
        and key in before
        and _is_plain(value)
        and type(before[key]) is type(value)
        and before[key] == value
        else value
        for key, value in now
    }


def settled(
    values: Mapping[Any, Any], now: Mapping[Any, Any], changed: Callable[[str], None]
) -> dict[Any, Any]:
    """Values by key, with those of this start in place of the marked ones.

    Args:
        values: As they were saved.
        now: Those of this start's set-up.
        changed: Told the key of each that is another one now.
    """
    found = {}
    for key, value in values.items():
        found[key] = value
        if type(value) is FromEnvironment:
            found[key] = now.get(key, value.value)
            if not _is_plain(found[key]):
                found[key] = value.value
            if found[key] != value.value:
                changed(key)
    return found


def marked_content(
    now: Content, before: Content | None, names: frozenset[str], cell: str = ""
) -> Content:
    """A content with its values from the environment marked.

    Args:
        now: The content.
        before: That of set-up.
        names: Names whose values come from the environment.
        cell: Name of the variable that functions share, where this is its content.
    """
    if before is None:
        return now
    items = now.items
    if now.kind == "cell" and items:
        both = marked([(cell, items[0])], dict(zip([cell], before.items, strict=False)), names)
        items = tuple(both.values())
    if now.kind == "dict" and not names.isdisjoint(_texts(items[::2])):
        items = flat(marked(pairs(items), dict(pairs(before.items)), names))
    attributes = now.attributes
    if not names.isdisjoint(_texts(attributes[::2])):
        attributes = flat(marked(pairs(attributes), dict(pairs(before.attributes)), names))
    return now._replace(items=items, attributes=attributes)


def settled_content(seen: Content, now: Content | None, changed: Callable[[str], None]) -> Content:
    """A saved content with this start's values from the environment."""
    items, attributes = seen.items, seen.attributes
    if seen.kind == "cell" and _has_marks(items):
        own = dict(zip(["it"], now.items, strict=False)) if now else {}
        items = tuple(settled({"it": items[0]}, own, changed).values())
    if seen.kind == "dict" and _has_marks(items):
        items = flat(settled(dict(pairs(items)), dict(pairs(now.items)) if now else {}, changed))
    if _has_marks(attributes):
        own = dict(pairs(now.attributes)) if now else {}
        attributes = flat(settled(dict(pairs(attributes)), own, changed))
    return seen._replace(items=items, attributes=attributes)


def has_marks(seen: Content) -> bool:
    """Return True if there are marks in a saved content."""
    return _has_marks(seen.items) or _has_marks(seen.attributes)


def _has_marks(parts: tuple[Any, ...]) -> bool:
    return any(type(part) is FromEnvironment for part in parts)


def _texts(keys: tuple[Any, ...]) -> Iterable[str]:
    return (key for key in keys if type(key) is str)


def _is_plain(value: Any) -> bool:
    """Return True if a value is text, a number, a path, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return type(value) in PLAIN_ATOMS or isinstance(value, PurePath)


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


_SIMPLE = (
    dict, list, deque, set, bytearray, types.CellType, types.SimpleNamespace, argparse.Namespace,
    property, staticmethod, classmethod, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
    weakref.WeakSet, contextvars.ContextVar, threading.local,
)  # fmt: skip
"""Objects without a class of the program's that are its own where something of its own has them."""


_MANY = 10_000
"""Items from which on a container is written down only when it has changed."""


_WRITTEN = -1
"""A version that no tensor has."""


_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of modules that torch itself keeps."""


class Names:
    """The objects that are reached from some roots, when this is made.

    Args:
        roots: Names and objects to begin with.
        modules: Names of the program's own modules, whose classes' objects are its own.
        foreign: Names and objects of other modules to begin with: their contents count when they
            have changed.
        packages: Names of other modules whose classes are looked into.
        environment: Names whose values set-up takes from the environment.
        reducers: Type to how its objects are made again, for what cannot be pickled as it is. Such
            objects are written down as values each time, also those that set-up makes.
        states: Type to two functions that ask for and set the state of its objects: those that
            set-up makes stay, and get their state back.

    Attributes:
        objects: Path to object, in the order in which they are reached.
        types: Path to the object's class at that time.
        geometry: How tensors and arrays lay in memory.
        blocks: Address of a block of memory to its name.
        weights: The tensors that can have gradients.
        lost: Paths of tensors and optimizers to which nothing led when last was saved or restored.
        kinds: Tells the kind of any object.
        renewals: What comes from the environment and was another value when it was saved.
    """

    def __init__(  # noqa: PLR0917 (what a walk begins with)
        self,
        roots: Mapping[str, Any],
        modules: Iterable[str],
        reducers: Mapping[type, Reducer] | None = None,
        states: Mapping[type, State] | None = None,
        foreign: Mapping[str, Any] | None = None,
        packages: Iterable[str] = (),
        environment: frozenset[str] = frozenset(),
    ) -> None:
        self.kinds = Kinds(reducers or {}, states or {})
        self.objects: dict[str, Any] = {}
        self._modules = frozenset(modules)
        self._packages = frozenset(packages)
        self._environment = environment
        self._foreign: set[str] = set()
        self._left: set[str] = set()
        self._counting: set[str] = set()
        self.renewals: list[str] = []
        self._own: set[str] = set()
        self._paths: dict[int, str] = {}
        self._digests: dict[str, bytes] = {}
        self._hidden: dict[str, bytes] = {}
        self.types: dict[str, type] = {}
        self._before: dict[str, Content | None] = {}
        self._always: set[str] = set()
        self.geometry: dict[str, Geometry] = {}
        self.blocks: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self.lost: frozenset[str] = frozenset()
        with side_effect_free():
            self._walk(roots, own=True)
            own = len(self.objects)
            self._walk(foreign or {}, own=False)
            self._foreign.update(list(self.objects)[own:])
            self._look()
        # A frozen parameter may be thawed.
        self.weights = [
            value
            for value in self.objects.values()
            if isinstance(value, nn.Parameter)
            or (isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad)
        ]

    def path_of(self, value: Any) -> str | None:
        """The name of an object; None for one that came later."""
        return self._paths.get(id(value))

    def is_later(self, value: types.FunctionType) -> bool:
        """Return True for a function without a name that the program has defined after set-up."""
        return value.__module__ in self._modules

    def is_own(self, path: str) -> bool:
        """Return True if the program's own objects hold a named object."""
        return path in self._own

    def renewed(self, path: str, key: str) -> None:
        """Take note that a value from the environment is another one in this start."""
        self.renewals.append(f"{path}.{key}")

    def leave(self, path: str) -> bool:
        """Save what a package holds at a path no more; gives whether it is a package's."""
        if path in self._foreign:
            self._left.add(path)
        return path in self._foreign

    def path_at(self, address: int) -> str | None:
        """The name of the object with this `id()`; None for any other number."""
        return self._paths.get(address)

    def held(self, path: str) -> Content | None:
        """Present content of a named object, if it is to be written down.

        That of the program's own objects is, since what their set-up does may depend on the time of
        day; that of libraries' objects and of large containers is when it is not what it was.

        Raises:
            Unsaveable: When what it holds has changed and cannot be seen.
        """
        value = self.objects[path]
        if path in self._left:
            return None
        if path in self._hidden and hidden_digest(value) != self._hidden[path]:
            raise Unsaveable(value, HIDDEN_ADVICE, root=path)
        if self._is_of_library(path):
            return None
        if path in self._digests:
            if digest_if_plain(value) == self._digests[path]:
                return None
            return self.kinds.of(value).content(value)
        now = self.kinds.of(value).content(value)
        if isinstance(value, set) and path in self._own and not keeps_order(value):
            raise Unsaveable(value, ORDER_ADVICE, root=path)
        if path in self._always:
            return self._marked(path, now)
        if now is not None and now.kind == "dict" and not same(self._before[path], now):
            # The content of a dictionary without hooks that closed libraries set when first used.
            kept = {
                key: item
                for key, item in pairs(now.items)
                if id(item) in self._paths or not is_of_process(item)
            }
            now = now._replace(items=flat(kept)) if 2 * len(kept) < len(now.items) else now
        return None if same(self._before[path], now) else self._marked(path, now)

    def led_to(self, path: str) -> Iterator[str]:
        """Names of the objects that an object leads to."""
        if path not in self._digests and not self._is_of_library(path):
            value = self.objects[path]
            yield from self._named(value)
            if (kind := self._paths.get(id(type(value)))) is not None:
                yield kind

    def touched(self, path: str) -> bool:
        """Return True if the program has changed an object that it seems to hold no more.

        Of tensors their versions tell, which is enough for what nobody seems to hold. Arrays have
        none, and count as unchanged.
        """
        if path in self._versions:
            return self.is_written(path)
        if path in self._hidden:
            return hidden_digest(self.objects[path]) != self._hidden[path]
        if path in self._digests:
            return digest_if_plain(self.objects[path]) != self._digests[path]
        if path in self._left or self._is_of_library(path):
            return False
        if path in self._counting:
            return True
        return (path in self._own or path in self._foreign) and not same(
            self._before[path], self.kinds.of(self.objects[path]).content(self.objects[path])
        )

    def is_written(self, path: str) -> bool:
        """Return True if a named tensor was written to since set-up, in any life of the run."""
        before = self._versions.get(path)
        return before is not None and before != _version(self.objects[path])

    def count_as_written(self, paths: Iterable[str]) -> None:
        """Named tensors that an earlier life has written to; to put that back counts nothing."""
        self._versions |= dict.fromkeys(paths, _WRITTEN)

    def now_at(self) -> dict[str, str]:
        """Address to name of the blocks that lie where set-up has put them."""
        found: dict[str, str] = {}
        for path, before in self.geometry.items():
            if geometry(self.objects[path]) == before:
                found.setdefault(before.block, f"={path}")
        return found

    def _marked(self, path: str, now: Content | None) -> Content | None:
        """A content with what set-up takes from the environment marked."""
        if now is None or not self._environment or path not in self._own:
            return now
        name = path.rpartition(".<")[2].removesuffix(">") if now.kind == "cell" else ""
        return marked_content(now, self._before[path], self._environment, name)

    def _named(self, value: Any) -> Iterator[str]:
        for _, _, item in self.kinds.of(value).children(value):
            path = self._paths.get(id(item))
            if path is not None:
                yield path
            elif self.kinds.of(item).role is Role.VALUE:
                yield from self._named(item)

    def _look(self) -> None:
        """Keep what the named objects hold now."""
        for path, object_ in self.objects.items():
            self.types[path] = type(object_)
            left = path in self._digests or self._is_of_library(path)
            self._before[path] = None if left else self.kinds.of(object_).content(object_)
            opaque = self.kinds.is_opaque(object_) or (path in self._own and has_addresses(object_))
            if opaque and (digest := hidden_digest(object_)) is not None:
                self._hidden[path] = digest
            if lies_in_block(object_):
                self.geometry[path] = geometry(object_)
                self.blocks.setdefault(self.geometry[path].block, f"={path}")
                self._versions[path] = _version(object_)
        self._counting = {
            path
            for path in self._foreign
            if (before := self._before[path]) is not None
            and any(is_builtin_iterator(type(part)) for part in before.attributes + before.items)
        }
        self._always = {path for path in self.objects if self._counts_always(path)}

    def _walk(self, roots: Mapping[str, Any], *, own: bool) -> None:
        waiting = deque((name, root, own) for name, root in roots.items())
        foreign = not own
        # Those of modules are looked at name by name.
        spaces = {
            id(vars(module)) for module in sys.modules.values() if type(module) is types.ModuleType
        }
        # Held while the walk lasts, so that no other object gets its address.
        passed: dict[int, Any] = {}
        while waiting:
            path, value, own = waiting.popleft()
            if id(value) in self._paths or id(value) in passed:
                continue
            kind = self.kinds.of(value)
            if kind.role is Role.ATOM or self._is_foreign_class(value):
                continue
            if foreign and (id(value) in spaces or is_bare_function(value)):
                continue
            if value is vars(builtins):
                continue
            own = own and (kind.role is Role.VALUE or self._is_own(value))
            if kind.role is Role.VALUE:
                passed[id(value)] = value
            else:
                self._paths[id(value)] = path
                self.objects[path] = value
                if own:
                    self._own.add(path)
                if self._is_plain(path, value):
                    continue
            waiting.extend(self._beyond(path, value, kind, own))

    def _beyond(
        self, path: str, value: Any, kind: Kind, own: bool
    ) -> Iterator[tuple[str, Any, bool]]:
        if (kind.of_program and not own) or (isinstance(value, type) and not self._opens(value)):
            return
        own = own and not (isinstance(value, (list, dict, tuple, deque)) and len(value) > _MANY)
        internals: Collection[str] = ()
        if isinstance(value, nn.Module):
            internals = _MODULE_INTERNALS
        elif isinstance(value, torch.Tensor):
            internals = HOOKS
        for form, key, item in kind.children(value):
            yield path + form % (key,), item, own and key not in internals
        if type(value).__module__ in self._modules:
            yield f"{path}.__class__", type(value), True

    def _is_of_library(self, path: str) -> bool:
        """Return True if an object concerns the process, since a library keeps something there."""
        return path not in self._own and self.kinds.of(self.objects[path]).of_program

    def _is_plain(self, path: str, value: Any) -> bool:
        if type(value) not in (list, dict) or len(value) <= _MANY:
            return False
        found = digest_if_plain(value)
        if found is not None:
            self._digests[path] = found
        return found is not None

    def _is_foreign_class(self, value: Any) -> bool:
        # One that is not found by its name is known by the path to it, as if it were the program's.
        return isinstance(value, type) and not self._opens(value) and is_importable(value)

    def _opens(self, value: type) -> bool:
        """Return True if the variables of a class are looked into."""
        return value.__module__ in self._modules or value.__module__ in self._packages

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, (*_SIMPLE, torch.Tensor)) or self.kinds.of(value).of_program:
            return True
        if isinstance(value, types.FunctionType):
            return value.__module__ in self._modules
        owner = value if isinstance(value, type) else type(value)
        return owner.__module__ in self._modules

    def _counts_always(self, path: str) -> bool:
        before = self._before[path]
        if before is None or self.kinds.of(self.objects[path]).role is Role.STATE:
            return before is not None
        if path in self._own and len(before.items) + len(before.attributes) < _MANY:
            return True
        parts = (*before.items, *before.attributes)
        return not PLAIN_ATOMS.issuperset(map(type, parts)) and any(
            map(self._changes_unseen, parts)
        )

    def _changes_unseen(self, part: Any) -> bool:
        """Return True if a nameless part of a content can change without being another object."""
        if type(part) is tuple:
            return any(map(self._changes_unseen, part))
        if id(part) in self._paths or self._is_foreign_class(part):
            return False
        role = self.kinds.of(part).role
        if role is Role.VALUE:
            return not isinstance(part, (tuple, frozenset, types.MethodType))
        return role is not Role.ATOM and not isinstance(part, torch.Tensor)


def _version(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return value._version
