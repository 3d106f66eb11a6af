"""Names for all that a program's set-up has made: the paths that lead there.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.autosave.heap.atoms import PLAIN_ATOMS, is_builtin_iterator, is_of_process
from outlast.autosave.heap.blocks import Geometry, geometry, lies_in_block
from outlast.autosave.heap.code import is_bare_function
from outlast.autosave.heap.content import Content, flat, pairs, same
from outlast.autosave.heap.environment import marked_content
from outlast.autosave.heap.hidden import has_addresses, hidden_digest
from outlast.autosave.heap.kinds import Kind, Kinds, Reducer, Role, State
from outlast.autosave.heap.modules import is_importable
from outlast.autosave.heap.order import keeps_order
from outlast.autosave.heap.plain import digest_if_plain
from outlast.autosave.heap.refusal import HIDDEN_ADVICE, ORDER_ADVICE, Unsaveable
from outlast.autosave.heap.tensors import HOOKS
from outlast.autosave.heap.undisturbed import undisturbed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

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
        with undisturbed():
            self._walk(roots, own=True)
            own = len(self.objects)
            self._walk(foreign or {}, own=False)
            self._foreign.update(list(self.objects)[own:])
            self._look()
        self.weights = [object_ for object_ in self.objects.values() if _is_weight(object_)]

    def path_of(self, value: Any) -> str | None:
        """The name of an object; None for one that came later."""
        return self._paths.get(id(value))

    def is_later(self, value: types.FunctionType) -> bool:
        """Whether a function without a name is one that the program has defined after set-up."""
        return value.__module__ in self._modules

    def is_own(self, path: str) -> bool:
        """Whether the program's own objects hold a named object."""
        return path in self._own

    def is_foreign(self, path: str) -> bool:
        """Whether only modules that are not the program's lead to a named object."""
        return path in self._foreign

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
        """What a named object holds now, if that is to be written down.

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
            return now if now is None else self._marked(path, now)
        if now is not None and now.kind == "dict" and not same(self._before[path], now):
            now = self._without_process_hooks(now)
        if same(self._before[path], now):
            return None
        return now if now is None else self._marked(path, now)

    def is_plain(self, path: str) -> bool:
        """Whether what lies in an object has no names, as it is large and plain data."""
        return path in self._digests

    def led_to(self, path: str) -> Iterator[str]:
        """Names of the objects that an object leads to."""
        if path not in self._digests and not self._is_of_library(path):
            value = self.objects[path]
            yield from self._named(value)
            if (kind := self._paths.get(id(type(value)))) is not None:
                yield kind

    def touched(self, path: str) -> bool:
        """Whether the program has changed an object that it seems to hold no more.

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
        """Whether a named tensor was written to since set-up, in this life or an earlier one."""
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

    def _marked(self, path: str, now: Content) -> Content:
        """A content with what set-up takes from the environment marked."""
        if not self._environment or path not in self._own:
            return now
        name = path.rpartition(".<")[2].removesuffix(">") if now.kind == "cell" else ""
        return marked_content(now, self._before[path], self._environment, name)

    def _without_process_hooks(self, seen: Content) -> Content:
        """The content of a dictionary without hooks that closed libraries set when first used.

        The wrappers of sharded models do; they do it again in the next process.
        """
        kept = {
            key: item
            for key, item in pairs(seen.items)
            if id(item) in self._paths or not is_of_process(item)
        }
        return seen._replace(items=flat(kept)) if 2 * len(kept) < len(seen.items) else seen

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
        """Whether an object concerns the process, since a library keeps something there."""
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
        """Whether the variables of a class are looked into."""
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
        """Whether a part of a content can change without being another object, and has no name."""
        if type(part) is tuple:
            return any(map(self._changes_unseen, part))
        if id(part) in self._paths or self._is_foreign_class(part):
            return False
        role = self.kinds.of(part).role
        if role is Role.VALUE:
            return not isinstance(part, (tuple, frozenset, types.MethodType))
        return role is not Role.ATOM and not isinstance(part, torch.Tensor)


def _is_weight(value: Any) -> bool:
    # A frozen parameter may be thawed.
    return isinstance(value, nn.Parameter) or (
        isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    )


def _version(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return value._version
