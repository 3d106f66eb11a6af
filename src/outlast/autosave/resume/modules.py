"""The modules of a program: its files, and others of its folder that it finds while it runs.

Packages that the program's names lead to are looked into as the program itself is, and their
contents count where they have changed since set-up. Torch's and Python's own modules are full of
state that belongs to a process; of these, only what the program or a package has put there counts:
names that were not there before the program began, and those that its text gives values to.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import logging
import os
import sys
import sysconfig
import types
from collections import deque
from operator import is_
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.objects import (
    in_closed_module,
    is_builtin_iterator,
    is_importable,
    module_named,
)
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from outlast.autosave.program.source import SourceFile


_LIBRARY = sysconfig.get_path("stdlib")
"""Where Python's own modules lie."""


_INSTALLED = ("site-packages", "dist-packages")


_ITSELF = "outlast"


_COMPILED = ("__compiled_fn_", "__resume_at_", "__builtins_dict__", "__import_")
"""Names that torch.compile gives to what it puts into a program's modules begin so."""


class ProgramModules:
    """Looks at the modules of a program.

    Args:
        files: The files whose text was read, the script first.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = frozenset(map(str, files))
        self._folder = f"{files[0].parent}{os.sep}"
        self._search = frozenset(map(os.path.realpath, sys.path))
        self._editable = [name for name in _editable() if name.startswith(self._folder)]
        self._known: dict[str, bool] = {}

    def globals(self) -> dict[str, dict[str, Any]]:
        """Name of each module of the program to its global names and their values."""
        found = {}
        for name, module in list(sys.modules.items()):
            if self.is_own(name, module):
                own = vars(module)
                found[name] = {name: own[name] for name in own_names(own)}
        return found

    def is_own(self, name: str, module: Any) -> bool:
        """Return True if a module is the program's."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            return False
        if file not in self._known:
            # Of thousands of modules, the file system is asked only of those not installed.
            self._known[file] = file in self._files or (
                not file.startswith(_LIBRARY)
                and not any(item in file for item in _INSTALLED)
                and name.partition(".")[0] != _ITSELF
                and file.endswith(".py")
                and self._is_found(os.path.realpath(file))
            )
        return self._known[file]

    def _is_found(self, file: str) -> bool:
        """Return True for a file of the program: it lies beside it, or where it has searched."""
        if file in self._files:
            return True
        if any(file == item or file.startswith(f"{item}{os.sep}") for item in self._editable):
            return False
        if file.startswith(self._folder):
            return True
        added = frozenset(map(os.path.realpath, sys.path)) - self._search
        return any(file.startswith(f"{item}{os.sep}") for item in added)


def _editable() -> list[str]:
    """Folders and files where installed packages lie that are being worked on."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [part for part in sys.path if part and part not in own]
    for name, module in list(sys.modules.items()):
        # What setuptools installs to find them.
        if name.startswith("__editable__"):
            found += map(str, getattr(module, "MAPPING", {}).values())
    return [os.path.realpath(name) for name in found]


def own_names(values: dict[str, Any]) -> list[str]:
    """The global names of a module that are the program's."""
    return [
        name
        for name in values
        if not (name.startswith("__") and name.endswith("__")) or name[:10] == "__outlast_"
        if name != "__outlast__"
        if not name.startswith(_COMPILED)
    ]


def globals_of(module: str) -> dict[str, Any]:
    """The global names of a module, which is imported if set-up has not done so.

    Raises:
        AutosaveError: When it cannot be found by its name.
    """
    try:
        return vars(importlib.import_module(module))
    except ImportError as error:
        raise AutosaveError(
            f"the module `{module}` was there when the program was saved, and cannot be imported "
            f"now ({error}); import it before the training loop, so that set-up does it"
        ) from None


Owner = tuple[str, str]
"""Name of a module, and of a class in it; empty for the module itself."""


Changes = dict[Owner, tuple[dict[str, Any], tuple[str, ...]]]
"""Owner to the values that it has got since set-up, and the names that it has lost."""


_MADE: Owner = ("sys", "modules")
"""Stands for the modules that the program has made itself since set-up."""


_OF_PROCESS = frozenset({
    *sys.stdlib_module_names, "torch", "torchgen", "functorch", "numpy", "outlast", "triton",
    "sympy", "mpmath",
}) - {"__main__"}  # fmt: skip
"""Packages that hold a process's own state, or what follows from their inputs alone (SymPy)."""


_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
    functools._lru_cache_wrapper,
)  # fmt: skip


_LOGGER = frozenset(vars(logging.getLogger("outlast")))


_STANDARD = frozenset({"__warningregistry__", "__annotations__", "__slotnames__", "__doc__"})


class ForeignModules:
    """Looks at modules that are not the program's; made before the program begins.

    Args:
        sources: The program.
        is_own: Whether a module is the program's.

    Attributes:
        packages: Names of the modules of packages that the program leads to.
    """

    def __init__(
        self, sources: Iterable[SourceFile], is_own: Callable[[str, types.ModuleType], bool]
    ) -> None:
        self._is_own = is_own
        self._trees = [source.tree for source in sources]
        self._written = frozenset(name for tree in self._trees for name in _written(tree))
        # Names alone, in tuples: there are hundreds of thousands.
        self._before = {
            owner: tuple(values) for owner, values in self._namespaces(frozenset()).items()
        }
        self.packages: frozenset[str] = frozenset()
        self._iterators: Changes = {}
        self._left: set[tuple[Owner, str]] = set()
        self._modules_at_setup: frozenset[str] = frozenset()
        self._at_setup: list[tuple[Owner, Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]] = []

    def begin(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Take note of how things are when set-up is done.

        Args:
            own: Name of each module of the program to its global names and their values.

        Returns:
            Names and objects to look into, apart from the program's own.
        """
        self.packages = self._led_to(own)
        found = {
            f"{module}.{name}": value
            for module in sorted(self.packages)
            for name, value in vars(sys.modules[module]).items()
            if not _is_special(name)
        }
        self._modules_at_setup = frozenset(sys.modules)
        for owner, values in self._namespaces(self.packages).items():
            before = self._before.get(owner)
            # The names of before set-up where none has come or gone.
            grown = before is None or len(before) != len(values)
            same = before is not None and not grown and all(map(is_, before, values))
            names = before if before is not None and same else tuple(values)
            self._at_setup.append((owner, values, names, tuple(values.values())))
            if owner[0] in self.packages:
                # They continue without becoming other objects.
                iterators = {
                    name: value
                    for name, value in values.items()
                    if is_builtin_iterator(type(value))
                }
                self._iterators |= {owner: (iterators, ())} if iterators else {}
            elif before is not None:
                # Names of a module of the process that were put there after that was made.
                put = self._written & values.keys()
                if grown:
                    put |= values.keys() - frozenset(before)
                found |= {
                    f"{'.'.join(filter(None, owner))}.{name}": values[name]
                    for name in sorted(put)
                    if self._is_put(owner, name)
                    and not isinstance(values[name], types.ModuleType)
                    and not _is_outlasts(values[name])
                }
        found |= self._used(own)
        for name, logger in {"root": logging.root, **logging.root.manager.loggerDict}.items():
            if isinstance(logger, logging.Logger):
                found |= _of_logger(name, logger, own)
        return found

    def changes(self) -> Changes:
        """Changes since set-up."""
        made = {
            name: module
            for name, module in list(sys.modules.items())
            if name not in self._modules_at_setup
            and self._is_made(name, module)
            and (_MADE, name) not in self._left
        }
        return self._changed() | ({_MADE: (made, ())} if made else {})

    def _changed(self) -> Changes:
        flat = itertools.chain.from_iterable
        found: Changes = dict(self._iterators)
        now = [values for _, values, _, _ in self._at_setup]
        then = [before for _, _, _, before in self._at_setup]
        # Hundreds of thousands of names are compared at each save, and hardly ever has one changed.
        if sum(map(len, now)) == sum(map(len, then)) and all(
            map(is_, flat(then), flat(values.values() for values in now))
        ):
            return found
        for owner, values, names, before in self._at_setup:
            if len(values) == len(before) and all(map(is_, before, values.values())):
                continue
            old = dict(zip(names, before, strict=True))
            new = {
                name: value
                for name, value in list(values.items())
                if (name not in old or not _same(old[name], value))
                and not (_is_outlasts(value) or _is_outlasts(old.get(name)))
                and self._counts(owner, name, value, is_new=name not in old)
            }
            lost = tuple(
                name
                for name in old.keys() - values.keys()
                if (owner[0] in self.packages or name in self._written)
                and not _is_outlasts(old[name])
            )
            if new or lost:
                found[owner] = (found.get(owner, ({}, ()))[0] | new, lost)
        return found

    def put(self, changes: Changes) -> None:
        """Put back what had changed."""
        sys.modules.update(changes.pop(_MADE, ({}, ()))[0])
        for (module, name), (values, lost) in changes.items():
            try:
                owner: Any = module_named(module)
                owner = functools.reduce(getattr, name.split(".") if name else (), owner)
            except (ImportError, AttributeError) as error:
                place, there = f"`{module}.{name}`", "is not there now"
                if isinstance(error, ImportError):
                    place, there = f"the module `{module}`", "cannot be imported now"
                raise AutosaveError(
                    f"{place} was there when the program was saved, and {there} ({error})"
                ) from None
            place_of = type if isinstance(owner, type) else object
            for key, value in values.items():
                place_of.__setattr__(owner, key, value)
            for attribute in lost:
                if attribute in vars(owner):
                    place_of.__delattr__(owner, attribute)

    def leave(self, owner: Owner, name: str) -> bool:
        """Save a name no more; gives whether it may be left, as the program has none such."""
        if name in self._written:
            return False
        self._left.add((owner, name))
        return True

    def _is_put(self, owner: Owner, name: str) -> bool:
        """Return True if a name of a module of the process was put there after that was made."""
        before = self._before.get(owner)
        if name in _STANDARD:
            return False
        if before is None or name in before:
            return name in self._written and before is not None
        # Libraries that are not looked into keep their own state in their own modules.
        closed = in_closed_module(owner[0]) and not owner[0].startswith("torch.")
        return name in self._written or not (closed or name.startswith("_"))

    def _counts(self, owner: Owner, name: str, value: Any, *, is_new: bool) -> bool:
        if isinstance(value, types.ModuleType) or (owner, name) in self._left:
            return False
        if is_new and isinstance(value, (type, types.FunctionType)) and is_importable(value):
            # Packages import their parts when they are asked for.
            return False
        if owner[0] in self.packages:
            return not _is_special(name) or name in self._written
        return self._is_put(owner, name)

    def _namespaces(self, packages: frozenset[str]) -> dict[Owner, Mapping[str, Any]]:
        """The variables of modules, and of classes that are not looked into otherwise."""
        found: dict[Owner, Mapping[str, Any]] = {}
        for module_name, module in list(sys.modules.items()):
            values = getattr(module, "__dict__", None)
            if not isinstance(values, dict) or self._is_own(module_name, module):
                continue
            if module_name.partition(".")[0] == "outlast":
                continue
            found[module_name, ""] = values
            if module_name in packages:
                continue
            for value in list(values.values()):
                # Asked for their class, some objects of torch warn.
                if issubclass(type(value), type) and value.__module__ == module_name:
                    found[module_name, value.__qualname__] = vars(value)
        return found

    def _led_to(self, own: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
        """Names of the modules of packages that the program's names lead to."""
        found: set[str] = set()
        waiting = deque(value for values in own.values() for value in values.values())
        while waiting:
            value = waiting.popleft()
            # Modules that an object shows the way to.
            names: list[Any] = [type(value).__module__]
            if isinstance(value, types.ModuleType):
                names = [value.__name__]
            elif isinstance(value, (type, *_FUNCTIONS)):
                names.append(getattr(value, "__module__", None))
            if isinstance(value, types.MethodType):
                names.append(type(value.__self__).__module__)
            for name in names:
                module = sys.modules.get(name) if isinstance(name, str) else None
                if name in found or module is None or not self._is_package(name, module):
                    continue
                found.add(name)
                waiting.extend(vars(module).values())
        # Those made by the program itself, too.
        return frozenset(found).union(
            name
            for name, module in list(sys.modules.items())
            if (name, "") not in self._before and self._is_made(name, module)
        )

    def _is_package(self, name: str, module: Any) -> bool:
        return (
            isinstance(module, types.ModuleType)
            and name.partition(".")[0] not in _OF_PROCESS
            and not in_closed_module(name)
            and not self._is_own(name, module)
        )

    def _is_made(self, name: str, module: Any) -> bool:
        return (
            type(module) is types.ModuleType
            and vars(module).get("__spec__") is None
            and "__file__" not in vars(module)
            and self._is_package(name, module)
        )

    def _used(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Objects in other modules that the program's text changes or calls methods of."""
        names = {name: value for values in own.values() for name, value in values.items()}
        found: dict[str, Any] = {}
        for tree in self._trees:
            imported = {**names, **_imported(tree)}
            for chain in _changed_places(tree):
                value = _resolved(chain, imported)
                # The modules are looked at one by one.
                if value is None or value is sys.modules:
                    continue
                if not isinstance(value, (types.ModuleType, type)):
                    found[ast.unparse(chain)] = value
        return found


def _of_logger(
    name: str, logger: logging.Logger, own: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Handlers and filters of a logger that are the program's, and what it keeps in the logger."""
    inner = [*logger.handlers, *logger.filters]
    inner += [item for handler in logger.handlers for item in handler.filters]
    handlers = {
        f"logging.{name}.handlers[{place}]": item
        for place, item in enumerate(inner)
        if type(item).__module__ in own
    }
    kept = {key: value for key, value in vars(logger).items() if key not in _LOGGER}
    return handlers | {f"logging.{name}.{key}": value for key, value in kept.items()}


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_outlasts(value: Any) -> bool:
    """Return True if Outlast itself has put a value in place of torch's or Python's.

    Of a function its text tells: one that wraps another has that one's name and module.
    """
    match value:
        case types.FunctionType():
            module = value.__globals__.get("__name__")
        case types.MethodType():
            return _is_outlasts(value.__self__) or _is_outlasts(value.__func__)
        case property():
            return any(map(_is_outlasts, (value.fget, value.fset, value.fdel)))
        case staticmethod() | classmethod():
            return _is_outlasts(value.__func__)
        case functools.partial():
            return _is_outlasts(value.func)
        case type():
            module = value.__module__
        case _:
            module = type(value).__module__
    return isinstance(module, str) and f"{module}.".startswith("outlast.autosave.")


def _same(old: Any, now: Any) -> bool:
    plain = (int, float, str, bytes, bool)
    return old is now or (type(old) is type(now) and isinstance(now, plain) and bool(old == now))


def _written(tree: ast.Module) -> Iterator[str]:
    """Names of attributes that a text gives values to, and its texts that could be such names."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def _changed_places(tree: ast.Module) -> Iterator[ast.expr]:
    """Names whose attributes or items a text sets, and those whose methods it calls."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(value=place, ctx=ast.Store() | ast.Del())
                | ast.Subscript(value=place, ctx=ast.Store() | ast.Del())
                | ast.Call(func=ast.Name(id="setattr" | "delattr" | "vars"), args=[place, *_])
                | ast.Call(func=ast.Attribute(value=place))
            ):
                yield place


def _imported(tree: ast.Module) -> dict[str, Any]:
    """Names that imports anywhere in a text bind, and the modules that are loaded for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = sys.modules.get(name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = sys.modules.get(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = vars(module).get(alias.name) if module else None
    return {name: value for name, value in found.items() if value is not None}


def _resolved(chain: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object of another module that a chain of names leads to, without asking anybody."""
    path: list[str] = []
    while isinstance(chain, ast.Attribute):
        # What is in an object's own dictionary belongs to the object.
        if chain.attr != "__dict__":
            path.append(chain.attr)
        chain = chain.value
    if not isinstance(chain, ast.Name):
        return None
    value = names.get(chain.id)
    if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return None
    for part in reversed(path):
        own = getattr(value, "__dict__", {})
        if part not in own:
            return None
        value = own[part]
    return value
